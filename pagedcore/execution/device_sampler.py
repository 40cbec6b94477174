"""From logits on a GPU to tokens, there: biases, penalties, masks and log-probabilities, and the choice itself.

Does what ``sampler`` does for the same rows, of which a few numbers come back instead of a whole vocabulary. What a
request's parameters do to a row is counted on the host and sent over in one copy; ``TokenChooser`` chooses. A row whose
logits its caller wants to see is fetched, and sampled as on a CPU; its neighbours are not.

Invariant: adjusted logits have the bits that they have on a CPU, each operation being rounded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch

from pagedcore.execution.devices import Device
from pagedcore.execution.row_adjuster import LARGEST_FINITE, RowAdjuster, RowEdits, bars_tokens
from pagedcore.execution.sampler import SampledTokens, Sampler
from pagedcore.outputs import TokenLogprobs
from pagedcore.protocols import Int32Array, Int64Array, RaggedRows
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence
from pagedcore_kernels.cpu.sampling.samplers import sampling_rows
from pagedcore_kernels.interface import TokenChooser

_PIECE: Final = 2**21
"""Logits that are masked or reported at once: some ten megabytes on the way."""
_LOW: Final = 2**32
_ALL_IDS: Final = _LOW - 1
_BITS: Final = 64
_REPORT: Final = 3
"""Words of 32 bits that come back with a token's log-probabilities: what to subtract in two of them, and its logit."""


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """What chooses tokens where logits are."""

    device: Device
    choose: TokenChooser
    latest: torch.Tensor | None = None
    """There, int32: the tokens that were chosen last, 0 for rows without one; a token id of ``-1 - place`` in a batch
    means one of these. ``None``: the model does not look there."""

    def with_latest(self, num_rows: int) -> DeviceTokens:
        """Return the same with room for the tokens of so many rows."""
        with self.device.computing():
            return replace(self, latest=torch.zeros(num_rows, dtype=torch.int32, device=self.device.torch_device))


@runtime_checkable
class KeepsLogits(Protocol):
    """A model backend whose logits may stay on its device."""

    @property
    def device_tokens(self) -> DeviceTokens | None:
        """What chooses from them there; ``None``: nothing does. Asked before every step."""

    def forward_there(self, batch: RaggedRows) -> torch.Tensor:
        """Compute as ``ModelBackend.forward``; return logits on the device, in any float type, until the next call."""


class DeviceSampler:
    """Chooses the next token of every sequence of a step on a GPU.

    Invariant: as that of ``Sampler``.
    """

    def __init__(self, sampler: Sampler, tokens: DeviceTokens) -> None:
        """Choose as ``sampler`` does, and leave to it what has to be seen on the host."""
        self.tokens = tokens
        self._sampler, self._device, self._choose = sampler, tokens.device, tokens.choose
        self._vocab_size = sampler.vocab_size
        self._adjusters: dict[int, RowAdjuster] = {}

    def sample(
        self, logits: torch.Tensor, sequences: ListOf[Sequence], scored: ListOf[ScheduledRow] = ()
    ) -> SampledTokens:
        """Choose one token per row, score the tokens of prompts, and wait once for what comes back; see ``begin``."""
        return self.begin(logits, sequences, scored)()

    @torch.inference_mode()
    def begin(
        self, logits: torch.Tensor, sequences: ListOf[Sequence], scored: ListOf[ScheduledRow] = ()
    ) -> Callable[[], SampledTokens]:
        """Begin to choose tokens; return what waits for them, and may see other tokens of no sequence until then.

        Args:
            logits: [S + P, vocab_size] on the device, in any float type; they are left alone.
            sequences: [S]; row ``i`` is the distribution of what follows ``sequences[i].token_ids``. Of one that has
                finished the token is of no use.
            scored: those whose ``scored_positions`` are the P further rows, one after the other.
        """
        live = [i for i, one in enumerate(sequences) if one.finish_reason is None]
        apart = [i for i in live if is_seen_on_host(sequences[i])]
        others = sorted(set(live).difference(apart))
        reports = _Reports(
            {i: count for i in others if (count := sequences[i].num_logprobs) is not None}, self._vocab_size)
        with self._device.computing():
            drawn = logits[: len(sequences)]
            edits, failures = self._edits_of({i: sequences[i] for i in others})
            chosen = self._choose(self._adjusted(drawn, edits), _draws(sequences, others))
            narrow = chosen.to(torch.int32)
            if (latest := self.tokens.latest) is not None and len(chosen):
                # Why 0: a row that is broken has no token, and what is computed behind it is of no use.
                torch.clamp(narrow, min=0, out=latest[: len(chosen)])
            wanted = [torch.cat([narrow, *self._reported(drawn, chosen, reports)])]
            wanted += [_as_read(torch.stack([logits[i] for i in apart]))] if apart else []
            wanted += [_as_read(logits[len(sequences) :])] if scored else []
            fetch = self._device.begin_fetch(wanted)

        def wait() -> SampledTokens:
            fetched = fetch()
            words: Int32Array = fetched[0].numpy()
            token_ids = words[: len(sequences)].astype(np.int64)
            logprobs = reports.read(words[len(sequences) :], token_ids)
            result = SampledTokens(token_ids, [logprobs.get(i) for i in range(len(sequences))], failures=failures)
            if apart:
                result = _put(result, apart, self._sampler.sample(fetched[1], [sequences[i] for i in apart]))
            if scored:
                prompts, errors = self._sampler.score(fetched[-1], scored)
                result = replace(result, prompts=prompts, failures={**result.failures, **errors})
            return result

        return wait

    def forget(self) -> None:
        """Forget the adjusters; they are made again from their sequences."""
        self._adjusters = {}

    def _edits_of(self, sequences: Mapping[int, Sequence]) -> tuple[_Edits, dict[int, Exception]]:
        """Return what is done to the rows of sequences, and why one cannot be sampled, by its id."""
        before, self._adjusters = self._adjusters, {}
        edits, constrained = _Edits(self._vocab_size), list[tuple[int, Sequence]]()
        for i, sequence in sequences.items():
            if not (sequence.is_adjusted or bars_tokens(sequence)):
                continue
            adjuster = before.get(sequence.sequence_id)
            if adjuster is None or not adjuster.is_for(sequence):
                adjuster = RowAdjuster(sequence, self._vocab_size)
            self._adjusters[sequence.sequence_id] = adjuster
            edits.add(i, adjuster.edits(sequence))
            if sequence.constraint is not None:
                constrained.append((i, sequence))
        if not constrained:
            return edits, {}
        assert self._sampler.masks is not None  # Invariant: an engine that compiles constraints gives it
        masks, failures = self._sampler.masks.masks_of([
            (one.constraint, one.output_token_ids) for _, one in constrained if one.constraint is not None])
        for (i, _), mask in zip(constrained, masks, strict=True):
            edits.allow(i, mask)
        return edits, {constrained[place][1].sequence_id: error for place, error in failures.items()}

    def _adjusted(self, logits: torch.Tensor, edits: _Edits) -> torch.Tensor:
        """Return the rows to choose from, float32; a copy where something is done to them."""
        if edits.is_empty:
            return logits.float().contiguous()
        rows = logits.to(torch.float32, copy=True).contiguous()
        places, numbers, masks = edits.parts()
        sent = self._device.send(np.concatenate((*places, *(part.view(np.int64) for part in numbers), masks)))
        sizes = [len(part) for part in (*places, *numbers, masks)]
        biased, seen, barred, forced, masked, bias, penalty, taken_off, bits = torch.split(sent, sizes)
        flat = rows.view(-1)
        if len(biased):
            flat.scatter_(0, biased, flat.gather(0, biased) + bias.view(torch.float64).float())
        if len(seen):
            _penalise(flat, seen, penalty.view(torch.float64), taken_off.view(torch.float64))
        for ids, value in ((barred, -torch.inf), (forced, 0.0)):
            if len(ids):
                known = flat.gather(0, ids)
                flat.scatter_(0, ids, known.masked_fill(known < torch.inf, value))
        if len(masked):
            self._mask(rows, masked, bits.view(len(masked), -1))
        return rows

    def _mask(self, rows: torch.Tensor, masked: torch.Tensor, bits: torch.Tensor) -> None:
        """Leave of the rows ``masked`` [C] what bits [C, W] allow, int64, lowest bits first."""
        shifts = torch.arange(8, dtype=torch.uint8, device=rows.device)
        for places, words in self._pieces(masked, bits):
            allowed = (words.view(torch.uint8).unsqueeze(2) >> shifts & 1).view(len(words), -1)[:, : self._vocab_size]
            part = rows.index_select(0, places)
            # Why: what is NaN or plus infinity stays, so that a broken row is recognised.
            rows.index_copy_(0, places, part.masked_fill((allowed == 0) & (part < torch.inf), -torch.inf))

    def _pieces(self, *tensors: torch.Tensor) -> Any:
        """Split tensors of rows alike, so that the logits of so many rows are a piece."""
        most = max(1, _PIECE // self._vocab_size)
        return zip(*(torch.split(tensor, most) for tensor in tensors), strict=True)

    def _reported(self, logits: torch.Tensor, chosen: torch.Tensor, reports: _Reports) -> list[torch.Tensor]:
        """Return the words of the reports, in their order, as one tensor; none if there are none."""
        if not len(reports.rows):
            return []
        sent = self._device.send(np.concatenate((reports.rows, reports.places())))
        rows, places = torch.split(sent, [len(reports.rows), len(sent) - len(reports.rows)])
        summaries = list[torch.Tensor]()
        for (part,) in self._pieces(rows):
            raw = logits.index_select(0, part).float() + 0.0  # so that there is one zero
            tokens = chosen.index_select(0, part).clamp(min=0).unsqueeze(1)
            normalisers = torch.logsumexp(raw.double(), 1, keepdim=True).view(torch.int32)
            ids, values = _largest(raw, reports.most)
            summaries.append(torch.cat([
                normalisers, raw.gather(1, tokens).view(torch.int32), ids, values.view(torch.int32)], 1))
        return [torch.cat(summaries).view(-1).gather(0, places)]


def is_seen_on_host(sequence: Sequence) -> bool:
    """Whether a caller sees a row, or what it was drawn from, so that its token is chosen on the host."""
    params = sequence.params
    return params.logits_processor is not None or (
        sequence.num_logprobs is not None and (params.return_logits or params.logprobs_mode == "processed"))


def _as_read(logits: torch.Tensor) -> torch.Tensor:
    """Return logits in a format that ``Sampler`` reads."""
    return (logits if logits.dtype == torch.bfloat16 else logits.float()).contiguous()


def _put(result: SampledTokens, places: list[int], seen: SampledTokens) -> SampledTokens:
    """Return the result with what the rows at these places have got instead."""
    logprobs = list(result.logprobs)
    result.token_ids[places] = seen.token_ids
    for i, one in zip(places, seen.logprobs, strict=True):
        logprobs[i] = one
    return replace(result, logprobs=logprobs, failures={**result.failures, **seen.failures})


def _draws(sequences: ListOf[Sequence], others: ListOf[int]) -> npt.NDArray[Any] | None:
    """Return the parameters that rows are drawn with; rows that are not among ``others`` are greedy."""
    params = [one.params for one in sequences]
    temperatures = np.zeros(len(params))
    temperatures[others] = [params[i].temperature for i in others]
    if not temperatures.any():
        return None
    top_k, top_p, min_p = zip(*[(one.top_k, one.top_p, one.min_p) for one in params], strict=True)
    seeds, positions = [one.seed for one in sequences], [len(one.token_ids) for one in sequences]
    return sampling_rows(temperatures, top_k, top_p, min_p, seeds, positions)


def _penalise(flat: torch.Tensor, seen: torch.Tensor, penalty: torch.Tensor, taken_off: torch.Tensor) -> None:
    logits = flat.gather(0, seen)
    wide = logits.double()
    wide = torch.where(wide > 0, wide / penalty, wide * penalty) - taken_off
    wide = wide.clamp(-LARGEST_FINITE, LARGEST_FINITE)
    flat.scatter_(0, seen, torch.where(logits.isfinite(), wide.float(), logits))


def _largest(raw: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids, int32, and values of the largest of float32 [P, vocab_size], the lowest id first of equal ones; past
    the last finite one the id is -1.
    """
    bits = raw.view(torch.int32).long()
    # Why: integers in the order of the floats, with the ids below them, are all different.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = ordered * _LOW + (_ALL_IDS - torch.arange(raw.shape[1], device=raw.device))
    ids = _ALL_IDS - (keys.topk(count, 1).values & _ALL_IDS)
    values = raw.gather(1, ids)
    return ids.masked_fill(values == -torch.inf, -1).to(torch.int32), values


class _Edits:
    """What is done to the rows of a step, collected so that it can be sent over in one piece."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._biased, self._seen, self._barred, self._forced = ([_NO_PLACES] for _ in range(4))
        self._bias, self._penalty, self._taken_off = ([_NO_NUMBERS] for _ in range(3))
        self._masks: dict[int, npt.NDArray[np.uint8]] = {}
        """Bits of the tokens that may come, by row."""
        self.is_empty = True

    def add(self, row: int, edits: RowEdits) -> None:
        """Do this to a row, and to no row twice."""
        self.is_empty, begin = False, row * self._vocab_size
        self._biased.append(edits.biased + begin)
        self._bias.append(edits.bias.astype(np.float64))
        self._seen.append(edits.seen + begin)
        self._penalty.append(np.full(len(edits.seen), edits.penalty))
        self._taken_off.append(edits.taken_off)
        self._barred.append(edits.barred + begin)
        allowed = None if edits.others is None else ~edits.others
        if edits.forced is not None:
            self._forced.append(edits.forced + begin)
            allowed = np.zeros(self._vocab_size, np.bool_)
            allowed[edits.forced] = True
        if allowed is not None:
            self._masks[row] = np.packbits(allowed, bitorder="little")

    def allow(self, row: int, mask: npt.NDArray[np.uint8]) -> None:
        """Allow no other tokens of a row than a mask [ceil(vocab_size / 8)] does."""
        self._masks[row] = self._masks[row] & mask if row in self._masks else mask

    def parts(self) -> tuple[list[Int64Array], list[npt.NDArray[np.float64]], Int64Array]:
        """Return places among all logits, and rows that are masked; the numbers that go with the first two; and the
        masks, in words.
        """
        places = [np.concatenate(part) for part in (self._biased, self._seen, self._barred, self._forced)]
        numbers = [np.concatenate(part) for part in (self._bias, self._penalty, self._taken_off)]
        masks = np.zeros((len(self._masks), -(-self._vocab_size // _BITS) * _BITS // 8), np.uint8)
        for place, mask in enumerate(self._masks.values()):
            masks[place, : len(mask)] = mask
        return [*places, np.array(list(self._masks), np.int64)], numbers, masks.view(np.int64).reshape(-1)


_NO_PLACES: Final = np.empty(0, np.int64)
_NO_NUMBERS: Final = np.empty(0)


class _Reports:
    """The log-probabilities that come back: which rows want how many of the likeliest tokens."""

    def __init__(self, wanted: Mapping[int, int], vocab_size: int) -> None:
        self.rows = np.fromiter(wanted, np.int64, len(wanted))
        self._counts = [min(count, vocab_size) for count in wanted.values()]
        self.most = max(self._counts, default=0)
        """How many of each row are looked for."""

    def places(self) -> Int64Array:
        """Return which words of summaries, each with ids and then values of the ``most`` largest, are wanted."""
        parts = list[Int64Array]()
        for place, count in enumerate(self._counts):
            begin, largest = place * (_REPORT + 2 * self.most), np.arange(count)
            ids = begin + _REPORT + largest
            parts += [begin + np.arange(_REPORT), ids, ids + self.most]
        return np.concatenate(parts)

    def read(self, words: Int32Array, token_ids: Int64Array) -> dict[int, TokenLogprobs]:
        """Return them by row, of the words that have come back, for rows that have a token."""
        found, begin = dict[int, TokenLogprobs](), 0
        for i, count in zip(self.rows.tolist(), self._counts, strict=True):
            report, begin = words[begin : begin + _REPORT + 2 * count], begin + _REPORT + 2 * count
            if (token_id := int(token_ids[i])) < 0:
                continue
            normaliser, floats = float(report[:2].copy().view(np.float64)[0]), report.view(np.float32)
            pairs = zip(report[_REPORT : _REPORT + count].tolist(), floats[_REPORT + count :].tolist(), strict=True)
            top = tuple((one, value - normaliser) for one, value in pairs if one >= 0)
            found[i] = TokenLogprobs(token_id, float(floats[2]) - normaliser, top)
        return found
