"""One small run in which steps do all they can do: admit, chunk, decode, hit prefixes, copy and share blocks, swap both
ways, choose candidates and beams, match stop strings, embed, expire and finish. Deterministic, and over in a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from pagedcore.analysis.diagnosis.invariants import check, snapshot
from pagedcore.engine.builder import build_components
from pagedcore.engine.engine import Engine
from pagedcore.outputs import CompletionOutput, TokenLogprobs
from pagedcore.protocols import FloatArray
from pagedcore.request_options import NO_OPTIONS
from pagedcore.requests.embedding import TextEncoder
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams
from support.ahead import launched_ahead
from support.doubles import VOCAB_SIZE, FakeClock, ToyBackend, ToyHybrid, ToyWindowed, toy_answer
from support.drafts import Adversary, Mistaken, draft_model, let_guess


class _Letters:
    def push(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token_id % 26) for token_id in token_ids)

    def finish(self) -> str:
        return "."


class LetterTokenizer:
    """Writes each token as a letter, and a full stop at the end."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decode at once."""
        return _Letters().push(token_ids)

    def new_detokenizer(self) -> _Letters:
        """Start an incremental decoding."""
        return _Letters()


def params(max_tokens: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)  # type: ignore[arg-type]


WANTED = [
    ([1, 2, 3, 4, 6], params(5, logprobs=1)),
    ([7, 8], params(4, stop=["q", "zz"])),
    ([1, 2, 3], params(3, n=2, best_of=3, temperature=1.0, seed=5)),
    ([2, 2], params(3, beam_width=2, n=2)),
    ([9, 9, 9], params(3, temperature=1.0, seed=6, prompt_logprobs=1)),
    ([3], params(6, presence_penalty=1.0)),
    ([4, 5, 6, 7, 8, 9, 10], params(5)),
]
"""Prompts and parameters."""
READ = [("mean", [1, 2, 3, 4, 5, 6, 7]), ("last", [6, 5, 4, 3, 2, 1])]
"""Texts that are embedded beside them."""


def _bytes_of(vector: FloatArray | None) -> bytes | None:
    return None if vector is None else vector.tobytes()


def _told(scored: Sequence[TokenLogprobs | None] | None) -> list[object] | None:
    # Why rounded: where logits are on a device, last bits depend on the company.
    return None if scored is None else [
        None if one is None else (one.token_id, round(one.logprob, 5), [token_id for token_id, _ in one.top])
        for one in scored
    ]


@dataclass
class Scenario:
    """An engine with all requests waiting, one of which has waited too long."""

    engine: Engine
    requests: list[Request]
    has_drafts: ClassVar[bool] = False
    keeps_states: ClassVar[bool] = False
    is_ahead: ClassVar[bool] = False
    has_windows: ClassVar[bool] = False

    @classmethod
    def begin(cls) -> Scenario:
        """Make the engine; a beginning and the past of a session are cached."""
        clock, kind = FakeClock(), ToyHybrid if cls.keeps_states else ToyWindowed if cls.has_windows else ToyBackend
        engine = Engine(build_components(
            launched_ahead(kind)() if cls.is_ahead else kind(), block_size=2, max_num_seqs=5,
            num_kv_blocks=48 if cls.has_drafts else 16 if cls.has_windows else 9,
            max_num_batched_tokens=24 if cls.has_drafts else 12,
            preemption="swap", host_kv_memory=None if cls.has_windows else 32 * 32,
            tokenizer=LetterTokenizer(), max_num_waiting=64, queue_timeout_s=10.0,
            speculation="off",
        ), clock)
        if cls.has_drafts:
            source = Adversary(toy_answer, VOCAB_SIZE, promises=0.3)
            let_guess(engine, source, VOCAB_SIZE, model=draft_model(Mistaken(), num_blocks=20, max_num_seqs=8))
        engine.generate([[1, 2, 3, 4, 5]], params(2), show_progress=False)
        late = [engine.add_request([5], params(2)), engine.add_request([5], params(2, best_of=2, temperature=1.0))]
        clock.advance(11.0)
        read = [TextEncoder.of(engine.input_processor, how).process(text, NO_OPTIONS) for how, text in READ]
        wanted = [engine.add_request(prompt, params) for prompt, params in WANTED[:3]]
        wanted += [engine.accept(one) for one in read]
        return cls(engine, late + wanted + [engine.add_request(prompt, params) for prompt, params in WANTED[3:]])

    def finish(self) -> None:
        """Step until nothing is left to do."""
        while self.engine.has_pending_requests():
            self.engine.step_pending()

    def results(self) -> list[list[CompletionOutput]]:
        """What every caller sees in the end, errors as their types."""
        return [
            [(*self._said(one), one.finish_reason, _told(one.logprobs), one.score and round(one.score, 5),  # type: ignore[misc]
              type(one.error)) for one in
             request.output().outputs] + [_told(request.prompt_logprobs), _bytes_of(request.output().vector)]
            for request in self.requests
        ]

    def _said(self, one: CompletionOutput) -> tuple[object, object]:
        # Why not of chosen ones: some are equally good, and last bits depend on whether the host samples a step.
        return (None, None) if self.is_ahead and one.score is not None else (one.token_ids, one.text)

    def broken_laws(self) -> list[str]:
        """The state laws that do not hold now."""
        return [f"{one.law}: {one.what}" for one in check(snapshot(self.engine.scheduler))]

    def leaks(self) -> list[str]:
        """What is held although every request has finished and is removed."""
        for request in self.requests:
            request.remove()
        stats = self.engine.stats()
        held = {"device": stats.num_blocks_used, "windows": stats.num_windows_used, "states": stats.num_states_used,
                "host": stats.num_host_blocks_used,
                "host states": stats.num_host_states_used,
                "running": stats.num_running, "waiting": stats.num_waiting,
                "text": len(self.engine._outputs.by_sequence)}
        return [f"{count} {what}" for what, count in held.items() if count]
