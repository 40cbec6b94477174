"""The demo model on a twentieth of the memory that its requests want: every answer right, and nothing left behind."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.sampling_params import SamplingParams
from support.doubles import ToyBackend
from support.engine_builders import assert_all_free, make_engine, run
from support.families import tiny_model

PARAMS = SamplingParams(max_tokens=64)
BLOCK_SIZE = 16
NUM_QUESTIONS = 64


def wanted_blocks(engine: Engine) -> int:
    """Blocks of all questions with their longest answers, at once."""
    lengths = [len(engine.prepare(q.prompt, PARAMS).token_ids) + 64 for q in demo_questions(NUM_QUESTIONS, seed=3)]
    return sum(-(-length // BLOCK_SIZE) for length in lengths)


@pytest.mark.parametrize("preemption", ["auto", "swap", "shrink", "recompute", "wait"])
def test_every_answer_is_right_on_a_twentieth_of_the_memory(preemption: str) -> None:
    """However room is made, no answer changes, no block is lost, and what was done about it can be read."""
    questions = demo_questions(NUM_QUESTIONS, seed=3)
    with Engine.from_pretrained("demo", num_kv_blocks=1024, block_size=BLOCK_SIZE) as roomy:
        num_blocks = wanted_blocks(roomy) // 20
        expected = [one.outputs[0].token_ids for one in roomy.generate([q.prompt for q in questions], PARAMS)]
    with Engine.from_pretrained(
        "demo", num_kv_blocks=num_blocks, block_size=BLOCK_SIZE, host_kv_memory="4MiB", preemption=preemption,
        max_num_waiting=NUM_QUESTIONS,
    ) as engine:
        requests = [engine.add_request(question.prompt, PARAMS) for question in questions]
        run(engine)
        answers = [request.output().outputs[0] for request in requests]
        stats = engine.stats()
        done = f"{stats.num_preemptions_by_kind}, {stats.num_stalled_rows} rows stood still"
        print(f"{preemption}: {num_blocks} blocks, {done}")
        assert [answer.token_ids for answer in answers] == expected
        assert all(is_correct(question, answer.text) for question, answer in zip(questions, answers, strict=True))
        assert preemption == "wait" or stats.num_preemptions > 0
        assert_all_free(engine)


class Variable(ToyBackend):
    """A backend that promises nothing."""

    is_schedule_invariant = False


def preemptions(backend: Any, **settings: Any) -> dict[str, int]:
    """Preemptions by kind of six requests that want three times the blocks there are."""
    with make_engine(backend, num_kv_blocks=12, max_num_batched_tokens=16, **settings) as engine:
        for number in range(6):
            engine.add_request([number, 3, 4, 5, 6], SamplingParams(max_tokens=24, ignore_eos=True))
        run(engine)
        kinds = engine.stats().num_preemptions_by_kind
        assert_all_free(engine)
    return dict(kinds)


@pytest.mark.parametrize("preemption", ["auto", "recompute", "shrink", "swap"])
def test_what_depends_on_the_schedule_is_swapped_not_computed_again(preemption: str) -> None:
    """With a host tier, a model that is not schedule invariant loses nothing that was computed."""
    kinds = preemptions(Variable(), preemption=preemption, host_kv_memory="64KiB")
    assert kinds["swap"] > 0
    assert kinds["recompute"] == kinds["shrink"] == 0
    if preemption in ("recompute", "shrink"):
        kinds = preemptions(ToyBackend(), preemption=preemption, host_kv_memory="64KiB")
        assert kinds["recompute"] + kinds["shrink"] > 0


@pytest.mark.parametrize("preemption", ["auto", "recompute", "shrink", "swap", "wait"])
def test_what_depends_on_the_schedule_waits_where_there_is_no_host_tier(preemption: str) -> None:
    """Without a host tier it is as if "wait" had been asked for, and with guaranteed admission nothing is preempted."""
    assert preemptions(Variable(), preemption=preemption) == preemptions(ToyBackend(), preemption="wait")
    assert sum(preemptions(Variable(), preemption=preemption, admission="guaranteed").values()) == 0


def test_one_warning_says_why_and_what_it_means(caplog: pytest.LogCaptureFixture) -> None:
    """A model that makes no promise is warned of once, with the reason; one that makes it is not."""
    for family, reason in (("jetmoe", "JetMoeParallelExperts"), ("qwen3_moe", "")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="pagedcore"):
            Engine.from_pretrained(tiny_model(family), num_kv_blocks=8, host_kv_memory="1MiB").close()
        warnings = [record.getMessage() for record in caplog.records if record.name == "pagedcore"]
        assert len(warnings) == (1 if reason else 0), warnings
        assert all(reason in text and "depend on the schedule" in text and "'swap'" in text for text in warnings)
