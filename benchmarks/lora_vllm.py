"""vLLM's decode steps whose rows have LoRA adapters, against the same steps without: what ``lora.py`` measures here.

    build/vllm/bin/python benchmarks/lora_vllm.py --model MODEL_DIR [--rank 16] [--pairs 8]

32 requests decode greedily side by side; a round of them is generated with 8 and with 40 tokens each, and the
difference is 32 steps. Rounds of one kind take turns with rounds without adapters, of the same engine: 4 rows with an
adapter each, and all rows with 16 adapters. Adapters are random, in bfloat16, of all layers of attention and MLP.
Runs in the environment of ``make bench-vllm``. Run it with nothing else on the machine, right before or after
``lora.py`` with the same model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from interleaved import interval, markdown, ratios
from safetensors.torch import save_file

ROWS, ADAPTERS, PROMPT_TOKENS, SHORT, LONG = 32, 16, 32, 8, 40


def write_adapter(directory: Path, config: dict[str, Any], rank: int, seed: int) -> str:
    """Write an adapter as PEFT saves it; return its directory."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    sizes = {"self_attn.q_proj": (hidden, query), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
             "self_attn.o_proj": (query, hidden), "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner),
             "mlp.down_proj": (inner, hidden)}
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for number in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in sizes.items():
            whole = f"base_model.model.model.layers.{number}.{name}"
            first = torch.randn(rank, inputs, generator=generator) * inputs**-0.5
            second = torch.randn(outputs, rank, generator=generator) * rank**-0.5
            tensors |= {f"{whole}.lora_A.weight": first.bfloat16(), f"{whole}.lora_B.weight": second.bfloat16()}
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in sizes})}))
    return str(directory)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--pairs", type=int, default=8)
    given = parser.parse_args()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    config = json.loads((Path(given.model) / "config.json").read_text())
    engine = LLM(given.model, dtype="bfloat16", enable_lora=True, max_loras=ADAPTERS, max_lora_rank=given.rank,
                 max_cpu_loras=ADAPTERS, max_num_seqs=ROWS, max_model_len=512, enable_prefix_caching=False)  # fmt: skip
    prompts = [{"prompt_token_ids": [5 + (row * 37 + place * 11) % 4000 for place in range(PROMPT_TOKENS)]}
               for row in range(ROWS)]  # fmt: skip

    def step_ms(adapters: list[Any]) -> float:
        times = []
        for count in (SHORT, LONG):
            params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
            begin = time.perf_counter()
            engine.generate(prompts, params, lora_request=adapters, use_tqdm=False)
            times.append(time.perf_counter() - begin)
        return (times[1] - times[0]) * 1e3 / (LONG - SHORT)

    table, none = list[list[str]](), [None] * ROWS
    with tempfile.TemporaryDirectory() as folder:
        loaded = list[Any]()
        for number in range(1, ADAPTERS + 1):
            directory = write_adapter(Path(folder) / str(number), config, given.rank, number)
            loaded.append(LoRARequest(f"a{number}", number, directory))
        kinds = {f"{ROWS - 4} rows without, 4 rows of 4 adapters": [*none[4:], *loaded[:4]],
                 f"{ROWS} rows of {ADAPTERS} adapters": loaded * (ROWS // ADAPTERS)}  # fmt: skip
        for name, adapters in kinds.items():
            step_ms(adapters)
            step_ms(none)
            some, others = list[float](), list[float]()
            for pair in range(given.pairs):
                for one in (adapters, none) if pair % 2 else (none, adapters):
                    (some if one is adapters else others).append(step_ms(one))
            speed = ratios(others, some)
            low, high = interval(speed)
            table.append([name, f"{statistics.median(some):.2f}", f"{statistics.median(others):.2f}",
                          f"{statistics.median(speed):.3f} ({low:.3f} - {high:.3f})"])
    print(markdown(["rows", "ms a step", "ms without adapters", "speed"], table))


if __name__ == "__main__":
    main()
