"""The engine on a GPU: right answers, and where a step's time goes: python benchmarks/gpu_engine.py --out RESULTS.json

``gpu.py build`` compiles the kernels. Parts: the demo model's questions; six architectures with random weights, whose
log-probabilities are compared with transformers in float32, and whose completions with those of steps that are taken or
launched one by one; which numbers of rows give the same bits in torch's products; steps of two models' shapes, by the
fused decoder and by transformers' modules, recorded and launched one by one, overlapping and not, over KV in 16 and 8
bits, with weights in bfloat16 and in FP8, which one of the architectures has in its comparison too; and completions per
second beside transformers' continuous batching and its ``generate``.

Each part runs in a process of its own for at most five minutes, and the results are written as each ends. What was
predicted is beside what was found, as ``wanted`` and ``ok``. ``--small`` runs every part at the size that tests use,
``--device cpu`` those that need no GPU. benchmarks/h200.md has what was found.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "benchmarks")]

from gpu import private_copy  # noqa: E402

from pagedcore import Engine, RequestOutput, SamplingParams  # noqa: E402
from pagedcore.demo_model.questions import demo_questions, is_correct  # noqa: E402
from pagedcore.execution import devices  # noqa: E402
from pagedcore.execution.model_runner import ModelRunner  # noqa: E402
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
PART_S = 300
ENGINE: dict[str, Any] = {}
"""Further settings of every engine; tests have other attention."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything: as measured on a GPU, or as small as control flow allows."""

    kinds: tuple[str, ...]
    """Architectures that are compared."""
    model: dict[str, Any]
    prompts: tuple[int, ...]
    tokens: int
    questions: int
    products: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    shapes: dict[str, dict[str, Any]]
    steps: tuple[tuple[str, int], ...]
    """Shapes and rows."""
    crowd: int
    """Requests that are completed beside transformers."""
    prompt: int
    """Tokens before the steps that are timed."""
    warm: int
    """Steps before those."""
    repeats: int
    profiled: int
    copy_bytes: int
    batching: dict[str, Any]
    """Of transformers' continuous batching, which takes what memory there is."""


FULL = Sizes(tuple(ARCHITECTURES), SIZES, (5, 17, 33, 64, 100, 150, 200, 300), 24, 32, PRODUCTS, ROWS, SHAPES,
             (("qwen2", 1), ("qwen2", 64), ("qwen2", 256), ("llama", 1), ("llama", 64)), 64, 64, 12, 20, 4, 2**31, {})
_TINY = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
SMALL = Sizes(("llama",), _TINY, (5, 9), 4, 1, ((32, 64),), (1, 2, 3), {"llama": _TINY}, (("llama", 1),), 2, 4, 3, 2, 1,
              2**12, {"num_blocks": 64, "max_batch_tokens": 64})
VARIANTS: dict[str, dict[str, Any]] = {
    "fused": {}, "fused, one step after the other": {"is_ahead": False},
    "fused, launched one by one": {"is_recorded": False}, "modules": {"is_fused": False},
    "modules, launched one by one": {"is_fused": False, "is_recorded": False},
    "fused, KV in int8": {"kv": "int8"}, "fused, KV in e4m3": {"kv": "e4m3"},
    "fused, weights in e4m3": {"is_float8": True},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the parts and write each as it ends; returns 0 if all came to their end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help="names of parts; all by default")
    parser.add_argument("--out", type=Path, default=Path("build/gpu/engine.json"))
    parser.add_argument("--kernels", type=Path, default=Path("build/gpu-kernels"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="as little as control flow allows")
    parser.add_argument("--here", action="store_true", help="in this process, without a limit of time")
    given = parser.parse_args(arguments)
    parts = parts_of(SMALL if given.small else FULL, given.device)
    if unknown := sorted(set(given.parts) - set(parts)):
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(parts)}")
    found: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name in given.parts or parts:
        found[name] = run_here(name, parts[name], given) if given.here else run_apart(name, given)
        print(name, json.dumps(found[name])[:1500], flush=True)
        given.out.write_text(json.dumps(found, indent=1, default=float) + "\n")
    return int(any(isinstance(one, dict) and "failure" in one for one in found.values()))


def parts_of(sizes: Sizes, device: str) -> dict[str, Callable[[], Any]]:
    """What there is to find out, by name."""
    parts: dict[str, Callable[[], Any]] = {"demo": lambda: demo(sizes, device)}
    for kind in sizes.kinds:
        parts[f"against transformers: {kind}"] = partial(against_transformers, kind, sizes, device)
    parts[f"against transformers: {sizes.kinds[0]}, weights in e4m3"] = partial(
        against_transformers, sizes.kinds[0], sizes, device, is_float8=True)
    for shape in sizes.products:
        parts[f"same bits: {shape}"] = partial(same_bits, *shape, sizes.rows, device)
    if device == "cuda":
        parts["GPU"] = lambda: {"name": torch.cuda.get_device_name(0), "copy, bytes/s": copy_speed(sizes)}
        for kind, rows in sizes.steps:
            for name, how in VARIANTS.items():
                parts[f"steps: {kind}, {rows} rows, {name}"] = partial(steps, kind, rows, sizes, **how)
    for kind in sizes.shapes:
        parts[f"completions: {kind}"] = partial(completions, kind, sizes, device)
    return parts


def run_here(name: str, part: Callable[[], Any], given: argparse.Namespace) -> Any:
    """Return what a part finds, or why it did not come to its end."""
    try:
        with prebuilt(given.kernels, given.device):
            return part()
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}", "at": traceback.format_exc()[-3000:]}


def run_apart(name: str, given: argparse.Namespace) -> Any:
    """Do so in a process of its own: a fault of the GPU ends that process and not the next part."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, __file__, name, "--here", "--out", str(out), "--kernels", str(given.kernels),
                   "--device", given.device, *["--small"] * given.small]
        try:
            done = subprocess.run(command, timeout=PART_S, check=False, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            return {"failure": f"not done within {PART_S} s"}
        if out.is_file():
            return json.loads(out.read_text())[name]
        return {"failure": f"ended with status {done.returncode}", "at": done.stderr[-3000:]}


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
def overlapping(is_on: bool) -> Iterator[None]:
    """Let steps on a GPU overlap, or take them one after the other."""
    if is_on:
        yield
        return
    with patch.object(ModelRunner, "can_launch", False):
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


def demo(sizes: Sizes, device: str) -> dict[str, Any]:
    """The demo model's questions, at once, at once in steps that do not overlap, and some of them alone."""
    questions, params = demo_questions(sizes.questions, seed=5), SamplingParams(max_tokens=48)
    prompts = [question.prompt for question in questions]
    with Engine.from_pretrained("demo", device=device, **ENGINE) as engine:
        outputs = answer(engine, prompts, params)
        alone = [answer(engine, [prompt], params)[0] for prompt in prompts[:8]]
        with overlapping(False):
            single = answer(engine, prompts, params)
    texts = [output.outputs[0].text for output in outputs]
    same = {how: sum(one.outputs[0].text == text for one, text in zip(others, texts, strict=False))
            for how, others in (("same one step after the other", single), ("same alone, of 8", alone))}
    return {"right": sum(map(is_correct, questions, texts)), "of": len(questions), **same}


def model_of(kind: str, sizes: dict[str, Any], device: str) -> Any:
    """Random weights in bfloat16."""
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, bos_token_id=1, eos_token_id=2, pad_token_id=0, **sizes)
    config.dtype = torch.bfloat16
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()


def in_float8(model: Any, directory: str) -> None:
    """Save a model whose layers, but for the output layer, are e4m3 with a scale for each output, and rows too; it gets
    the numbers of its file.
    """
    tensors, floats = model.state_dict(), {"num_bits": 8, "type": "float", "symmetric": True}
    head = model.get_output_embeddings()
    if head.weight is model.get_input_embeddings().weight:
        del tensors["lm_head.weight"]
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            scale = module.weight.detach().abs().amax(1, keepdim=True).float() / 448
            codes = (module.weight.detach() / scale).to(torch.float8_e4m3fn)
            tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": scale}
            module.weight.data = (codes.float() * scale).to(module.weight.dtype)
    save_file({name: one.contiguous() for name, one in tensors.items()}, Path(directory) / "model.safetensors")
    groups = {"all": {"targets": ["Linear"], "weights": {**floats, "strategy": "channel"},
                      "input_activations": {**floats, "strategy": "token", "dynamic": True}}}
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "bfloat16",
              "quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized",
                                      "config_groups": groups, "ignore": ["lm_head"]}}
    (Path(directory) / "config.json").write_text(json.dumps(config, default=str))


def against_transformers(kind: str, sizes: Sizes, device: str, *, is_float8: bool = False) -> dict[str, Any]:
    """Errors of log-probabilities against float32, beside those of transformers in bfloat16; order of the batch. With
    weights in e4m3 these are of the numbers that they stand for.
    """
    with tempfile.TemporaryDirectory() as directory:
        model = model_of(kind, sizes.model | ARCHITECTURES[kind], device)
        exact = copy.deepcopy(model).float()
        if is_float8:
            in_float8(exact, directory)
            model.load_state_dict(exact.state_dict())
        return compared(model, exact, sizes, device, directory if is_float8 else None)


def compared(model: Any, exact: Any, sizes: Sizes, device: str, directory: str | None) -> dict[str, Any]:
    """The same of a model in bfloat16 and in float32; the engine takes what is in a directory, if there is one."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, sizes.model["vocab_size"], n).tolist() for n in sizes.prompts]
    params = SamplingParams(max_tokens=sizes.tokens, ignore_eos=True, prompt_logprobs=1)
    settings: dict[str, Any] = {"device": device, "dtype": "bfloat16", "max_num_batched_tokens": 128,
                                "max_num_seqs": 8, "num_kv_blocks": 400, **ENGINE}
    with Engine.from_pretrained(directory or copy.deepcopy(model), **settings) as engine:
        outputs = answer(engine, prompts, params)
        turned = answer(engine, prompts[::-1], params)[::-1]
        with overlapping(False):
            single = answer(engine, prompts, params)
        backend: Any = engine.components.runner.backend
        decoder, graphed = type(getattr(backend, "_decoder", None)).__name__, getattr(backend, "_graphed", None)
        is_recorded = graphed is not None and graphed.is_possible
    with recording(False), Engine.from_pretrained(directory or copy.deepcopy(model), **settings) as engine:
        launched = answer(engine, prompts, params)
    own, theirs, regrets = [], [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt + list(output.outputs[0].token_ids)], device=model.device)
        with torch.inference_mode():
            want, other = (torch.log_softmax(one(ids).logits[0].double(), -1).cpu() for one in (exact, model))
        at = torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
        own += np.abs([one.logprob for one in output.prompt_logprobs[1:]] - want[at].numpy()).tolist()
        theirs += (other[at] - want[at]).abs().tolist()
        end = want[len(prompt) - 1 : -1]
        regrets += (end.max(-1).values - end.gather(1, ids.cpu()[0, len(prompt) :, None])[:, 0]).tolist()
    same = {f"same {how}": sum(a.outputs[0].token_ids == b.outputs[0].token_ids
                               for a, b in zip(outputs, others, strict=True))
            for how, others in (("in another order", turned), ("one step after the other", single),
                                ("launched one by one", launched))}
    return {"mean error": float(np.mean(own)), "largest error": max(own), "mean error of transformers": np.mean(theirs),
            "largest of transformers": max(theirs), "largest regret of a greedy token": max(regrets),
            "is recorded": is_recorded, "decoder": decoder, **same, "of": len(prompts)}


def same_bits(inner: int, outer: int, counts: tuple[int, ...], device: str) -> dict[str, Any]:
    """Numbers of rows that give a row the same bits in ``linear``, and whether its place among the rows matters."""
    torch.manual_seed(0)
    weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16) * inner**-0.5
    rows = torch.randn(max(counts), inner, device=device, dtype=torch.bfloat16)
    groups: list[tuple[list[int], torch.Tensor]] = []
    moved = []
    for count in counts:
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


def copy_speed(sizes: Sizes) -> float:
    """Bytes per second of a copy on the GPU, read and written ones together."""
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = []
    for _ in range(sizes.repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 2 * sizes.copy_bytes / float(np.median(times))


def steps(
    kind: str, rows: int, sizes: Sizes, *, is_fused: bool = True, is_recorded: bool = True, is_ahead: bool = True,
    kv: str = "auto", is_float8: bool = False,
) -> dict[str, Any]:
    """Decode steps: wall clock, launches, and how long the GPU works in one; of one row beside what its bytes take."""
    model, rng = model_of(kind, sizes.shapes[kind], "cuda"), np.random.default_rng(0)
    settings: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "max_num_batched_tokens": 8192, "max_num_seqs": max(8, rows),
        "num_kv_blocks": rows * 12 + 64, "kv_cache_dtype": kv, **ENGINE}
    with ExitStack() as stack:
        for how in (recording(is_recorded), overlapping(is_ahead)):
            stack.enter_context(how)
        took = stack.enter_context(decoding(is_fused))
        if is_float8:
            in_float8(model, directory := stack.enter_context(tempfile.TemporaryDirectory()))
            model = directory
        engine = stack.enter_context(Engine.from_pretrained(model, **settings))
        backend: Any = engine.components.runner.backend
        model = backend.model
        # Why without the embedding: one row of it is read, unless it is the output layer too.
        num_bytes = sum(one.nbytes for one in (*model.parameters(), *model.buffers())) - (
            0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.nbytes)
        for _ in range(rows):
            engine.add_request(rng.integers(3, sizes.shapes[kind]["vocab_size"], sizes.prompt).tolist(),
                               SamplingParams(max_tokens=3 * (sizes.warm + sizes.repeats), ignore_eos=True))
        longest, times = max(timed_steps(engine, sizes.warm)[1:]), timed_steps(engine, sizes.repeats)
        with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
            timed_steps(engine, sizes.profiled)
    count = sizes.profiled
    events = [event for event in profile.key_averages() if "CUDA" in str(event.device_type)]
    each = [(event.self_device_time_total / count, event.count // count, event.key[:60]) for event in events]
    found = {**took, "ms": float(np.median(times)) * 1e3, "fastest ms": min(times) * 1e3,
             "longest of the first after one, ms": longest * 1e3,
             "GPU ms": sum(event.self_device_time_total for event in events) / count / 1e3,
             "launches and copies": sum(event.count for event in events) // count,
             "longest (us, number, name)": sorted(each)[:-9:-1]}
    if rows == 1:
        least = num_bytes / copy_speed(sizes) * 1e3
        found |= {"weights, ms": least, "wanted": "1.2 x that", "ok": found["ms"] <= 1.2 * least}
    return found


def timed_steps(engine: Engine, count: int) -> list[float]:
    """Seconds of each of so many steps."""
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return times


def completions(kind: str, sizes: Sizes, device: str) -> dict[str, Any]:
    """Tokens per second of a crowd, beside transformers' continuous batching, with its graphs, and ``generate``."""
    vocabulary, rng = sizes.shapes[kind]["vocab_size"], np.random.default_rng(1)
    model = model_of(kind, sizes.shapes[kind], device)
    prompts = [rng.integers(3, vocabulary, int(n)).tolist() for n in rng.integers(8, 8 * sizes.tokens, sizes.crowd)]
    tokens, found, stack = 4 * sizes.tokens, dict[str, Any](), ExitStack()
    ways: dict[str, Callable[[], Callable[[], int]]] = {
        "generate, padded": lambda: padded(model, prompts, tokens),
        "continuous batching": lambda: continuous(model, prompts, tokens, sizes.batching),
        "engine": lambda: engine_of(model, prompts, tokens, device, stack),
    }
    for name, begin in ways.items():
        try:
            run, expected = begin(), len(prompts) * tokens
            run()  # compiles, records, and takes memory
            start = time.perf_counter()
            if (given := run()) != expected:
                raise RuntimeError(f"{given} tokens came of {expected}")
            found[name] = expected / (time.perf_counter() - start)
        except Exception as error:
            found[f"{name}, failure"] = f"{type(error).__name__}: {error}"
        # Why: it keeps nine tenths of the memory.
        model.destroy_cached_continuous_batching_manager()
        if device == "cuda":
            torch.cuda.empty_cache()
    stack.close()
    for name, wanted in (("continuous batching", 1.0), ("generate, padded", 3.0)):
        if "engine" in found and name in found:
            ratio = found["engine"] / found[name]
            found[f"engine beside {name}"] = {"times": ratio, "wanted": wanted, "ok": ratio >= wanted}
    return found if "engine" in found else found | {"failure": found["engine, failure"]}


def engine_of(
    model: Any, prompts: list[list[int]], tokens: int, device: str, stack: ExitStack
) -> Callable[[], int]:
    """What completes prompts by an engine, which the stack closes, and returns how many tokens came."""
    engine = stack.enter_context(Engine.from_pretrained(model, device=device, dtype="bfloat16", **ENGINE))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)

    def run() -> int:
        return sum(len(one.outputs[0].token_ids) for one in answer(engine, prompts, params))

    return run


def continuous(
    model: Any, prompts: list[list[int]], tokens: int, settings: dict[str, Any]
) -> Callable[[], int]:
    """The same by transformers' continuous batching; the manager, with what it has recorded, stays."""
    config = transformers.GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = transformers.ContinuousBatchingConfig(use_cuda_graph=True, allow_block_sharing=False, **settings)

    def run() -> int:
        outputs = model.generate_batch(
            prompts, generation_config=config, continuous_batching_config=batching, persistent_manager=True)
        return sum(len(one.generated_tokens) for one in outputs.values())

    return run


def padded(model: Any, prompts: list[list[int]], tokens: int) -> Callable[[], int]:
    """The same by ``generate``, over prompts that are padded to the longest."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(one)) + one for one in prompts], device=model.device)
    seen = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts],
                        device=model.device)

    def run() -> int:
        out = model.generate(ids, attention_mask=seen, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
                             pad_token_id=0)
        return int(out[:, longest:].cpu().numel())

    return run


if __name__ == "__main__":
    sys.exit(main())
