"""Greedy answers of the engine against ``model.generate`` of transformers, for every architecture family."""

from __future__ import annotations

from typing import Any

import pytest

from pagedcore.engine.engine import Engine
from pagedcore.sampling_params import SamplingParams
from support.families import FAMILIES, HYBRIDS, tiny_model
from support.generate_oracle import NUM_TOKENS, generate_alone, make_prompts

_EACH_TIME = 6
"""`make test` takes every sixth architecture; `make slow` takes all. The logits of one of each kind are
compared in ``models/families``, every time."""


@pytest.mark.parametrize("family", [
    pytest.param(family, marks=[pytest.mark.slow] if place % _EACH_TIME else [])
    for place, family in enumerate(one for one in FAMILIES if one not in HYBRIDS)
])
def test_greedy_tokens_are_those_of_generate(family: str) -> None:
    """Chunked, in company and under preemption, greedy tokens are identical to ``model.generate`` alone."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    prompts = make_prompts()
    expected = [generate_alone(model, prompt) for prompt in prompts]
    settings: dict[str, Any] = {"max_num_batched_tokens": 7, "max_num_seqs": 3, "num_kv_blocks": 12, "block_size": 4}
    with Engine.from_pretrained(model, attention_backend="reference", **settings) as engine:
        outputs = engine.generate(prompts, SamplingParams(max_tokens=NUM_TOKENS))
        assert engine.stats().num_preemptions > 0 or any(len(answer) < NUM_TOKENS for answer in expected)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
