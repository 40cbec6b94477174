"""Reads a calibration set: the prompts over which ``pagedcore convert`` looks at a model's activations.

Owns the file's two forms and their limits. It computes nothing; ``smoothing.py`` does.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from pagedcore.config.given_file import check_given_file
from pagedcore.errors import InvalidConfig, InvalidText, describe

MAX_FILE_BYTES: Final = 2**24
MAX_PROMPT_TOKENS: Final = 4096
"""Of one prompt, where the model takes as many: attention over a prompt is computed in one piece."""
MAX_TOKENS: Final = 2**18
"""Of all prompts: twice what SmoothQuant's authors take, 512 prompts of 256 tokens."""
_FIELDS: Final = ("prompt", "prompt_token_ids")


def read_calibration_set(
    path: str | os.PathLike[str], encode: Callable[[str], list[int]], vocab_size: int, max_model_len: int
) -> list[list[int]]:
    """Return the token ids of each prompt.

    Args:
        path: a ``.jsonl`` file, whose lines are strings or objects with ``prompt`` or ``prompt_token_ids``, or any
            other text file, whose lines are prompts. Empty lines are left out.
        encode: text to token ids.
        vocab_size: token ids are below.
        max_model_len: most tokens of a prompt, ``MAX_PROMPT_TOKENS`` where that is less.

    Raises:
        InvalidConfig: the file cannot be read, is no regular file or no UTF-8, is too large, has no prompt, or a line
            is not as it should be; the message names the line, what was found and what is allowed.
    """
    prompts, num_tokens, longest = [], 0, min(max_model_len, MAX_PROMPT_TOKENS)
    # Why not splitlines: JSON may hold other ends of lines inside a string.
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        prompt = _parse(number, line) if Path(path).suffix.lower() == ".jsonl" else line.rstrip("\r")
        if isinstance(prompt, str):
            try:
                token_ids = encode(prompt)
            except InvalidText:
                raise _refused(f"a lone surrogate in line {number}", "text without any") from None
        else:
            token_ids = prompt
            if outside := [one for one in token_ids if not 0 <= one < vocab_size]:
                raise _refused(f"the token id {describe(outside[0])} in line {number}", f"0 to {vocab_size - 1}")
        if not 1 <= len(token_ids) <= longest:
            raise _refused(f"{len(token_ids)} tokens in line {number}", f"1 to {longest} tokens in a prompt")
        num_tokens += len(token_ids)
        if num_tokens > MAX_TOKENS:
            raise _refused(f"more tokens in lines 1 to {number}", f"up to {MAX_TOKENS} tokens in all prompts")
        prompts.append(token_ids)
    if not prompts:
        raise _refused("no prompt", "one prompt at least, each in a line of its own")
    return prompts


def _read(path: str | os.PathLike[str]) -> str:
    try:
        check_given_file(path, MAX_FILE_BYTES, _refused)
        return Path(path).read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise _refused(f"no UTF-8 text, byte {error.start} for one", "UTF-8") from None
        if isinstance(error, InvalidConfig):
            raise
        raise InvalidConfig(f"calibration: it cannot be read ({type(error).__name__}).") from None


def _parse(number: int, line: str) -> str | list[int]:
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        raise _refused(f"no JSON in line {number}", "one JSON value in each line") from None
    values = [given] if isinstance(given, str) else list(_known_fields(given))
    is_known = len(values) == 1 and (isinstance(values[0], str) or _are_integers(values[0]))
    if not is_known:
        raise _refused(
            f"{describe(given)} in line {number}", "a string, or an object with either prompt, a string, or "
            "prompt_token_ids, a list of integers"
        )
    value: str | list[int] = values[0]
    return value


def _known_fields(given: Any) -> Iterator[Any]:
    for name in _FIELDS if isinstance(given, dict) else ():
        if name in given and isinstance(given[name], str) == (name == "prompt"):
            yield given[name]


def _are_integers(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int for one in value)


def _refused(given: str, allowed: str) -> InvalidConfig:
    return InvalidConfig(f"calibration: got {given}, allowed is {allowed}.")
