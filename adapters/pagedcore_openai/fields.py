"""What the bodies of the endpoints may say, and its translation into sampling parameters and request options.

Every name is known: it is read, or it is accepted and changes no completion, or it is refused unless its value is the
one that means nothing. ``null`` means that a field was not given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, cast

from pagedcore import SamplingParams
from pagedcore.errors import InvalidRequest, UnknownParameter, did_you_mean
from pagedcore.request_options import CALLERS_OPTIONS, TIMEOUT, OptionKeywords
from pagedcore_http.events import encode
from pagedcore_http.salts import Caller
from pagedcore_openai import structured
from pagedcore_openai.errors import FieldMissing, FieldNotSupported, is_field

DEFAULT_TEMPERATURE: Final = 1.0
"""OpenAI's, where the model has none of its own; the engine's own default is 0."""
DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's for text completions; chats and responses may fill the context."""
_OTHERWISE: Final = {
    "max_tokens", "top_k", "best_of", "beam_width", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs",
    "structured", "stop_outside", "bad_words_ids", "logits_processor", "return_logits",
}
"""Sampling parameters that bodies say in other words or with other limits, or not at all."""
_SAME: Final = tuple(one.name for one in dataclasses.fields(SamplingParams) if one.name not in _OTHERWISE)
"""Those with the same name and meaning: OpenAI's, vLLM's, and every other one."""
_NOT_WITH_BEAMS: Final = {"temperature": DEFAULT_TEMPERATURE, "top_p": 1.0}
_OPTIONS: Final = ("model", "stream", "stream_options", "timeout_s", "return_token_ids", *CALLERS_OPTIONS)
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_OF_TEMPLATE: Final = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")
_IGNORED: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prompt_cache_options", "prediction", "client_metadata",
})
"""Accepted by every endpoint: they identify, bill, store or speed up, and change no completion."""
_VERBOSITY: Final = ("low", "medium", "high")
_ADVICE: Final[Mapping[str, str]] = {
    "audio": "Models here read and write text only.", "modalities": "Models here read and write text only.",
    "image": "Models here read and write text only.", "documents": "Write them into a message.",
    "web_search_options": "There is no search here; give a function of your own in tools.",
    "moderation": "Nothing is moderated here; ask a model for it before or after.",
    "conversation": "previous_response_id continues a stored response.",
    "prompt": "Write its text as instructions and input.",
    "background": "Keep the connection, with stream: true, or cancel and ask again.",
    "max_tool_calls": "parallel_tool_calls: false allows one call in an answer.",
    "context_management": "Send a shorter input.", "truncation": "Send a shorter input.",
    "prompt_logprobs": "Ask /v1/completions with echo and logprobs.",
    "chat_template": "The operator gives one: serve --chat-template FILE.",
    "logits_processors": "They are code, which is not taken from a body.",
}
"""What to do instead of leaving a name out, where it is refused unless its value asks for nothing."""
_NUM_SEEDS: Final = 2**63
"""Seeds of the engine, from 0 on."""
MAX_METADATA: Final = (16, 64, 512)
"""OpenAI's most of a response's metadata: pairs, characters of a name, characters of a value."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "spaces_between_special_tokens": (True,), "prompt_logprobs": (),
    "logits_processors": ([],), "guided_decoding_backend": (),
    "return_tokens_as_token_ids": (False,), "kv_transfer_params": (), "vllm_xargs": ({},),
}


@dataclass(frozen=True)
class Form:
    """The names that one endpoint knows."""

    reads: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Names that it does not support, with the values that ask for nothing."""
    ignored: frozenset[str] = _IGNORED
    """Names without effect, whatever their value."""
    place: str = ""
    """Where the names are, for an object inside of a body: its name and a dot."""

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that were given and are read.

        Raises:
            UnknownParameter: a name that no version of the interface has, as far as this one knows.
            FieldNotSupported: a name that is known and not supported, with a value that asks for something.
        """
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - self.reads - self.ignored:
            if name not in self.neutral:
                raise self._unknown(name)
            _require_neutral(self.place, name, given[name], self.neutral[name])
        return {name: value for name, value in given.items() if name in self.reads}

    def _unknown(self, name: str) -> UnknownParameter:
        # Safety: text that is no name of a field may be anything, a part of a prompt among it, and is not repeated.
        shown = self.place + name if is_field(name) else self.place.rstrip(".") or "body"
        return UnknownParameter(shown, "an unknown field", f"one of {', '.join(sorted(self.reads)) or 'none'}",
                                did_you_mean(name, self.reads), is_described=True)

    def read_in(self, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Return the fields of an object inside of a body, empty if it was not given.

        Raises ``InvalidRequest`` if it is no object, else as ``read``.
        """
        value = fields.get(name, {})
        if not isinstance(value, dict):
            raise InvalidRequest(name, value, "an object")
        return self.read(value)


def _require_neutral(place: str, name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    # Why types: JSON's true is no 1.
    if not any(type(value) is type(one) and value == one for one in neutral):
        allowed = " or ".join(["null", *map(encode, neutral)])
        raise FieldNotSupported(place + name, value, f"{allowed}, because this is not supported here",
                                _ADVICE.get(name, "Leave it out."))


_SAMPLING: Final = {*_SAME, "top_k", "max_tokens", "use_beam_search", "length_penalty", "early_stopping",
                    *_OPTIONS}
CHAT: Final = Form(
    frozenset({*_SAMPLING, *_TOOLS, *structured.NAMES, "messages", "max_completion_tokens", "logprobs",
               "top_logprobs", "functions", "function_call", "reasoning_effort", *_OF_TEMPLATE}),
    {**_NEUTRAL,
     "modalities": (["text"],), "audio": (), "web_search_options": (), "moderation": (), "verbosity": _VERBOSITY,
     "best_of": (1,), "echo": (False,),
     "add_special_tokens": (False,), "documents": (), "chat_template": (), "mm_processor_kwargs": (),
     "include_reasoning": (True,)},
)
COMPLETION: Final = Form(
    frozenset({*_SAMPLING, *structured.NAMES, "prompt", "suffix", "logprobs", "echo", "best_of"}),
    {**_NEUTRAL, "parallel_tool_calls": (True, False), "add_special_tokens": (True,),
     "prompt_embeds": ()},
)
RESPONSE: Final = Form(
    frozenset({"input", "instructions", "previous_response_id", "store", "max_output_tokens", "top_logprobs", "include",
               "top_k", "text", "reasoning", "truncation", "metadata", *_SAME, *_OPTIONS, *_TOOLS}
              - {"return_token_ids", "n", "presence_penalty", "frequency_penalty"}),
    {"conversation": (), "prompt": (), "image": (), "moderation": (), "access_programs": (),
     "background": (False,), "background_options": (), "max_tool_calls": (), "context_management": ()},
)
TEXT: Final = Form(frozenset({"format"}), {"verbosity": _VERBOSITY}, frozenset(), "text.")
REASONING: Final = Form(
    frozenset({"effort"}), {"context": ("auto",), "mode": ("standard",)},
    frozenset({"summary", "generate_summary"}), "reasoning.",
)
"""Reasoning is given as it was written, and not summed up."""
_STREAM_OPTIONS: Final = Form(
    frozenset({"include_usage", "continuous_usage_stats"}), {"include_obfuscation": (True, False)}, frozenset(),
    "stream_options.",
)
TOKENIZE: Final = Form(
    frozenset({"model", "prompt", "messages", "tools", "return_token_strs", *_OF_TEMPLATE}),
    {"add_special_tokens": (True, False), "chat_template": (), "mm_processor_kwargs": ()},
)
EMBEDDING: Final = Form(
    frozenset({"input", "model", "encoding_format", "dimensions", "pooling", "normalize", "prompt_name", "timeout_s",
               *CALLERS_OPTIONS}),
    {"truncate_prompt_tokens": (), "add_special_tokens": (True,)},
)
_JUDGING: Final = frozenset({"model", "use_activation", "timeout_s", *CALLERS_OPTIONS})
_NOT_CUT: Final[Mapping[str, tuple[Any, ...]]] = {
    "truncate_prompt_tokens": (), "max_tokens_per_doc": (), "max_tokens_per_query": (0,), "max_chunks_per_doc": (),
    "activation": (True,), "softmax": (True,), "mm_processor_kwargs": (),
}
"""Names of vLLM, Jina and Cohere that would cut texts off, and older ones of ``use_activation``."""
RERANK: Final = Form(_JUDGING | {"query", "documents", "top_n", "return_documents", "instruction", "prompt_name"},
                     {**_NOT_CUT, "rank_fields": ()})
SCORE: Final = Form(_JUDGING | {"text_1", "text_2", "instruction", "prompt_name"}, _NOT_CUT)
CLASSIFY: Final = Form(_JUDGING | {"input"}, {**_NOT_CUT, "add_special_tokens": (True,)})
DETOKENIZE: Final = Form(frozenset({"model", "tokens"}))


def flag(fields: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """Return a field that is true or false. Raises ``InvalidRequest`` for anything else."""
    value = fields.get(name, default)
    if type(value) is not bool:
        raise InvalidRequest(name, value, "true or false")
    return value


def required(fields: Mapping[str, Any], name: str, limit: str) -> Any:
    """Return a field. Raises ``FieldMissing`` if it was not given."""
    if name not in fields:
        raise FieldMissing(name, limit)
    return fields[name]


class Usages(Enum):
    """Which chunks of a stream have the usage."""

    NONE = "none"
    LAST = "last"
    """One more, at the end."""
    EVERY = "every"
    """Each, up to its token, and one more at the end, as vLLM's ``continuous_usage_stats``."""


def usages_of(fields: Mapping[str, Any]) -> Usages:
    """Return which chunks of a stream have the usage. Raises ``InvalidRequest``."""
    options = _STREAM_OPTIONS.read_in(fields, "stream_options")
    if "stream_options" in fields and not flag(fields, "stream"):
        raise InvalidRequest("stream_options", fields["stream_options"], "given with stream: true only")
    is_every, is_last = flag(options, "continuous_usage_stats"), flag(options, "include_usage")
    # Why both: vLLM gives no usage at all without include_usage.
    return Usages.NONE if not is_last else Usages.EVERY if is_every else Usages.LAST


def metadata_of(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata of a response. Raises ``InvalidRequest`` for more of it than OpenAI takes."""
    given = fields.get("metadata", {})
    num_pairs, num_in_name, num_in_value = MAX_METADATA
    if not isinstance(given, dict) or len(given) > num_pairs:
        num_given = len(given) if isinstance(given, dict) else given
        raise InvalidRequest("metadata", num_given, f"an object of at most {num_pairs} pairs")
    for name, value in given.items():
        if len(name) > num_in_name or not isinstance(value, str) or len(value) > num_in_value:
            limit = f"names of at most {num_in_name} characters, and texts of at most {num_in_value}"
            raise InvalidRequest("metadata", value if len(name) <= num_in_name else name, limit)
    return given


def options_of(fields: Mapping[str, Any], caller: Caller, label: str, lora: str | None = None) -> OptionKeywords:
    """Return the options of the request, with what the operator says of its caller, and the adapter of its model's
    name.

    Raises:
        InvalidRequest: the priority, the salt, the label or the deadline is refused, or the body names two adapters.
    """
    given = {name: fields[name] for name in CALLERS_OPTIONS if name in fields}
    if lora is not None and given.setdefault("lora", lora) != lora:
        raise InvalidRequest("lora", given["lora"], "the adapter of the model's name, or none beside it")
    return caller.options(cast(OptionKeywords, {"request_id": label, **given}))


def timeout_of(fields: Mapping[str, Any]) -> float | None:
    """Return the longest time to the end of the completions, in seconds. Raises ``InvalidRequest``."""
    return TIMEOUT.check("timeout_s", fields.get("timeout_s"))


def params_of(fields: Mapping[str, Any], **more: Any) -> SamplingParams:
    """Return the sampling parameters.

    Args:
        fields: what ``Form.read`` returned.
        more: what the endpoint names otherwise.

    Raises:
        InvalidRequest: as from ``SamplingParams``.
    """
    values = {name: fields[name] for name in _SAME if name in fields} | more
    if (wanted := structured.structured_of(fields)) is not None:
        values["structured"] = wanted
    if type(top_p := fields.get("top_p")) in (int, float) and top_p == 0:
        # Why: of the fewest tokens that reach a probability of 0 there is one, the most likely.
        values |= {"top_p": 1.0, "temperature": 0.0}
    if type(seed := fields.get("seed")) is int and -_NUM_SEEDS <= seed < 0:
        # Why: -1 asks vLLM and llama.cpp for a random one; OpenAI takes any of 64 bits.
        values["seed"] = None if seed == -1 else seed + _NUM_SEEDS
    if "top_k" in fields:
        # Why: vLLM's -1 is our 0, all tokens.
        values["top_k"] = 0 if fields["top_k"] == -1 else fields["top_k"]
    if flag(fields, "use_beam_search"):
        return _beams(fields, values)
    for name in ("length_penalty", "early_stopping"):
        if name in fields:
            raise FieldNotSupported(name, fields[name], "null without use_beam_search")
    return SamplingParams.from_mapping(values, {"temperature": DEFAULT_TEMPERATURE})


def _beams(fields: Mapping[str, Any], values: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a beam search, which takes no temperature; as many beams as completions."""
    chosen = {name: value for name, value in values.items() if value != _NOT_WITH_BEAMS.get(name)}
    if chosen.get("temperature") == 0:
        del chosen["temperature"]
    penalties = {name: fields[name] for name in ("length_penalty", "early_stopping") if name in fields}
    width = chosen.pop("best_of", None) or values.get("n", 1)
    return SamplingParams.from_mapping({**chosen, **penalties, "beam_width": width})
