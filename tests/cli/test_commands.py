"""The command line from outside: help, listings, errors and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pagedcore import __version__
from pagedcore.cli.generate import _read_prompts
from pagedcore.cli.main import main
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore_kernels.cuda.build.resources import RESOURCES_FILE, read_resource_table
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from support.runner import invoke, run, run_all, try_invoke

COMMANDS = ["demo", "generate", "chat", "size", "plugins", "doctor", "bench", "kernels", "simulate"]


def test_help_lists_every_command() -> None:
    """``pagedcore --help`` names all commands."""
    out = invoke("--help")
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", [*COMMANDS, "bench batching", "kernels build"])
def test_every_command_has_help(command: str) -> None:
    """Each command explains itself."""
    assert "Usage:" in invoke(*command.split(), "--help")


def test_plugins_lists_every_plugin_with_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listing has the built-in plugin, its version and its state."""
    monkeypatch.setenv("PAGEDCORE_DISABLE_PLUGIN_AUTOLOAD", "1")
    out = invoke("plugins")
    assert "builtin" in out
    assert "active" in out


@pytest.mark.parametrize("table", create_plugin_manager(entry_points=False).registry.tables)
def test_plugins_lists_a_table(table: str) -> None:
    """A table's listing has each entry, and every built-in one is available."""
    out = invoke("plugins", "--table", table)
    for entry in create_plugin_manager(entry_points=False).registry.find_table(table):
        line = next(line for line in out.splitlines() if entry.name in line)
        assert "available" in line


def test_doctor_says_whether_a_smaller_model_has_the_tokens(tmp_path: Path) -> None:
    """It compares them as the engine does, and wants to know for which model."""
    assert "its tokens are the model's" in invoke("doctor", "demo", "--speculative-model", "demo")
    other = shutil.copytree(DEMO_MODEL_DIR, tmp_path / "other")
    text = (other / "tokenizer.json").read_text()
    known = json.loads(text)
    first, second = list(known["model"]["vocab"])[50:52]
    known["model"]["vocab"] |= {first: known["model"]["vocab"][second], second: known["model"]["vocab"][first]}
    (other / "tokenizer.json").write_text(json.dumps(known))
    assert "refused: its token" in invoke("doctor", "demo", "--speculative-model", str(other))
    with pytest.raises(InvalidConfig, match="Name one"):
        try_invoke("doctor", "--speculative-model", "demo")


def test_doctor_reports_machine_versions_plugins_and_choices() -> None:
    """The report has what a bug report needs."""
    out = invoke("doctor")
    for word in ("usable cores", "memory", "transformers", "numba", "dtype", "attention_backend", "builtin", "w4a16"):
        assert word in out


def test_size_shows_the_sum_and_what_fits() -> None:
    """The table has the formula, the engine's bytes and what fits, and the setting that makes an engine of it."""
    out = invoke("size", "demo", "--context", "100", "--concurrency", "3", "--dtype", "float32", "--memory", "1GiB")
    for words in ("2 x 4 layers x 2 KV heads x 32 x 4 bytes", "2,048", "786,432", "1.0 GiB given", "It fits:",
                  "max_model_len=100, max_num_seqs=3, max_num_batched_tokens=512, num_kv_blocks=12"):
        assert words in out
    assert "free on this machine" in invoke("size", "demo")


def test_size_says_what_to_change() -> None:
    """Without room for a single sequence there is advice, and no engine is proposed."""
    out = invoke("size", "demo", "--memory", "1MiB")
    assert "It does not fit" in out
    assert "from_pretrained" not in out


def test_size_as_json_is_the_report() -> None:
    """With --json the output is one JSON object with bytes as numbers."""
    data = json.loads(invoke("size", "demo", "--context", "64", "--concurrency", "2", "--dtype", "bfloat16", "--json"))
    assert data["bytes_per_token"] == 2 * 4 * 2 * 32 * 2
    assert data["kv_bytes"] == 128 * data["bytes_per_token"]
    assert data["settings"]["num_kv_blocks"] == data["num_blocks"]


REFUSED = (
    (["plugins", "--table", "nothing"], "adapters, attention, linears, models, reasoning_parsers, schedulers"),
    (["kernels", "build", "--arch", "sm_75"], "sm_80 or newer"),
    (["kernels", "build", "--arch", "sm_90", "--only", "nothing"], "--only"),
    (["generate"], "prompts: got none"),
    (["generate", "x", "--prompts-file", "no-such-file"], "--prompts-file"),
    (["generate", "x", "--temperature", "-1"], "temperature"),
    (["generate", "x", "--model", "no-such-directory/at-all"], "model: "),
    (["bench", "throughput", "--random-weights", "huge"], "tiny, qwen05b"),
    (["bench", "throughput", "--workload", "w9"], "ragged, w1, w2, w3"),
    (["demo", "--dtype", "int3"], "float32"),
    (["demo", "--quantization", "int3"], "w8a8, w8a16, w4a16"),
    (["size", "no-such-directory/at-all"], "model: "),
    (["size", "demo", "--memory", "much"], "memory: got "),
)


def test_errors_are_one_line_and_exit_code_one() -> None:
    """What pagedcore refuses is said without a traceback, on standard error, with exit code 1."""
    for done, (words, message) in zip(run_all(words for words, _ in REFUSED), REFUSED, strict=True):
        assert (done.returncode, done.stdout) == (1, ""), words
        assert message in done.stderr, words
        assert "Traceback" not in done.stderr, words


def test_a_context_beyond_the_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same where a model is built for it, by libraries that a process of its own would take seconds to import."""
    monkeypatch.setattr("sys.argv", ["pagedcore", "size", "demo", "--context", "4096"])
    with pytest.raises(SystemExit) as ended:
        main()
    out, said = capsys.readouterr()
    assert (ended.value.code, out) == (1, "")
    assert "max_model_len: got 4096" in said
    assert "Traceback" not in said


def test_kernels_are_built_into_a_directory(tmp_path: Path) -> None:
    """``kernels build`` writes one file per kernel, and a wheel, and says how many; a second run finds them there."""
    if missing_compiler_parts():
        pytest.skip("needs pagedcore[cuda] to compile kernels")
    for _ in range(2):
        where = ["--out", str(tmp_path / "built"), "--wheel"]
        out = invoke("kernels", "build", "--arch", "sm_90", "--only", "norm-bf16-1", *where)
        assert "1 kernels in" in out
        assert f"pagedcore_cuda_kernels-{__version__}-py3-none-any.whl" in out
    assert list(read_resource_table((tmp_path / "built" / RESOURCES_FILE).read_text())) == [("norm-bf16-1", "sm_90")]
    assert [path.name.partition(".")[0] for path in (tmp_path / "built").glob("*.kernel")] == ["norm-bf16-1"]


def test_the_version_is_said() -> None:
    """``--version`` prints it and loads nothing."""
    assert invoke("--version") == f"pagedcore {__version__}\n"


def test_prompts_that_are_no_utf8_are_refused(tmp_path: Path) -> None:
    """A file or standard input in another encoding is one line that names the byte, not a traceback."""
    path = tmp_path / "prompts.txt"
    path.write_bytes("What is 2 + 3?\ncaf\u00e9".encode("latin-1"))
    for words in (["--prompts-file", str(path)], ["--prompts-file", "-"]):
        done = run("generate", *words, given=path.read_bytes())
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: --prompts-file: is no UTF-8 text, byte 18")
        assert done.stderr.count("\n") == 1


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    """Files of editors that begin with one hold the same prompts."""
    (tmp_path / "prompts.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo\n")
    assert _read_prompts(tmp_path / "prompts.txt") == ["one", "two"]


def test_a_chat_in_another_encoding_is_refused() -> None:
    """The chat names its input; nothing else fails."""
    done = run("chat", given=b"caf\xe9\n")
    assert done.returncode == 1
    assert done.stderr.endswith("error: standard input: is no UTF-8 text, byte 3 for one.\n")
