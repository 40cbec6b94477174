"""What ended a completion is known of one that is made anew as well, as after an import of its session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pagedcore import SamplingParams
from pagedcore.requests.pending_output import PendingOutput
from pagedcore.tokenizer.incremental_text import IncrementalText


class Letters:
    """A detokenizer whose tokens are letters by number."""

    def push(self, token_ids: Any) -> str:
        """Return their text."""
        return "".join(chr(96 + token_id) for token_id in token_ids)

    def finish(self) -> str:
        """Return nothing: no text is held back."""
        return ""


@pytest.mark.parametrize(("stop", "reason", "expected"), [
    (("b",), "stop", "b"), (("z",), "stop", None), ((), "length", None),
])
@pytest.mark.parametrize("is_finished", [False, True])
def test_a_completion_made_anew_knows_its_stop(
    stop: tuple[str, ...], reason: str, expected: str | None, is_finished: bool
) -> None:
    """From its tokens alone, before its text has been ended and after."""
    params = SamplingParams(stop=stop)
    sequence: Any = SimpleNamespace(output_token_ids=[1, 2], token_ids=[9, 1, 2], finish_reason=reason, params=params,
                                    logprobs=[], score=None, weights_of_output=tuple)
    pending = PendingOutput(SimpleNamespace(error=None), sequence, 0, None,  # type: ignore[arg-type]
                            lambda: IncrementalText(Letters(), params.stop))
    pending.replay()
    if is_finished:
        pending.finish_text()
    assert pending.completion().stop_reason == expected
