"""The engine on a GPU: right answers, and where a step's time goes: python benchmarks/gpu_engine.py --out RESULTS.json

``gpu.py build`` compiles the kernels. Parts: the demo model's questions; six architectures with random weights, whose
log-probabilities are compared with transformers in float32; which numbers of rows give the same bits in torch's
products; and steps of two models' shapes, by the fused decoder and by transformers' modules, recorded and launched one
by one: how long they take, how long the GPU works meanwhile, and how long recording at the start takes. ``--device cpu
--small`` runs all but the last without a GPU. benchmarks/h200.md has what was found.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from gpu import private_copy  # noqa: E402

from pagedcore import Engine, RequestOutput, SamplingParams  # noqa: E402
from pagedcore.demo_model.questions import demo_questions, is_correct  # noqa: E402
from pagedcore.execution import devices  # noqa: E402
from pagedcore.models import transformers_model  # noqa: E402
from pagedcore.models.decoders.graphed import GraphedSteps  # noqa: E402
from pagedcore.models.decoders.plain import PlainDecoder  # noqa: E402

SIZES = {"vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 4096}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {"head_dim": 128}, "gemma2": {"head_dim": 256, "sliding_window": 64},
    "gpt_neox": {}, "qwen2_moe": {"num_experts": 8, "moe_intermediate_size": 256, "num_experts_per_tok": 2,
                                  "shared_expert_intermediate_size": 256},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
              "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama": {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072},
}
PRODUCTS = ((896, 4864), (4864, 896), (896, 151936), (4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256))
ROWS = (1, 2, 3, 4, 7, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def main() -> int:
    """Run the parts and write each as it ends; returns 0 if all came to their end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu/engine.json"))
    parser.add_argument("--kernels", type=Path, default=Path("build/gpu-kernels"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="one architecture and one product, no steps timed")
    given = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {"demo": lambda: demo(given.device)}
    for kind in list(ARCHITECTURES)[: 1 if given.small else None]:
        parts[f"against transformers: {kind}"] = lambda kind=kind: against_transformers(kind, given.device)
    for shape in PRODUCTS[: 1 if given.small else None]:
        parts[f"same bits: {shape}"] = lambda shape=shape: same_bits(*shape, given.device)
    if not given.small:
        for kind, rows in (("qwen2", 1), ("qwen2", 64), ("qwen2", 256), ("llama", 1), ("llama", 64)):
            for is_fused, is_recorded in ((True, True), (True, False), (False, True), (False, False)):
                name = f"steps: {kind}, {rows} rows, {'fused' if is_fused else 'modules'}"
                parts[f"{name}{'' if is_recorded else ', launched one by one'}"] = partial(
                    steps, kind, rows, is_fused, is_recorded)
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if given.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name(0)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with prebuilt(given.kernels, given.device):
        for name, part in parts.items():
            try:
                found[name] = part()
            except Exception as error:
                found[name] = {"failure": f"{type(error).__name__}: {error}", "at": traceback.format_exc()[-3000:]}
            print(name, json.dumps(found[name])[:1500], flush=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(isinstance(one, dict) and "failure" in one for one in found.values()))


@contextmanager
def prebuilt(kernels: Path, device: str) -> Iterator[None]:
    """Have engines take compiled kernels from a folder."""
    if device == "cpu":
        yield
        return
    from pagedcore_kernels.cuda.attention import backend
    from pagedcore_kernels.cuda.build.library import KernelLibrary

    with tempfile.TemporaryDirectory() as folder:
        library = KernelLibrary([private_copy(kernels, Path(folder))])
        with patch.object(backend, "KernelLibrary", lambda prebuilt: library):
            yield


@contextmanager
def recording(is_on: bool) -> Iterator[None]:
    """Let engines on a GPU record their decode steps, or not."""
    if is_on:
        yield
        return
    with patch.object(devices, "CudaGraphs", lambda device: None):
        yield


@contextmanager
def decoding(is_fused: bool) -> Iterator[dict[str, float]]:
    """Let models on a GPU be computed by the fastest decoder, or by their modules; yields how long recording took."""
    took, record_ahead = {"s of recording at the start": 0.0}, GraphedSteps.record_ahead

    def timed(steps: GraphedSteps, *arguments: Any) -> None:
        begin = time.perf_counter()
        record_ahead(steps, *arguments)
        torch.cuda.synchronize()
        took["s of recording at the start"] = round(time.perf_counter() - begin, 2)

    factory = transformers_model.best_factory
    with patch.object(GraphedSteps, "record_ahead", timed), patch.object(
        transformers_model, "best_factory", factory if is_fused else lambda *_: PlainDecoder
    ):
        yield took


def answer(engine: Engine, prompts: list[Any], params: SamplingParams) -> list[RequestOutput]:
    """All prompts at once."""
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.has_pending_requests():
        engine.step()
    return [request.output() for request in requests]


def demo(device: str) -> dict[str, Any]:
    """The demo model's questions, at once and some of them alone."""
    questions, params = demo_questions(32, seed=5), SamplingParams(max_tokens=48)
    with Engine.from_pretrained("demo", device=device) as engine:
        outputs = answer(engine, [question.prompt for question in questions], params)
        alone = [answer(engine, [question.prompt], params)[0] for question in questions[:8]]
    texts = [output.outputs[0].text for output in outputs]
    return {"right": sum(map(is_correct, questions, texts)), "of": len(questions),
            "same alone, of 8": sum(one.outputs[0].text == text for one, text in zip(alone, texts, strict=False))}


def model_of(kind: str, sizes: dict[str, Any], device: str) -> Any:
    """Random weights in bfloat16."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    config.dtype = torch.bfloat16
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def against_transformers(kind: str, device: str) -> dict[str, Any]:
    """Errors of log-probabilities against float32, beside those of transformers in bfloat16; order of the batch."""
    model = model_of(kind, SIZES | ARCHITECTURES[kind], device)
    exact = copy.deepcopy(model).float()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 2048, n).tolist() for n in (5, 17, 33, 64, 100, 150, 200, 300)]
    params = SamplingParams(max_tokens=24, ignore_eos=True, prompt_logprobs=1)
    settings: dict[str, Any] = {"device": device, "dtype": "bfloat16", "max_num_batched_tokens": 128,
                                "max_num_seqs": 8, "num_kv_blocks": 400}
    with Engine.from_pretrained(copy.deepcopy(model), **settings) as engine:
        outputs = answer(engine, prompts, params)
        turned = answer(engine, prompts[::-1], params)[::-1]
        backend: Any = engine.components.runner.backend
        decoder, graphed = type(getattr(backend, "_decoder", None)).__name__, getattr(backend, "_graphed", None)
        is_recorded = graphed is not None and graphed.is_possible
    with recording(False), Engine.from_pretrained(copy.deepcopy(model), **settings) as engine:
        launched = answer(engine, prompts, params)
    own, theirs, regrets = [], [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + list(output.outputs[0].token_ids)], device=device)
        with torch.inference_mode():
            want, other = (torch.log_softmax(one(ids).logits[0].double(), -1).cpu() for one in (exact, model))
        at = torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
        own += np.abs([one.logprob for one in output.prompt_logprobs[1:]] - want[at].numpy()).tolist()
        theirs += (other[at] - want[at]).abs().tolist()
        end = want[len(prompt) - 1 : -1]
        regrets += (end.max(-1).values - end.gather(1, ids.cpu()[0, len(prompt) :, None])[:, 0]).tolist()
    same = sum(a.outputs[0].token_ids == b.outputs[0].token_ids for a, b in zip(outputs, turned, strict=True))
    return {"mean error": float(np.mean(own)), "largest error": max(own), "mean error of transformers": np.mean(theirs),
            "largest of transformers": max(theirs), "largest regret of a greedy token": max(regrets),
            "same in another order": same, "of": len(prompts), "is recorded": is_recorded, "decoder": decoder,
            "same launched one by one": sum(a.outputs[0].token_ids == b.outputs[0].token_ids
                                            for a, b in zip(outputs, launched, strict=True))}


def same_bits(inner: int, outer: int, device: str) -> dict[str, Any]:
    """Numbers of rows that give a row the same bits in ``linear``, and whether its place among the rows matters."""
    torch.manual_seed(0)
    weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) * inner**-0.5
    rows = torch.randn(max(ROWS), inner, device=device, dtype=torch.bfloat16)
    groups: list[tuple[list[int], torch.Tensor]] = []
    moved = []
    for count in ROWS:
        found = torch.nn.functional.linear(rows[:count], weight)
        turned = torch.nn.functional.linear(rows[:count].flip(0).contiguous(), weight).flip(0)
        if not torch.equal(found.view(torch.int16), turned.view(torch.int16)):
            moved.append(count)
        for group, other in groups:
            if torch.equal(other.view(torch.int16), found[: len(other)].view(torch.int16)):
                group.append(count)
                break
        else:
            groups.append(([count], found))
    return {"groups of rows": [group for group, _ in groups], "place matters at": moved}


def steps(kind: str, rows: int, is_fused: bool, is_recorded: bool) -> dict[str, Any]:
    """Decode steps: wall clock, launches, and how long the GPU works in one."""
    model = model_of(kind, SHAPES[kind], "cuda")
    rng = np.random.default_rng(0)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 8192,
                                "max_num_seqs": max(8, rows), "num_kv_blocks": rows * 12 + 64}
    with recording(is_recorded), decoding(is_fused) as took, Engine.from_pretrained(model, **settings) as engine:
        for _ in range(rows):
            engine.add_request(rng.integers(3, 2000, 64).tolist(), SamplingParams(max_tokens=80, ignore_eos=True))
        times = []
        for _ in range(12):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        longest, times = max(times[1:]), []
        for _ in range(20):
            begin = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - begin)
        kinds = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA]) as profile:
            for _ in range(4):
                engine.step()
    events = [event for event in profile.key_averages() if "CUDA" in str(event.device_type)]
    top = sorted((event.self_device_time_total / 4, event.count // 4, event.key[:60]) for event in events)[:-9:-1]
    return {**took, "ms": float(np.median(times)) * 1e3, "fastest ms": min(times) * 1e3,
            "longest of the first after one, ms": longest * 1e3,
            "GPU ms": sum(event.self_device_time_total for event in events) / 4e3,
            "launches and copies": sum(event.count for event in events) // 4, "longest (us, number, name)": top}


if __name__ == "__main__":
    sys.exit(main())
