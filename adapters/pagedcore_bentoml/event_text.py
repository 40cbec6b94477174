"""The server-sent events of ``/stream``: one for each delta, then "done" with the usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pagedcore import Delta, TokenLogprobs, Usage
from pagedcore_bentoml.wire import json_of, prompt_logprobs_of
from pagedcore_http.events import encode, frame_text, stop_of
from pagedcore_http.json_pieces import with_list


async def events_of(delta: Delta) -> str:
    """Return the event of a delta, after a request's last one that of its end, too."""
    text = frame_text(await _delta_json(delta))
    if delta.usage is None or delta.error is not None:
        return text
    # Why: in one piece, because every piece passes through all of BentoML's middleware.
    return text + frame_text(await _end_json(delta.usage, delta.prompt_logprobs), "done")


async def _delta_json(delta: Delta) -> str:
    data: dict[str, Any] = {"index": delta.index, "text": delta.text, "token_ids": delta.token_ids}
    if delta.finish_reason is not None:
        data |= {"finish_reason": delta.finish_reason, **stop_of(delta)}
    text = encode(data)
    return text if delta.logprobs is None else await with_list(text, "logprobs", delta.logprobs, _entry_json)


async def _end_json(usage: Usage, prompt_logprobs: Sequence[TokenLogprobs | None] | None) -> str:
    text = encode({"usage": asdict(usage)})
    if prompt_logprobs is None:
        return text
    return await with_list(text, "prompt_logprobs", prompt_logprobs, _entry_json)


def _entry_json(entry: TokenLogprobs | None) -> str:
    return json_of(prompt_logprobs_of(entry))
