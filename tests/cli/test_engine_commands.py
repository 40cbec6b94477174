"""The commands that run a model, on the demo model, without a terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pagedcore.cli.common import open_engine
from pagedcore.cli.demo import frame, show, start
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.errors import InvalidGrammar
from support.runner import invoke, try_invoke


def test_demo_answers_every_question() -> None:
    """Without a terminal the demo prints one line per answer and the verdict last, and every answer is right."""
    lines = invoke("demo", "--requests", "12").splitlines()
    assert len(lines) == 13
    assert all(line.endswith("right") for line in lines[:-1])
    assert lines[-1].startswith("12 of 12 answers right")


def test_demo_answers_do_not_change_under_memory_pressure() -> None:
    """With few blocks requests are preempted, and the answers are the same as without."""
    def answers(*words: str) -> tuple[list[str], int]:
        *lines, verdict = invoke("demo", "--requests", "12", *words).splitlines()
        found = re.search(r"(\d+) preemptions", verdict)
        assert found is not None
        return sorted(lines), int(found[1])

    roomy, none = answers("--blocks", "64")
    tight, several = answers("--blocks", "8")
    assert roomy == tight
    assert (none, several > 0) == (0, True)


def test_demo_marks_a_wrong_answer_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong answer is shown with the expected one, counted, and makes the command fail."""
    monkeypatch.setattr("pagedcore.demo_model.questions.is_correct", lambda question, text: False)
    result = try_invoke("demo", "--requests", "2")
    assert result.exit_code == 1
    assert "WRONG, expected" in result.stdout
    assert "0 of 2 answers right" in result.stdout


def test_demo_draws_frames_on_a_terminal() -> None:
    """On a terminal the demo draws states, counters and blocks, and ends with the table of all answers."""
    console = Console(force_terminal=True, width=120, height=30, record=True, file=io.StringIO())
    with open_engine("demo", max_num_seqs=2) as engine:
        run = start(engine, 5, seed=0)
        engine.step()
        drawing = Console(width=120, record=True, file=io.StringIO())
        drawing.print(frame(run, num_rows=4))
        first = drawing.export_text()
        show(run, console)
    assert "waiting" in first
    assert "blocks in use" in first
    last_table = console.export_text().rpartition("completion so far")[2]
    assert "5 of 5 answers right" in last_table
    assert len(re.findall(r"│ right +│", last_table)) == 5


def test_generate_streams_one_prompt() -> None:
    """One prompt gives the bare answer on standard output."""
    question = demo_questions(1)[0]
    assert is_correct(question, invoke("generate", question.prompt, "--max-tokens", "96"))


def test_generate_answers_many_prompts_as_json(tmp_path: Path) -> None:
    """Prompts from arguments and from a file are answered in order, one JSON object per line."""
    questions = demo_questions(5)
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(question.prompt for question in questions[2:]) + "\n\n", encoding="utf-8")
    out = invoke("generate", *(question.prompt for question in questions[:2]), "--prompts-file", str(path), "--json",
                 "--quantization", "w8a8")
    records = [json.loads(line) for line in out.splitlines()]
    assert all(0.0 <= record["queue_s"] <= record["ttft_s"] and len(record["itl_s"]) == record["num_tokens"] - 1
               for record in records)
    assert [record["prompt"] for record in records] == [question.prompt for question in questions]
    assert all(is_correct(question, record["text"]) for question, record in zip(questions, records, strict=True))


ALL_KINDS = """
from pagedcore import Engine, SamplingParams
from pagedcore.cli.kernels import warm
from pagedcore_kernels.cpu.runtime.compiled import compiled_entries

warm("demo")
num_entries = len(compiled_entries())
with Engine.from_pretrained("demo", num_kv_blocks=12, host_kv_memory="1MiB") as engine:
    kinds = [SamplingParams(max_tokens=40, n=2, temperature=1.0), SamplingParams(max_tokens=9, logprobs=20),
             SamplingParams(max_tokens=40, logit_bias={5: 2.0}), SamplingParams(temperature=0.5, min_p=0.1)]
    engine.generate(["What is 2 + 3?" * 3, "Hi", "What is 7 - 4?" * 9, "Hello"], kinds)
assert len(compiled_entries()) == num_entries, compiled_entries()[num_entries:]
"""


def test_kernels_warm_leaves_nothing_to_compile() -> None:
    """After it a process takes all kernels from the cache, and requests of other kinds need no further one."""
    assert "kernels compiled" in invoke("kernels", "warm", "demo")
    done = subprocess.run([sys.executable, "-c", ALL_KINDS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:19]) == (0, "0 kernels compiled,"), (done.stdout, done.stderr)


def test_generate_keeps_a_form(tmp_path: Path) -> None:
    """A schema from a file, a regular expression or a choice; two of them are refused."""
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}', encoding="utf-8")
    words = ("generate", "What is 2 + 3?", "--temperature", "2.0", "--seed", "1")
    assert [type(one) for one in json.loads(invoke(*words, "--json-schema", str(schema)))] == [bool, bool]
    assert invoke(*words, "--regex", "[xyz]{3}").strip("xyz\n") == ""
    assert invoke(*words, "--choice", "so", "--choice", "not so").strip() in ("so", "not so")
    with pytest.raises(InvalidGrammar):
        invoke(*words, "--regex", "a", "--choice", "b")


def test_generate_with_a_seed_repeats_itself() -> None:
    """Sampling with a seed gives the same answer twice, and the options reach the sampler."""
    words = ("generate", "What is 2 + 3?", "--temperature", "8.0", "--max-tokens", "24", "--seed")
    first = invoke(*words, "7")
    assert first == invoke(*words, "7")
    assert first != invoke(*words, "8")


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every line of piped input is answered, and a later turn computes only what is new."""
    from pagedcore.cli.chat import Conversation

    reused = []
    say = Conversation.say

    def spy(self: Conversation, text: str) -> None:
        say(self, text)
        reused.append(self.num_reused_tokens)

    monkeypatch.setattr(Conversation, "say", spy)
    out = invoke("chat", given="What is 2 + 3?\n\nWhat is 4 + 4?\n/new\nWhat is 7 - 4?\n/exit\nWhat is 1 + 1?\n")
    assert len(out.strip().splitlines()) == 3
    # Why: a new conversation still begins as every conversation does, and that much is found.
    assert reused[0] == 0 < reused[2] < reused[1]
    assert reused[1] > 0


def test_chat_says_when_the_context_is_full() -> None:
    """A turn that no longer fits is refused with advice, and the conversation can start again."""
    given = "What is 2 + 3?\n" * 12 + "/new\nWhat is 2 + 3?\n"
    result = try_invoke("chat", "--max-model-len", "64", "--max-tokens", "16", "--quantization", "w8a16", given=given)
    assert result.exit_code == 0
    assert "/new starts a new conversation" in result.stderr
    assert result.stdout.strip().splitlines()[-1]


def test_bench_compares_ways_of_batching_and_writes_json(tmp_path: Path) -> None:
    """The benchmark runs with random weights and prompts of one's own, and writes what it measured."""
    prompts, target = tmp_path / "prompts.json", tmp_path / "result.json"
    prompts.write_text(json.dumps([[40 + number] * (1 + number) for number in range(6)]))
    out = invoke("bench", "batching", "--random-weights", "tiny", "--prompts-json", str(prompts), "--output-tokens",
                 "4", "--max-num-seqs", "4", "--dtype", "float32", "--quantization", "w8a16", "--json", str(target))
    assert "static" in out
    data = json.loads(target.read_text())
    assert [m["mode"] for m in data["measurements"]] == ["none", "static", "continuous"]
    assert [m["num_slots"] for m in data["measurements"]] == [4, 4, 4]
    assert {m["num_output_tokens"] for m in data["measurements"]} == {24}
    assert (data["dtype"], data["quantization"]) == ("float32", "w8a16")
