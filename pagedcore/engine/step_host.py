"""What a step of an engine meets outside of its scheduler: the model, the transfers of blocks, the output side."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf
from typing import TYPE_CHECKING, TypeVar

from pagedcore.engine.interrupts import CtrlC
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.kv_cache.block_manager import BlockManager
from pagedcore.kv_cache.host_cache import Transfer
from pagedcore.protocols import Clock
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.scheduler.plan import ScheduledRow, SchedulePlan

if TYPE_CHECKING:
    import torch

    from pagedcore.execution.model_runner import ModelRunner
    from pagedcore.execution.sampler import SampledTokens
    from pagedcore.lora.loader import AdapterLoader


_T = TypeVar("_T")


class BrokenOff(BaseException):
    """The model did not compute a plan; what it raised is the cause. The step was rolled back."""

    def __init__(self, plan: SchedulePlan, cause: BaseException) -> None:
        super().__init__(plan, cause)
        self.plan, self.cause = plan, cause


class EngineHost:
    """The ``StepHost`` of one engine."""

    def __init__(
        self, runner: ModelRunner, blocks: BlockManager, transfers: KVTransfers, outputs: OutputProcessor, clock: Clock,
        ctrl_c: CtrlC, adapters: AdapterLoader | None = None,
    ) -> None:
        self._runner, self._blocks, self._transfers = runner, blocks, transfers
        self._outputs, self._ctrl_c = outputs, ctrl_c
        self.now = clock.now
        self.move_blocks = transfers.advance
        self.tokens, self.publish = outputs.collect, outputs.publish
        self.further_tokens, self.publish_further = outputs.collect_further, outputs.publish_further
        if adapters is not None:
            self.move_adapters = adapters.move_adapters
        self.plan = SchedulePlan()
        """What was handed to the model last; for undoing a step."""

    def make_room(self, plan: SchedulePlan, transfers: ListOf[Transfer]) -> None:
        """Start transfers, and stamp the requests that are preempted."""
        self._transfers.start(transfers)
        if plan.preempted:
            self._outputs.note_preempted(plan, self.now())

    def compute(self, plan: SchedulePlan, copies: tuple[tuple[int, int], ...], begun_s: float) -> SampledTokens:
        """Run the model. Raises ``BrokenOff``."""
        self.plan = plan
        return self._run(plan, copies, begun_s, self._runner.execute)

    def launch(self, plan: SchedulePlan, copies: tuple[tuple[int, int], ...], begun_s: float) -> torch.Tensor:
        """Begin to run the model; return logits on its device. Raises ``BrokenOff``."""
        return self._run(plan, copies, begun_s, self._runner.launch)

    def choose(self, plan: SchedulePlan, logits: torch.Tensor) -> Callable[[], SampledTokens]:
        """Begin to choose tokens; return what waits for them. Raises ``BrokenOff``."""
        try:
            return self._runner.choose(logits, plan.rows)
        except Exception as error:
            raise BrokenOff(plan, error) from error

    def _run(
        self, plan: SchedulePlan, copies: tuple[tuple[int, int], ...], begun_s: float,
        run: Callable[[ListOf[ScheduledRow], BlockManager], _T],
    ) -> _T:
        if plan.admitted:
            self._outputs.note_started(plan, begun_s)
        try:
            self._ctrl_c.is_allowed = True
            if self._ctrl_c.is_noted:
                self._ctrl_c.raise_noted()
            if copies:
                self._transfers.copy(copies, self._blocks)
            return run(plan.rows, self._blocks)
        except BaseException as error:
            raise BrokenOff(plan, error) from error
        finally:
            self._ctrl_c.is_allowed = False
