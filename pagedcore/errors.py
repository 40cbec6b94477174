"""Every way a call into pagedcore can fail, and whose fault it is.

    PagedcoreError
      * InvalidRequest (ValueError)       the caller's: this call is refused, nothing was taken
          - InvalidPrompt  PromptEmpty  PromptTooLong  InvalidToken  InvalidText  TextTooLong
          - InvalidSampling  InvalidMaxTokens  InvalidMinTokens  InvalidStop  InvalidBias  InvalidSeed  InvalidSalt
          - InvalidGrammar  InvalidTools  InvalidAdapter  UnknownAdapter
          - TooManySequences  TooManyLogprobs  UnknownParameter (TypeError)  RequestTooLarge
          - RequestStateError  SessionStateError  InvalidSessionFile  ModelMismatch  AdapterMismatch
          - InvalidWeights
      * InvalidConfig (ValueError)        the operator's: the engine was not built
          - ModelNotSupported  ModelTakenOver  DeviceUnavailable  MissingDependency  MemoryBudgetExceeded
      * UnsupportedPlatform (ImportError) the system's: pagedcore does not run on it
      * EngineOverloaded  TooManySessions capacity: try again later, or close sessions first
          - GrammarsBusy  PromiseRefused  AdaptersBusy
      * RequestFailed                     one accepted request ended with finish_reason "error"
          - StepFailed  InvalidLogits  ProcessorFailed  GrammarFailed  TextFailed  QueueTimeout
          - RequestAborted  AdapterFailed
      * RequestTimeout (TimeoutError)     the caller's time limit is over; the request was aborted
      * NotPicklable (TypeError)          the program's: an engine cannot go to another process
      * EngineInUse                       the program's: two threads call one Engine at once
      * CalledFromHook                    the program's: what an engine calls makes a call of it that cannot be there
          - HooksTooDeep
      * NoEventLoop (RuntimeError)        the program's: it awaits an engine outside of asyncio
      * WeightsIncomplete                 new weights were written in part: load a whole version, or make a new engine
      * EngineAsleep                      the engine has given its memory back: call wake()
      * EngineClosed                      the engine was closed; make a new one
          - ForkedProcess  EngineHung
      * RecordingError (ValueError)       a recording is damaged, or cannot be taken again here
          - RecordingMismatch
      * InternalError                     a law of the engine is broken: a defect of pagedcore

Messages are made of names, numbers and limits only: never a prompt, a path or an object's repr. An operator's own
setting is shown, unless it is long, a path or a secret.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches
from inspect import currentframe
from traceback import walk_stack
from typing import Final, Self

from pagedcore_kernels.errors import InternalError as InternalError
from pagedcore_kernels.errors import InvalidConfig as InvalidConfig
from pagedcore_kernels.errors import MissingDependency as MissingDependency
from pagedcore_kernels.errors import PagedcoreError as PagedcoreError
from pagedcore_kernels.errors import UnsupportedPlatform as UnsupportedPlatform
from pagedcore_kernels.errors import is_passing as is_passing

_NAME: Final = re.compile("[A-Za-z_][A-Za-z0-9_]{0,39}")
_SHOWN: Final = re.compile(r"[^/\\]{0,64}", re.DOTALL)
_LONGEST_NAME: Final = 64
_OWN: Final = frozenset({"pagedcore", "contextlib", "pluggy"})
"""Modules whose functions are no caller's."""


def describe_name(name: object) -> str:
    """Quote the name of a field if it looks like one; any other text may be a caller's own and is only described."""
    return repr(name) if isinstance(name, str) and _NAME.fullmatch(name) else describe(name)


def describe(value: object) -> str:
    """Say what a refused value was without repeating text or printing an unbounded number."""
    if value is None or isinstance(value, bool | float):
        return repr(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**20 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    kind = value if isinstance(value, type) else type(value)
    return f"a value of type {kind.__name__}"


def show(value: object) -> str:
    """Say what an operator's own setting was: short text that is no path as it is. Not for secrets or callers' text."""
    return repr(value) if isinstance(value, str) and _SHOWN.fullmatch(value) else describe(value)


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """Ask whether the known name was meant that is most like a given one, which is not repeated; empty if none is."""
    close = get_close_matches(given[:_LONGEST_NAME], known, n=1) if isinstance(given, str) else []
    return f"Did you mean {close[0]}?" if close else ""


class InvalidRequest(PagedcoreError, ValueError):
    """A call is refused before anything was allocated.

    Attributes:
        what: the name of the refused input, for example ``"temperature"``.
        given: the refused value, described without its content.
        limit: what would have been accepted.
    """

    _where = ""

    def __init__(self, what: str, given: object, limit: str, advice: str = "", *, is_described: bool = False) -> None:
        self.what, self.given, self.limit = what, str(given) if is_described else describe(given), limit
        super().__init__(f"{self._where}{what}: got {self.given}, allowed is {limit}. {advice}".rstrip())


class InvalidPrompt(InvalidRequest):
    """The prompt is neither text, nor token ids, nor chat messages."""


class PromptEmpty(InvalidRequest):
    """The prompt has no token."""


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room for a completion in the model's context."""


class InvalidToken(InvalidRequest):
    """A token id is not an integer of the vocabulary."""


class InvalidText(InvalidRequest):
    """Text that cannot be encoded, or more of it than the context could ever hold."""


class TextTooLong(InvalidText, PromptTooLong):
    """More text than the context could ever hold, however it is tokenised."""


class InvalidSampling(InvalidRequest):
    """A sampling parameter is not a finite number within its range."""


class InvalidMaxTokens(InvalidRequest):
    """max_tokens is out of range for this prompt and model."""


class InvalidMinTokens(InvalidRequest):
    """min_tokens is out of range for the resolved max_tokens."""


class InvalidStop(InvalidRequest):
    """A stop string is empty, too long, or there are too many of them."""


class InvalidBias(InvalidRequest):
    """logit_bias has too many entries, or a value out of range."""


class InvalidSeed(InvalidRequest):
    """The seed is not an integer in range."""


class InvalidGrammar(InvalidRequest):
    """A grammar, schema or regular expression is malformed, too large, or cannot be kept with this model."""


class InvalidSalt(InvalidRequest):
    """The cache salt is not text or bytes of at most 64 bytes."""


class TooManySequences(InvalidRequest):
    """More sequences per request than the limit."""


class TooManyLogprobs(InvalidRequest):
    """More log-probabilities per token than the limit."""


class UnknownParameter(InvalidRequest, TypeError):
    """A parameter name that pagedcore does not know; refused, never ignored. As of a keyword, a ``TypeError`` too."""

    @classmethod
    def named(cls, what: str, name: object, known: Collection[str], advice: str = "") -> UnknownParameter:
        """Make the error of one name where only ``known`` ones are allowed; ``advice`` instead of the nearest one."""
        return cls(what, describe_name(name), f"one of {', '.join(known)}", advice or did_you_mean(name, known),
                   is_described=True)


class RequestTooLarge(InvalidRequest):
    """The request could not fit even if it had the whole KV pool to itself."""


class InvalidTools(InvalidRequest):
    """Tools, or the choice among them, are malformed, too many or too large, or not for this model."""


class InvalidAdapter(InvalidRequest):
    """A directory has no adapter that this model can take, or none that may be loaded; nothing was kept of it."""

    _where = "adapter, "


class UnknownAdapter(InvalidRequest):
    """No adapter of this name is loaded."""

    @classmethod
    def named(cls, name: object) -> UnknownAdapter:
        """Make the error of a name, which may be a caller's own text."""
        advice = "Load it by load_adapter(name, directory), or give it to the engine as adapters={name: directory}."
        return cls("lora", describe_name(name), "the name of a loaded adapter", advice, is_described=True)


class RequestStateError(InvalidRequest):
    """The request is in the state ``given``; the call ``what`` is allowed in the state ``limit`` only."""

    _whose = "request"

    def __init__(self, what: str, state: str, needed: str, advice: str = "") -> None:
        self.what, self.given, self.limit = what, state, needed
        ValueError.__init__(self, f"{what}: the {self._whose} is {state}, it has to be {needed}. {advice}".rstrip())


class SessionStateError(RequestStateError):
    """The session is in the state ``given``; the call ``what`` is allowed in the state ``limit`` only."""

    _whose = "session"


class InvalidSessionFile(InvalidRequest):
    """A session file is damaged, is not one, or asks for more than this engine allows; nothing was taken from it."""

    _where = "session file, "


class ModelMismatch(InvalidSessionFile):
    """A session file was made with the model ``made_with``, and this engine runs ``running``."""

    def __init__(self, made_with: str, running: str) -> None:
        self.made_with, self.running = made_with, running
        self.what, self.given, self.limit = "model", made_with, running
        ValueError.__init__(
            self, f"session file, model: it was made with {made_with}, this engine runs {running}. "
            "Import it into an engine with the same model, weights and number format."
        )


class AdapterMismatch(InvalidSessionFile):
    """A session file was made with the adapter ``made_with``, and ``running`` was asked for; both are digests, or empty
    for none."""

    def __init__(self, made_with: str, running: str, name: str = "") -> None:
        self.made_with, self.running = made_with, running
        self.what, self.given, self.limit = "adapter", made_with or "none", running or "none"
        known = f" ({name!r} there)" if name else ""
        ValueError.__init__(
            self, f"session file, adapter: it was made with {made_with[:16] or 'none'}{known}, asked for is "
            f"{running[:16] or 'none'}. Load the same adapter, and name it as lora=."
        )


class InvalidWeights(InvalidRequest):
    """New weights are refused; those that the engine has stay as they are."""


class ModelNotSupported(InvalidConfig):
    """This architecture would give wrong completions or cannot run; the message says why."""


class ModelTakenOver(InvalidConfig):
    """A loaded model that an engine has taken over was called, was changed, or was handed to another engine."""


class DeviceUnavailable(InvalidConfig):
    """This process has no device of the kind asked for; nothing was loaded, and the message says what is missing."""


class MemoryBudgetExceeded(InvalidConfig):
    """An engine needs ``asked`` bytes of a shared memory budget at least; ``left`` of ``total`` bytes are left."""

    def __init__(self, asked: int, left: int, total: int, advice: str = "") -> None:
        self.asked, self.left, self.total = asked, left, total
        super().__init__(
            f"memory budget: asked for {asked} bytes, {left} of {total} bytes are left. "
            + (advice or "Close an engine that draws on it, ask for less, or open a larger budget.")
        )


class EngineOverloaded(PagedcoreError):
    """The waiting queue is full: ``num_waiting`` requests wait, ``limit`` is the most that may."""

    def __init__(self, num_waiting: int, limit: int) -> None:
        self.num_waiting, self.limit = num_waiting, limit
        super().__init__(
            f"waiting queue: {num_waiting} requests wait, the limit is {limit}. "
            "Run some steps or retry later, or raise max_num_waiting."
        )


class PromiseRefused(EngineOverloaded):
    """A deadline cannot be promised now, or the request would break one that was promised to others.

    Ask again in ``retry_after_s`` seconds: if nothing else comes until then, it will be accepted. ``deadline_s`` is
    what was asked for, ``None`` for a request without one.
    """

    def __init__(self, deadline_s: float | None, retry_after_s: float) -> None:
        self.num_waiting = self.limit = 0
        self.deadline_s, self.retry_after_s = deadline_s, retry_after_s
        what = "it would break promises to others" if deadline_s is None else f"{deadline_s:g} s cannot be promised now"
        PagedcoreError.__init__(self, f"deadline_s: {what}. Ask again in {retry_after_s:.3g} seconds.")


class GrammarsBusy(EngineOverloaded):
    """Too many grammars are compiled at present, or those of all requests together take too much memory."""

    def __init__(self, reason: str) -> None:
        self.num_waiting = self.limit = 0
        # Why not the text: task queues build an error again from its arguments, and the text would be said twice.
        PagedcoreError.__init__(self, reason)

    def __str__(self) -> str:
        return f"structured output: {self.args[0]}. Retry later."


class AdaptersBusy(EngineOverloaded):
    """As many adapters are loaded, or are being read, as may be at a time."""

    def __init__(self, reason: str) -> None:
        self.num_waiting = self.limit = 0
        # Why not the text: as of GrammarsBusy.
        PagedcoreError.__init__(self, reason)

    def __str__(self) -> str:
        return f"adapters: {self.args[0]}."


class TooManySessions(PagedcoreError):
    """As many sessions are open as one engine keeps, which is ``limit``."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"sessions: {limit:d} are open, which is the limit. Close some, or export them first.")


class RequestFailed(PagedcoreError):
    """One accepted request ended with ``finish_reason="error"``; the others are unaffected."""


class InvalidDrafts(PagedcoreError):
    """What proposes tokens that may follow has failed, or a model failed that computed some; only speed is lost."""


class StepFailed(RequestFailed):
    """The model failed while computing the batch that held this request."""


class InvalidLogits(RequestFailed):
    """The model returned NaN, an infinity or no finite value for this request's row."""


class ProcessorFailed(RequestFailed):
    """This request's ``logits_processor`` raised, its error being ``__cause__``, or returned no row to choose from."""


class GrammarFailed(RequestFailed):
    """The grammar of this request took more than a step's limits, or no token of the vocabulary continues it."""


class TextFailed(RequestFailed):
    """The tokenizer failed on this request's prompt, or on its tokens; ``__cause__`` is its error."""


class AdapterFailed(RequestFailed):
    """The adapter of this request could not be read when it was needed; ``__cause__`` is the reason."""


class QueueTimeout(RequestFailed):
    """The request waited longer than ``queue_timeout_s`` without being started."""

    def __init__(self, limit_s: float, *, waits_for: str = "") -> None:
        what = f", it waits for {waits_for}" if waits_for else ""
        super().__init__(f"not started within {limit_s:g} seconds{what}; retry later or raise queue_timeout_s")


class DeadlineMissed(RequestFailed):
    """The request was not started, because it could not have ended within its ``deadline_s`` any more."""

    def __init__(self, deadline_s: float, *, waits_for: str = "") -> None:
        self.deadline_s, self.waits_for = deadline_s, waits_for
        what = f", it waits for {waits_for}" if waits_for else ""
        super().__init__(f"not started: it cannot end within its deadline_s of {deadline_s:g} seconds any more{what}")


class RequestAborted(RequestFailed):
    """The request was aborted by its id while it still waited for room in the engine's queue."""

    def __init__(self) -> None:
        super().__init__("aborted before there was room for it in the waiting queue")


class RequestTimeout(PagedcoreError, TimeoutError):
    """A completion was not ready within ``timeout_s`` seconds, as its caller asked; the request was aborted."""

    def __init__(self, timeout_s: float, *, waited_for: str = "") -> None:
        self.timeout_s, self.waited_for = timeout_s, waited_for
        what = f" while it waited for {waited_for}" if waited_for else ""
        super().__init__(f"timeout: the completion was not ready within {timeout_s:g} seconds; it was aborted{what}.")


class NotPicklable(PagedcoreError, TypeError):
    """Something has an engine of this process, which another process cannot have."""

    def __str__(self) -> str:
        return (f"{self.args[0]} cannot be pickled or copied: its model, memory and threads are of this process. "
                "Pass on the name of the model and the settings, and build an engine where it is used.")


class EngineInUse(PagedcoreError):
    """The thread ``caller`` called an ``Engine`` while the thread ``owner`` was in a call of it; nothing was done."""

    def __init__(self, owner: str, caller: str) -> None:
        self.owner, self.caller = owner, caller
        super().__init__(
            f"engine: thread {caller!r} called it while thread {owner!r} is in a call of it. "
            "An Engine takes one call at a time; use AsyncEngine for callers on several threads."
        )


class CalledFromHook(PagedcoreError):
    """The function ``hook``, which an engine has called, made a ``call`` of it that is impossible there; nothing was
    done.
    """

    def __init__(self, call: str, hook: str, advice: str) -> None:
        self.call, self.hook = call, hook
        super().__init__(f"{call}: called from {hook}, {advice}")

    @classmethod
    def here(cls, advice: str) -> Self:
        """Make the error of the call that is under way in this thread: names are those of its functions."""
        call, hook = "a call", "a function"
        for frame, _ in walk_stack(currentframe()):
            package = frame.f_globals.get("__name__", "").partition(".")[0]
            if package not in _OWN:
                hook = frame.f_code.co_qualname
            elif hook == "a function":
                call = frame.f_code.co_name
            elif package != "pluggy":
                break
        return cls(call, hook, advice)


class HooksTooDeep(CalledFromHook):
    """A hook made a call because of what a hook's call did, and so on, more often than is allowed; nothing was done."""


class NoEventLoop(PagedcoreError, RuntimeError):
    """An engine was awaited where no event loop of asyncio runs, under trio for example."""

    def __init__(self) -> None:
        super().__init__(
            "no event loop of asyncio runs here, and an engine can be awaited under no other. Use generate_sync, or "
            "submit(...).result() on a thread."
        )


class WeightsIncomplete(PagedcoreError):
    """New weights were written over the old ones in part, and the rest failed: nothing is computed with them."""

    def __init__(self) -> None:
        super().__init__(
            "weights incomplete: a load of new weights in place broke off after its first write. Load a whole version "
            "with new_weights(), or make a new engine."
        )


class EngineAsleep(PagedcoreError):
    """The engine sleeps at ``level`` 1, without its KV pool, or 2, without its weights too; nothing was taken."""

    def __init__(self, level: int) -> None:
        self.level = level
        gone = "its KV pool" if level == 1 else "its KV pool and its weights"
        super().__init__(f"this engine sleeps (level {level:d}): it has given {gone} back. Call wake() first.")


class EngineClosed(PagedcoreError):
    """The engine was closed, or its thread ended; requests in flight were aborted."""


class ForkedProcess(EngineClosed):
    """The engine belongs to the process ``owner``, of which this one is a fork without the engine's threads."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        # Why "d": task queues build an error again from its text, and fall back to the text where that fails.
        super().__init__(
            f"this engine belongs to process {owner:d}, of which this one is a fork. Make an engine after the fork, or "
            'start processes with the method "spawn".'
        )


class EngineHung(EngineClosed):
    """The engine thread did not end a step for ``seconds`` seconds and was given up; whatever it returns is dropped."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(
            f"the engine thread did not end a step for {seconds:g} seconds and was given up; make a new engine. "
            "Raise dead_after_s if a step may take that long."
        )


class RecordingError(PagedcoreError, ValueError):
    """A recording is damaged, is none, is too large, or lacks what was asked of it; nothing was taken from it."""

    def __str__(self) -> str:
        return f"recording: {self.args[0]}."


class RecordingMismatch(RecordingError):
    """A recording was made with another model, other kernels or another processor than this engine has."""
