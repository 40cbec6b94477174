"""``Infill``: a prompt of the text before and behind a gap, which the completion fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from pagedcore.config.limits import MAX_TEXT_BYTES_PER_TOKEN
from pagedcore.errors import InvalidPrompt, InvalidSampling
from pagedcore.sampling_params import SamplingParams
from pagedcore.tokenizer.text_size import count_text_bytes


@runtime_checkable
class FillsIn(Protocol):
    """A tokenizer whose model may complete text between two others."""

    @property
    def infill_end_ids(self) -> frozenset[int]:
        """The tokens that end such a completion besides the model's own; empty if the model has no such prompts."""

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """Return the prompt that asks for the text between the two.

        Raises:
            InvalidPrompt: the model has no such prompts, or a text has that of a control token, which this tokenizer
                reads in one way only.
        """


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt that asks for the text between two others, of a model with fill-in-the-middle tokens.

    Its tokens are the model's own marks around both texts, in the order that its family was trained with. The text of a
    control token in either is ordinary text. A completion ends at the family's end tokens too, which are no text,
    unless ``ignore_eos`` is set.

    Raises:
        InvalidPrompt: a text is none; token ids cannot be put between the marks.
    """

    prefix: str
    suffix: str

    def __post_init__(self) -> None:
        for name, what in (("prefix", "prompt"), ("suffix", "suffix")):
            if not isinstance(getattr(self, name), str):
                raise InvalidPrompt(what, getattr(self, name), "text where there is a suffix")


def encode_infill(
    prompt: Infill, params: SamplingParams, tokenizer: Any, max_model_len: int
) -> tuple[list[int], frozenset[int]]:
    """Return the tokens of a prompt, and those that end its completion besides the model's own.

    Raises:
        InvalidPrompt: the model has no such prompts, or reads a text in one way only.
        InvalidText: a text is no UTF-8, or both are more than could fit.
        InvalidSampling: the prompt is to be truncated, which would take its marks away.
    """
    if params.truncate_prompt_tokens is not None:
        raise InvalidSampling("truncate_prompt_tokens", params.truncate_prompt_tokens, "None with a suffix")
    room = MAX_TEXT_BYTES_PER_TOKEN * max_model_len
    count_text_bytes("suffix", prompt.suffix, room - count_text_bytes("text", prompt.prefix, room))
    if not isinstance(tokenizer, FillsIn):
        raise InvalidPrompt("suffix", prompt.suffix, "none with this tokenizer, or without one")
    return tokenizer.encode_infill(prompt.prefix, prompt.suffix), tokenizer.infill_end_ids


def require_no_gap(prompt: object) -> None:
    """Raise ``InvalidPrompt`` for a gap behind other tokens, where none can be filled."""
    if type(prompt) is Infill:
        raise InvalidPrompt("suffix", prompt.suffix, "none in a session or a further turn, where prompts follow others")
