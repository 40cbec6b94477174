"""The demo model on a twentieth of the memory that its requests want: every answer right, and nothing left behind."""

from __future__ import annotations

import pytest

from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.sampling_params import SamplingParams
from support.engine_builders import assert_all_free, run

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
