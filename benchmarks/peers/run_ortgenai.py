"""ONNX Runtime GenAI's engine on the CPU: ``python run_ortgenai.py --model DIR``, as its model builder wrote it.

It batches statically on a CPU: a request that ends leaves its place empty until all of its batch have ended.
"""

from __future__ import annotations

import json
import time

import numpy as np
import onnxruntime_genai
from measuring import arguments, measure
from workloads import Workload

options = arguments(max_seqs=32)
config = onnxruntime_genai.Config(options.model)
config.clear_providers()
config.overlay(json.dumps({
    "model": {"decoder": {"session_options": {"intra_op_num_threads": options.threads}}},
    "engine": {"static_batching": {"max_batch_size": options.max_seqs}},
}))
engine = onnxruntime_genai.Engine(onnxruntime_genai.Model(config))
events, Flags = engine.create_event_buffer(256), onnxruntime_genai.EngineEventFlags


def begin(prompt: list[int], number: int) -> object:
    """Hand over one request for exactly ``number`` tokens, greedy."""
    limits = onnxruntime_genai.RequestOptions()
    limits.set_max_session_tokens(len(prompt) + number)
    request = engine.create_request(options=limits)
    turn = onnxruntime_genai.TurnOptions(request)
    turn.set_min_generated_tokens(number)
    turn.set_max_generated_tokens(number)
    turn.set_do_sample(False)
    request.begin_turn(np.array(prompt, np.int32), turn)
    return request


def answer(work: Workload) -> list[float]:
    """Answer all prompts; return when each token came."""
    waiting, stamps, num_open = list(zip(work.prompts, work.outputs, strict=True)), [], 0
    requests = []  # Why kept: a request that Python frees is lost to the engine.
    while waiting or num_open:
        while waiting and num_open < options.max_seqs:
            requests.append(begin(*waiting.pop(0)))
            num_open += 1
        for event in engine.run(events):
            flags = int(getattr(event.flags, "value", event.flags))
            if flags & Flags.FAILED.value:
                raise SystemExit(f"the engine failed: {event.error_code}")
            stamps += [time.perf_counter()] * bool(flags & Flags.TOKEN.value)
            if flags & Flags.TURN_FINISHED.value:
                num_open -= 1
                event.request.close()
    return stamps


def run(work: Workload) -> int:
    """Answer all prompts."""
    return len(answer(work))


def stream(work: Workload) -> tuple[float, list[float]]:
    """Answer one prompt."""
    return time.perf_counter(), answer(work)


measure("onnxruntime-genai", options, run, stream)
