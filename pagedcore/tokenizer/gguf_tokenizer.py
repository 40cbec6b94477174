"""Builds a tokenizer from the metadata of a GGUF file: byte-level BPE of known kinds, and SentencePiece's BPE.

Owns what llama.cpp's names of tokenizers and of ways to split text mean. A file whose way is not known needs the
model's own ``tokenizer.json`` beside it, which must have the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pagedcore.errors import InvalidConfig, PagedcoreError, describe
from pagedcore.tokenizer.quick_tokenizer import QWEN_SPLIT, QuickTokenizer
from pagedcore.tokenizer.tokenizer import HFTokenizer

_LLAMA_SPLIT: Final = QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_MARKS_SPLIT: Final = QWEN_SPLIT.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"


def _split_by_case(endings: str, digits: str) -> str:
    """Return an expression by which words end where small letters do, with their contractions."""
    large, small, first = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[^\r\n\p{L}\p{N}]?"
    words = f"{first}{large}*{small}+{endings}|{first}{large}+{small}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class _Way:
    """How text is split before bytes are merged, and what else goes with a name of that."""

    expression: str | None = None
    """``None``: GPT-2's own."""
    ignores_merges: bool = False
    """Whether a part that is a token is one, whatever merges say."""
    begins: bool = False
    """Whether the first token is put before a text where the file does not say."""
    has_single_digits: bool = False
    """Whether digits are parts of their own first."""
    composes: bool = False
    """Whether text is put in NFC first."""


_OF_GPT_2, _OF_DIGITS, _OF_QWEN = _Way(), _Way(has_single_digits=True), _Way(QWEN_SPLIT, composes=True)
_OF_LLAMA, _OF_GPT_4O = _Way(_LLAMA_SPLIT, True, True), _Way(_split_by_case(_ENDINGS, r"\p{N}{1,3}"))
_WAYS: Final[Mapping[str, _Way]] = {
    "gpt-2": _OF_GPT_2, "smollm": _OF_DIGITS, "refact": _OF_DIGITS, "starcoder": _OF_DIGITS, "qwen2": _OF_QWEN,
    "deepseek-r1-qwen": _OF_QWEN, "qwen35": _Way(_MARKS_SPLIT), "llama-bpe": _OF_LLAMA,
    "llama3": _OF_LLAMA, "llama-v3": _OF_LLAMA, "lfm2": _OF_LLAMA, "dbrx": _Way(_LLAMA_SPLIT),
    "chatglm-bpe": _Way(_LLAMA_SPLIT),
    "glm4": _Way(_LLAMA_SPLIT, True), "gpt-4o": _OF_GPT_4O, "llama4": _OF_GPT_4O,
    "tekken": _Way(_split_by_case("", r"\p{N}"), True, True),
}
"""By ``tokenizer.ggml.pre``."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_NAMED: Final = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
_TEXT, _FLAG, _TEXTS = ("text", (str,)), ("true or false", (bool,)), ("a list of texts", (str,))
_NEEDED: Final[Mapping[str, tuple[str, tuple[type, ...]]]] = {
    "model": _TEXT, "pre": _TEXT, "chat_template": _TEXT, "add_bos_token": _FLAG, "add_eos_token": _FLAG,
    "add_space_prefix": _FLAG, "tokens": _TEXTS, "merges": _TEXTS, "token_type": ("a list of integers", (int,)),
    "scores": ("a list of numbers", (float, int)),
}
"""What entries are, of those that are read without a look at their types."""
_SPACE: Final = "▁"
_LONGEST_PIECE: Final = 256
"""Longest token of SentencePiece whose pieces are looked for; the work grows with its square."""


def gguf_tokenizer(metadata: Mapping[str, Any], directory: Path) -> HFTokenizer | None:
    """Return the tokenizer of a GGUF file; ``None``: there is none.

    Args:
        metadata: of the file.
        directory: where the file is.

    Raises:
        InvalidConfig: the metadata contradict themselves, or are of a kind that is not known, and the directory has no
            tokenizer with the same tokens.
    """
    if (quick := tokenizer_in_metadata(metadata)) is not None:
        return HFTokenizer(quick, is_shared=False)
    tokens, kind, split, _ = _described(metadata)
    if not tokens:
        return HFTokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    return _beside(directory, tokens, f"{str(kind)[:80]!r} with text split as {str(split)[:80]!r}")


def tokenizer_in_metadata(metadata: Mapping[str, Any]) -> QuickTokenizer | None:
    """Return the tokenizer that the metadata of a GGUF file describe; ``None``: none, or one of an unknown kind.

    Raises:
        InvalidConfig: the metadata contradict themselves.
    """
    tokens, kind, split, given = _described(metadata)
    if not tokens or not (kind == "llama" or (kind == "gpt2" and split in _WAYS)):
        return None
    try:
        return _build(given, kind == "llama", metadata.get("tokenizer.chat_template"))
    except PagedcoreError:
        raise
    except Exception as error:  # Why any: the library of tokenizers raises the bare Exception.
        raise InvalidConfig(
            f"tokenizer: the metadata of the GGUF file contradict themselves ({type(error).__name__})."
        ) from error


def _described(metadata: Mapping[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """Return tokens, if there are any, kind of tokenizer, way to split text, and all there is.

    Raises:
        InvalidConfig: an entry is of another type than in any file.
    """
    given = {name.removeprefix("tokenizer.ggml."): value for name, value in metadata.items()
             if name.startswith("tokenizer.ggml.")}
    for name, value in {**given, "chat_template": metadata.get("tokenizer.chat_template", "")}.items():
        if name in _NEEDED:
            _require_type(name, value)
    kind = given.get("model")
    return None if kind == "no_vocab" else given.get("tokens"), kind, given.get("pre", "default"), given


def _require_type(name: str, value: Any) -> None:
    needed, types = _NEEDED[name]
    is_list = needed.startswith("a list")
    elements = value if is_list and isinstance(value, list) else [value]
    if isinstance(value, list) is not is_list or not {*map(type, elements)} <= {*types}:
        raise InvalidConfig(f"tokenizer: {name} of the GGUF file is {describe(value)}, needed is {needed}.")


def _beside(directory: Path, tokens: list[str], kind: str) -> HFTokenizer:
    if not (directory / "tokenizer.json").is_file():
        raise InvalidConfig(
            f"tokenizer: the GGUF file has the kind {kind}, known are 'llama' and 'gpt2' with {', '.join(_WAYS)}. "
            "Put the model's own tokenizer.json and tokenizer_config.json beside the file, or name their directory."
        )
    found = HFTokenizer.from_directory(directory)
    # Shape: files fill their vocabulary up.
    known = found._tokenizer.get_vocab()
    others = [token for number, token in enumerate(tokens)
              if known.get(token) != number and not token.startswith("[PAD")]
    if others:
        raise InvalidConfig(
            f"tokenizer: {len(others)} tokens of the GGUF file are others in the tokenizer.json beside it. Name the "
            "directory of the model's own tokenizer."
        )
    return found


def _build(given: Mapping[str, Any], is_spm: bool, chat_template: str | None) -> QuickTokenizer:
    tokens, kinds = given["tokens"], given.get("token_type") or [_NORMAL] * len(given["tokens"])
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens) or not all(isinstance(one, str) for one in tokens):
        raise InvalidConfig(
            f"tokenizer: the GGUF file has {len(tokens)} tokens, {len(vocabulary)} of them different, and "
            f"{len(kinds)} types; needed are as many of each."
        )
    named = {own: tokens[_id_of(given, name, len(tokens))] for name, own in _NAMED.items()
             if given.get(f"{name}_token_id") is not None}
    backend = _spm(given, vocabulary, kinds, named) if is_spm else _bpe(given, vocabulary)
    # Why in this order: the first of two that begin alike would win otherwise.
    added = [AddedToken(token, normalized=False, special=kind == _CONTROL)
             for token, kind in zip(tokens, kinds, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens([AddedToken(token, normalized=False, special=True) for token in named.values()])
    backend.add_tokens(added)
    _add_ends(backend, given, named, is_spm)
    return QuickTokenizer(backend, {f"{name}_token": token for name, token in named.items()}, chat_template)


def _id_of(given: Mapping[str, Any], name: str, count: int) -> int:
    number = given[f"{name}_token_id"]
    if type(number) is not int or not 0 <= number < count:
        raise InvalidConfig(f"tokenizer: {name}_token_id is {str(number)[:80]}, with {count} tokens.")
    return number


def _bpe(given: Mapping[str, Any], vocabulary: Mapping[str, int]) -> Tokenizer:
    """Build byte-level BPE; pieces have no spaces, so that a merge is two of them with one between."""
    way = _WAYS[given["pre"]]
    merges = [tuple(merge.split(" ")) for merge in given.get("merges", ())]
    backend = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=way.ignores_merges))
    expression = way.expression
    first: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if way.has_single_digits else []
    if expression is not None:
        first = [pre_tokenizers.Split(Regex(expression), behavior="isolated")]
    if way.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=expression is None)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _spm(
    given: Mapping[str, Any], vocabulary: Mapping[str, int], kinds: list[int], named: Mapping[str, str]
) -> Tokenizer:
    """Build what SentencePiece computes: of two neighbours that form a token, those with the best score are merged."""
    scores = given.get("scores", ())
    if len(scores) != len(kinds):
        raise InvalidConfig(f"tokenizer: the GGUF file has {len(kinds)} tokens and {len(scores)} scores.")
    merges = sorted(_merges(vocabulary, kinds), key=lambda one: (-scores[one[0]], one[1:]))
    backend = Tokenizer(models.BPE(
        vocab=dict(vocabulary), merges=[(left, right) for *_, left, right in merges], unk_token=named.get("unk"),
        fuse_unk=True, byte_fallback=True,
    ))
    has_prefix = given.get("add_space_prefix", True)
    replaced = normalizers.Replace(" ", _SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replaced] if has_prefix else [replaced])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return backend


def _merges(vocabulary: Mapping[str, int], kinds: list[int]) -> Iterator[tuple[int, int, int, str, str]]:
    """Yield every token with two parts that are tokens too: its id, those of the parts, and the parts."""
    for token, number in vocabulary.items():
        if kinds[number] not in (_NORMAL, _USER_DEFINED):
            continue
        if len(token) > _LONGEST_PIECE:
            raise InvalidConfig(f"tokenizer: a token has {len(token)} characters, allowed are {_LONGEST_PIECE}.")
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                yield number, vocabulary[left], vocabulary[right], left, right


def _add_ends(backend: Tokenizer, given: Mapping[str, Any], named: Mapping[str, str], is_spm: bool) -> None:
    """Put the first and the last token around a text, where the file says so or llama.cpp would."""
    begins = "bos" in named and given.get("add_bos_token", is_spm or _WAYS[given["pre"]].begins)
    ends = "eos" in named and given.get("add_eos_token", False)
    parts = [*([f"{named['bos']}:0"] if begins else []), "$A:0", *([f"{named['eos']}:0"] if ends else [])]
    if len(parts) == 1:
        return
    special = [(named[name], backend.token_to_id(named[name])) for name in ("bos", "eos") if name in named]
    backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=special)
