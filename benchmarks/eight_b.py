"""The shape of Llama-3.1-8B with random weights on a machine that cannot hold it: written, converted, and run in turns.

    python eight_b.py weights MODEL_DIR               # 16 GB of bfloat16, a file a layer; what is there stays
    python eight_b.py convert MODEL_DIR INT4_DIR      # `pagedcore convert --quantization w4a16`, and its peak of memory
    python eight_b.py gguf LLAMA_CPP MODEL_DIR FILE   # 16 GB; then `llama-quantize --pure FILE Q4_FILE Q4_K`
    python eight_b.py turns INT4_DIR Q4_FILE LLAMA_BIN RESULTS [WORKLOADS]

Both engines are loaded when the turns begin, and one computes at a time. With ``-`` in the place of the workloads a
round begins with each name on the input. What is measured is in ``peers/workloads.py``.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

PEERS = Path(__file__).resolve().parent / "peers"
LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY = 32, 4096, 32, 8, 14336, 128256
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY, "max_position_embeddings": 131072,
    "rope_theta": 5e5, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_cache": True,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "bos_token_id": 128000, "eos_token_id": 128001,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192},
}


def shapes_by_file() -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Yield the files of a model, and the shapes of their tensors."""
    kv = KV_HEADS * HIDDEN // HEADS
    yield "embedding", {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    yield "head", {"lm_head.weight": (VOCABULARY, HIDDEN)}
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,), "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN), "self_attn.v_proj": (kv, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN), "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    for number in range(LAYERS):
        yield f"layer-{number:02}", {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}


def write_weights(out: Path) -> None:
    """Write the files that are not there yet, each from a seed of its own, then what names them."""
    sys.path.insert(0, str(PEERS))
    import make_model

    out.mkdir(parents=True, exist_ok=True)
    index = {}
    for seed, (name, shapes) in enumerate(shapes_by_file()):
        path = out / f"{name}.safetensors"
        index |= dict.fromkeys(shapes, path.name)
        if path.exists():
            continue
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for tensor, shape in shapes.items():
            made = torch.ones(shape, dtype=torch.bfloat16)
            tensors[tensor] = made if len(shape) == 1 else made.normal_(0.0, 0.02, generator=generator)
        save_file(tensors, path.with_suffix(".unfinished"), metadata={"format": "pt"})
        path.with_suffix(".unfinished").rename(path)
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (out / "config.json").write_text(json.dumps(CONFIG, indent=1))
    make_model.SPECIAL = {"<|endoftext|>": 128000, "<|im_start|>": 128002, "<|im_end|>": 128001}
    make_model.write_tokenizer(out)


def convert(model: str, out: str) -> None:
    """Convert, and print seconds and the largest resident set: of all pages, and of those that are no file's."""
    begin = time.perf_counter()
    command = "from pagedcore.cli.main import app; app()"
    child = subprocess.Popen([sys.executable, "-c", command, "convert", model, "--quantization", "w4a16",
                              "--dtype", "bfloat16", "--out", out])
    peaks = {"VmHWM": 0, "RssAnon": 0}
    while child.poll() is None:
        status = Path(f"/proc/{child.pid}/status").read_text()
        for name in peaks:
            if (found := status.partition(f"{name}:")[2].split()[:1]):
                peaks[name] = max(peaks[name], int(found[0]) // 1024)
        time.sleep(0.1)
    if child.returncode:
        raise SystemExit(child.returncode)
    print(json.dumps({"convert_s": round(time.perf_counter() - begin, 1),
                      "peak_rss_mb": peaks["VmHWM"], "peak_anonymous_mb": peaks["RssAnon"]}))


def write_gguf(llama_cpp: str, model: str, out: str) -> None:
    """Run llama.cpp's own converter, which is told how the tokenizer, none that it knows, splits text."""
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    from conversion import base

    for one in vars(base).values():
        if isinstance(one, type) and "get_vocab_base_pre" in vars(one):
            one.get_vocab_base_pre = lambda self, tokenizer: "qwen2"  # type: ignore[attr-defined]
    sys.argv = ["convert_hf_to_gguf.py", model, "--outfile", out, "--outtype", "bf16"]
    runpy.run_path(f"{llama_cpp}/convert_hf_to_gguf.py", run_name="__main__")


def take_turns(model: str, gguf: str, programs: str, results: str, names: Iterator[str]) -> None:
    """Load both engines, then let each run a workload while the other waits for its next one."""
    common = ["--workloads", "-", "--results", results, "--max-seqs", "4"]
    commands = [
        [sys.executable, PEERS / "run_pagedcore.py", "--model", model, *common],
        [sys.executable, PEERS / "run_llamacpp.py", "--model", gguf, "--programs", programs, *common],
    ]
    engines = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
               for command in commands]
    for number, name in enumerate(names):
        for engine in engines if number % 2 == 0 else engines[::-1]:
            assert engine.stdin is not None
            assert engine.stdout is not None
            engine.stdin.write(f"{name}\n")
            print(engine.stdout.readline(), end="", flush=True)
    for engine in engines:
        engine.communicate()


if __name__ == "__main__":
    _, command, *given = sys.argv
    if command == "weights":
        write_weights(Path(given[0]))
    elif command == "convert":
        convert(*given)
    elif command == "gguf":
        write_gguf(*given)
    else:
        *paths, listed = given if len(given) == 5 else [*given, "w3,w3,w3"]
        take_turns(*paths, map(str.strip, sys.stdin) if listed == "-" else iter(listed.split(",")))
