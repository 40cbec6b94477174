"""Directories of tiny rerankers that answer yes or no, as sentence-transformers writes them, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.families import tiny_model
from support.text_builders import BUILDERS

#: As published ones have it: an instruction, the query and the document behind it.
TEMPLATE = (
    "{%- set task = messages | selectattr('role', 'eq', 'system') | map(attribute='content') | first"
    " | default('the quick brown fox') -%}\n"
    "<|im_start|>lazy dog\n<Instruct>: {{ task }}\n<Query>: "
    "{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}\n<Document>: "
    "{{ messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first }}<|im_end|>"
    "{% if add_generation_prompt %}\n<|im_start|>over{% endif %}"
)
NAMES = "sentence_transformers."
WAY = {"method": "forward", "method_output_name": "logits"}


def write_reranker(
    directory: Path, *, family: str = "qwen3", template: str | None = TEMPLATE, head: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None, prompts: dict[str, Any] | None = None, **changes: Any,
) -> Any:
    """Write a directory and return the model, in float32.

    Args:
        directory: is made.
        family: of ``support.families``.
        template: the tokenizer's chat template.
        head: what ``1_LogitScore/config.json`` has; by default two tokens.
        limits: fields of ``sentence_bert_config.json``.
        prompts: fields of ``config_sentence_transformers.json``.
        **changes: fields of the configuration.
    """
    tokenizer = BUILDERS["byte_level"]()
    model = tiny_model(family, vocab_size=tokenizer.get_vocab_size(), **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * (0.3 if parameter.ndim == 1 else 0.05)
    model.save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    files: dict[str, Any] = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>",
                                  "pad_token": "<eos>", "model_max_length": 256,
                                  **({} if template is None else {"chat_template": template})},
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": f"{NAMES}base.modules.transformer.Transformer"},
            {"idx": 1, "name": "1", "path": "1_LogitScore",
             "type": f"{NAMES}cross_encoder.modules.logit_score.LogitScore"},
        ],
        "1_LogitScore/config.json": {"true_token_id": 70, "false_token_id": 80} if head is None else head,
        "sentence_bert_config.json": {"transformer_task": "text-generation", "max_seq_length": 120,
                                       "modality_config": {"text": WAY, "message": {**WAY, "format": "flat"}},
                                       "module_output_name": "causal_logits", **(limits or {})},
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", "prompts": {}, **(prompts or {})},
    }
    (directory / "1_LogitScore").mkdir()
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return model
