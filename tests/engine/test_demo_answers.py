"""The demo model, whose answers can be checked: right in any order, in any company, under any memory pressure."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.demo_model.questions import DemoQuestion, demo_questions, is_correct
from pagedcore.engine.engine import Engine
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.async_engine import AsyncEngine
from support.engine_builders import run

PARAMS = SamplingParams(max_tokens=64)


@pytest.fixture(scope="module")
def questions() -> list[DemoQuestion]:
    """Questions of every task."""
    return demo_questions(48, seed=1)


@pytest.fixture(scope="module")
def answers_alone(questions: list[DemoQuestion]) -> list[str]:
    """Every question answered alone, and right."""
    with Engine.from_pretrained("demo", max_num_seqs=1) as engine:
        texts = [engine.generate([question.prompt], PARAMS)[0].outputs[0].text for question in questions]
    wrong = [(q.prompt, text) for q, text in zip(questions, texts, strict=True) if not is_correct(q, text)]
    assert len(wrong) <= 1, wrong
    return texts


@pytest.mark.parametrize(
    ("is_reversed", "settings"),
    [
        (False, {}),
        (True, {}),
        (False, {"max_num_seqs": 3, "max_num_batched_tokens": 16}),
        (False, {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 16}),
        (True, {"num_kv_blocks": 24, "block_size": 4, "max_num_seqs": 16, "scheduling_policy": "priority"}),
    ],
    ids=["together", "reversed", "small steps", "tiny pool", "tiny pool, reversed"],
)
def test_answers_are_the_same_in_company(
    questions: list[DemoQuestion], answers_alone: list[str], is_reversed: bool, settings: dict[str, Any]
) -> None:
    """Order, batch mates, chunking and constant preemption change no character."""
    numbered = list(enumerate(questions))
    if is_reversed:
        numbered.reverse()
    with Engine.from_pretrained("demo", max_num_waiting=64, **settings) as engine:
        requests = {i: engine.add_request(question.prompt, PARAMS) for i, question in numbered}
        run(engine)
        texts = [requests[i].output().outputs[0].text for i in range(len(questions))]
        num_preemptions = engine.stats().num_preemptions
    assert texts == answers_alone
    if "num_kv_blocks" in settings:
        assert num_preemptions > 10, num_preemptions


def test_a_question_may_be_chat_messages(questions: list[DemoQuestion]) -> None:
    """The chat template gives right answers too."""
    with Engine.from_pretrained("demo") as engine:
        chats = [[{"role": "user", "content": question.prompt}] for question in questions]
        outputs = engine.generate(chats, PARAMS)
    wrong = [q.prompt for q, out in zip(questions, outputs, strict=True) if not is_correct(q, out.outputs[0].text)]
    assert len(wrong) <= 1, wrong


def test_a_conversation_goes_on_in_the_same_cache() -> None:
    """Follow-up chat turns are answered right, computing only what is new."""
    with Engine.from_pretrained("demo") as engine:
        request = engine.add_request([{"role": "user", "content": "What is the capital of Sweden?"}], PARAMS)
        run(engine)
        assert "Stockholm" in request.output().outputs[0].text
        request.extend([{"role": "user", "content": "What is 4 + 4?"}])
        run(engine)
        output = request.output()
        assert "8" in output.outputs[0].text
        assert output.num_cached_tokens > 0
        assert output.num_cached_tokens >= len(output.prompt_token_ids) // 2


async def test_streamed_text_is_the_offline_text(questions: list[DemoQuestion], answers_alone: list[str]) -> None:
    """Concatenated deltas of an asynchronous stream are the answer."""
    async with AsyncEngine.from_pretrained("demo") as engine:
        for question, expected in list(zip(questions, answers_alone, strict=True))[:6]:
            deltas = [delta async for delta in engine.generate(question.prompt, PARAMS)]
            assert "".join(delta.text for delta in deltas) == expected
            assert deltas[-1].finish_reason == "stop"
