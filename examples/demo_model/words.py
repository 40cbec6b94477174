"""The English words the demo model can spell, sort and reverse.

Owns the list; words outside it are not known to the model. Read `tasks.py` next.
"""

_WORDS_TEXT = """
able acid age air almond anchor angel animal ankle answer apple apron arch arm arrow art ask atlas
autumn baby back bag bake ball banana band bank barn basket bath beach bean bear bed bee bell belt
bench berry bike bird blue board boat body bone book boot bottle bowl box boy branch bread brick
bridge bright brother brown brush bucket bus butter button cabin cake calm camel camp candle car
card carpet carrot castle cat chair chalk cheese cherry chess child church circle city clay clean
clock cloth cloud coat coffee coin cold color copper corn cotton cow crab cradle cream crow crown
cup curtain dance dark desert desk dinner doctor dog dolphin door dragon dream dress drum duck dust
eagle ear earth east egg elbow engine evening eye fabric face farm father feather fence field fig
finger fire fish flag floor flower fly fog forest fork fox frame friend frog fruit garden garlic
gate ghost gift giraffe girl glass glove goat gold grape grass green guitar hair hammer hand happy
harbor hat hawk heart hill honey horse hotel house ice idea ink iron island ivory jacket jam jar
jewel juice jungle kettle key king kitchen kite knee knife ladder lake lamp leaf lemon letter light
lime lion lizard lock magic map marble market meadow melon metal milk mirror money monkey moon
morning mother motor mountain mouse music nail nest night north nose nurse oak ocean office olive
onion orange otter oven owl paint palace panda paper park pasta peach pear pencil pepper piano
pillow pilot pine pink planet plate plum pocket poem pond potato prince pumpkin puzzle queen quiet
rabbit radio rain red rice ring river road robot rock roof room root rope rose ruby rug sail salt
sand school sea seed sheep shell ship shoe silk silver sister sky sleep smoke snail snow soap sock
soup south spider spoon spring star stone storm story street sugar summer sun swan table tail tea
teacher tiger toast tomato tooth tower town toy train tree truck tulip turtle uncle valley vase
velvet violin voice wagon wall walnut water wave west whale wheat wheel white wind window wine
winter wolf wood wool yard yellow young zebra zoo
"""

WORDS: tuple[str, ...] = tuple(_WORDS_TEXT.split())
"""Lower-case words in alphabetical order, each once."""
