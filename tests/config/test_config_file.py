"""Settings from a file: what TOML and JSON may hold, and that everything else is refused, quietly and unread."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pagedcore import Engine, EngineConfig
from pagedcore.config.limits import MAX_CONFIG_BYTES
from pagedcore.errors import InvalidConfig
from support.doubles import ToyBackend
from support.runner import invoke, try_invoke

TOML = 'max_batch_size = 4\nmax_wait_ms = 2.5\nmin_batch_size = 2\nkv_cache_memory = "1MiB"\nseed = 7\n'
SETTINGS = {"max_num_seqs": 4, "max_wait_ms": 2.5, "min_batch_size": 2, "kv_cache_memory": "1MiB", "seed": 7}


def write(folder: Path, content: str | bytes, name: str = "engine.toml") -> Path:
    """A file of the folder."""
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_file_gives_what_keywords_give(tmp_path: Path) -> None:
    """TOML and JSON of the same settings, aliases among them, make equal configurations; so does a byte order mark."""
    wanted = EngineConfig(**SETTINGS)  # type: ignore[arg-type]
    assert EngineConfig.from_file(write(tmp_path, TOML)) == wanted
    assert EngineConfig.from_file(str(write(tmp_path, "\ufeff" + json.dumps(SETTINGS), "a.JSON"))) == wanted
    assert EngineConfig.from_file(write(tmp_path, "")) == EngineConfig()


def test_a_file_replaces_defaults_and_keywords_replace_the_file(tmp_path: Path) -> None:
    """Each of the three may use either name of a setting, and what is replaced is not looked at."""
    path = write(tmp_path, "max_batch_size = 0\nseed = 2\n")
    config = EngineConfig.from_file(path, {"seed": 1, "block_size": 4, "max_num_seqs": 3}, max_num_seqs=5)
    assert config == EngineConfig(seed=2, block_size=4, max_num_seqs=5)


REFUSED = [
    ("a.toml", "max_num_seq = 4", "Did you mean max_num_seqs?"),
    ("a.toml", "[max_num_seqs]\na = 1", "max_num_seqs: got a value of type dict"),
    ("a.toml", 'max_num_seqs = "4"', "max_num_seqs: got '4'"),
    ("a.toml", "seed = 2024-01-01", "seed: got a value of type date"),
    ("a.toml", "seed = 1\nseed = 1", r"a syntax error at line 2, column \d+|a syntax error"),
    ("a.toml", "max_batch_size = 4\nmax_num_seqs = 5", "max_num_seqs: got two values"),
    ("a.toml", "seed = = 1", "a syntax error at line 1, column 8"),
    ("a.toml", 'session_key = "very secret key indeed', "a syntax error"),
    ("a.toml", b"seed = 1 # \xff", r"no UTF-8 text \(byte 11\)"),
    ("a.toml", "seed = " + "[" * 30_000, "a syntax error"),
    ("a.json", '{"seed": 1, "seed": 1}', "'seed' twice"),
    ("a.json", '{"max_wait_ms": NaN}', "a syntax error"),
    ("a.json", '{"seed": %s}' % ("9" * 5000), "a syntax error"),
    ("a.json", "[" * 30_000, "a syntax error"),
    ("a.json", "[1]", "a value of type list, allowed is an object"),
    ("a.json", "{'seed': 1}", "a syntax error"),
    ("a.json", '{"seed": true}', "seed: got True"),
    ("a.json", "{}" + " " * MAX_CONFIG_BYTES, "a larger file, allowed is up to 65536 bytes"),
    ("a.yaml", "seed: 1", "another ending"),
]


@pytest.mark.parametrize(("name", "content", "message"), REFUSED, ids=range(len(REFUSED)))
def test_other_files_are_refused(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    """Unknown and doubled names, wrong types, syntax, encodings and sizes are InvalidConfig, whose message holds
    neither the path nor what the file says."""
    with pytest.raises(InvalidConfig, match=message) as refusal:
        EngineConfig.from_file(write(tmp_path, content, name))
    assert str(tmp_path) not in str(refusal.value)
    assert "secret" not in str(refusal.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """A missing file, a directory, a pipe without a writer and what is no path are refused without waiting."""
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    for given, message in [
        (tmp_path / "missing.toml", r"cannot be read \(FileNotFoundError\)"),
        (tmp_path / "pipe.toml", "a regular file"), (tmp_path / "folder.toml", "a regular file"),
        (3, "got 3, allowed is the path"),
        ("a\0.toml", "config file: "),
    ]:
        with pytest.raises(InvalidConfig, match=message):
            EngineConfig.from_file(given)  # type: ignore[arg-type]


def test_an_engine_takes_a_configuration_and_keywords_win() -> None:
    """from_pretrained(config=...) is as its fields; what is given beside it, under either name, replaces them."""
    config = EngineConfig(block_size=4, num_kv_blocks=8, max_num_seqs=4)
    with Engine.from_pretrained(ToyBackend(), config=config) as engine:
        assert (engine.stats().num_blocks, engine.stats().max_num_seqs) == (8, 4)
    with Engine.from_pretrained(ToyBackend(), config=config, max_batch_size=2) as engine:
        assert (engine.stats().num_blocks, engine.stats().max_num_seqs) == (8, 2)
    with pytest.raises(InvalidConfig, match="config: got a value of type dict, allowed is an EngineConfig"):
        Engine.from_pretrained(ToyBackend(), config={})


def test_commands_take_a_file_and_options_win(tmp_path: Path) -> None:
    """--config fills in what the command line leaves open, before the command's own defaults."""
    path = str(write(tmp_path, "max_num_seqs = 2\nblock_size = 0\n"))
    for words in (["generate", "hello"], ["chat"], ["demo"], ["bench", "throughput"], ["serve", "demo"]):
        with pytest.raises(InvalidConfig, match="block_size: got 0"):
            try_invoke(*words, "--config", path)
    path = str(write(tmp_path, "max_model_len = 0\n"))
    assert invoke("generate", "What is 2 + 3?", "--config", path, "--max-model-len", "64").strip()
