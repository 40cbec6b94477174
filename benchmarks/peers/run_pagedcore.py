"""pagedcore by its public names: ``python run_pagedcore.py --model MODEL_DIR``."""

from __future__ import annotations

import time

import torch
from measuring import arguments, measure
from workloads import Workload

from pagedcore import Engine, SamplingParams

options = arguments(dtype="bfloat16", quantization="none", max_seqs=32, max_tokens=0, max_len=1024)
torch.set_num_threads(options.threads)
budget = {"max_num_batched_tokens": options.max_tokens} if options.max_tokens else {}
engine = Engine.from_pretrained(
    options.model, dtype=options.dtype, quantization=options.quantization, max_model_len=options.max_len,
    max_num_seqs=options.max_seqs, **budget
)


def params(number: int) -> SamplingParams:
    """Greedy, exactly ``number`` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=number, min_tokens=number, ignore_eos=True)


def run(work: Workload) -> int:
    """Answer all prompts."""
    outputs = engine.generate(work.prompts, [params(number) for number in work.outputs])
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def stream(work: Workload) -> tuple[float, list[float]]:
    """Answer one prompt, step by step."""
    begin, stamps = time.perf_counter(), []
    request = engine.add_request(work.prompts[0], params(work.outputs[0]))
    while engine.has_pending_requests():
        engine.step()
        stamps += [time.perf_counter()] * len(request.take_new_tokens())
    request.remove()
    return begin, stamps


measure("pagedcore", options, run, stream)
