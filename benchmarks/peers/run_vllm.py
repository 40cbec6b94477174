"""vLLM's CPU build, compiled; see ``run_peers.sh`` for the environment it needs."""

from __future__ import annotations

import time

from measuring import arguments, measure
from vllm import LLM, SamplingParams
from workloads import Workload

options = arguments(dtype="bfloat16", max_seqs=32, max_tokens=2048, max_len=1024)
llm = LLM(
    model=options.model, dtype=options.dtype, max_model_len=options.max_len, max_num_seqs=options.max_seqs,
    max_num_batched_tokens=options.max_tokens, enforce_eager=False, enable_prefix_caching=True, disable_log_stats=True,
)


def params(number: int) -> SamplingParams:
    """Greedy, exactly ``number`` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=number, min_tokens=number, ignore_eos=True, detokenize=False)


def run(work: Workload) -> int:
    """Answer all prompts."""
    prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
    outputs = llm.generate(prompts, [params(number) for number in work.outputs], use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def stream(work: Workload) -> tuple[float, list[float]]:
    """Answer one prompt, step by step."""
    begin, stamps, engine = time.perf_counter(), [], llm.llm_engine
    engine.add_request(work.name, {"prompt_token_ids": work.prompts[0]}, params(work.outputs[0]))
    while engine.has_unfinished_requests():
        for output in engine.step():
            stamps += [time.perf_counter()] * (len(output.outputs[0].token_ids) - len(stamps))
    return begin, stamps


measure("vllm", options, run, stream)
