"""What quantisation costs in quality: logits of random models, and right answers and perplexity of the demo model.

    python benchmarks/quantization.py [--questions 500] [--conversations 1056] [--kinds none w8a8]

Random models have transformers' own initial weights, layers of a width of 256 to 1,024, and 512 random tokens; one has
eight channels besides that are fifty times as large as the others, as models of several billion weights have them. The
error of their logits is the root mean square of the difference, relative to that of the logits around their mean; in
the last column only linear layers are quantised, and the embedding is not. The
demo model is asked what its own report asks (``examples/demo_model/evaluation.py``), so many questions of a task and
form, all held out of its training. Its perplexity is that of what it says in conversations like those of its training
(``examples/demo_model/conversations.py``), about questions of the training and about others that are held out of it,
from ``prompt_logprobs``; the row "transformers" is the same from transformers' forward in float32. Rows named "int8 KV"
have the weights as they are and ``kv_cache_dtype="int8"``; those named "smoothed" are w8a8, written by ``pagedcore
convert --calibration`` with other random tokens, or with conversations of the training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from interleaved import markdown
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.demo_model.questions import Split
from pagedcore.execution.ragged_batch import assemble
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.linears.int8_embedding import quantize_embedding
from pagedcore.models.linears.packed_experts import pack_experts
from pagedcore.models.linears.packed_linear import FASTEST, pack_linears
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.linears.stored_weight import StoredLinears
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
from demo_model.conversations import IGNORED, ConversationSource, Row
from demo_model.evaluation import FORMS, LONGEST_ANSWER, accuracy
from train_demo_model import BATCHES, WEIGHTS

INT8_KV, SMOOTHED, OUTLIERS = "int8 KV", "smoothed", "llama, outliers"
KINDS = ("none", "w8a8", SMOOTHED, "w8a16", "w4a16", "w4a8", INT8_KV)
VOCAB = 8192
SUMS, CAPITALS, ASKED = ("add",), ("capital",), ("sums", "capitals", "all")
SPLITS: tuple[Split, ...] = ("train", "held_out")
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, **HEADS},
    "qwen2": {"hidden_size": 896, "intermediate_size": 2432, "num_hidden_layers": 6, **HEADS},
    "gemma3_text": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "head_dim": 64, **HEADS},
    OUTLIERS: {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, **HEADS},
    "gpt2": {"n_embd": 768, "n_layer": 6, "n_head": 12},
    "qwen2_moe": {"hidden_size": 256, "moe_intermediate_size": 512, "num_hidden_layers": 4, "num_experts": 8,
                  "num_experts_per_tok": 2, "shared_expert_intermediate_size": 512, **HEADS},
}

#: Architectures that ``convert`` does not write, and so does not smooth.
NOT_CONVERTED = ("gpt2", "qwen2_moe")


@torch.inference_mode()
def logit_error(name: str, kind: str, has_int8_embedding: bool = True) -> tuple[float, float]:
    """Return the relative error of the logits, and the share of tokens whose largest logit is of the same token."""
    model, tokens = random_model(name), torch.randint(0, VOCAB, (1, 512))
    exact = model(input_ids=tokens, use_cache=False).logits[0]
    if kind == INT8_KV:
        given = logits_with_int8_kv(model, tokens[0])
    elif kind == SMOOTHED:
        with smoothed(model, torch.randint(0, VOCAB, (16, 256)).tolist(), "float32") as directory:
            loaded = load_stored(directory, stored_format(directory), torch.float32, trust_remote_code=False)
            pack_linears(loaded, linears=StoredLinears())
            given = loaded(input_ids=tokens, use_cache=False).logits[0]
    else:
        if has_int8_embedding:
            quantize_embedding(model, QUANTIZERS[kind], kind)
        keep = {"linears": StoredLinears(QUANTIZERS[kind]), "on_unused": lambda weight: None}
        pack_experts(model, routers=FASTEST, **keep)
        pack_linears(model, **keep)
        given = model(input_ids=tokens, use_cache=False).logits[0]
    spread = exact - exact.mean(dim=-1, keepdim=True)
    same = (exact.argmax(dim=-1) == given.argmax(dim=-1)).float().mean()
    return ((given - exact).norm() / spread.norm()).item(), same.item()


def random_model(name: str) -> Any:
    """Make a model of ``SHAPES``; outliers are made in norms and undone in the weights that read them."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name.split(",")[0]](vocab_size=VOCAB, **SHAPES[name]))
    for layer in model.model.layers if name == OUTLIERS else ():
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            norm.weight[:8] *= 50
            for reader in readers:
                reader.weight[:, :8] /= 50
    return model.eval()


@contextmanager
def smoothed(model: Any, prompts: list[list[int]], dtype: str) -> Iterator[str]:
    """Convert a model, or "demo", to w8a8 with a calibration set of token ids, in a directory for the time being."""
    with tempfile.TemporaryDirectory() as parent:
        source, out, calibration = Path(parent, "model"), Path(parent, "out"), Path(parent, "set.jsonl")
        calibration.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
        if model != "demo":
            model.save_pretrained(source)
        convert("demo" if model == "demo" else str(source), out, quantization="w8a8", dtype=dtype,
                calibration=calibration)
        yield str(out)


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


def conversations(split: Split, count: int) -> list[Row]:
    """Write conversations as training has them: their tokens and, at each, the next one if the model says it."""
    source = ConversationSource(AutoTokenizer.from_pretrained(DEMO_MODEL_DIR), WEIGHTS, seed=1, split=split)
    rows = list[Row]()
    while len(rows) < count:
        for shape in BATCHES:
            for ids, targets in zip(*(one.tolist() for one in source.batch(*shape)), strict=True):
                # Why: padding comes after the last token that is learned, and after the one it is learned at.
                end = 2 + max(place for place, target in enumerate(targets) if target != IGNORED)
                rows.append(Row(ids[:end], targets[:end]))
    return rows[:count]


def said(row: Row) -> list[int]:
    """Return the places of the tokens before those that the model is to say.

    The end of a message that a conversation leaves out is not among them: no prompt has it.
    """
    followers = zip(row.targets, row.ids[1:], strict=False)
    return [place for place, (target, follower) in enumerate(followers) if target == follower]


def perplexity(engine: Engine, rows: list[Row]) -> float:
    """Return the perplexity of what the model is to say in conversations."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    outputs = engine.generate([row.ids for row in rows], params, show_progress=False)
    return _perplexity(
        output.prompt_logprobs[place + 1].logprob
        for row, output in zip(rows, outputs, strict=True) for place in said(row)
    )


@torch.inference_mode()
def perplexity_of_transformers(rows: list[Row]) -> float:
    """Return the same, of the demo model computed by transformers in float32."""
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    scores = list[float]()
    for row in rows:
        logprobs = model(torch.tensor([row.ids])).logits[0].log_softmax(dim=-1)
        scores += [logprobs[place, row.ids[place + 1]].item() for place in said(row)]
    return _perplexity(scores)


def _perplexity(logprobs: Iterable[float]) -> float:
    scores = list(logprobs)
    return math.exp(-sum(scores) / len(scores))


@contextmanager
def demo_engine(kind: str) -> Iterator[Engine]:
    """Open the demo model, quantised."""
    if kind == SMOOTHED:
        prompts = [row.ids for row in conversations("train", 264)]
        with smoothed("demo", prompts, "auto") as source, Engine.from_pretrained(source, max_num_seqs=64) as engine:
            yield engine
        return
    settings = {"kv_cache_dtype": "int8"} if kind == INT8_KV else {"quantization": kind}
    with Engine.from_pretrained("demo", max_num_seqs=64, **settings) as engine:
        yield engine


def right_answers(engine: Engine, num_questions: int) -> Counter[str]:
    """Count questions and right answers of the demo model: of all tasks, of sums, of capitals."""
    params = SamplingParams(max_tokens=LONGEST_ANSWER, temperature=0.0)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL_DIR)

    def ask(prompts: list[str]) -> list[str]:
        token_ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        return [output.outputs[0].text for output in engine.generate(token_ids, params, show_progress=False)]

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
    parser.add_argument("--questions", type=int, default=500, help="of a task and form; 0 leaves answers out")
    parser.add_argument("--conversations", type=int, default=1056, help="of each split; 0 leaves the perplexity out")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=tuple(SHAPES))
    given = parser.parse_args()
    rows = []
    for kind in given.kinds:
        for name in given.shapes:
            if kind != "none" and not (kind == SMOOTHED and name in NOT_CONVERTED):
                error, same = logit_error(name, kind)
                others = f"{logit_error(name, kind, False)[0]:.2%}" if kind in QUANTIZERS else ""
                rows.append([kind, name, f"{error:.2%}", f"{same:.1%} of 512", others])
    print(markdown(["scheme", "random model", "error of logits", "same largest logit", "with the embedding as it is"],
                   rows), flush=True)
    asked = {split: conversations(split, given.conversations) for split in SPLITS if given.conversations}
    rows = [["transformers", *(f"{perplexity_of_transformers(one):.4f}" for one in asked.values())]] if asked else []
    for kind in given.kinds if asked or given.questions else ():
        with demo_engine(kind) as engine:
            row = [kind, *(f"{perplexity(engine, one):.4f}" for one in asked.values())]
            if given.questions:
                counts = right_answers(engine, given.questions)
                row += [f"{counts[f'{one} right']:,} of {counts[f'{one} asked']:,}" for one in ASKED]
        rows.append(row)
    heads = [f"perplexity, {name} ({sum(len(said(row)) for row in one):,} tokens)" for name, one in asked.items()]
    print()
    print(markdown(["demo model", *heads, *(f"{one} right" for one in ASKED if given.questions)], rows))


if __name__ == "__main__":
    main()
