"""What an engine has done and how full it is: counters it keeps, and one frozen snapshot of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.stats import SchedulerStats

if TYPE_CHECKING:
    from pagedcore.requests.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(SchedulerStats):
    """One moment of one engine. Sizes are in bytes, times in seconds of the engine's clock."""

    block_size: int
    kv_bytes: int
    state_bytes: int = 0
    """Of all state blocks, which are beside the KV pool."""
    num_steps: int
    num_rows: int
    """Rows computed, summed over all steps."""
    num_computed_tokens: int
    """Positions computed, summed over all steps; recomputed ones count again."""
    num_prompt_tokens: int
    """Prompt tokens accepted, counted once however many completions a prompt has."""
    num_generated_tokens: int
    num_finished: int
    """Requests that ended, whatever the reason."""
    num_targeted: int
    """Those of them with a ``deadline_s``, ``ttft_ms`` or ``tpot_ms``, except aborted ones."""
    num_on_target: int
    """Those of these that ended by themselves and kept all of it."""
    num_promises: int = 0
    """Requests whose ``deadline_s`` was promised; 0 unless the policy promises."""
    num_promises_kept: int = 0
    num_promises_broken: int = 0
    """Promised ones that ended late, or failed; aborted ones are neither kept nor broken."""
    num_promises_refused: int = 0
    """Requests with a deadline that could not be promised."""
    num_quotes: int = 0
    """Quotes that the engine made to itself, of requests that it accepted and that have ended; 0 before the first
    quote was asked for."""
    num_quotes_held: int = 0
    """Those of them whose end lay in the interval."""
    swapped_out_bytes: int
    swapped_in_bytes: int
    max_num_seqs: int
    max_model_len: int
    attention_backend: str
    dtype: str
    is_schedule_invariant: bool
    speculation: str = "off"
    """Whether tokens are guessed ahead: "on", or "off" and, where it was asked for, the reason; "on" with why
    ``speculative_model`` guesses no more, if that has failed."""
    num_adapters: int = 0
    """Names of adapters that requests may give as ``lora``."""
    num_adapters_in_slots: int = 0
    adapter_bytes: int = 0
    """Of what is in slots, or on its way there."""
    num_adapter_loads: int = 0
    """Times an adapter came into a slot."""
    num_adapter_failures: int = 0
    """Times one could not be read when it was needed."""

    @property
    def goodput(self) -> float:
        """Share of the requests with targets that kept them, 0 to 1; 1 before one has ended."""
        return self.num_on_target / self.num_targeted if self.num_targeted else 1.0


@dataclass(slots=True, kw_only=True)
class StepStats:
    """What one step did: what is cheap to say every time."""

    num_steps: int
    """Steps since the start, this one among them."""
    num_tokens: int
    """Positions that it computed."""
    num_rows: int
    """Its batch size: sequences that it computed a token or a chunk of."""
    num_decode_tokens: int
    """Tokens that had just been generated, one for each sequence that decodes."""
    num_prefill_tokens: int
    """All others: of prompts, and of what is computed again."""
    num_kv_tokens: int
    """Positions whose keys and values it read: over all rows, the one that each of them reached."""
    num_started: int
    """Sequences that started in it for the first time; so are the next three."""
    num_input_tokens: int
    """Their prompt tokens together, cached ones included."""
    mean_wait_s: float
    """From their arrival to this step, in seconds; 0 if none started."""
    longest_wait_s: float
    waits: dict[str, int]
    """How many sequences wait after it, by reason: "company" (``min_batch_size``), "rows" (``max_num_seqs``), "tokens"
    (the budget), "blocks" (the KV pool), "phase" (a step of decode rows), "prefix" (another sequence computes it),
    "transfer" (from or to the host), "tenant" (it has as much as it may), "adapter" (its adapter is in no slot yet),
    "batch" (a static one runs), "new" (it came with this step); and "stall": running
    ones that lacked a block."""
    preemptions: dict[str, int]
    """How many sequences were preempted for it: "swap", "shrink", "recompute"."""
    evictions: dict[str, int]
    """How many cached blocks were evicted for room: on the "device", on the "host"."""
    num_running: int
    """Sequences that run after it."""
    num_waiting: int
    plan: SchedulePlan
    """What it computed for which sequences. They belong to the engine: read them inside of the hook, and keep none."""
    engine_stats: Callable[[], EngineStats]
    """Puts everything else together, as it stands now. Call it inside of the hook, and not at every step: it takes ten
    times as long as all of the above."""


@dataclass(slots=True)
class Counters:
    """The engine's running totals."""

    num_steps: int = 0
    num_rows: int = 0
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    num_targeted: int = 0
    num_on_target: int = 0

    def note_finished(self, request: Request) -> None:
        """Count a request whose last completion has ended, and whether it kept what it was asked to keep."""
        self.num_finished += 1
        if request.options.has_targets and not request.was_aborted:
            self.num_targeted += 1
            self.num_on_target += request.is_on_target
