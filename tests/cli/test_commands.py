"""The command line from outside: help, listings, errors and exit codes."""

from __future__ import annotations

import pytest

from cli.runner import invoke, run
from pagedcore.plugins.manager import create_plugin_manager

COMMANDS = ["demo", "generate", "chat", "plugins", "doctor", "bench"]


def test_help_lists_every_command() -> None:
    """``pagedcore --help`` names all commands."""
    out = invoke("--help")
    assert all(command in out for command in COMMANDS)


@pytest.mark.parametrize("command", ["demo", "generate", "chat", "plugins", "doctor", "bench", "bench throughput"])
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


def test_doctor_reports_machine_versions_plugins_and_choices() -> None:
    """The report has what a bug report needs."""
    out = invoke("doctor")
    for word in ("usable cores", "memory", "transformers", "numba", "dtype", "attention_backend", "builtin"):
        assert word in out


@pytest.mark.parametrize(("words", "message"), [
    (["plugins", "--table", "nothing"], "adapters, attention, schedulers"),
    (["generate"], "prompts: got none"),
    (["generate", "x", "--prompts-file", "no-such-file"], "--prompts-file"),
    (["generate", "x", "--temperature", "-1"], "temperature"),
    (["generate", "x", "--model", "no-such-directory/at-all"], "model: "),
    (["bench", "throughput", "--random-weights", "huge"], "tiny, qwen05b"),
    (["bench", "throughput", "--workload", "w9"], "ragged, w1, w2, w3"),
    (["demo", "--dtype", "int3"], "float32"),
])
def test_errors_are_one_line_and_exit_code_one(words: list[str], message: str) -> None:
    """What pagedcore refuses is said without a traceback, on standard error, with exit code 1."""
    done = run(*words)
    assert done.returncode == 1, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
