"""Writes the benchmark's model: the shape of Qwen2.5-0.5B with random bfloat16 weights, and a tokenizer that fits.

    python make_model.py OUT_DIR
"""

from __future__ import annotations

import json
import pathlib
import random
import sys
from collections.abc import Iterator

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LAYERS, HIDDEN, HEADS, KV_HEADS, INTERMEDIATE, VOCABULARY = 24, 896, 14, 2, 4864, 151936
SPECIAL = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645}
#: Pieces the tokenizer learns; the special tokens come after.
LEARNED = 4093
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def corpus(lines: int = 30000) -> Iterator[str]:
    """Yield lines of made-up words with a Zipf-like spread: enough to learn merges from."""
    rng = random.Random(7)
    syllables = [c + v + t for c in "bcdfghjklmnprstvwz" for v in "aeiou" for t in ("", "n", "r", "s")]
    words = ["".join(rng.choice(syllables) for _ in range(rng.randint(1, 3))) for _ in range(9000)]
    weights = [1.0 / (i + 5) for i in range(len(words))]
    for _ in range(lines):
        yield " ".join(rng.choices(words, weights, k=12)) + rng.choice([".", "?", "!", ", 42"])


def write_tokenizer(out: pathlib.Path) -> None:
    """Train and write a byte-level BPE tokenizer with the special tokens at the model's ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(corpus(), trainer)
    data = json.loads(tokenizer.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    data["added_tokens"] = [{"id": number, "content": text, **flags} for text, number in SPECIAL.items()]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in data["model"]["merges"]]
    (out / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False))
    (out / "vocab.json").write_text(json.dumps(data["model"]["vocab"], ensure_ascii=False))
    (out / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n"
    )
    settings = {
        "tokenizer_class": "Qwen2Tokenizer", "model_max_length": 32768, "bos_token": None, "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>", "unk_token": None, "add_prefix_space": False, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "chat_template": template,
        "added_tokens_decoder": {str(number): {"content": text, **flags} for text, number in SPECIAL.items()},
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def write_weights(out: pathlib.Path) -> None:
    """Write random weights, the same for everybody."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).bfloat16()

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, HIDDEN), "model.norm.weight": ones.clone()}
    kv_size = KV_HEADS * HIDDEN // HEADS
    for number in range(LAYERS):
        layer = f"model.layers.{number}."
        tensors[layer + "input_layernorm.weight"] = ones.clone()
        tensors[layer + "post_attention_layernorm.weight"] = ones.clone()
        for name, rows in (("q", HIDDEN), ("k", kv_size), ("v", kv_size)):
            tensors[f"{layer}self_attn.{name}_proj.weight"] = normal(rows, HIDDEN)
            tensors[f"{layer}self_attn.{name}_proj.bias"] = normal(rows)
        tensors[layer + "self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        tensors[layer + "mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[layer + "mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[layer + "mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})


def write_config(out: pathlib.Path) -> None:
    """Write the configuration of Qwen2.5-0.5B."""
    tokens = {"bos_token_id": 151643, "eos_token_id": 151645, "pad_token_id": 151643}
    config = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "initializer_range": 0.02,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_cache": True, "use_sliding_window": False,
        "sliding_window": 32768, "max_window_layers": LAYERS, "attention_dropout": 0.0, "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "intermediate_size": INTERMEDIATE, "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768, "rope_theta": 1e6, **tokens,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps({**tokens, "do_sample": False}, indent=1))


if __name__ == "__main__":
    directory = pathlib.Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    write_weights(directory)
    write_config(directory)
    write_tokenizer(directory)
