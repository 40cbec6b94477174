"""One step as a transaction: plan, reserve, execute, commit; done, or undone whatever breaks it off.

Before the forward and after it a step changes queues, blocks and requests; an exception there leaves ``is_torn`` set.
``recover`` then makes all of that anew from what cannot be torn: the tokens of the live requests. It keeps no computed
block, and results are what they would have been. During the forward a step is rolled back and costs nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import ArgumentError
from typing import TYPE_CHECKING, Final, NoReturn

from pagedcore.engine.interrupts import CtrlC
from pagedcore.engine.step_host import BrokenOff, EngineHost
from pagedcore.engine.steps_ahead import StepsAhead, TokensLost
from pagedcore.errors import CalledFromHook, EngineClosed, EngineInUse, EngineOverloaded, HooksTooDeep, InvalidRequest
from pagedcore.execution.failures import is_out_of_memory
from pagedcore.execution.kv_transfers import KVTransfers
from pagedcore.protocols import Clock
from pagedcore.requests.output_processor import OutputProcessor
from pagedcore.requests.turn_rules import TurnRules
from pagedcore.scheduler.plan import SchedulePlan
from pagedcore.scheduler.scheduler import Scheduler
from pagedcore.scheduler.step_recipe import run_step

if TYPE_CHECKING:
    from pagedcore.execution.model_runner import ModelRunner
    from pagedcore.lora.loader import AdapterLoader

_NO_PLAN: Final = SchedulePlan()
_WITHIN: Final = (
    "while the engine changes what that needs; nothing was done. Make the call after the engine's has returned, or "
    "from an observer that is told between two changes (docs/plugins.md). abort() may be called anywhere."
)
MOST_DEPTH: Final = 4
"""The longest chain of hooks, each told of what the one before it has called, whose calls are carried out."""
_TOO_DEEP: Final = (
    f"hook {MOST_DEPTH + 1} of a chain in which each is told of what the one before has called; allowed are "
    f"{MOST_DEPTH}, and nothing was done. Let hooks pass over what their own calls bring (docs/plugins.md)."
)
_log = logging.getLogger("pagedcore")


class StepRunner:
    """Runs the steps of one engine, and its other changes, for one thread at a time.

    Invariant: after ``run`` the engine is before the step or after it, or else ``is_torn``.
    Invariant: a thread that is refused has changed nothing.
    Invariant: observers are told while nothing is being changed, so that they may call the engine; what is called
        within a change is refused.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, transfers: KVTransfers, outputs: OutputProcessor,
        rules: TurnRules, clock: Clock, give_up: Callable[[str], None], adapters: AdapterLoader | None = None,
    ) -> None:
        """Take the parts of an engine; ``give_up`` closes it with a reason, ``adapters`` reads those of requests."""
        self._scheduler, self._runner, self._transfers = scheduler, runner, transfers
        self._outputs, self._rules, self._give_up = outputs, rules, give_up
        self._ctrl_c = CtrlC()
        self._adapters = adapters
        self._host = host = EngineHost(
            runner, scheduler.kv_cache.device, transfers, outputs, clock, self._ctrl_c, adapters)
        self._ahead = StepsAhead(scheduler, runner, host, outputs, self._apply_rules) if runner.can_launch else None
        self._landed: SchedulePlan | None = None
        """What was in flight and was ended before its time; its outputs are told with the next step."""
        # Why a lock that is never waited for: taking it and finding it taken are one operation.
        self._lock, self._owner = threading.RLock(), threading.current_thread()
        self._is_inside = self.is_silent = False
        self._hook = 0, 0
        """How many hooks are being told, each within a call of the one before, and how many news they have left."""
        self._is_cut = False
        """Whether these were too many, so that until the first one returns no further one may call."""
        self.is_torn = False
        """Whether something is being changed, or broke off and was not undone yet."""
        self.is_stalled = False
        """Whether the last step computed nothing although there was work: all of it waits for blocks on their way."""
        self.has_failed = False
        """Whether the last step computed nothing because the model failed."""

    def run(self) -> SchedulePlan:
        """End what is over a limit, run one step, and return what was computed; see ``StepsAhead`` for models that are
        launched before the step before them is read.

        A step that lacks memory is undone and repeated once. The caller is ``exclusive``.

        Raises:
            EngineClosed: the step broke off and could not be undone, or the device has failed for good.
            MemoryError: it lacked memory twice, and was undone.
        """
        try:
            with self._runner.floats, self._ctrl_c:
                # Why a call: no context covers the line of a ``try`` that comes first, as it is compiled.
                return self._run_or_repeat()
        except ArgumentError as error:
            # Why: ctypes says so where memory for an argument lacks, and the host's floats are to come back all the
            # same; on the way in, where nothing was changed, this does nothing.
            self._runner.floats.__exit__(None, None, None)
            raise MemoryError from error

    def _run_or_repeat(self) -> SchedulePlan:
        plan, self._landed = self._landed, None
        if plan is None:
            try:
                with self._change():
                    plan = self._run()
            except MemoryError:
                with self._change():
                    plan = self._run()
        self.tell()
        return plan

    def tell(self, caught: type[BaseException] = Exception) -> None:
        """Tell observers what has happened, unless it is silent; then raise the first error of those ``caught``.

        A hook that calls this hears of what its call did, not of what had come before. A chain of hooks that is too
        long is logged, not raised: who has made the call that it began with is served.
        """
        news, (depth, num_left), errors = self._outputs.news, self._hook, list[BaseException]()
        while len(news) > num_left and not self.is_silent:
            call = news[num_left]
            del news[num_left]
            # Why cut: where each brings several, there would be that many to the power of the bound.
            self._hook = MOST_DEPTH + 1 if self._is_cut else depth + 1, len(news)
            try:
                call()
            except caught as error:
                if depth or not isinstance(error, HooksTooDeep):
                    errors.append(error)
                else:
                    _log.error("%s", error)
            finally:
                self._hook, self._is_cut = (depth, num_left), self._is_cut and depth > 0
        if errors:
            raise errors[0]

    def tell_last(self) -> None:
        """Tell what outer hooks have not heard yet as well, whatever is raised, because nothing comes after it."""
        self._hook = self._hook[0], 0
        self.tell(BaseException)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other threads out; this one may come in again.

        Raises ``EngineInUse`` if another one is in, ``CalledFromHook`` within a change, and ``HooksTooDeep``.
        """
        if not self._lock.acquire(blocking=False):
            raise EngineInUse(self._owner.name, threading.current_thread().name)
        try:
            if self._is_inside:
                raise CalledFromHook.here(_WITHIN)
            if self._hook[0] > MOST_DEPTH:
                self._is_cut = True
                raise HooksTooDeep.here(_TOO_DEEP)
            self._owner, hook = threading.current_thread(), self._hook
            try:
                yield
            finally:
                # Why again: an interrupt may have kept the end of a change, or of a hook, from saying so.
                self._is_inside, self._hook, self._is_cut = False, hook, self._is_cut and hook[0] > 0
        finally:
            self._lock.release()

    def postpones(self, call: Callable[[], object]) -> bool:
        """Whether this thread is within a change; then the call is made when it is over."""
        if not self._is_inside or self._owner is not threading.current_thread():
            return False
        self._outputs.news.append(call)
        return True

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Keep other threads out, undo what broke off, and end the step in flight. Raises as ``change``."""
        with self.exclusive():
            self.recover()
            self._land()
            yield

    @property
    def has_landed(self) -> bool:
        """Whether the next step has something to tell, even if there is nothing to compute."""
        return self._landed is not None

    def recover(self) -> None:
        """Undo what broke off, if anything did.

        Raises ``EngineClosed`` if that is impossible, and as ``exclusive``.
        """
        with self.exclusive():
            self._undo()

    def forget_computed(self, renew: Callable[[], None]) -> None:
        """Make a change after which nothing that was computed is of use; live requests compute their tokens again.

        ``renew`` is called while nothing is in flight, and may raise nothing. Raises ``EngineInUse``.
        """
        with self.change():
            self._transfers.drain()
            renew()
            self._outputs.undo_step(_NO_PLAN)
            self._runner.forget()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Keep other threads out, and hold Ctrl-C back until the end; a second one comes at once."""
        with self.exclusive(), self._ctrl_c:
            yield

    def _undo(self) -> None:
        if not self.is_torn:
            return
        try:
            self._transfers.drain()
            self._outputs.undo_step(self._host.plan)
            self._runner.forget()
            self._landed = None
            if self._ahead is not None:
                self._ahead.forget()
        except Exception as error:
            reason = f"this engine is closed, because a step broke off and could not be undone: {type(error).__name__}"
            self._end(reason, error, "; make a new one")
        self.is_torn = False

    def _end(self, reason: str, error: Exception, advice: str = "") -> NoReturn:
        # Why: closing makes changes of its own.
        self.is_torn = self._is_inside = False
        self._give_up(reason)
        raise EngineClosed(f"{reason}{advice}.") from error

    @contextmanager
    def change(self, *, lands: bool = True) -> Iterator[None]:
        """Change queues, blocks or requests; whatever breaks that off is undone, as is what broke off before, and a
        refusal changes nothing.

        ``lands``: a step in flight is ended first. Raises as ``exclusive``, and ``EngineClosed`` if the device has
        failed for good.
        """
        with self.exclusive():
            self._undo()
            if lands:
                self._land()
            with self._change():
                yield
                if self._ahead is not None:
                    self._ahead.leave_if_over()
            self.tell()

    def _land(self) -> None:
        if self._ahead is None or not self._ahead.is_in_flight:
            return
        with self._runner.floats, self._ctrl_c, self._change():
            try:
                self._landed = self._ahead.land()
            except TokensLost as lost:
                self._take_back(lost)
            self.is_torn = False
            self._outputs.note_step()

    def _take_back(self, lost: TokensLost) -> None:
        """Let what a step has computed be computed again, by itself."""
        error = lost.cause
        if isinstance(error, Exception) and not is_out_of_memory(error) and self._runner.has_lost_device:
            self._end_without_device(error)
        self._undo()
        self.is_torn = True

    @contextmanager
    def _change(self) -> Iterator[None]:
        groups, self._host.plan = self._outputs.groups, _NO_PLAN
        self._outputs.open_before = groups.open_requests if groups.by_request else ()
        try:
            self._is_inside = self.is_torn = True
            yield
            self.is_torn = False
        except (InvalidRequest, EngineOverloaded):
            self.is_torn = False
            raise
        except BaseException:
            self._undo()
            raise
        finally:
            self._is_inside = False

    def _run(self) -> SchedulePlan:
        self.is_stalled = self.has_failed = False
        if self._adapters is not None:
            self._adapters.settle()
        plan = self._step_ahead() if self._ahead is not None else None
        if plan is None:
            self._apply_rules()
            plan = self._compute(None)
        if not plan.rows and (self._ahead is None or not self._ahead.is_in_flight):
            self.is_stalled = self._scheduler.has_work and not self._scheduler.is_gated
            # Why not both: one that waits for a file need not wait for a transfer as well.
            awaits_file = self._adapters is not None and bool(plan.awaiting) and self.is_stalled
            self._transfers.settle(wait=self.is_stalled and not awaits_file)
            if self._adapters is not None and awaits_file:
                self._adapters.settle(wait=True)
        # Why first: from here on nothing undoes the step.
        self.is_torn = False
        self._outputs.note_step()
        return plan

    def _apply_rules(self) -> None:
        if self._scheduler.waiting.sequences:
            self._rules.apply()

    def _step_ahead(self) -> SchedulePlan | None:
        """Take a step as ``StepsAhead`` does; ``None``: the next one has to be taken by itself."""
        assert self._ahead is not None  # Invariant: the caller has looked
        try:
            return self._ahead.step()
        except TokensLost as lost:
            self._take_back(lost)
            return None
        except BrokenOff as broken:
            if isinstance(broken.cause, Exception):
                self._end_without_device(broken.cause)
            self.is_torn = False
            self._outputs.note_step()
            raise broken.cause from None

    def _compute(self, most_tokens: int | None, *, is_halved: bool = False) -> SchedulePlan:
        """Run the step; if memory lacked, once more without its drafts, and once more with half of its tokens. What
        failed then ends its requests.
        """
        try:
            return run_step(self._scheduler, self._host, most_tokens)
        except BrokenOff as broken:
            plan, error = broken.plan, broken.cause
            if not isinstance(error, Exception):
                self.is_torn = False
                self._outputs.note_step()
                raise error from None
            if not is_out_of_memory(error) and self._runner.has_lost_device:
                self._end_without_device(error)
            if is_halved or not is_out_of_memory(error):
                self.has_failed = True
                self._outputs.fail(plan, {row.sequence.sequence_id: error for row in plan.rows})
                return plan
        if plan.num_drafts:
            return self._compute(plan.num_tokens - plan.num_drafts)
        # Why: half of the tokens may fit; if not, the requests of that half end, and no others.
        return self._compute(max(1, plan.num_tokens // 2), is_halved=True)

    def _end_without_device(self, error: Exception) -> NoReturn:
        # Why: every later step would fail too, and so would another engine of this process there.
        what = str(error).partition("\n")[0][:300]
        reason = f"this engine is closed, because its device failed for good ({what}): restart the process"
        self._end(reason, error)
