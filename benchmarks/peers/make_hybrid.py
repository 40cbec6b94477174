"""Writes a hybrid model of random bfloat16 weights, with a tokenizer, and llama.cpp's files of it.

    python make_hybrid.py lfm2|qwen3_5 OUT_DIR [LLAMA_CPP_SOURCE]

The shapes are those of LFM2-350M and of Qwen3.5-0.8B. With llama.cpp's sources, its own converter writes
``model-bf16.gguf`` and ``model-q8_0.gguf`` beside the weights; it needs sentencepiece and PyYAML beside pagedcore.
"""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import torch
from make_model import write_tokenizer

sys.path.append(str(Path(__file__).resolve().parents[1]))

from recurrent import shape_of

#: Layers of Qwen3.5-0.8B, and its vocabulary.
LAYERS, VOCABULARY = 24, 248320
#: llama.cpp's names of the ways in which these models split text.
SPLITS = {"lfm2": "lfm2", "qwen3_5": "qwen35"}


def write_weights(shape: str, out: Path) -> None:
    """Write configuration and weights."""
    from transformers import AutoModelForCausalLM

    config = shape_of(shape, LAYERS)
    if shape == "qwen3_5":
        config.vocab_size = VOCABULARY
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(out)


def fit_tokenizer(out: Path) -> None:
    """Give the special tokens numbers that are in the vocabulary."""
    path = out / "tokenizer.json"
    given = json.loads(path.read_text())
    for number, token in enumerate(given["added_tokens"]):
        token["id"] = len(given["model"]["vocab"]) + number
    path.write_text(json.dumps(given, ensure_ascii=False))
    settings = out / "tokenizer_config.json"
    given = json.loads(settings.read_text())
    del given["added_tokens_decoder"]
    given["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.write_text(json.dumps(given))


def convert(shape: str, source: Path, out: Path) -> None:
    """Run llama.cpp's converter, which knows ways to split text by what they make of a sample, and does not know ours.
    """
    sys.path[:0] = [str(source), str(source / "gguf-py")]
    from conversion import base

    for one in vars(base).values():
        if isinstance(one, type) and "get_vocab_base_pre" in vars(one):
            one.get_vocab_base_pre = lambda *_: SPLITS[shape]
    for kind in ("bf16", "q8_0"):
        sys.argv = ["convert", str(out), "--outfile", str(out / f"model-{kind}.gguf"), "--outtype", kind]
        # Why: transformers' class has no layers that guess, which the converter looks for.
        sys.argv += ["--no-mtp"] if shape == "qwen3_5" else []
        runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    directory = Path(sys.argv[2])
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / "model.safetensors").exists():
        write_weights(sys.argv[1], directory)
    write_tokenizer(directory)
    fit_tokenizer(directory)
    if len(sys.argv) > 3:
        convert(sys.argv[1], Path(sys.argv[3]), directory)
