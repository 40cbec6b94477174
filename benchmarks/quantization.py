"""What quantisation costs in quality: logits of random models, and right answers of the demo model.

    python benchmarks/quantization.py [--questions 500]

Random models have transformers' own initial weights, layers of a width of 256 to 1,024, and 512 random tokens. The
error of their logits is the root mean square of the difference, relative to that of the logits around their mean. The
demo model is asked what its own report asks (``examples/demo_model/evaluation.py``), so many questions of a task and
form, all held out of its training. Rows named "int8 KV" have the weights as they are and ``kv_cache_dtype="int8"``.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import markdown
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.execution.ragged_batch import assemble
from pagedcore.models.cpu.packed_experts import pack_experts
from pagedcore.models.cpu.packed_linear import FASTEST, pack_linears
from pagedcore.models.quantization.schemes import SCHEMES
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from demo_model.evaluation import FORMS, LONGEST_ANSWER, accuracy

INT8_KV = "int8 KV"
SUMS, CAPITALS = ("add",), ("capital",)
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, **HEADS},
    "qwen2": {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 6, **HEADS},
    "gemma3_text": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 64, **HEADS},
    "gpt2": {"n_embd": 768, "n_layer": 6, "n_head": 12},
    "qwen2_moe": {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_experts": 8,
                  "num_experts_per_tok": 2, "shared_expert_intermediate_size": 512, **HEADS},
}


@torch.inference_mode()
def logit_error(family: str, shape: dict[str, Any], scheme: str) -> tuple[float, float]:
    """Return the relative error of the logits, and the share of tokens whose largest logit is of the same token."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](vocab_size=8192, **shape)).eval()
    tokens = torch.randint(0, 8192, (1, 512))
    exact = model(input_ids=tokens, use_cache=False).logits[0]
    if scheme == INT8_KV:
        given = logits_with_int8_kv(model, tokens[0])
    else:
        keep = {"linears": SCHEMES[scheme], "on_unused": lambda weight: None}
        pack_experts(model, routers=FASTEST, **keep)
        pack_linears(model, **keep)
        given = model(input_ids=tokens, use_cache=False).logits[0]
    spread = exact - exact.mean(dim=-1, keepdim=True)
    same = (exact.argmax(dim=-1) == given.argmax(dim=-1)).float().mean()
    return ((given - exact).norm() / spread.norm()).item(), same.item()


def logits_with_int8_kv(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Take a model over and return the logits of one prompt, computed in chunks over int8 KV."""
    backend, block_size, chunk = TransformersModel(model, NumbaCpuAttention, kv_cache_dtype="int8"), 32, 128
    table = np.arange(-(-len(tokens) // block_size), dtype=np.int32)
    backend.allocate_kv(len(table), block_size)
    parts = []
    for start in range(0, len(tokens), chunk):
        ids = tokens[start : start + chunk].numpy()
        batch = assemble(ids, np.array([start]), np.array([len(ids)]), seq_ids=np.zeros(1, np.int64), tables=[table],
                         block_size=block_size)
        parts.append(backend.forward(replace(batch, logits_rows=np.arange(len(ids)))).clone())
    return torch.cat(parts)


def right_answers(scheme: str, num_questions: int) -> Counter[str]:
    """Count questions and right answers of the demo model: of all tasks, of sums, of capitals."""
    settings = {"kv_cache_dtype": "int8"} if scheme == INT8_KV else {"quantization": scheme}
    params = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)
    with Engine.from_pretrained("demo", max_num_seqs=64, **settings) as engine:

        def ask(prompts: list[str]) -> list[str]:
            token_ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
            return [output.outputs[0].text for output in engine.generate(token_ids, params)]

        figures = accuracy(ask, tokenizer, FORMS, num_questions, seed=1)
    counts: Counter[str] = Counter()
    for task, by_form in figures.items():
        for figure in by_form.values():
            for name in ("all", *(["sums"] if task in SUMS else []), *(["capitals"] if task in CAPITALS else [])):
                counts[f"{name} right"] += figure["right"]
                counts[f"{name} asked"] += figure["questions"]
    return counts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=int, default=500)
    given = parser.parse_args()
    rows = []
    for scheme in (*SCHEMES, INT8_KV):
        for family, shape in SHAPES.items():
            error, same = logit_error(family, shape, scheme)
            rows.append([scheme, family, f"{error:.2%}", f"{same:.1%} of 512"])
    print(markdown(["scheme", "random model", "error of logits", "same largest logit"], rows), flush=True)
    kinds, rows = ("sums", "capitals", "all"), []
    for scheme in ("none", *SCHEMES, INT8_KV):
        counts = right_answers(scheme, given.questions)
        rows.append([scheme, *(f"{counts[f'{kind} right']:,} of {counts[f'{kind} asked']:,}" for kind in kinds)])
    print()
    print(markdown(["demo model", *(f"{kind} right" for kind in kinds)], rows))


if __name__ == "__main__":
    main()
