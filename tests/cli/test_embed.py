"""``pagedcore embed``: a file of texts becomes a file of vectors, and a bad line or Ctrl-C leaves whole ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedcore import Engine
from pagedcore.errors import InvalidConfig, PromptTooLong
from support.runner import invoke

TEXTS = ["What is 2 + 3?", "naïve \x0c ca\u2028fé", "What is 9 - 5?"]


def test_lines_and_objects_get_the_engines_vectors(tmp_path: Path) -> None:
    """From a file of lines, of JSON, and from standard input; fields of objects are kept; empty lines are none, and no
    character but the end of a line ends one."""
    with Engine.from_pretrained("demo", num_kv_blocks=64, dtype="float32") as engine:
        wanted = np.array(engine.embed(TEXTS, dimensions=8, show_progress=False))
    lines, objects, out = (tmp_path / name for name in ("in.txt", "in.jsonl", "out.jsonl"))
    lines.write_text("\n\n".join(TEXTS), encoding="utf-8")
    rest = [json.dumps(one, ensure_ascii=False) for one in TEXTS[1:]]
    objects.write_text("\r\n".join([json.dumps({"id": "\ud800", "body": TEXTS[0]}), *rest]), encoding="utf-8")
    options = ("--dimensions", "8", "--blocks", "64", "--dtype", "float32")
    printed = invoke("embed", str(lines), *options)
    assert invoke("embed", "-", *options, given="\n".join(TEXTS)) == printed
    assert invoke("embed", str(objects), "--field", "body", "--out", str(out), *options) == ""
    for text in (printed, out.read_text(encoding="utf-8")):
        found = [json.loads(line) for line in text.splitlines()]
        assert np.array_equal(np.array([one["embedding"] for one in found], np.float32), wanted)
    assert (found[0]["id"], found[0]["body"], found[1]["text"]) == ("\ud800", TEXTS[0], TEXTS[1])


@pytest.mark.parametrize(("content", "words"), [
    (b"", "no text"), (b"\xff", "no UTF-8"), (b'{"text": 5}', "line 1 has no text"), (b'"a"\n{', "line 2 is no JSON"),
    (b'{"other": "a"}', "line 1 has no text"), (b"[" * 10**5, "line 1 is no JSON"),
])
def test_what_is_no_text_is_refused_before_a_model_is_loaded(content: bytes, words: str, tmp_path: Path) -> None:
    """With the number of its line."""
    (tmp_path / "in.jsonl").write_bytes(content)
    with pytest.raises(InvalidConfig, match=words):
        invoke("embed", str(tmp_path / "in.jsonl"), "--model", "no-such-model")


def test_what_was_written_before_a_bad_text_is_whole(tmp_path: Path) -> None:
    """A text that is too long ends the command behind the pieces before it."""
    (tmp_path / "in.txt").write_text("\n".join([*map(str, range(256)), "a " * 5000]), encoding="utf-8")
    with pytest.raises(PromptTooLong, match="text"):
        invoke("embed", str(tmp_path / "in.txt"), "--out", str(tmp_path / "out"))
    assert len((tmp_path / "out").read_text().splitlines()) == 256


@pytest.mark.slow
def test_what_was_written_before_ctrl_c_is_whole(tmp_path: Path) -> None:
    """Lines of JSON, some of them."""
    (tmp_path / "many.txt").write_text("\n".join(f"What is {number} + 3?" for number in range(30000)))
    words = [sys.executable, "-m", "pagedcore", "embed", str(tmp_path / "many.txt")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=dict(os.environ)) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        lines = [first, *process.stdout.read().splitlines(keepends=True)]
        assert process.wait(30) != 0
    assert 0 < len(lines) < 30000
    assert all("embedding" in json.loads(line) for line in lines)
