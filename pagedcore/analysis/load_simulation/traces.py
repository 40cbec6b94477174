"""Reads traces of real services: Azure's CSV and Mooncake's JSON lines.

Azure: columns ``TIMESTAMP``, ``ContextTokens``, ``GeneratedTokens``; prompts share nothing. Mooncake: objects with
``timestamp`` in milliseconds, ``input_length``, ``output_length`` and ``hash_ids``, one for each 512 tokens of the
prompt; equal ids are equal contents. A completion without tokens counts as one of a single token. Both may say whose a
request is: columns ``Tenant`` and ``Weight``, or ``tenant`` and ``weight``.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from pagedcore.analysis.load_simulation.workload import MAX_REQUESTS, MAX_TOKENS, SimulatedRequest, own_segment
from pagedcore.config import field_rules as rules
from pagedcore.config.given_file import check_given_file
from pagedcore.errors import InvalidConfig, InvalidRequest, describe
from pagedcore.request_options import NO_OPTIONS, RequestOptions

HASHED_TOKENS: Final = 512
"""Tokens that one of Mooncake's hash ids stands for; the last one of a prompt may stand for fewer."""
MAX_TRACE_BYTES: Final = 2**28
_MAX_LINE: Final = 2**20
_COLUMNS: Final = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_PROMPT, _COMPLETION = rules.integer(1, MAX_TOKENS), rules.integer(0, MAX_TOKENS)
_HASH_ID: Final = rules.integer(0, 2**40 - 1)
_MILLISECONDS: Final = rules.number(0, 1e12)


def read_trace(path: str | os.PathLike[str], most: int = MAX_REQUESTS) -> list[SimulatedRequest]:
    """Read the first ``most`` requests of a ``.csv`` or ``.jsonl`` file; the earliest one arrives at 0.

    Raises:
        InvalidConfig: the file cannot be read, is no regular file, is too large, has another ending, or a row is not as
            it should be; the message names the row, the column, what was found and what is allowed.
    """
    rules.integer(1, MAX_REQUESTS).check("num_requests", most, rules.invalid_setting)
    parse = _PARSERS.get(Path(path).suffix.lower())
    if parse is None:
        raise _refused("a file with another ending", "a name that ends in .csv or .jsonl")
    requests = []
    try:
        check_given_file(path, MAX_TRACE_BYTES, _refused)
        with open(path, encoding="utf-8-sig", newline="") as file:
            for request in parse(file):
                requests.append(request)
                if len(requests) == most:
                    break
    except OSError as error:
        raise InvalidConfig(f"trace: cannot be read ({type(error).__name__}).") from None
    except UnicodeDecodeError:
        raise _refused("no UTF-8 text", "UTF-8") from None
    if not requests:
        raise _refused("no request", "one row at least")
    requests.sort(key=lambda one: one.arrival_s)
    first_s = requests[0].arrival_s
    return [replace(one, arrival_s=one.arrival_s - first_s) for one in requests]


def _lines(file: IO[str]) -> Iterator[str]:
    """Yield lines, none of which is longer than a row can be."""
    row = 0
    while line := file.readline(_MAX_LINE + 1):
        row += 1
        if len(line) > _MAX_LINE:
            raise _refused(f"a longer line in row {row}", f"up to {_MAX_LINE} characters")
        yield line


def _parse_azure(file: IO[str]) -> Iterator[SimulatedRequest]:
    reader = csv.reader(_lines(file))
    try:
        names = next(reader, [])
        if missing := [name for name in _COLUMNS if name not in names]:
            raise _refused(f"no column {missing[0]} in row 1", f"the columns {', '.join(_COLUMNS)}")
        places = [names.index(name) for name in _COLUMNS]
        for index, fields in enumerate(filter(None, reader)):
            row = reader.line_num
            if len(fields) != len(names):
                raise _refused(f"{len(fields)} columns in row {row}", f"the {len(names)} of row 1")
            time, num_input, num_output = (fields[place] for place in places)
            given = dict(zip(names, fields, strict=True))
            yield SimulatedRequest(
                _timestamp_s(row, time), (own_segment(index, _count(row, "ContextTokens", num_input, _PROMPT)),),
                max(1, _count(row, "GeneratedTokens", num_output, _COMPLETION)),
                _options(row, given.get("Tenant", ""), given.get("Weight") or 1.0),
            )
    except csv.Error:
        raise _refused(f"no CSV in row {reader.line_num}", "comma-separated values") from None


def _parse_mooncake(file: IO[str]) -> Iterator[SimulatedRequest]:
    for row, line in enumerate(_lines(file), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError):
            raise _refused(f"no JSON in row {row}", "one JSON object in each line") from None
        if not isinstance(fields, dict):
            raise _refused(f"{describe(fields)} in row {row}", "one JSON object in each line")
        time_ms = _checked(row, "timestamp", fields.get("timestamp"), _MILLISECONDS)
        num_input = int(_checked(row, "input_length", fields.get("input_length"), _PROMPT))
        num_output = int(_checked(row, "output_length", fields.get("output_length"), _COMPLETION))
        prompt = _segments(row, num_input, fields.get("hash_ids"))
        options = _options(row, fields.get("tenant", ""), fields.get("weight", 1.0))
        yield SimulatedRequest(time_ms / 1e3, prompt, max(1, num_output), options)


def _segments(row: int, num_input: int, hash_ids: Any) -> tuple[tuple[int, int], ...]:
    needed = -(-num_input // HASHED_TOKENS)
    if not isinstance(hash_ids, list) or len(hash_ids) != needed:
        given = f"{len(hash_ids)} entries" if isinstance(hash_ids, list) else describe(hash_ids)
        raise _refused(f"{given} in row {row}, column hash_ids",
                       f"a list of {needed}, one for each {HASHED_TOKENS} tokens of input_length")
    sizes = [HASHED_TOKENS] * (needed - 1) + [num_input - (needed - 1) * HASHED_TOKENS]
    return tuple((int(_checked(row, "hash_ids", one, _HASH_ID)), size)
                 for one, size in zip(hash_ids, sizes, strict=True))


def _options(row: int, tenant: Any, weight: Any) -> RequestOptions:
    """Return what a row says of its tenant; a weight may be text."""
    if tenant == "" and weight == 1.0:
        return NO_OPTIONS
    try:
        return RequestOptions(tenant=tenant, weight=float(weight) if isinstance(weight, str) else weight)
    except (InvalidRequest, ValueError):
        raise _refused(f"tenant {describe(tenant)}, weight {describe(weight)} in row {row}",
                       "a name of 1 to 128 printable characters, and a weight from 0.001 to 1,000") from None


def _timestamp_s(row: int, text: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise _refused(f"{describe(text)} in row {row}, column TIMESTAMP", "a date and time in ISO 8601") from None
    return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def _count(row: int, column: str, text: str, rule: rules.FieldRule[int]) -> int:
    digits = text.strip()
    is_number = digits.isascii() and digits.isdigit() and len(digits) < 20
    return int(_checked(row, column, int(digits) if is_number else text, rule))


def _checked(row: int, column: str, value: Any, rule: rules.FieldRule[Any]) -> Any:
    return rule.check(f"row {row}, column {column}", value, lambda place, given, limit, _: _refused(
        f"{describe(given)} in {place}", limit))


def _refused(given: str, limit: str) -> InvalidConfig:
    return InvalidConfig(f"trace: got {given}, allowed is {limit}.")


_PARSERS: Final[dict[str, Callable[[IO[str]], Iterator[SimulatedRequest]]]] = {
    ".csv": _parse_azure, ".jsonl": _parse_mooncake,
}
