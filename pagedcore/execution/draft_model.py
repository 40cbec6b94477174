"""A small model that guesses what a large one will say next.

It computes the tokens of the large one's sequences in a KV pool of its own, and draws behind them with the same seed
and position, so that both use the same random number and agree as often as they can. All that it keeps can be made
again from the tokens of a sequence: it follows these, and whatever of its own does not agree with them is taken back.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as ListOf
from dataclasses import dataclass, field, replace
from typing import Final

from pagedcore.drafting.offers import NO_CHANCES, Chances, Record
from pagedcore.errors import StepFailed
from pagedcore.execution.model_runner import ModelRunner
from pagedcore.execution.row_adjuster import bars_tokens
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.prefix_match import NO_MATCH
from pagedcore.protocols import HasShortContext
from pagedcore.scheduler.plan import ScheduledRow
from pagedcore.sequence import Sequence

_FIRST_GUESS: Final = Chances(0.6, 0.7)
_RATE: Final = 0.2
"""Weight of one more forward in how long one takes."""
_FEW: Final = 2
"""Tokens of a row that has kept up: a draft that was right, and what followed it."""
_MOST_BEHIND: Final = 16
"""Tokens that are worth computing for each one that a sequence may still have."""


@dataclass(slots=True)
class _Track:
    """One sequence of the large model, as the small one has it."""

    shadow: Sequence
    """The same tokens, and drafts behind them; its blocks are those of the small model's pool."""
    num_known: int = 0
    """How many of its tokens are the sequence's."""
    record: Record = field(default_factory=lambda: Record(guess=_FIRST_GUESS))
    answer: tuple[int, tuple[int, ...]] = (0, ())
    """The latest drafts, and behind how many tokens."""
    is_given_up: bool = False
    """Whether nothing can be drawn for it."""


class DraftModel:
    """Drafts of a model, as ``scheduler.speculation.DraftingModel``.

    Invariant: a block of its pool is cached under the keys of tokens that its sequence had, never of drafts.
    Invariant: it is in the way of nothing: where its pool has no block there are fewer drafts.

    Args:
        runner: computes and draws; another one than the large model's.
        blocks: of the small model's pool; must not copy blocks.
        vocab_size: of the large model.
        most_tokens: of one forward.
    """

    def __init__(
        self, runner: ModelRunner, blocks: BlockManager, vocab_size: int, most_tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._runner, self._blocks, self._clock = runner, blocks, clock
        self._vocab_size, self._most_tokens = vocab_size, most_tokens
        backend = runner.backend
        short = backend.num_short_tokens if isinstance(backend, HasShortContext) else None
        # Why: behind the border all of a sequence would have to be computed again.
        self._longest = min(backend.max_model_len, short if short is not None else backend.max_model_len)
        self._tracks: dict[int, _Track] = {}
        """The one that was asked for last is the last."""
        self._forward_s: float | None = None

    def chances(self, sequences: ListOf[Sequence]) -> list[Chances]:
        """Return how likely drafts would be right, and what one would cost if all of these had some."""
        found = [self._chances_of(one) for one in sequences]
        num_possible = sum(one is not NO_CHANCES for one in found)
        each_s = (self._forward_s or 0.0) / max(1, num_possible)
        return [one if one is NO_CHANCES else one._replace(each_s=each_s) for one in found]

    def answer(self, sequence: Sequence) -> tuple[int, ...] | None:
        """Return the drafts behind the tokens of a sequence; ``None`` if these were not asked for."""
        track = self._tracks.get(sequence.sequence_id)
        if track is None or track.answer[0] != len(sequence.token_ids):
            return None
        return track.answer[1]

    def draft(self, asked: ListOf[tuple[Sequence, int]]) -> None:
        """Make drafts behind the tokens of sequences, at most so many each, to be had from ``answer``.

        Of a sequence that is far behind a part is computed, and there is none yet.

        Raises:
            StepFailed: the model's logits are not valid.
            Exception: what the model raised.
        """
        self._runner.forget()
        tracks = [self._follow(sequence) for sequence, _ in asked]
        wanted = {track.shadow.sequence_id: most for track, (_, most) in zip(tracks, asked, strict=True)}
        rows, left = list[ScheduledRow](), self._most_tokens
        for track in tracks:
            if (row := self._next_row(track, left, wanted)) is not None:
                rows, left = [*rows, row], left - row.num_tokens
        while rows:
            drawn = self._compute(rows)
            for track in drawn:
                track.answer = track.num_known, tuple(track.shadow.token_ids[track.num_known :])
            found = [self._next_row(one, 1, wanted) for one in drawn
                     if len(one.answer[1]) < wanted[one.shadow.sequence_id]]
            rows = [row for row in found if row is not None]

    def observe(self, sequence: Sequence, num_offered: int, num_kept: int) -> None:
        """Learn how many drafts of a row were right."""
        if (track := self._tracks.get(sequence.sequence_id)) is not None:
            track.record.observe(len(sequence.token_ids), num_offered, num_kept)

    def forget(self, sequence_id: int) -> None:
        """Note that a sequence has ended; what is computed of its tokens stays cached."""
        if (track := self._tracks.pop(sequence_id, None)) is not None:
            self._free(track)

    def reset(self) -> None:
        """Forget all sequences and all blocks, whatever state they are in."""
        self._tracks = {}
        self._blocks.reset()

    def _chances_of(self, sequence: Sequence) -> Chances:
        track, num_tokens = self._tracks.get(sequence.sequence_id), len(sequence.token_ids)
        if num_tokens >= self._longest or (track is not None and track.is_given_up):
            return NO_CHANCES
        num_behind = num_tokens - (track.shadow.num_computed_tokens if track is not None else 0)
        if num_behind > _FEW + _MOST_BEHIND * (sequence.max_total_tokens - num_tokens):
            return NO_CHANCES
        return track.record.chances(num_tokens) if track is not None else _FIRST_GUESS

    def _follow(self, sequence: Sequence) -> _Track:
        """Let the track of a sequence have exactly its tokens, as far as they are the same with what is computed."""
        track, tokens = self._tracks.pop(sequence.sequence_id, None), sequence.token_ids
        if track is not None and len(tokens) < track.num_known:
            self._free(track)
            track = None
        if track is None:
            track = _Track(_shadow_of(sequence))
        self._tracks[sequence.sequence_id] = track
        shadow, num_same = track.shadow, track.num_known
        most = min(len(tokens), len(shadow.token_ids))
        while num_same < most and shadow.token_ids[num_same] == tokens[num_same]:
            num_same += 1
        new = tokens[num_same:]
        shadow.token_ids[num_same:] = new
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, num_same, len(tokens) - 1)
        self._blocks.shorten(shadow)
        track.num_known, track.answer = len(tokens), (len(tokens), ())
        if new and max(new) >= self._runner.backend.vocab_size:
            track.is_given_up = True
        return track

    def _next_row(self, track: _Track, most: int, kept: dict[int, int]) -> ScheduledRow | None:
        """Return a row of at most so many tokens that a track lacks, with its blocks; ``None`` if there is no room."""
        shadow, match = track.shadow, NO_MATCH
        if track.is_given_up or most <= 0 or len(shadow.token_ids) > self._longest:
            return None
        if not self._blocks.num_blocks_of(shadow.sequence_id):
            match = self._blocks.match(shadow)
            shadow.num_computed_tokens = match.num_tokens
        start = shadow.num_computed_tokens
        row = ScheduledRow(shadow, start, min(most, len(shadow.token_ids) - start), match=match)
        while (reservation := self._blocks.reserve([row.demand])) is None:
            idle = next((one for number, one in self._tracks.items()
                         if number not in kept and self._blocks.num_blocks_of(number)), None)
            if idle is None:
                if match is not NO_MATCH:
                    shadow.num_computed_tokens = 0
                return None
            self._free(idle)
        reservation.commit()
        return row

    def _compute(self, rows: ListOf[ScheduledRow]) -> list[_Track]:
        """Compute rows, and append what is drawn behind those that reach their end; return the tracks of these.

        Why not what ends a turn: the large model draws it where it was guessed, and nothing follows.
        """
        started = self._clock()
        sampled = self._runner.execute(rows, self._blocks)
        seconds = self._clock() - started
        for error in sampled.failures.values():
            raise error
        if max(row.num_tokens for row in rows) <= _FEW:
            before = self._forward_s if self._forward_s is not None else seconds
            # Why: a forward in which kernels are loaded, or that stood still, says nothing of the next ones.
            is_first = seconds < before / 2
            self._forward_s = seconds if is_first else before + _RATE * (min(seconds, 2 * before) - before)
        for row in rows:
            row.sequence.num_computed_tokens = row.end
            self._blocks.register(row.sequence, min(row.end, self._tracks[row.sequence.sequence_id].num_known))
        drawn = list[_Track]()
        ends = [row.sequence for row in rows if row.num_sampled]
        for shadow, token_id in zip(ends, sampled.token_ids.tolist(), strict=True):
            track = self._tracks[shadow.sequence_id]
            if 0 <= token_id < self._vocab_size and shadow.end_at(token_id, shadow.num_output_tokens + 1) is None:
                shadow.token_ids.append(token_id)
                drawn.append(track)
            elif token_id < 0:
                # Why: what a request wants may leave nothing to draw from, which is no fault of the model.
                if not (shadow.is_adjusted or bars_tokens(shadow)):
                    raise StepFailed("speculative_model: its logits are NaN, infinite, or none is finite")
                track.is_given_up = True
        return drawn

    def _free(self, track: _Track) -> None:
        """Free the blocks of a track; those of known tokens stay cached."""
        shadow = track.shadow
        del shadow.token_ids[track.num_known :]
        shadow.num_computed_tokens = min(shadow.num_computed_tokens, track.num_known)
        self._blocks.shorten(shadow)
        self._blocks.free_blocks(shadow)


def _shadow_of(sequence: Sequence) -> Sequence:
    """Return the sequence that a small model computes for one of the large model."""
    # Why: a processor and a grammar belong to the answer alone, and see nothing that may not become part of it.
    shadow = Sequence(
        sequence.sequence_id, [], replace(sequence.params, logits_processor=None), max_tokens=sequence.max_tokens,
        seed=sequence.seed, stop_token_ids=sequence.stop_token_ids, cache_root=sequence.cache_root,
    )
    shadow.num_prompt_tokens, shadow.num_logprobs = sequence.num_prompt_tokens, None
    return shadow
