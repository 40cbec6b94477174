"""Directories of tiny text embedders, as sentence-transformers writes them, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors

from support.families import tiny_model
from support.text_builders import BUILDERS

TEXTS = [
    "the quick brown fox", "jumps over the lazy dog and on and on and on", "a", "naïve café", "don't stop . ok , yes ?",
    "the quick brown fox jumps over the quick brown fox jumps over the quick brown fox", "Größe und Straße",
]
NAMES = "sentence_transformers.models."


def write_embedder(
    directory: Path, *, family: str = "qwen3", pooling: str = "pooling_mode_lasttoken", has_head: bool = False,
    normalizes: bool = True, prompts: dict[str, str] | None = None, more: dict[str, Any] | None = None,
    includes_prompt: bool = True, appends: bool = True, **changes: Any,
) -> Any:
    """Write a directory and return the model without its head, in float32.

    Args:
        directory: is made.
        family: of ``support.families``.
        pooling: the flag of ``1_Pooling/config.json`` that is set.
        has_head: whether the files are those of a model for completions; else they have no output layer, and names
            without "model.", as those of Qwen3-Embedding and E5-Mistral.
        normalizes: whether ``modules.json`` ends with Normalize.
        prompts: of ``config_sentence_transformers.json``.
        more: further fields of that file.
        includes_prompt: of the pooling.
        appends: whether the tokenizer appends its end token to a text.
        **changes: fields of the configuration.
    """
    tokenizer = BUILDERS["byte_level"]()
    if appends:
        end = tokenizer.token_to_id("<eos>")
        tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", end)])
    model = tiny_model(family, vocab_size=tokenizer.get_vocab_size(), **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape) * 0.3
    body = model if has_head else model.base_model
    body.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>",
                                  "pad_token": "<eos>", "model_max_length": 512, "padding_side": "left"},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{NAMES}Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{NAMES}Pooling"},
            *([{"idx": 2, "name": "2", "path": "2_Normalize", "type": f"{NAMES}Normalize"}] if normalizes else []),
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": model.config.hidden_size, pooling: True,
                                  "include_prompt": includes_prompt},
        "sentence_bert_config.json": {"max_seq_length": 100, "do_lower_case": False},
        "config_sentence_transformers.json": {"prompts": prompts or {}, "default_prompt_name": None, **(more or {})},
    }
    (directory / "1_Pooling").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return model.base_model


def change_file(path: Path, **changes: Any) -> None:
    """Change fields of a file of JSON."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
