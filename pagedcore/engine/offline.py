"""Offline generation: many prompts in, outputs in the same order, with a progress bar."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as SequenceOf
from typing import Protocol

from tqdm import tqdm

from pagedcore.errors import InvalidRequest
from pagedcore.outputs import RequestOutput
from pagedcore.requests.input_processor import ProcessedRequest, Prompt
from pagedcore.requests.request import Request
from pagedcore.requests.stats import EngineStats
from pagedcore.sampling_params import SamplingParams


class _Engine(Protocol):
    """What offline generation uses of an engine."""

    def prepare(self, prompt: Prompt, params: SamplingParams | None = None) -> ProcessedRequest: ...
    def can_accept(self, num_sequences: int = 1) -> bool: ...
    def accept(self, processed: ProcessedRequest) -> Request: ...
    def step_pending(self) -> object: ...
    def stats(self) -> EngineStats: ...


def run_offline(
    engine: _Engine,
    prompts: SequenceOf[Prompt],
    params: SamplingParams | SequenceOf[SamplingParams] | None,
    *,
    show_progress: bool | None,
) -> list[RequestOutput]:
    """Complete all prompts; see ``Engine.generate``. Requests of other callers advance along with them."""
    waiting = deque(_prepare_all(engine, prompts, params))
    requests: list[Request] = []
    is_hidden = None if show_progress is None else not show_progress
    try:
        with tqdm(total=len(waiting), unit="request", disable=is_hidden) as bar:
            while waiting or not all(request.is_done for request in requests):
                while waiting and engine.can_accept(waiting[0].params.num_initial_sequences):
                    requests.append(engine.accept(waiting.popleft()))
                engine.step_pending()
                _show(bar, engine, requests)
        return [request.output() for request in requests]
    finally:
        for request in requests:
            request.abort()
            request.remove()


def _prepare_all(
    engine: _Engine, prompts: SequenceOf[Prompt], params: SamplingParams | SequenceOf[SamplingParams] | None
) -> list[ProcessedRequest]:
    if isinstance(prompts, str):
        raise InvalidRequest("prompts", prompts, "a list of prompts", "For one prompt pass [prompt].")
    each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise InvalidRequest("params", len(each), f"one SamplingParams, or one per prompt ({len(prompts)})")
    return [engine.prepare(prompt, one) for prompt, one in zip(prompts, each, strict=True)]


def _show(bar: tqdm[None], engine: _Engine, requests: list[Request]) -> None:
    if bar.disable:
        return
    done = sum(request.is_done for request in requests)
    if done > bar.n:
        bar.set_postfix(tokens=engine.stats().num_generated_tokens, refresh=False)
        bar.update(done - bar.n)
