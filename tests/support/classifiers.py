"""Directories of tiny classifiers of sequences, as transformers writes them, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.families import tiny_model
from support.text_builders import BUILDERS

LABELS = ["joy", "anger", "neither"]


def write_classifier(
    directory: Path, *, family: str = "qwen3", labels: list[str] | None = None, template: str | None = None,
    **changes: Any,
) -> Any:
    """Write a directory and return the model of transformers' own class, in float32.

    Args:
        directory: is made.
        family: of ``support.families``.
        labels: names of the classes.
        template: the tokenizer's chat template.
        **changes: fields of the configuration.
    """
    from transformers import AutoModelForSequenceClassification

    tokenizer, names = BUILDERS["byte_level"](), LABELS if labels is None else labels
    config = tiny_model(family, vocab_size=tokenizer.get_vocab_size()).config
    config.id2label, config.label2id = dict(enumerate(names)), {name: place for place, name in enumerate(names)}
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.05)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "pad_token": "<eos>",
                "model_max_length": 256, **({} if template is None else {"chat_template": template})}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return model
