"""A model that writes what a test says: for paths that need a model which calls tools by itself.

Its tokenizer is the demo model's, with a chat template of the test's choice and special tokens besides. Everything
else, from the template to the sampler with its masks, is the engine's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from pagedcore import AsyncEngine
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.protocols import FloatArray
from pagedcore.tokenizer.quick_tokenizer import read_tokenizer
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.doubles import ToyBackend
from support.engine_builders import make_engine

_TURNS: Final = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}{{- CALL }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
)
_TOOLS: Final = "{%- for tool in tools or [] %}{{- '# ' + tool | tojson + '\\n' }}{%- endfor %}"
_OPENING: Final = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_CALLS: Final = {
    "hermes": "'<tool_call>\\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson"
              " + '\\n</tool_call>'",
    "llama3": "{'name': call.function.name, 'parameters': call.function.arguments} | tojson",
    "harmony": "' to=functions.' + call.function.name + '<|channel|>commentary json<|message|>'"
               " + call.function.arguments | tojson + '<|call|>'",
    "glm": "'<tool_call>' + call.function.name }}{% for key, value in call.function.arguments.items() %}"
           "{{ '\n<arg_key>' + key + '</arg_key>\n<arg_value>' + (value if value is string else value | tojson)"
           " + '</arg_value>' }}"
           "{% endfor %}{{ '\n</tool_call>'",
    "qwen3_coder": "'<tool_call>\n<function=' + call.function.name + '>\n' }}{% for key, value in"
                   " call.function.arguments.items() %}{{ '<parameter=' + key + '>\n' + (value | string) +"
                   " '\n</parameter>\n' }}{% endfor %}{{ '</function>\n</tool_call>'",
    "minimax_m2": "'<minimax:tool_call>\n<invoke name=\"' + call.function.name + '\">\n' }}{% for key, value in"
                  " call.function.arguments.items() %}{{ '<parameter name=\"' + key + '\">' + (value | string) +"
                  " '</parameter>\n' }}{% endfor %}{{ '</invoke>\n</minimax:tool_call>'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>'"
                    " + call.function.arguments | tojson + '<｜tool▁call▁end｜><｜tool▁calls▁end｜>'",
    "granite": "'<|tool_call|>[' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson + ']'",
    "mistral": "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson",
}
TEMPLATES: Final = {name: _TOOLS + _TURNS.replace("CALL", call) + _OPENING for name, call in _CALLS.items()} | {
    # What the family's own templates are recognised by.
    "reasons": "{#- <|channel|>analysis<|message|> #}",
    "none": "{%- set calls = 0 %}" + _TURNS.replace("CALL", "''") + _OPENING,
}
TEMPLATES["llama3"] = "{#- <|start_header_id|> \"parameters\" #}" + TEMPLATES["llama3"]
HARMONY: Final = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
SPECIAL: Final = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", *HARMONY)
_ASSISTANT: Final = "<|im_start|>assistant\n"
#: Where the script is not allowed, the first of these that is: it ends what is open as soon as that may be.
_FALLBACK: Final = ("<|im_end|>", '"}', '"', "}", "]", ", ", ",", "3", "e", ":", ": ", "{", "<", "a")

Script = Callable[[str], str]
"""Takes the text of a prompt, with its special tokens; returns what the model writes."""


def scripted_tokenizer(template: str) -> HFTokenizer:
    """The demo model's tokenizer with another chat template and a few special tokens more."""
    tokenizer = read_tokenizer(DEMO_MODEL_DIR)
    assert tokenizer is not None
    tokenizer.backend.add_special_tokens(list(SPECIAL))
    tokenizer.added_tokens_decoder = tokenizer.backend.get_added_tokens_decoder()
    tokenizer.chat_template = template
    return HFTokenizer(tokenizer, is_shared=False)


class ScriptedBackend(ToyBackend):
    """A model whose completions a script writes, as far as masks and biases let it."""

    eos_token_ids = frozenset({2})
    vocab_size = 2048 + len(SPECIAL)

    def __init__(self, tokenizer: HFTokenizer, script: Script) -> None:
        super().__init__()
        self._backend = tokenizer._tokenizer.backend
        self._script = script
        self.prompts: list[str] = []
        self._written: dict[str, list[int]] = {}
        self._base = np.linspace(0, -1, self.vocab_size, dtype=np.float32)
        for place, text in enumerate(_FALLBACK):
            if len(ids := self._encode(text)) == 1:
                self._base[ids[0]] = 20 - place

    def logits_after(self, token_ids: npt.NDArray[np.int64]) -> FloatArray:
        """Prefer the next token of the script."""
        text = self._decode(token_ids.tolist())
        if _ASSISTANT not in text:
            return self._base
        prompt = text[: text.rindex(_ASSISTANT) + len(_ASSISTANT)]
        if prompt not in self._written:
            self.prompts.append(prompt)
            self._written[prompt] = self._encode(self._script(prompt))
        tokens = token_ids.tolist()
        opening = self._encode(_ASSISTANT)
        written = tokens[len(tokens) - tokens[::-1].index(opening[0]) - 1 + len(opening) :]
        logits = self._base.copy()
        if (following := self._following(self._written[prompt], written)) is not None:
            logits[following] = 50
        return logits

    def _following(self, script: Sequence[int], written: Sequence[int]) -> int | None:
        if list(script[: len(written)]) == written:
            return script[len(written)] if len(script) > len(written) else 2
        whole, text = self._decode(script), self._decode(written)
        rest = self._encode(whole[len(text) :]) if whole.startswith(text) else None
        return None if rest is None else (rest or [2])[0]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False))


def scripted_engine(script: Script | str, form: str = "hermes", **settings: Any) -> AsyncEngine:
    """Open an engine whose model writes what a script says, in the format of a family."""
    tokenizer = scripted_tokenizer(TEMPLATES.get(form, form))
    backend = ScriptedBackend(tokenizer, (lambda _: script) if isinstance(script, str) else script)
    engine = make_engine(backend, tokenizer=tokenizer, **{
        "num_kv_blocks": 512, "block_size": 16, "max_model_len": 2048, "max_num_batched_tokens": 2048,
        "check_invariants": False, **settings})
    return AsyncEngine(engine, stream_interval_s=0.0)
