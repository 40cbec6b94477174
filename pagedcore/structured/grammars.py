"""Compiles the structured output of an engine's requests, and masks rows of logits by it.

A grammar is compiled for each request anew, which takes a millisecond: compiled ones share limits, failures and
timing with everything that uses them, so no two requests do. Compiling has a thread of its own, because the library
recurses as deep as a grammar refers to itself. A grammar that is not small is tried in a child process first.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from pagedcore.config import limits
from pagedcore.errors import GrammarFailed, GrammarsBusy, InvalidGrammar, MissingDependency
from pagedcore.protocols import Constraint, FloatArray
from pagedcore.structured.deep_stack import STACK_BYTES, DeepStack
from pagedcore.structured.grammar_source import GrammarSource, first_line, source_of
from pagedcore.structured.trial import try_grammar
from pagedcore.structured.vocabulary import Vocabulary
from pagedcore.structured_output import StructuredOutput

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

_LIMITS: Final[dict[str, Any]] = {
    "initial_lexer_fuel": 200_000, "step_lexer_fuel": 100_000, "step_max_items": 20_000, "max_items_in_row": 1_000,
    "max_lexer_states": 20_000, "max_grammar_size": 100_000, "verbose_errors": False,
}
"""What compiling and one mask may take: some hundred and some ten milliseconds."""


_MOST_THREADS: Final = 4
"""For the masks of a step: they are computed while the model is idle."""


class CompiledGrammar:
    """The grammar of one request."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self.matcher, self.num_bytes = matcher, num_bytes


class GrammarCursor:
    """One sequence under a grammar: a matcher that is caught up with the sequence's tokens when a mask is needed.

    Invariant: ``_consumed`` is what ``_matcher`` was given, whatever became of the step for which it was.
    """

    __slots__ = ("_consumed", "_grammar", "_matcher")

    def __init__(self, grammar: CompiledGrammar) -> None:
        self._grammar = grammar
        self._matcher, self._consumed = grammar.matcher.deep_copy(), list[int]()

    def branch(self) -> GrammarCursor:
        """Return another one at the beginning of the same grammar."""
        return GrammarCursor(self._grammar)

    def matcher_after(self, token_ids: Sequence[int]) -> LLMatcher:
        """Return the matcher, as it is after these tokens of the completion."""
        num_known = len(self._consumed)
        if self._consumed != token_ids[:num_known]:
            self._matcher, self._consumed, num_known = self._grammar.matcher.deep_copy(), [], 0
        if new := list(token_ids[num_known:]):
            self._matcher.consume_tokens(new)
            self._consumed += new
        return self._matcher


class Grammars:
    """The grammars of one engine. ``compile`` may be called from any thread, ``mask_rows`` from the engine's."""

    def __init__(self, tokenizer: object, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Read nothing yet; the vocabulary is read for the first request that needs it."""
        self._tokenizer, self._vocab_size, self.eos_token_ids = tokenizer, vocab_size, eos_token_ids
        self._lock = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._refusal: InvalidGrammar | None = None
        self._deep_stack = DeepStack(limits.MAX_COMPILING_GRAMMARS, limits.MAX_COMPILING_S)
        self._live: WeakSet[CompiledGrammar] = WeakSet()
        self._executor: tuple[int, LLExecutor] | None = None

    def compile(self, wanted: StructuredOutput, owner: bytes = b"") -> Constraint:
        """Compile a request's grammar.

        Args:
            wanted: what a completion has to look like.
            owner: of the request. Those of one owner never compile on all threads, so that others can go on.

        Raises:
            InvalidGrammar: it is malformed or unsupported, takes too much to compile, or no token can begin it; or the
                model or its tokenizer has no structured output.
            GrammarsBusy: the grammars of all requests together take too much memory, or too many are compiled now.
            MissingDependency: the library is not installed.
        """
        try:
            import llguidance  # noqa: F401  # Why: it says whether the library is there
        except ImportError as error:
            raise MissingDependency(
                "structured output: llguidance is missing. pip install 'pagedcore[structured]' brings it."
            ) from error
        source, vocabulary = source_of(wanted), self._read_vocabulary()
        source = source._replace(text=vocabulary.adapted(source.text))
        with self._lock:
            num_bytes = sum(one.num_bytes for one in self._live)
        if num_bytes + len(source.text) > limits.MAX_LIVE_GRAMMAR_BYTES:
            raise GrammarsBusy("the grammars of all requests together are too large")
        try:
            made: LLMatcher | str = self._deep_stack.run(partial(_compile, vocabulary, source), owner)
        except TimeoutError:
            made = f"compiling takes over {limits.MAX_COMPILING_S:g} s"
        why = made if isinstance(made, str) else _reason(made) if made.is_error() else ""
        if isinstance(made, str) or why:
            raise InvalidGrammar(wanted.kind, "one that is refused", "a grammar that can be compiled", f"{why}.",
                                 is_described=True)
        grammar = CompiledGrammar(made, len(source.text))
        with self._lock:
            self._live.add(grammar)
        return GrammarCursor(grammar)

    def masks_of(
        self, constrained: Sequence[tuple[Constraint, Sequence[int]]]
    ) -> tuple[npt.NDArray[np.uint8], dict[int, Exception]]:
        """Say which tokens may come next; as ``MasksTokens``."""
        from llguidance.numpy import fill_next_token_bitmask_par

        vocabulary, failures = self._read_vocabulary(), dict[int, Exception]()
        masks = np.empty((len(constrained), vocabulary.num_words), np.int32)
        matchers = [(cast(GrammarCursor, one).matcher_after(ids), place)
                    for place, (one, ids) in enumerate(constrained)]
        fill_next_token_bitmask_par(self._threads(), matchers, masks)
        masks &= vocabulary.known
        for matcher, place in matchers:
            if matcher.is_error():
                failures[place] = GrammarFailed(f"structured output: {_reason(matcher)}")
                masks[place] = 0
        return masks.view(np.uint8)[:, : -(-self._vocab_size // 8)], failures

    def mask_rows(
        self, rows: FloatArray, constrained: Sequence[tuple[int, Constraint, Sequence[int]]]
    ) -> dict[int, Exception]:
        """Allow what the grammars allow; as ``MasksTokens``."""
        masks, failures = self.masks_of([(one, ids) for _, one, ids in constrained])
        for (index, _, _), mask in zip(constrained, masks, strict=True):
            row, bits = rows[index], np.unpackbits(mask, bitorder="little", count=self._vocab_size)
            # Why: what is NaN or plus infinity stays, so that a broken row is recognised.
            np.putmask(row, (bits == 0) & (row < np.inf), -np.inf)
        return {constrained[place][0]: error for place, error in failures.items()}

    def forced(self, constraint: Constraint, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Return the tokens that a grammar forces next; as ``ForcedTokens``."""
        matcher = cast(GrammarCursor, constraint).matcher_after(token_ids)
        # Why no draft is tried on the matcher: what a wrong one costs would count for the masks of the right ones.
        return () if matcher.is_error() else tuple(matcher.compute_ff_tokens()[:most])

    def _read_vocabulary(self) -> Vocabulary:
        if self._vocabulary is not None:
            return self._vocabulary
        with self._lock:
            if self._refusal is None and self._vocabulary is None:
                try:
                    self._vocabulary = Vocabulary(self._tokenizer, self._vocab_size, self.eos_token_ids)
                except InvalidGrammar as error:
                    self._refusal = error
        if self._vocabulary is None:
            one = cast(InvalidGrammar, self._refusal)
            raise InvalidGrammar(one.what, one.given, one.limit, is_described=True)
        return self._vocabulary

    def _threads(self) -> LLExecutor:
        from llguidance import LLExecutor

        # Why: a forked child has none of its parent's threads.
        if self._executor is None or self._executor[0] != os.getpid():
            self._executor = os.getpid(), LLExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))))
        return self._executor[1]


def _compile(vocabulary: Vocabulary, source: GrammarSource) -> LLMatcher | str:
    """Return the grammar compiled, or why it is not."""
    from llguidance import LLMatcher, LLParserLimits

    if source.size > limits.MAX_UNTRIED_GRAMMAR_SIZE and (why := _try(vocabulary, source)):
        return why
    matcher = LLMatcher(vocabulary.tokens, source.text, log_level=0, limits=LLParserLimits(**_LIMITS))
    # Why: a grammar that nothing can begin is found here, and the lexer's first states are made.
    matcher.compute_bitmask()
    return matcher


def _try(vocabulary: Vocabulary, source: GrammarSource) -> str | None:
    """Return why a grammar is too much for this process, ``None`` if it is not."""
    request = {
        "grammar": source.text, "limits": _LIMITS, "vocab_size": vocabulary.size, "special": vocabulary.special,
        "num_bytes": limits.MAX_TRIAL_BYTES, "stack_bytes": STACK_BYTES,
    }
    try:
        # Why half: compiling it here takes as long again.
        return try_grammar(request, limits.MAX_COMPILING_S / 2)
    except OSError:
        return (f"it expands to {source.size}, allowed is at most {limits.MAX_UNTRIED_GRAMMAR_SIZE} where no child "
                "process can be started that tries a larger one")


def _reason(matcher: LLMatcher) -> str:
    whole = matcher.get_error()
    text = first_line(whole)
    if text.endswith("regex parse error:"):
        # Why: between the two lines is the expression, which is the caller's text.
        text = " ".join([text, *(line.strip() for line in whole.splitlines() if line.startswith("error: "))][:2])
    return "no token of the vocabulary continues it" if text.startswith("NoExtension") else text
