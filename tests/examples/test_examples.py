"""Every numbered example runs, is short, and shows what it says it shows."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBERED = sorted(EXAMPLES.glob("[0-9]*.py"))
MAX_LINES = 60


def output_of(number: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run an example as a script and return what it printed."""
    runpy.run_path(str(NUMBERED[number - 1]), run_name="__main__")
    return capsys.readouterr().out


def test_examples_are_numbered_and_short() -> None:
    """The examples are numbered without gaps and each fits on a screen and a half."""
    assert [path.name[:2] for path in NUMBERED] == [f"{number:02}" for number in range(1, len(NUMBERED) + 1)]
    assert all(len(path.read_text(encoding="utf-8").splitlines()) < MAX_LINES for path in NUMBERED)


def test_every_example_has_a_test() -> None:
    """A new example needs a test below."""
    assert len(NUMBERED) == 13


def test_offline_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo model answers every question of the offline example right, in order."""
    assert output_of(1, capsys).endswith("24 of 24 answers right\n")


def test_step_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """The step loop prints tokens of three requests, extends one of them and ends with no block in use."""
    out = output_of(2, capsys)
    assert len(set(re.findall(r"request (\w+)  new token \d+", out))) == 3
    assert out.count(" says ") == 4
    assert out.count("goes on with") == 1
    assert out.endswith("blocks still in use: 0\n")


def test_three_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    """The batch shrinks from three to one as sequences finish, and no row is computed for a finished one."""
    out = output_of(3, capsys)
    assert re.findall(r"steps +(\d+) to +(\d+): batch of (\d)", out) == [
        ("1", "10", "3"), ("11", "20", "2"), ("21", "30", "1")
    ]
    assert "60 tokens in 30 steps, 60 rows computed" in out


def test_async_streaming(capsys: pytest.CaptureFixture[str]) -> None:
    """Three callers get whole answers, a fourth leaves early, and the adapter made by name answers too."""
    out = output_of(4, capsys)
    assert len(re.findall(r" -> .+ \(\d+ deltas\)", out)) == 3
    assert "left after " in out
    assert out.strip().splitlines()[-1]


def test_bring_your_own_forward(capsys: pytest.CaptureFixture[str]) -> None:
    """A NumPy model under memory pressure gives exactly the sequences it should."""
    out = output_of(5, capsys)
    for line in re.findall(r"^(\[.*\]) -> (\[.*\])$", out, flags=re.MULTILINE):
        start, answer = ([int(number) for number in re.findall(r"\d+", part)] for part in line)
        known = start + answer
        assert len(answer) == 12
        assert all(known[i] == (known[i - 1] + known[i - 2]) % 100 for i in range(len(start), len(known)))
    assert int(re.findall(r"(\d+) preemptions", out)[0]) > 0


def test_langchain_chain(capsys: pytest.CaptureFixture[str]) -> None:
    """Two hundred inputs of a blocking chain are answered right, many of them in each step."""
    out = output_of(6, capsys)
    assert out.startswith("200 of 200 answers right\n")
    assert int(re.findall(r"(\d+) sequences per step", out)[0]) > 8


def test_langchain_chat(capsys: pytest.CaptureFixture[str]) -> None:
    """Every turn is answered, from a history that grows, and says how much of it was cached."""
    out = output_of(7, capsys)
    assert [answer in out for answer in ("2 + 3 = 5.", "9 - 5 = 4.", "6 + 6 = 12.")] == [True] * 3
    lengths = [int(number) for number in re.findall(r"(\d+) tokens in, \d+ of them cached", out)]
    assert len(lengths) == 3
    assert lengths == sorted(set(lengths))


def test_bentoml_service() -> None:
    """The service answers whole and as a stream, refuses with the limit, and has an endpoint of its own."""
    pytest.importorskip("bentoml")
    # Why another process: BentoML keeps the settings of the first application of a process for all later ones.
    done = subprocess.run([sys.executable, NUMBERED[7]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = done.stdout
    assert "whole: 2 + 3 = 5." in out
    assert "'num_output_tokens': " in out
    assert "refused: 400 temperature: got 99, allowed is" in out
    assert "its own: 12 + 30 = 42." in out
    assert out.endswith("ready: 200\n")


def test_sessions(capsys: pytest.CaptureFixture[str]) -> None:
    """Every turn is right and finds all that was computed before it, across a fork, a file and two engines."""
    out = output_of(9, capsys)
    for what, answer in (("first turn", 5), ("fork", 4), ("second turn", 42), ("imported", 12)):
        assert re.search(rf"^{what} .*= {answer}\.", out, flags=re.MULTILINE), what
    num_kept = int(re.findall(r"on disk, (\d+) positions kept", out)[0])
    cached = [int(number) for number in re.findall(r"(\d+) of \d+ cached", out)]
    assert cached[0] == 0 < num_kept == cached[1] <= cached[2] < cached[3]
    assert "blocks still in use: 0\n" in out


def test_rag_prefixes(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """A pool for a third of the documents finds next to nothing and says so once; with a host tier or a pool for all of
    them nearly all that three of four rounds can find is found, and little or nothing is computed again."""
    out = output_of(10, capsys)
    needed = int(re.findall(r"documents take (\d+) blocks", out)[0])
    rows = [tuple(map(int, row)) for row in re.findall(
        r"(\d+) blocks, +(\d+) on the host: +(\d+)% of the tokens found, +(\d+) blocks computed again", out)]
    (small, _, hits, again), (_, host, host_hits, host_again), (large, _, all_hits, none) = rows
    assert small < needed // 2 < needed < large
    assert host > needed
    assert hits < 20 < 60 < host_hits <= all_hits <= 75
    assert host_again < again // 4
    assert (again > small, none) == (True, 0)
    assert [record.getMessage().split(":")[0] for record in caplog.records if record.levelname == "WARNING"
            and record.name == "pagedcore"] == ["prefix cache"]


def test_openai_app(capsys: pytest.CaptureFixture[str]) -> None:
    """The official client lists, asks, streams and is refused through a mounted app, which drains at the end."""
    pytest.importorskip("openai")
    out = output_of(11, capsys)
    assert "models: ['demo']" in out
    assert [f"{kind}: 2 + 3 = 5." in out for kind in ("whole", "stream")] == [True, True]
    assert "refused: temperature " in out
    assert out.endswith("calls left after the drain: 0\n")


def test_agent(capsys: pytest.CaptureFixture[str]) -> None:
    """Each question leads to one call that can be carried out, and its result to an answer without a further call."""
    pytest.importorskip("langgraph")
    lines = output_of(12, capsys).splitlines()
    assert [line.split(">")[0].strip() for line in lines] == ["human", "ai", "tool", "ai"] * 2
    for asked, result in ((1, 2), (5, 6)):
        (left, sign, right) = re.findall(r"ai> calls calculator\((\d+) ([+-]) (\d+)\)$", lines[asked])[0]
        assert lines[result].endswith(f"> {int(left) + int(sign + right)}")


@pytest.mark.slow
def test_on_policy(capsys: pytest.CaptureFixture[str]) -> None:
    """A few steps of learning, in each of which every token was drawn by the very weights that score it."""
    runpy.run_path(str(NUMBERED[12]), run_name="a short cut")["main"](2)
    out = capsys.readouterr().out
    assert re.match(r"2 steps, \d{3,} tokens, ratio exactly 1.0 for all; weights 2\n", out)
    assert int(re.findall(r"(\d+) preemptions", out)[0]) > 0
    assert int(re.findall(r"(\d+) drafts kept", out)[0]) > 0
