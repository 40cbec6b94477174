"""A quantised model served to callers who come and leave: each gets what it gets alone, to the last bit."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from pagedcore import AsyncEngine, Engine, SamplingParams
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "block_size": 16}
NUM_QUESTIONS = 12


def questions() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of many lengths, sampled and greedy, with log-probabilities."""
    rng = random.Random(0)
    beginning = [rng.randrange(5, 1000) for _ in range(20)]
    return [
        ([*beginning, *(rng.randrange(5, 1000) for _ in range(rng.randint(1, 60)))],
         SamplingParams(max_tokens=rng.randint(4, 24), temperature=float(i % 2), seed=i, logprobs=2, ignore_eos=True))
        for i in range(NUM_QUESTIONS)
    ]


@pytest.mark.parametrize("quantization", QUANTIZERS)
async def test_company_changes_no_bit_of_a_quantised_model(quantization: str) -> None:
    """Under memory pressure, beside callers who leave at any moment and prompts of extreme lengths."""
    asked, settings = questions(), {"quantization": quantization, **SETTINGS}
    with Engine.from_pretrained("demo", enable_prefix_caching=False, num_kv_blocks=64, **settings) as engine:
        alone = [engine.generate([prompt], params, show_progress=False)[0].outputs[0] for prompt, params in asked]

    async with AsyncEngine.from_pretrained("demo", num_kv_blocks=24, host_kv_memory="1MiB", **settings) as engine:
        rng = random.Random(1)

        async def leave(number: int) -> None:
            prompt = [7] * (1 if number % 2 else 150)
            task = asyncio.ensure_future(asyncio.wrap_future(engine.submit(prompt, asked[0][1], wait_for_room=True)))
            await asyncio.sleep(rng.uniform(0.0, 0.1))
            task.cancel()

        leavers = [asyncio.create_task(leave(number)) for number in range(20)]
        outputs = await asyncio.gather(*(
            asyncio.wrap_future(engine.submit(prompt, params, wait_for_room=True)) for prompt, params in asked
        ))
        await asyncio.gather(*leavers)
        stats = await engine.call(lambda engine: engine.stats())
    assert stats.is_schedule_invariant
    for output, wanted in zip(outputs, alone, strict=True):
        assert output.outputs[0].token_ids == wanted.token_ids
        assert output.outputs[0].logprobs == wanted.logprobs
