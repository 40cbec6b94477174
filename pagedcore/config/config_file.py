"""Reads the settings of an engine from a TOML or JSON file, strictly; which of them are right is not decided here."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pagedcore.config.limits import MAX_CONFIG_BYTES
from pagedcore.config.strict_json import load_json
from pagedcore.errors import InvalidConfig, describe, describe_name

_PLACE: Final = re.compile(r"(at|in) (line \d+,? column \d+|end of document)")


def read_settings(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the names and values of a file whose name ends in ``.toml`` or ``.json``.

    Raises:
        InvalidConfig: the file cannot be read, is no regular file, is larger than 64 KiB, is not UTF-8, is not one
            table in its format, or has a key twice. The message holds neither the path nor a value.
    """
    if not isinstance(path, str | os.PathLike):
        raise _refused(describe(path), "the path of a .toml or .json file")
    parse = _PARSERS.get(Path(path).suffix.lower())
    if parse is None:
        raise _refused("a file with another ending", "a name that ends in .toml or .json")
    try:
        settings = parse(_read(path))
    except InvalidConfig:
        raise
    except UnicodeDecodeError as error:
        raise _refused(f"no UTF-8 text (byte {error.start})", "UTF-8") from None
    except (ValueError, RecursionError) as error:
        # Safety: a parser's message may repeat what it read, a key of sessions among that.
        place = _PLACE.search(str(error))
        raise _refused(f"a syntax error{' ' + place[0] if place else ''}", "valid TOML, or JSON") from None
    if not isinstance(settings, dict):
        raise _refused(describe(settings), "an object of names and values")
    return settings


def _read(path: str | os.PathLike[str]) -> str:
    try:
        # Why asked first: to open a pipe waits for its writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _refused("a directory, pipe or device", "a regular file")
        with open(path, "rb") as file:
            content = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise InvalidConfig(f"config file: cannot be read ({type(error).__name__}).") from None
    if len(content) > MAX_CONFIG_BYTES:
        raise _refused("a larger file", f"up to {MAX_CONFIG_BYTES} bytes")
    return content.decode("utf-8-sig")


def _parse_json(text: str) -> Any:
    return load_json(text, _without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _refused(f"{describe_name(name)} twice", "each name once")
        found[name] = value
    return found


def _refused(given: str, limit: str) -> InvalidConfig:
    return InvalidConfig(f"config file: got {given}, allowed is {limit}.")


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {".toml": tomllib.loads, ".json": _parse_json}
