"""Preparing long prompts on threads of their own, so that no caller's event loop stands still while one is tokenised.

Owns those threads and what counts as long: a prompt that takes about a millisecond, and one with a grammar, which has
to be compiled. Shorter ones take less time than handing them over. What preparing means is in ``input_processor``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Final

from pagedcore.errors import EngineClosed
from pagedcore.requests.infill import Infill
from pagedcore.requests.input_processor import ProcessedRequest
from pagedcore.sampling_params import SamplingParams
from pagedcore.serving.commands import Commands, as_exception, end_sinks
from pagedcore.serving.stream import OutputSink
from pagedcore.shares import Shares
from pagedcore.tokenizer.chat import Chat

LONG_TEXT: Final = 2048
"""Characters of text, those of all messages of a chat together."""
LONG_CHAT: Final = 8
"""Messages of a chat: a template takes tens of microseconds for each."""
LONG_IDS: Final = 16_384
"""Token ids, which are only checked."""
NUM_THREADS: Final = 3
"""Each takes a core from the engine. Those of one owner use all but one, so that no caller's texts and grammars,
however long or many, keep another's waiting."""


def is_long(prompt: Any) -> bool:
    """Whether preparing a prompt, of whatever type, takes long enough to be done elsewhere."""
    if isinstance(prompt, str):
        return len(prompt) > LONG_TEXT
    if type(prompt) is Infill:
        return len(prompt.prefix) + len(prompt.suffix) > LONG_TEXT
    if type(prompt) is Chat:
        return bool(prompt.tools) or is_long(prompt.messages)
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    if isinstance(prompt[0], int):
        return len(prompt) > LONG_IDS
    # Why all values: a template may write any of them, and a list may hold any text.
    values = [value for message in prompt[:LONG_CHAT] if isinstance(message, Mapping) for value in message.values()]
    num_characters = sum(len(value) for value in values if isinstance(value, str))
    has_lists = any(isinstance(value, list | tuple | dict) for value in values)
    return len(prompt) > LONG_CHAT or has_lists or num_characters > LONG_TEXT


def is_structured(params: Any) -> bool:
    """Whether parameters, of whatever type, ask for what takes long beside the prompt: a grammar, which is compiled,
    words, which are tokenised, or special tokens, for which a decoding is chosen."""
    return type(params) is SamplingParams and (
        params.structured is not None or bool(params.bad_words) or not params.skip_special_tokens
    )


class LongPrompts:
    """Prepares long prompts on a few threads, those of each owner in order, and sends them on to the engine thread.

    Invariant: a sink that was taken reaches the engine thread, ends with an error, or has been cancelled.
    """

    def __init__(self, commands: Commands) -> None:
        """Prepare nothing yet; no thread starts before there is a prompt."""
        self._commands = commands
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="pagedcore-prompt")
        self._lock, self._shares = threading.Lock(), Shares(NUM_THREADS)
        self._waiting: list[tuple[bytes, Callable[[], None]]] = []
        self._num_skipped = 0
        """Turns on a thread that found nothing whose owner had not its share of them; who ends takes one up."""

    def send(self, prepare: Callable[[], ProcessedRequest], sink: OutputSink, owner: bytes) -> None:
        """Prepare a request on another thread and send it on; a refusal ends the sink, which has a place, with its
        error.

        Raises ``EngineClosed`` after ``close`` or at the end of the interpreter.
        """
        # Why a context: observers look for the caller's span there.
        work = owner, partial(copy_context().run, self._run, prepare, sink)
        try:
            with self._lock:
                self._threads.submit(self._take_turn)
                self._waiting.append(work)
        except RuntimeError:
            raise EngineClosed("this engine is closed; make a new one.") from None

    def close(self) -> None:
        """Take no more; what was taken gets its end. A second call does nothing."""
        self._threads.shutdown(wait=False)

    def _take_turn(self) -> None:
        """Prepare the first prompt whose owner has not its share of the threads."""
        is_mine = True
        while is_mine:
            with self._lock:
                found = next((work for work in self._waiting if self._shares.take(work[0])), None)
                if found is None:
                    self._num_skipped += 1
                    return
                self._waiting.remove(found)
            try:
                found[1]()
            finally:
                with self._lock:
                    self._shares.give_back(found[0])
                    is_mine = self._num_skipped > 0
                    self._num_skipped -= is_mine

    def _run(self, prepare: Callable[[], ProcessedRequest], sink: OutputSink) -> None:
        try:
            # Why: a prompt whose caller has left, or whose engine is closed, need not be tokenised.
            self._commands.require_open()
            if not sink.is_cancelled:
                processed = prepare()
                self._commands.put(lambda worker: worker.accept(processed, sink), sink)
                return
        except BaseException as error:  # of any kind: the reader gets it
            # Why first: when the reader learns of it, the next request of the same caller has its place.
            self._commands.places.give_back(sink)
            end_sinks([sink], as_exception(error))
        self._commands.places.give_back(sink)
