"""What a model's ``generation_config.json`` says of requests that do not say otherwise.

Owns the reading of its fields: which parameter each is, and which have no meaning here. ``models`` finds the fields,
``requests/input_processor.py`` applies what is made of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

from pagedcore.errors import InvalidRequest
from pagedcore.sampling_params import SamplingParams

_log = logging.getLogger("pagedcore")

_TAKEN: Final[Mapping[str, str]] = MappingProxyType({
    **{name: name for name in (
        "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids",
        "begin_suppress_tokens", "forced_eos_token_id", "suppress_tokens",
    )},
    "min_new_tokens": "min_tokens",
})
"""Fields of the file, as transformers calls them, and the parameters that they are."""
_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({
    "constraints": (), "diversity_penalty": (0.0,), "dola_layers": (), "early_stopping": (False,),
    "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1.0,), "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,), "exponential_decay_length_penalty": (), "force_words_ids": (), "forced_bos_token_id": (),
    "guidance_scale": (1.0,), "length_penalty": (1.0,), "max_time": (), "min_length": (0,), "num_beam_groups": (1,),
    "num_beams": (1,), "num_return_sequences": (1,), "penalty_alpha": (0.0,), "renormalize_logits": (False,),
    "sequence_bias": (), "stop_strings": (), "top_h": (), "typical_p": (1.0,), "watermarking_config": (),
})
"""Fields that change what transformers generates and are not supported, with the values that mean nothing."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's own sampling parameters, checked."""

    parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """The values of sampling parameters that a request did not give, by name."""
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that no request may get, whatever it gave."""
    unread: tuple[str, ...] = ()
    """Fields of the file that are not applied, each with its reason."""

    @classmethod
    def of(
        cls, fields: Mapping[str, Any], vocab_size: int, eos_token_ids: Set[int], *, is_used: bool = True
    ) -> GenerationDefaults:
        """Read the fields of a file.

        Args:
            fields: by the names of transformers; ``None`` means that a field is not there.
            vocab_size: of the model. Tokens beyond it cannot come anyway.
            eos_token_ids: of the model.
            is_used: whether the fields are defaults; ``suppress_tokens`` holds without it too.
        """
        read, unread = dict[str, Any](), list[str]()
        for name, parameter in _TAKEN.items():
            if (value := fields.get(name)) is None or not (is_used or name == "suppress_tokens"):
                continue
            try:
                value = _fitted(name, value, vocab_size, eos_token_ids)
                read[parameter] = getattr(SamplingParams(**{parameter: value}), parameter)
            except InvalidRequest as error:
                unread.append(f"{name} ({error.limit} is allowed)")
        for name, neutral in _NEUTRAL.items() if is_used else ():
            if (value := fields.get(name)) is not None and value not in neutral:
                unread.append(f"{name} (not supported)")
        suppressed = read.pop("suppress_tokens", ())
        return cls(MappingProxyType(read), suppressed, tuple(unread))

    @property
    def as_mapping(self) -> dict[str, Any]:
        """What holds, by the names of sampling parameters."""
        held = {"suppress_tokens": self.suppress_tokens} if self.suppress_tokens else {}
        return {**self.parameters, **held}

    def apply(self, params: SamplingParams) -> SamplingParams:
        """Return a request's parameters with the model's where it gave none; the very same if nothing is added."""
        if self.parameters:
            params = params.with_defaults(self.parameters)
        if not self.suppress_tokens or set(self.suppress_tokens) <= set(params.suppress_tokens):
            return params
        return replace(params, suppress_tokens=(*params.suppress_tokens, *self.suppress_tokens))

    def log(self) -> None:
        """Say once what holds, and what is not applied."""
        if held := self.as_mapping:
            _log.info("Requests that do not say otherwise have the model's own parameters: %s.", describe(held))
        if self.unread:
            _log.warning("The model's generation_config.json is not applied in: %s.", ", ".join(self.unread))


def describe(values: Mapping[str, Any]) -> str:
    """Return parameters for people, in one line; long lists by their length."""
    shown = {name: f"{len(value)} of them" if isinstance(value, tuple) and len(value) > 8 else value
             for name, value in values.items()}
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _fitted(name: str, value: Any, vocab_size: int, eos_token_ids: Set[int]) -> Any:
    """Return a field's value without what means nothing for a vocabulary."""
    if name == "top_k" and type(value) is int:
        return min(value, vocab_size)
    if name in ("suppress_tokens", "begin_suppress_tokens") and isinstance(value, list | tuple):
        return [one for one in value if type(one) is not int or 0 <= one < vocab_size]
    if name == "forced_eos_token_id":
        forced = value if isinstance(value, list | tuple) else [value]
        # Why -1: it is refused as no token, by the rule of the parameter.
        return -1 if any(type(one) is int and one >= vocab_size for one in forced) else value
    if name == "bad_words_ids" and isinstance(value, list | tuple):
        # Why: transformers leaves out the end tokens alone, without which nothing would end.
        return [one for one in value if not (isinstance(one, list | tuple) and (
            any(list(one) == [end] for end in eos_token_ids)
            or any(type(token_id) is int and token_id >= vocab_size for token_id in one)))]
    return value
