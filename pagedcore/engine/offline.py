"""Offline generation: many prompts in, outputs in the same order, with a progress bar."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import TYPE_CHECKING

from tqdm import tqdm

from pagedcore.errors import InvalidRequest
from pagedcore.outputs import RequestOutput
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.requests.request import Request
from pagedcore.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagedcore.engine.engine import Engine


def run_offline(
    engine: Engine,
    prompts: SequenceOf[Prompt],
    params: SamplingParams | SequenceOf[SamplingParams] | None,
    *,
    show_progress: bool | None,
) -> list[RequestOutput]:
    """Answer all prompts; see ``Engine.generate``. Requests of other callers advance along with them."""
    waiting = deque(_prepare_all(engine, prompts, params))
    requests: list[Request] = []
    try:
        with tqdm(total=len(waiting), unit="request", disable=_is_hidden(show_progress)) as bar:
            while waiting or not all(request.is_done for request in requests):
                _feed(engine, waiting, requests)
                engine.step_pending()
                _show(bar, engine, requests)
        return [request.output() for request in requests]
    finally:
        for request in requests:
            request.abort()
            request.remove()


def _prepare_all(
    engine: Engine, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
) -> list[ProcessedRequest]:
    if isinstance(prompts, str):
        raise InvalidRequest("prompts", prompts, "a list of prompts", "For one prompt pass [prompt].")
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequest("params", len(each), f"one SamplingParams, or one per prompt ({len(prompts)})")
    return [engine.prepare(prompt, one) for prompt, one in zip(prompts, each, strict=True)]


def _feed(engine: Engine, waiting: deque[ProcessedRequest], requests: list[Request]) -> None:
    while waiting and engine.can_accept(waiting[0].params.num_initial_sequences):
        requests.append(engine.accept(waiting.popleft()))


def _is_hidden(show_progress: bool | None) -> bool | None:
    return None if show_progress is None else not show_progress


def _show(bar: tqdm[None], engine: Engine, requests: list[Request]) -> None:
    if bar.disable:
        return
    done = sum(request.is_done for request in requests)
    if done > bar.n:
        bar.set_postfix(tokens=engine.stats().num_generated_tokens, refresh=False)
        bar.update(done - bar.n)
