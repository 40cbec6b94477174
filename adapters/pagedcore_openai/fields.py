"""What the bodies of the endpoints may say, and its translation into sampling parameters and request options.

Every name is known: it is read, or it is accepted and changes no completion, or it is refused unless its value is the
one that means nothing. ``null`` means that a field was not given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pagedcore import SamplingParams
from pagedcore.errors import InvalidRequest, UnknownParameter, did_you_mean
from pagedcore.request_options import TIMEOUT, OptionKeywords
from pagedcore_http.events import encode
from pagedcore_http.salts import Caller
from pagedcore_openai import structured
from pagedcore_openai.errors import FieldMissing, FieldNotSupported, is_field

DEFAULT_TEMPERATURE: Final = 1.0
"""OpenAI's; the engine's own default is 0."""
DEFAULT_MAX_TOKENS: Final = 16
"""OpenAI's for text completions; chats and responses may fill the context."""
_COMMON: Final = ("temperature", "top_p", "seed", "stop", "n", "presence_penalty", "frequency_penalty", "logit_bias")
"""Sampling parameters with the same name and meaning everywhere."""
_EXTRA: Final = ("min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos")
"""vLLM's, with the same name and meaning here."""
_NOT_WITH_BEAMS: Final = {"temperature": DEFAULT_TEMPERATURE, "top_p": 1.0}
_OPTIONS: Final = ("model", "stream", "stream_options", "priority", "cache_salt", "request_id", "timeout_s",
                   "deadline_s", "ttft_ms", "tpot_ms", "return_token_ids")
_TOOLS: Final = ("tools", "tool_choice", "parallel_tool_calls")
_IGNORED: Final = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "prediction",
})
"""Accepted by every endpoint: they identify, bill, store or speed up, and change no completion."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,),
    "bad_words": ([],), "allowed_token_ids": (), "truncate_prompt_tokens": (), "prompt_logprobs": (),
    "logits_processors": ([],), "guided_decoding_backend": (),
    "return_tokens_as_token_ids": (False,), "kv_transfer_params": (), "vllm_xargs": ({},),
}


@dataclass(frozen=True)
class Form:
    """The names that one endpoint knows."""

    reads: frozenset[str]
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Names that it does not support, with the values that ask for nothing."""

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that were given and are read.

        Raises:
            UnknownParameter: a name that no version of the interface has, as far as this one knows.
            FieldNotSupported: a name that is known and not supported, with a value that asks for something.
        """
        given = {name: value for name, value in body.items() if value is not None}
        for name in given.keys() - self.reads - _IGNORED:
            if name not in self.neutral:
                raise self._unknown(name)
            _require_neutral(name, given[name], self.neutral[name])
        return {name: value for name, value in given.items() if name in self.reads}

    def _unknown(self, name: str) -> UnknownParameter:
        # Safety: text that is no name of a field may be anything, a part of a prompt among it, and is not repeated.
        shown = name if is_field(name) else "body"
        return UnknownParameter(shown, "an unknown field", f"one of {', '.join(sorted(self.reads))}",
                                did_you_mean(name, self.reads), is_described=True)


def _require_neutral(name: str, value: Any, neutral: tuple[Any, ...]) -> None:
    # Why types: JSON's true is no 1.
    if not any(type(value) is type(one) and value == one for one in neutral):
        allowed = " or ".join(["null", *map(encode, neutral)])
        raise FieldNotSupported(name, value, f"{allowed}, because this is not supported here")


_SAMPLING: Final = {*_COMMON, *_EXTRA, "top_k", "max_tokens", "use_beam_search", "length_penalty", "early_stopping",
                    *_OPTIONS}
CHAT: Final = Form(
    frozenset({*_SAMPLING, *_TOOLS, *structured.NAMES, "messages", "max_completion_tokens", "logprobs",
               "top_logprobs"}),
    {**_NEUTRAL, "functions": ([],), "function_call": ("none", "auto"),
     "modalities": (["text"],), "audio": (), "web_search_options": (),
     "reasoning_effort": ("none",), "verbosity": ("medium",), "best_of": (1,), "echo": (False,),
     "add_generation_prompt": (True,), "continue_final_message": (False,), "add_special_tokens": (False,),
     "documents": (), "chat_template": (), "chat_template_kwargs": ({},), "mm_processor_kwargs": (),
     "include_reasoning": (True,)},
)
COMPLETION: Final = Form(
    frozenset({*_SAMPLING, *structured.NAMES, "prompt", "logprobs", "echo", "best_of"}),
    {**_NEUTRAL, "parallel_tool_calls": (True, False), "suffix": ("",), "add_special_tokens": (True,),
     "prompt_embeds": ()},
)
RESPONSE: Final = Form(
    frozenset({"input", "instructions", "previous_response_id", "store", "max_output_tokens", "temperature",
               "top_p", "top_logprobs", "include",
               "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos", "min_tokens", "stop_token_ids",
               "logit_bias", "text", *_OPTIONS, *_TOOLS} - {"return_token_ids"}),
    {"conversation": (), "prompt": (),
     "background": (False,), "reasoning": ({},), "truncation": ("disabled",),
     "max_tool_calls": (), "context_management": ()},
)
TOKENIZE: Final = Form(
    frozenset({"model", "prompt", "messages", "tools", "return_token_strs"}),
    {"add_special_tokens": (True, False), "add_generation_prompt": (True,), "continue_final_message": (False,),
     "chat_template": (), "chat_template_kwargs": ({},), "mm_processor_kwargs": ()},
)
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


def wants_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a stream ends with a chunk that has the usage. Raises ``InvalidRequest``."""
    options = fields.get("stream_options", {})
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", options, "an object")
    if "stream_options" in fields and not flag(fields, "stream"):
        raise InvalidRequest("stream_options", options, "given with stream: true only")
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise FieldNotSupported("stream_options", name, "include_usage and include_obfuscation")
    return flag({"include_usage": False, **{k: v for k, v in options.items() if v is not None}}, "include_usage")


def options_of(fields: Mapping[str, Any], caller: Caller, label: str) -> OptionKeywords:
    """Return the options of the request, with what the operator says of its caller.

    Raises:
        InvalidRequest: the priority, the salt, the label or the deadline is refused.
    """
    return caller.options({
        "priority": fields.get("priority", 0), "cache_salt": fields.get("cache_salt"),
        "request_id": fields.get("request_id", label), "deadline_s": fields.get("deadline_s"),
        "ttft_ms": fields.get("ttft_ms"), "tpot_ms": fields.get("tpot_ms"),
    })


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
    values = {name: fields[name] for name in (*_COMMON, *_EXTRA) if name in fields} | more
    if (wanted := structured.structured_of(fields)) is not None:
        values["structured"] = wanted
    if "top_k" in fields:
        # Why: vLLM's -1 is our 0, all tokens.
        values["top_k"] = 0 if fields["top_k"] == -1 else fields["top_k"]
    if flag(fields, "use_beam_search"):
        return _beams(fields, values)
    for name in ("length_penalty", "early_stopping"):
        if name in fields:
            raise FieldNotSupported(name, fields[name], "null without use_beam_search")
    return SamplingParams.from_mapping({"temperature": DEFAULT_TEMPERATURE, **values})


def _beams(fields: Mapping[str, Any], values: dict[str, Any]) -> SamplingParams:
    """Return the parameters of a beam search, which takes no temperature; as many beams as completions."""
    chosen = {name: value for name, value in values.items() if value != _NOT_WITH_BEAMS.get(name)}
    if chosen.get("temperature") == 0:
        del chosen["temperature"]
    penalties = {name: fields[name] for name in ("length_penalty", "early_stopping") if name in fields}
    width = chosen.pop("best_of", None) or values.get("n", 1)
    return SamplingParams.from_mapping({**chosen, **penalties, "beam_width": width})
