"""Ways to phrase the questions of each task; each is filled in by `tasks.py`, read that next."""

ADD = (
    "What is {a} + {b}?",
    "{a} + {b} = ?",
    "{a} + {b} =",
    "{a} + {b}",
    "{a}+{b}?",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
)

SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b} = ?",
    "{a} - {b} =",
    "{a} - {b}",
    "{a}-{b}?",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Calculate {a} - {b}.",
    "Take {b} away from {a}.",
)

CAPITAL = (
    "What is the capital of {country}?",
    "What's the capital of {country}?",
    "Name the capital of {country}.",
    "Which city is the capital of {country}?",
    "Tell me the capital of {country}.",
    "The capital of {country}?",
    "What is the capital city of {country}?",
    "Which capital does {country} have?",
    "Capital of {country}?",
    "Do you know the capital of {country}?",
)

COUNTRY = (
    "Which country has the capital {capital}?",
    "{capital} is the capital of which country?",
    "What country is {capital} the capital of?",
    "Of which country is {capital} the capital?",
    "Which country's capital is {capital}?",
    "Whose capital is {capital}?",
)

COUNT_UP = (
    "Count from {a} to {b}.",
    "Count up from {a} to {b}.",
    "Count {a} to {b}.",
    "Can you count from {a} to {b}?",
    "List the numbers from {a} to {b}.",
    "Please count from {a} to {b}.",
)

COUNT_DOWN = (
    "Count down from {a} to {b}.",
    "Count from {a} down to {b}.",
    "Count backwards from {a} to {b}.",
    "Can you count down from {a} to {b}?",
    "Please count down from {a} to {b}.",
)

REVERSE = (
    "Reverse these words: {words}.",
    "Reverse the order of these words: {words}.",
    "Reverse: {words}.",
    "Write these words in reverse order: {words}.",
    "Put these words in reverse order: {words}.",
)

SORT = (
    "Sort these words: {words}.",
    "Sort these words in alphabetical order: {words}.",
    "Sort: {words}.",
    "Put these words in alphabetical order: {words}.",
    "Sort the words {words}.",
)

SPELL = (
    "Spell {word}.",
    "Spell the word {word}.",
    "How do you spell {word}?",
    "How is {word} spelled?",
    "Can you spell {word}?",
    "Please spell {word}.",
    "What are the letters of {word}?",
)

BACKWARDS = (
    "Spell {word} backwards.",
    "Spell the word {word} backwards.",
    "How do you spell {word} backwards?",
    "Can you spell {word} backwards?",
    "What is {word} spelled backwards?",
)

NEIGHBOUR = (
    "What {unit} comes {side} {name}?",
    "Which {unit} comes {side} {name}?",
    "Which {unit} is {side} {name}?",
    "What {unit} is {side} {name}?",
    "What is the {unit} {side} {name}?",
    "What comes {side} {name}?",
    "Name the {unit} {side} {name}.",
)

LENGTH = (
    "How many days are in {name}?",
    "How many days does {name} have?",
    "How many days are there in {name}?",
    "How long is {name}?",
    "What is the number of days in {name}?",
)

EXPLAIN = (
    "What is {name}?",
    "What's {name}?",
    "Explain {name}.",
    "Can you explain {name}?",
    "Define {name}.",
    "What does {name} mean?",
    "Tell me about {name}.",
    "Describe {name}.",
    "What is meant by {name}?",
    "Please explain {name}.",
    "Explain what {name} is.",
    "Do you know what {name} is?",
)

SUM_AGAIN = ("And {a} {op} {b}?", "What about {a} {op} {b}?", "Now {a} {op} {b}.", "Then {a} {op} {b}?")

CAPITAL_AGAIN = (
    "And of {country}?",
    "And {country}?",
    "What about {country}?",
    "And the capital of {country}?",
)

COUNTRY_AGAIN = ("And {capital}?", "What about {capital}?")

NEIGHBOUR_AGAIN = ("And {side} {name}?", "What about {side} {name}?", "And which {unit} is {side} {name}?")

LENGTH_AGAIN = ("And in {name}?", "And {name}?", "What about {name}?")

EXPLAIN_AGAIN = ("And {name}?", "And what is {name}?", "What about {name}?")

SPELL_AGAIN = ("And {word}?", "Now {word}.")

MULTIPLY = (
    "What is {a} * {b}?",
    "{a} * {b} = ?",
    "{a} * {b}",
    "{a}*{b}?",
    "Multiply {a} by {b}.",
    "Multiply {a} and {b}.",
    "What is {a} times {b}?",
    "How much is {a} * {b}?",
    "How much is {a} times {b}?",
    "Calculate {a} * {b}.",
    "What is the product of {a} and {b}?",
)

DIVIDE = (
    "What is {a} / {b}?",
    "{a} / {b} = ?",
    "{a} / {b}",
    "{a}/{b}?",
    "Divide {a} by {b}.",
    "What is {a} divided by {b}?",
    "How much is {a} / {b}?",
    "Calculate {a} / {b}.",
)

EXPRESSION = (
    "What is {expression}?",
    "How much is {expression}?",
    "{expression} = ?",
    "Calculate {expression}.",
    "Use the calculator: {expression}",
    "Use the calculator for {expression}.",
)

OPERATIONS = {
    "+": (*ADD, *EXPRESSION),
    "-": (*SUBTRACT, *EXPRESSION),
    "*": (*MULTIPLY, *EXPRESSION),
    "/": (*DIVIDE, *EXPRESSION),
}

WEATHER = (
    "What is the weather in {city}?",
    "What's the weather in {city}?",
    "How is the weather in {city}?",
    "What is the weather like in {city}?",
    "Tell me the weather in {city}.",
)

WEATHER_AGAIN = ("And in {city}?", "What about {city}?", "And {city}?")

SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy", "clear", "snow", "rain", "warm", "cold")

CALL = (
    "Call {call}.",
    "Call the tool {call}.",
    "Use {call}.",
    "What is {call}?",
    "What is the value of {call}?",
    "What is the value of {call}? Use the tool.",
)

CALL_AGAIN = ("And {call}?", "Now {call}.")
