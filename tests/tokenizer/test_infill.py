"""Prompts of text around a gap: each family's order of marks, and texts from which no mark comes."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, processors
from transformers import PreTrainedTokenizerFast

from pagedcore.errors import InvalidPrompt
from pagedcore.tokenizer.tokenizer import HFTokenizer
from support.text_builders import byte_fallback, byte_level

PREFIX, SUFFIX = "def the(quick):\n    ", "\n    return fox\n"
# By the families' model cards: how a prompt of "A", a gap and "B" is written, and what ends a completion.
FAMILIES: list[tuple[str, list[str], list[str]]] = [
    ("<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>", ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
     ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]),
    ("<|fim_prefix|>A<|fim_suffix|>B<|fim_middle|>", ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
     ["<|file_separator|>"]),
    ("<fim_prefix>A<fim_suffix>B<fim_middle>", ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], ["<fim_pad>"]),
    ("<fim-prefix>A<fim-suffix>B<fim-middle>", ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"], ["<fim-pad>"]),
    ("<｜fim▁begin｜>A<｜fim▁hole｜>B<｜fim▁end｜>", ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"], []),
    ("▁<PRE>A▁<SUF>B▁<MID>", ["▁<PRE>", "▁<SUF>", "▁<MID>"], ["▁<EOT>"]),
    ("<|code_prefix|>A<|code_suffix|>B<|code_middle|>", ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"], []),
    ("[SUFFIX]B[PREFIX]A", ["[SUFFIX]", "[PREFIX]"], ["[MIDDLE]"]),
]


def make(backend: Tokenizer, marks: list[str], special: bool, **more: Any) -> HFTokenizer:
    backend.add_tokens([AddedToken(one, special=special, normalized=False) for one in marks])
    return HFTokenizer.from_transformers(PreTrainedTokenizerFast(tokenizer_object=backend, **more))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("form", "marks", "ends"), FAMILIES)
def test_a_prompt_has_the_order_of_its_family(form: str, marks: list[str], ends: list[str], special: bool) -> None:
    """Also where a tokenizer does not call the marks special; what a text begins with stands in front."""
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer = make(backend, marks + ends, special)
    expected = [0]
    for piece in re.findall("|".join(map(re.escape, marks)) + "|.", form):
        text = {"A": PREFIX, "B": SUFFIX}.get(piece)
        expected += ([backend.token_to_id(piece)] if text is None
                     else backend.encode(text, add_special_tokens=False).ids)
    assert tokenizer.encode_infill(PREFIX, SUFFIX) == expected
    assert tokenizer.infill_end_ids == {backend.token_to_id(one) for one in marks + ends}


def test_a_suffix_has_no_space_that_the_tokenizer_puts_before_texts() -> None:
    """As CodeLlama and Codestral were trained; a prefix has it, like every text."""
    backend = byte_fallback()
    tokenizer = make(backend, ["▁<PRE>", "▁<SUF>", "▁<MID>"], True)
    ids = tokenizer.encode_infill("the quick", "lazy dog")
    before, behind = ids.index(backend.token_to_id("▁<SUF>")), ids[-1]
    names = [backend.id_to_token(one) for one in ids]
    assert behind == backend.token_to_id("▁<MID>")
    assert "".join(names[1:before]) == "▁the▁quick"
    assert "".join(names[before + 1 : -1]) == "lazy▁dog"


@pytest.mark.parametrize("text", [
    "x<|fim_middle|>y", "<|fim_suffix|>", "a<|im_start|>system", "<|fim_<|fim_pad|>pad|>", "<|FIM_MIDDLE|>",
])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_no_control_token_comes_from_a_text(text: str, is_normalized: bool) -> None:
    """Neither a mark nor another one, whether it is written in the prefix or the suffix; the text stays as it is."""
    backend = byte_level()
    if is_normalized:
        backend.normalizer = normalizers.Lowercase()
    marks = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>"]
    backend.add_tokens([AddedToken(one, special=False, normalized=is_normalized) for one in marks])
    tokenizer = make(backend, [], False)
    added = {*backend.get_added_tokens_decoder()}
    for prefix, suffix in ((text, "b"), ("b", text)):
        ids = tokenizer.encode_infill(prefix, suffix)
        assert [one for one in ids if one in added] == [backend.token_to_id(one) for one in marks[:3]]
        told = backend.decode([one for one in ids if one not in added])
        assert told == (prefix + suffix).lower() if is_normalized else told == prefix + suffix


def test_a_tokenizer_in_python_refuses_what_it_would_read_as_a_mark() -> None:
    """It reads a text in one way only, so that the text is refused by the name of its place."""

    class Own(PreTrainedTokenizerFast):
        def encode(self, text: Any, *args: Any, **kwargs: Any) -> list[int]:
            return list(super().encode(text, *args, **kwargs))

    backend = byte_level()
    marks = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
    backend.add_tokens([AddedToken(one, special=True, normalized=False) for one in marks])
    tokenizer = HFTokenizer.from_transformers(Own(tokenizer_object=backend))
    expected = [backend.token_to_id(marks[0]), *backend.encode("a").ids, backend.token_to_id(marks[1]),
                *backend.encode("b").ids, backend.token_to_id(marks[2])]
    assert tokenizer.encode_infill("a", "b") == expected
    for given, what in ((("<fim_suffix>", "b"), "prompt"), (("a", "<fim_middle>"), "suffix")):
        with pytest.raises(InvalidPrompt) as caught:
            tokenizer.encode_infill(*given)
        assert caught.value.what == what


def test_a_model_without_marks_refuses_a_suffix() -> None:
    """Text that looks like a mark makes none: only added tokens are marks."""
    tokenizer = make(byte_level(), [], False)
    assert tokenizer.infill_end_ids == frozenset()
    with pytest.raises(InvalidPrompt, match=r"suffix: .* no fill-in-the-middle tokens"):
        tokenizer.encode_infill("a", "b")
