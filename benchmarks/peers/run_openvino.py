"""OpenVINO GenAI's continuous batching pipeline, in bf16 or f32, on a model exported in float32 or int8."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai
from measuring import arguments, measure
from workloads import Workload

options = arguments(max_seqs=32, max_tokens=2048, cache_gb=2, group_size=-1, precision="bf16")
scheduler = openvino_genai.SchedulerConfig()
scheduler.cache_size = options.cache_gb
scheduler.max_num_seqs = options.max_seqs
scheduler.max_num_batched_tokens = options.max_tokens
scheduler.enable_prefix_caching = True
scheduler.dynamic_split_fuse = True
properties = {
    "INFERENCE_NUM_THREADS": options.threads, "INFERENCE_PRECISION_HINT": options.precision,
    "KV_CACHE_PRECISION": options.precision,
}
if options.group_size >= 0:  # of activations that are quantised to int8 while it runs; 0: none are
    properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = options.group_size
pipeline = openvino_genai.ContinuousBatchingPipeline(options.model, scheduler, "CPU", properties)
serial = iter(range(1, 10**6))


def add(prompt: list[int], number: int) -> Any:
    """Hand over one request for exactly ``number`` tokens."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = config.min_new_tokens = number
    config.ignore_eos, config.do_sample = True, False
    return pipeline.add_request(next(serial), openvino.Tensor(np.array([prompt], dtype=np.int64)), config)


def run(work: Workload) -> int:
    """Answer all prompts."""
    handles = [add(prompt, number) for prompt, number in zip(work.prompts, work.outputs, strict=True)]
    while pipeline.has_non_finished_requests():
        pipeline.step()
    return sum(len(output.generated_ids) for handle in handles for output in handle.read_all())


def stream(work: Workload) -> tuple[float, list[float]]:
    """Answer one prompt, step by step."""
    begin, stamps = time.perf_counter(), []
    handle = add(work.prompts[0], work.outputs[0])
    while pipeline.has_non_finished_requests():
        pipeline.step()
        while handle.can_read():
            for output in handle.read().values():
                stamps += [time.perf_counter()] * len(output.generated_ids)
    return begin, stamps


measure("openvino-genai", options, run, stream)
