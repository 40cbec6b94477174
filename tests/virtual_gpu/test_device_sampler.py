"""Tokens that are chosen on a GPU: the CPU sampler's, and few bytes come back."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cuda.simulated_driver import SimulatedDriver
from pagedcore.errors import ProcessorFailed
from pagedcore.execution.device_sampler import DeviceSampler, DeviceTokens
from pagedcore.execution.devices import CPU, find_device
from pagedcore.execution.row_adjuster import RowAdjuster
from pagedcore.execution.sampler import SampledTokens, Sampler
from pagedcore.sampling_params import SamplingParams
from pagedcore.sequence import Sequence
from pagedcore_kernels.cuda.build.toolchain import missing_compiler_parts
from pagedcore_kernels.cuda.sampling import TokenSampler
from virtual_gpu.backends import QueuedChooser
from virtual_gpu.machine import Machine

VOCAB = 203
"""Neither a multiple of 8 nor of 64."""


def asking(sequence_id: int, output: ListOf[int] = (), **params: Any) -> Sequence:
    """A sequence that has generated ``output``."""
    sequence = Sequence(
        sequence_id, [1, 7, 7, 150], SamplingParams(**params), max_tokens=20, seed=3 + sequence_id,
        stop_token_ids=frozenset((4, 9, VOCAB + 5)),
    )
    sequence.token_ids.extend(output)
    return sequence


class EveryThird:
    """Constraints that allow every third token; one that is in error allows none."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def branch(self) -> EveryThird:
        return self


class Masks:
    """What knows them."""

    def masks_of(self, constrained: ListOf[tuple[Any, ListOf[int]]]) -> tuple[Any, dict[int, Exception]]:
        allowed = np.arange(VOCAB) % 3 == 0
        masks = [np.packbits(allowed & (not one.fails), bitorder="little") for one, _ in constrained]
        failures: dict[int, Exception] = {i: ValueError("no") for i, (one, _) in enumerate(constrained) if one.fails}
        return np.array(masks), failures

    def mask_rows(self, rows: Any, constrained: ListOf[tuple[int, Any, ListOf[int]]]) -> dict[int, Exception]:
        masks, failures = self.masks_of([(one, ids) for _, one, ids in constrained])
        for (i, _, _), mask in zip(constrained, masks, strict=True):
            bits = np.unpackbits(mask, bitorder="little", count=VOCAB)
            rows[i][(bits == 0) & (rows[i] < np.inf)] = -np.inf
        return {constrained[place][0]: error for place, error in failures.items()}


def together() -> list[Sequence]:
    """One row for each thing that parameters do, alone and with others."""
    seen = (9, 9, 12, 150, 7)
    rows = [
        asking(0), asking(1, temperature=0.9), asking(2, seen, logit_bias={5: 3.5, VOCAB - 1: -100, 7: 100}),
        asking(3, seen, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=-0.3),
        asking(4, seen, repetition_penalty=5e-324, temperature=1.0), asking(5, min_tokens=5, logprobs=0),
        asking(6, seen, allowed_token_ids=list(range(3, 60)), temperature=0.7, top_k=9, logprobs=20),
        asking(7, seen, bad_words_ids=((150, 7, 3), (8,)), no_repeat_ngram_size=2, logprobs=2),
        asking(8, (*range(19),), forced_eos_token_id=(4, 9), suppress_tokens=(9, 11), temperature=1.0, logprobs=5),
        asking(9, seen, temperature=1.2, top_p=0.8, min_p=0.01, logprobs=7, logit_bias={3: 4.0, 8: 4.0}),
        asking(10, seen, temperature=0.8, allowed_token_ids=list(range(3, 60)), logprobs=1), asking(11, logprobs=3),
        asking(12, seen, logits_processor=tripled, temperature=0.5), asking(13, logprobs=2, return_logits=True),
        asking(14, seen, logprobs=3, logprobs_mode="processed", temperature=0.8, top_k=5),
        asking(15, logits_processor=broken), asking(16, suppress_tokens=(9,), frequency_penalty=2.0, logprobs=1),
    ]
    for place, fails in ((10, False), (11, True)):
        rows[place].constraint, rows[place].is_adjusted = EveryThird(fails=fails), True
    return rows


def tripled(output_token_ids: list[int], logits: Any) -> Any:
    return logits * 3


def broken(output_token_ids: list[int], logits: Any) -> Any:
    raise ZeroDivisionError


def logits_of(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random logits with ties, zeros of both signs, infinities, and a row that is broken."""
    rows = torch.from_numpy(np.random.default_rng(count).standard_normal((count, VOCAB)) * 4).to(dtype)
    rows[:, 20:24], rows[:, 30], rows[:, 31], rows[:, 40:44] = 9.0, 0.0, -0.0, -torch.inf
    rows[4, ::2], rows[4, 1::2] = torch.finfo(torch.float32).max / 2, -torch.finfo(torch.float32).max / 2
    rows[6, 12:], rows[7], rows[7, 30], rows[7, 31], rows[-1, 9] = -torch.inf, -rows[7].abs() - 1, -0.0, 0.0, torch.nan
    return rows


@pytest.fixture
def sampler(gpus: Machine) -> DeviceSampler:
    """One on a virtual GPU."""
    return DeviceSampler(Sampler(VOCAB, Masks()), DeviceTokens(find_device("cuda:1"), QueuedChooser(VOCAB)))


@pytest.mark.skipif(bool(missing_compiler_parts()), reason="needs pagedcore[cuda] to compile kernels")
def test_the_kernel_that_ships_chooses_the_same() -> None:
    """So it is with the kernel for GPUs, executed by the interpreter."""
    logits, sequences = logits_of(17, torch.bfloat16), together()
    sampler = DeviceSampler(Sampler(VOCAB, Masks()), DeviceTokens(CPU, TokenSampler(VOCAB, SimulatedDriver())))
    expected = Sampler(VOCAB, Masks()).sample(logits.float().numpy().copy(), sequences)
    assert sampler.sample(logits, sequences).token_ids.tolist() == expected.token_ids.tolist()


def sample_there(sampler: DeviceSampler, logits: torch.Tensor, sequences: list[Sequence]) -> SampledTokens:
    with torch.inference_mode():
        sent = logits.to("cuda:1")
        found = sampler.sample(sent, sequences)
        assert torch.equal(sent.cpu().view(torch.uint8), logits.view(torch.uint8))  # they are left alone
    return found


class Watched:
    """A chooser that keeps the rows that it has chosen from."""

    def __init__(self) -> None:
        self.choose, self.rows = QueuedChooser(VOCAB), torch.empty(0)

    def __call__(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        self.rows = logits.cpu()
        return self.choose(logits, rows)


def test_adjusted_rows_have_the_bits_of_the_cpu(gpus: Machine) -> None:
    """Biases, penalties, bars and masks leave in float32 what they leave on a CPU, bit for bit."""
    logits, watched = logits_of(17, torch.float32), Watched()
    sequences = [one for one in together() if one.params.logits_processor is None and one.num_logprobs != 3]
    sampler = DeviceSampler(Sampler(VOCAB, Masks()), DeviceTokens(find_device("cuda"), watched))
    with torch.inference_mode():
        sampler.sample(logits[: len(sequences)].to("cuda"), sequences)
    expected = logits[: len(sequences)].numpy()
    for row, sequence in zip(expected, sequences, strict=True):
        RowAdjuster(sequence, VOCAB).adjust(row, sequence)
    Masks().mask_rows(expected, [(i, one.constraint, []) for i, one in enumerate(sequences) if one.constraint])
    assert watched.rows.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_tokens_and_probabilities_are_those_of_the_cpu(dtype: torch.dtype, sampler: DeviceSampler) -> None:
    """Every parameter in one batch, twice: the tokens are equal, log-probabilities to 1e-6, and failures, errors and
    rows that a caller sees are a CPU's."""
    logits, sequences = logits_of(17, dtype), together()
    for _ in range(2):
        expected = Sampler(VOCAB, Masks()).sample(logits.float().numpy().copy(), sequences)
        found = sample_there(sampler, logits, sequences)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.token_ids[16] == -1
        assert found.token_ids[11] == -1
        assert {i: type(one) for i, one in found.failures.items()} == {11: ValueError, 15: ProcessorFailed}
        for mine, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert (mine is None) == (other is None)
            if mine is not None and other is not None:
                assert (mine.token_id, [one for one, _ in mine.top]) == (
                    other.token_id, [one for one, _ in other.top])
                assert mine.logprob == pytest.approx(other.logprob, abs=1e-6)
                assert [value for _, value in mine.top] == pytest.approx([value for _, value in other.top], abs=1e-6)
                assert (mine.logits is None) == (other.logits is None)
        for sequence in sequences:
            if sequence.num_output_tokens < 19:
                sequence.append_token(2)


@pytest.mark.parametrize("count", [None, 0, 5, 6, 20])
def test_few_bytes_come_back(count: int | None, sampler: DeviceSampler, gpus: Machine) -> None:
    """A row costs 64 bytes at most, and 8 more for each log-probability beyond the first five; other rows pay nothing
    for it. All of it comes in one copy, nothing that goes over is waited for, and the host waits once."""
    with torch.inference_mode():
        logits = logits_of(8, torch.bfloat16).to("cuda:1")
    sequences = [
        asking(i, temperature=0.5, repetition_penalty=1.2, logprobs=count if i == 3 else None) for i in range(8)]
    torch.cuda.synchronize("cuda:1")
    gpus.counts.clear()
    sampler.sample(logits, sequences)
    assert gpus.counts["bytes to the host"] <= 4 * 7 + (64 + 8 * max(0, (count or 0) - 5) if count is not None else 4)
    assert gpus.counts["copies to the host"] == gpus.counts["waits"] == 1
    assert gpus.counts["pageable copies to the device"] == 0
