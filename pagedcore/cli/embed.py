"""``pagedcore embed``: the vectors of a file of texts, a JSON object for each, with a progress bar."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer

from pagedcore.cli import common
from pagedcore.errors import InvalidConfig

_AT_ONCE: Final = 256
"""Texts whose vectors are written together: what Ctrl-C loses at most."""


def embed(
    file: Annotated[Path, typer.Argument(help="A text on each line, or JSON (.jsonl); - is standard input.",
                                         allow_dash=True)],
    model: common.ModelOption = "demo",
    out: Annotated[Path | None, typer.Option(help="Where to write; not given: standard output.")] = None,
    as_jsonl: Annotated[bool, typer.Option("--jsonl", help="Each line of the input is a JSON text or object.")] = False,
    field: Annotated[str, typer.Option(help="The field of an object that is the text.")] = "text",
    pooling: Annotated[str | None, typer.Option(help="last or mean; not given: as the model's directory says.")] = None,
    normalize: Annotated[bool | None, typer.Option(help="Whether vectors get the length 1.")] = None,
    dimensions: Annotated[int | None, typer.Option(help="Keep so many of the first numbers.")] = None,
    prompt_name: Annotated[str | None, typer.Option(help="The model's prompt that is put before each text.")] = None,
    dtype: common.DtypeOption = None,
    quantization: common.QuantizationOption = None,
    max_num_seqs: common.SeqsOption = None,
    blocks: common.BlocksOption = None,
    config: common.ConfigOption = None,
) -> None:
    """Embed each line of a file, and write its vector as a JSON object on a line, in the same order.

    Objects keep their fields and get an "embedding". A line that cannot be embedded ends the command with its number;
    what is before it has been written, as after Ctrl-C.
    """
    from tqdm.auto import tqdm

    records = _records(file, as_jsonl or file.suffix == ".jsonl", field)
    asked: Any = common.chosen(pooling=pooling, normalize=normalize, dimensions=dimensions, prompt_name=prompt_name)
    with common.open_engine(model, config, dtype=dtype, quantization=quantization, max_num_seqs=max_num_seqs,
                            num_kv_blocks=blocks) as engine:
        target, bar = _opened(out), tqdm(total=len(records), unit="text", disable=None)
        try:
            for start in range(0, len(records), _AT_ONCE):
                some = records[start : start + _AT_ONCE]
                found = engine.embed([text for text, _ in some], show_progress=False, **asked)
                for (_, record), one in zip(some, found, strict=True):
                    line = {**record, "embedding": one.vector.tolist(), "num_tokens": one.num_prompt_tokens}
                    # Why in ASCII: fields of a JSON object may have what no encoding of the output can write.
                    target.write(json.dumps(line) + "\n")
                target.flush()
                bar.update(len(some))
        finally:
            bar.close()
            if target is not sys.stdout:
                target.close()


def _opened(out: Path | None) -> TextIO:
    try:
        return sys.stdout if out is None else out.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidConfig(f"--out: cannot be written ({type(error).__name__}).") from None


def _records(file: Path, is_jsonl: bool, field: str) -> list[tuple[str, dict[str, Any]]]:
    """Return the texts of a file, and what is written beside their vectors."""
    given = common.read_lines(file, "FILE")
    if not given:
        raise InvalidConfig("FILE: got no text, needed is at least one line.")
    return list(_parsed(given, field)) if is_jsonl else [(line, {"text": line}) for _, line in given]


def _parsed(lines: list[tuple[int, str]], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise InvalidConfig(f"FILE: line {number} is no JSON.") from None
        record = value if isinstance(value, dict) else {"text": value}
        text = record.get(field if isinstance(value, dict) else "text")
        if not isinstance(text, str) or not text:
            raise InvalidConfig(f"FILE: line {number} has no text, allowed is a JSON text, or an object with one as "
                                f"{field!r} (--field).")
        yield text, record
