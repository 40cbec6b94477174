"""Greedy decoding without logits, against the logits of the same models: the same tokens, in whatever company."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from models.decoders.test_fused import VOCAB, model_of
from models.decoders.test_recorded_steps import (
    BLOCK_SIZE,
    CASES,
    NUM_BLOCKS,
    QUICK_CASES,
    python_alone,
    step_of,
    steps,
    take_over,
)
from pagedcore import Engine, SamplingParams
from pagedcore.models.decoders import fused
from pagedcore.models.transformers_model import TransformersModel
from pagedcore.protocols import DecodesGreedily, FloatArray, RaggedRows
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from support.families import tiny_model

QUESTIONS = [f"{i} + {7 * i % 50} = " for i in range(24)]
GREEDY = SamplingParams(max_tokens=12)
NOTHING_BARRED = np.zeros((0, 2), np.int64)


def largest(logits: torch.Tensor) -> list[int]:
    """Say what greedy decoding takes of logits, by NumPy: the first of equal ones."""
    return list(logits.float().numpy().argmax(1).tolist())


@pytest.mark.parametrize("case", QUICK_CASES)
def test_the_tokens_are_those_of_the_logits(case: str) -> None:
    """Of every row of many steps, recorded and repeated, among steps with logits and without; models whose logits are
    capped afterwards have to compute them.
    """
    name, dtype, options = CASES[case]
    backend, plain = take_over(name, dtype, **options), python_alone(take_over(name, dtype, **options))
    assert isinstance(backend, DecodesGreedily)
    assert backend.decodes_greedily == ("gemma" not in name)
    if not backend.decodes_greedily:
        return
    for number, batch in enumerate(steps()):
        expected = plain.forward(batch)
        if number % 5 == 3:
            assert torch.equal(backend.forward(batch), expected)
        else:
            assert backend.forward_greedily(batch, NOTHING_BARRED).tolist() == largest(expected)
    assert python_alone(backend).forward_greedily(batch, NOTHING_BARRED).tolist() == largest(expected)


def test_a_family_with_caps_may_have_a_model_without() -> None:
    """What counts is the configuration of the model."""
    assert TransformersModel(tiny_model("gemma3_text"), NumbaCpuAttention).decodes_greedily


@pytest.mark.parametrize("name", ["granite", "olmo2", "mixtral", "general"])
def test_models_that_record_nothing(name: str) -> None:
    """Where nothing is recorded the tokens are chosen as well; not where logits are divided, which may make them equal,
    nor by the modules of transformers.
    """
    backend = take_over("olmo2" if name == "general" else name)
    if name == "general":
        fallback = backend._decoder.fallback()
        assert fallback is not None
        backend._decoder = fallback
    assert backend.decodes_greedily == (name in ("olmo2", "mixtral"))
    if backend.decodes_greedily:
        for pieces in ([(i, 0, 20) for i in range(6)], [(0, 20, 21)], [(i, 20, 30) for i in (1, 2)]):
            batch = step_of(pieces)
            logits = backend.forward(batch).clone()
            assert backend.forward_greedily(batch, NOTHING_BARRED).tolist() == largest(logits)


@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_barred_tokens_are_not_chosen(name: str) -> None:
    """From step to step others, more and fewer of them, recorded or not; the other rows keep their tokens."""
    backend, plain = take_over(name, torch.bfloat16), take_over(name, torch.bfloat16)
    for number, batch in enumerate(steps()):
        logits = plain.forward(batch).float()
        rng, num_rows = np.random.default_rng(number), len(logits)
        rows = rng.integers(0, num_rows, (1, 0, 3, 9, 200)[number % 5])
        best = logits.argsort(descending=True).numpy()[rows, rng.integers(0, 3, len(rows))]
        logits[rows, best] = -torch.inf
        assert backend.forward_greedily(batch, np.stack([rows, best], 1)).tolist() == largest(logits)


def test_rows_of_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row, two, and more than a recording has room for; steps of more tokens than are recorded."""
    monkeypatch.setattr(fused, "MOST_ROWS", 200)
    monkeypatch.setattr(fused, "MOST_LOGITS", 20)
    backend, plain = take_over("qwen2", torch.bfloat16), python_alone(take_over("qwen2", torch.bfloat16))
    for num_tokens, num_wanted in [(3, 1), (17, 2), (150, 20), (150, 21), (150, 150), (201, 5), (2, 1), (5, 1)]:
        pieces = [(0, 0, min(80, num_tokens - 1)), (1, 0, max(1, min(80, num_tokens - 81))), (2, 0, num_tokens - 161)]
        batch = step_of([piece for piece in pieces if piece[2] > 0])
        rows = np.random.default_rng(num_tokens).permutation(batch.num_tokens)[:num_wanted]
        batch = dataclasses.replace(batch, logits_rows=rows)
        assert backend.forward_greedily(batch, NOTHING_BARRED).tolist() == largest(plain.forward(batch))


def test_logits_have_no_memory_until_they_are_wanted() -> None:
    """A greedy step of 100 rows has room for a candidate for 64 of their logits, and none for logits but what loading
    the model has left, of 24 rows.
    """
    backend = take_over("qwen2", torch.bfloat16)
    decoder: Any = backend._decoder
    rooms, batch = decoder._steps.workspace._rooms, step_of([(0, 0, 50), (1, 0, 50)])
    greedily = partial(backend.forward_greedily, barred=NOTHING_BARRED)
    for take, most_logits in ((greedily, 32), (backend.forward, 128)):
        take(batch)
        assert max(len(room) for (purpose, *_), room in rooms.items() if purpose == "logits") == most_logits
        [size] = [room.shape for (purpose, *_), room in rooms.items() if purpose == "candidates"]
        assert size == (128, -(-VOCAB // 64))


class Counted:
    """How often an engine's model chose tokens, and how often it computed logits of any row."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_greedy = self.num_logits = 0
        picks, logits = TransformersModel.forward_greedily, TransformersModel._compute

        def forward_greedily(model: TransformersModel, batch: RaggedRows, barred: Any) -> Any:
            self.num_greedy += 1
            return picks(model, batch, barred)

        def compute(model: TransformersModel, attention: Any, batch: RaggedRows) -> torch.Tensor:
            self.num_logits += bool(len(batch.logits_rows))
            return logits(model, attention, batch)

        monkeypatch.setattr(TransformersModel, "forward_greedily", forward_greedily)
        monkeypatch.setattr(TransformersModel, "_compute", compute)


def answers(engine: Engine, params: Any) -> list[tuple[int, ...]]:
    """Return the tokens of all questions."""
    return [one.outputs[0].token_ids for one in engine.generate(QUESTIONS, params)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_of_the_demo(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine asks for logits only where a row wants them: answers are the same with them, without them, with little
    memory, and beside requests that sample, report, bias or must not end yet.
    """
    with Engine.from_pretrained("demo", dtype=dtype) as engine, monkeypatch.context() as replaced:
        replaced.setattr(TransformersModel, "decodes_greedily", False)
        expected = answers(engine, GREEDY)
        longer = answers(engine, SamplingParams(max_tokens=30, min_tokens=30))
    counted = Counted(monkeypatch)
    with Engine.from_pretrained("demo", dtype=dtype) as engine:
        counted.num_logits = 0
        assert answers(engine, GREEDY) == expected
        assert counted.num_greedy > 0
        assert counted.num_logits == 0
        counted.num_greedy = 0
        others = [SamplingParams(max_tokens=12, temperature=1.0, seed=1), SamplingParams(max_tokens=12, logprobs=2),
                  SamplingParams(max_tokens=12, logit_bias={5: -1.0})]  # fmt: skip
        mixed = answers(engine, [others[i % 12] if i % 12 < 3 else GREEDY for i in range(len(QUESTIONS))])
        assert counted.num_logits > 0
        assert all(mixed[i] == expected[i] for i in range(len(QUESTIONS)) if i % 12 > 2)
        counted.num_logits = 0
        assert answers(engine, SamplingParams(max_tokens=30, min_tokens=30)) == longer
        assert counted.num_logits == 0
    with Engine.from_pretrained("demo", dtype=dtype, num_kv_blocks=24, block_size=4, preemption="recompute") as engine:
        outputs = engine.generate(QUESTIONS, GREEDY)
        assert [one.outputs[0].token_ids for one in outputs] == expected
        assert sum(one.metrics.num_preemptions for one in outputs if one.metrics) > 0


@pytest.mark.parametrize("is_after", [False, True], ids=["before the product", "after it"])
def test_an_interrupt_in_the_output_layer_loses_nothing(is_after: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Ctrl-C while the step is recorded, once: the engine goes on, with the answers of one that was left alone."""
    with Engine.from_pretrained("demo") as engine:
        expected = answers(engine, GREEDY)
    pick_to, interrupts = PackedProduct.pick_to, [True]

    def interrupted(product: PackedProduct, *arguments: Any) -> None:
        if is_after or not interrupts:
            pick_to(product, *arguments)
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt

    with Engine.from_pretrained("demo") as engine:
        monkeypatch.setattr(PackedProduct, "pick_to", interrupted)
        requests = [engine.add_request(question, GREEDY) for question in QUESTIONS]
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while engine.has_pending_requests():
            engine.step()
        assert [request.output().outputs[0].token_ids for request in requests] == expected


class Biased(TransformersModel):
    """Wants one token above all others."""

    def forward(self, batch: RaggedRows) -> torch.Tensor:
        """Change the logits."""
        logits = super().forward(batch).clone()
        logits[:, 7] = 100.0
        return logits


@pytest.mark.parametrize("is_subclass", [True, False])
def test_who_replaces_forward_decides(is_subclass: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose ``forward`` is not ours gives the logits that tokens are chosen from."""
    backend = (Biased if is_subclass else TransformersModel)(model_of("llama"), NumbaCpuAttention)
    if not is_subclass:
        assert backend.decodes_greedily
        ours: Callable[[RaggedRows], torch.Tensor | FloatArray] = backend.forward

        def biased(batch: RaggedRows) -> torch.Tensor:
            logits = torch.as_tensor(ours(batch)).clone()
            logits[:, 7] = 100.0
            return logits

        monkeypatch.setattr(backend, "forward", biased)
    assert not backend.decodes_greedily
    with Engine.from_pretrained(backend, num_kv_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE) as engine:
        [one] = engine.generate([[3, 4, 5]], SamplingParams(max_tokens=5, ignore_eos=True))
        assert one.outputs[0].token_ids == (7,) * 5
