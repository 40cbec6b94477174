"""No completion has the end-of-text token before ``min_tokens``, whether that token would end it or not."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.protocols import FloatArray, RaggedRows
from pagedcore.sampling_params import SamplingParams
from support.doubles import VOCAB_SIZE, ToyBackend
from support.engine_builders import assert_all_free, make_engine, run

EOS = VOCAB_SIZE - 1
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampled": {"temperature": 2.0, "n": 3, "seed": 1},
    "best_of": {"temperature": 2.0, "best_of": 3, "seed": 1}, "beams": {"beam_width": 3, "n": 3},
}  # fmt: skip


class EagerToEnd(ToyBackend):
    """A toy model whose likeliest token is always the end of the text."""

    def forward(self, batch: RaggedRows) -> FloatArray:
        logits = super().forward(batch)
        logits[:, EOS] = 40.0
        return logits


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stop_token_ids", [(), (EOS - 1,)])
def test_with_ignore_eos_the_end_token_comes_after_min_tokens_only(way: str, stop_token_ids: tuple[int, ...]) -> None:
    """The model would always choose its end token: it has to wait for min_tokens, and then it ends nothing."""
    engine = make_engine(EagerToEnd(), num_kv_blocks=64)
    params = SamplingParams(max_tokens=7, min_tokens=4, ignore_eos=True, stop_token_ids=stop_token_ids, **WAYS[way])
    requests = [engine.add_request([i] * (3 + i), params) for i in range(4)]
    run(engine)
    for request in requests:
        outputs = request.output().outputs
        assert len(outputs) == params.n
        for completion in outputs:
            assert EOS not in completion.token_ids[:4]
            assert not set(stop_token_ids).intersection(completion.token_ids[:4])
            assert (len(completion.token_ids), completion.finish_reason) == (7, "length")
        assert outputs[0].token_ids[4:] == (EOS,) * 3
    assert_all_free(engine)


@pytest.mark.parametrize("way", WAYS)
def test_without_ignore_eos_the_end_token_ends_after_min_tokens(way: str) -> None:
    """Then the first place at which it may be chosen is also the last of the likeliest completion."""
    engine = make_engine(EagerToEnd(), num_kv_blocks=64)
    request = engine.add_request([5] * 4, SamplingParams(max_tokens=7, min_tokens=4, **WAYS[way]))
    run(engine)
    completion = request.output().outputs[0]
    assert EOS not in completion.token_ids[:4]
    assert (completion.token_ids[4:], completion.finish_reason) == ((EOS,), "stop")


def test_a_further_turn_is_held_to_its_own_min_tokens() -> None:
    """A continuation with ignore_eos has the end token masked anew; one without min_tokens begins with it."""
    engine = make_engine(EagerToEnd(), num_kv_blocks=64)
    request = engine.add_request([5] * 4, SamplingParams(max_tokens=2, ignore_eos=True))
    run(engine)
    assert request.output().outputs[0].token_ids == (EOS, EOS)
    request.extend([3], SamplingParams(max_tokens=3, min_tokens=2, ignore_eos=True))
    run(engine)
    first, second, third = request.output().outputs[0].token_ids
    assert EOS not in (first, second)
    assert third == EOS
