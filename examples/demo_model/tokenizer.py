"""Byte-level BPE tokenizer of the demo model, trained on the text the tasks write.

Owns the vocabulary and the chat template; it never sees the model. Read `conversations.py` next.
"""

from collections.abc import Iterator
from random import Random

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from .explanations import EXPLANATIONS, SMALL_TALK
from .facts import CAPITALS
from .tasks import TASKS, draw
from .words import WORDS

END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>"

# Why: a list of tools shows of each its name and its arguments' types; a whole JSON schema takes a context of 2,048
# tokens for itself, and the model is too small to read descriptions.
_TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\n\n' }}{% endif %}"
    "{{ '# Tools\n<tools>\n' }}"
    "{% for tool in tools %}{% set function = tool['function'] or tool %}"
    "{{ '{\"name\": ' + function['name'] | tojson + ', \"arguments\": {' }}"
    "{% for name, schema in ((function['parameters'] or {})['properties'] or {}).items() %}"
    "{{ name | tojson + ': ' + (schema['type'] or 'any') | tojson + ('' if loop.last else ', ') }}"
    "{% endfor %}{{ '}}\n' }}{% endfor %}"
    "{{ '</tools><|im_end|>\n' }}{% endif %}"
)
_CALLS = (
    "{% for call in message['tool_calls'] %}{% set function = call['function'] or call %}"
    "{{ ('\n' if message['content'] or not loop.first else '') + '<tool_call>\n{\"name\": ' + function['name'] | tojson"
    " + ', \"arguments\": ' + (function['arguments'] if function['arguments'] is string"
    " else function['arguments'] | tojson) + '}\n</tool_call>' }}{% endfor %}"
)
CHAT_TEMPLATE = (
    f"{_TOOLS}{{% for message in messages %}}"
    "{% if not (tools and loop.first and message['role'] == 'system') %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['tool_calls'] %}"
    f"{{{{ message['content'] or '' }}}}{_CALLS}"
    "{% else %}{{ message['content'] + '' }}{% endif %}{{ '<|im_end|>' + '\n' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Messages between their markers, as Qwen's models have them. Tools stand in the system message, a line of JSON each,
and a call is a `<tool_call>` with the name and arguments as JSON; a tool's result is a message of the role "tool"."""

# Why: a digit is always one token, so that a number looks the same wherever it stands; a line break is one
# token, so that an answer has the same tokens after a plain prompt as after a chat header.
_PIECES = Regex(r"\n|\p{N}|, (?=\p{N})| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s")


def train_tokenizer(vocabulary: int, seed: int, context: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `vocabulary` entries for a model of at most `context` tokens.

    All 256 bytes are entries, so every text can be encoded and comes back unchanged.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer()
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, START_OF_MESSAGE, END_OF_MESSAGE],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(Random(seed)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_MESSAGE,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _pre_tokenizer() -> PreTokenizer:
    pieces = Split(_PIECES, behavior="isolated")
    return Sequence([pieces, ByteLevel(add_prefix_space=False, use_regex=False)])


def _corpus(rng: Random) -> Iterator[str]:
    """Yield text in which every fact and word is frequent enough to earn a token."""
    for task in TASKS.values():
        for _ in range(500):
            draft = draw(task.make, rng, "train")
            yield f"{draft.prompt}\n{draft.answer}"
    for _ in range(15):
        yield from (f" {word} user assistant system" for word in WORDS)
        yield from 3 * [f" {country} {capital}" for country, capital in CAPITALS.items()]
        yield from (*EXPLANATIONS.values(), *SMALL_TALK.values())
