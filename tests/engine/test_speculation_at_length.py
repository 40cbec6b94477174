"""Ten thousand requests with drafts and without, in random small pools, with preemption and aborts: no byte differs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from engine.test_draft_model_files import always_asked
from engine.test_speculation import Known, drawn_requests, forced_of, told
from pagedcore import Engine
from pagedcore.requests.request import Request
from support.drafts import Adversary, let_guess
from support.engine_builders import assert_all_free

NUM_PARTS, NUM_REQUESTS = 20, 500


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """An engine without drafts."""
    with Engine.from_pretrained("demo", max_num_waiting=4 * NUM_REQUESTS) as engine:
        yield engine


def drawn_settings(rng: random.Random) -> dict[str, Any]:
    """Draw pools and budgets in which requests wait for each other."""
    rows = rng.choice([2, 5, 8])
    return {
        "max_num_seqs": rows, "max_num_batched_tokens": rng.choice([rows + 2, 24, 64]), "block_size": 8,
        "num_kv_blocks": rng.choice([11, 14, 24]), "phases": rng.choice(["mixed", "mixed", "separate"]),
        **rng.choice([{"preemption": "recompute"}, {"preemption": "shrink"}, {"preemption": "wait"},
                      {"host_kv_memory": "256KiB", "preemption": "swap"}, {"host_kv_memory": "64KiB"}]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_no_byte_of_ten_thousand_answers_differs(plain: Engine, part: int) -> None:
    """Each part has a schedule of its own; drafts come from who knows the answers, makes mistakes and goes too far, or
    in every other part from a model too.
    """
    rng, has_model = random.Random(f"at length {part}"), part % 2 == 1
    settings = drawn_settings(rng) | ({"speculative_model": "demo"} if has_model else {})
    with Engine.from_pretrained("demo", speculation="auto", check_invariants=True, **settings) as one:
        asked, known, vocab_size = drawn_requests(rng, one, NUM_REQUESTS), Known(), one.input_processor.vocab_size
        requests = [plain.add_request(*each) for each in asked]
        while plain.has_pending_requests():
            plain.step()
        expected = [told(plain.output_of(request)) for request in requests]
        for request in requests:
            known.learn(request)
            request.remove()
        source = Adversary(known, vocab_size, part, promises=0.5 if has_model else 1.0)
        let_guess(one, source, vocab_size, forced=forced_of(one), model=always_asked(one) if has_model else None)
        live = list[Request]()
        for each in asked:
            while not one.can_accept(3):
                one.step()
            live.append(one.add_request(*each))
            for _ in range(rng.choice([0, 0, 3])):
                one.step()
            if rng.random() < 0.05:
                one.abort_request(rng.choice(live[-5:]).request_id)
        while one.has_pending_requests():
            one.step()
        num_compared = 0
        for want, request in zip(expected, live, strict=True):
            output = one.output_of(request)
            if all(each.finish_reason != "abort" for each in output.outputs):
                assert told(output) == want, request
                num_compared += 1
        stats = one.stats()
        assert num_compared > 0.9 * NUM_REQUESTS
        assert stats.speculation == "on"
        assert NUM_REQUESTS / 5 < stats.num_accepted_tokens < stats.num_drafted_tokens
        assert_all_free(one)
        assert not source.live
        print(f"part {part}: {num_compared} compared, {stats.num_accepted_tokens} of {stats.num_drafted_tokens} "
              f"drafts, {stats.num_preemptions} preemptions")
