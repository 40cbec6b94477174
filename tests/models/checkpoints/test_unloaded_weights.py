"""Models that transformers has filled with random numbers, since the files have other names, are not taken."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from pagedcore import Engine
from pagedcore.errors import InvalidConfig
from support.families import tiny_model
from support.wrappers import tiny_wrapper

SMALL: dict[str, Any] = {"num_kv_blocks": 8, "max_num_seqs": 2, "max_num_batched_tokens": 32}


def take(model: Any, **settings: Any) -> None:
    Engine.from_pretrained(model, **SMALL, **settings).close()


@pytest.mark.parametrize(("kind", "text"), [("gemma3", "Gemma3ForCausalLM"), ("mistral3", "MistralForCausalLM")])
def test_a_class_of_text_loaded_from_a_wrapper_is_refused(
    kind: str, text: str, tmp_path: Path
) -> None:
    """transformers finds no tensor of that name, logs it and goes on; the message names what to give instead."""
    tiny_wrapper(kind).save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=rf"weights are random numbers.*{text}.*directory of the files instead"):
        take(getattr(transformers, text).from_pretrained(tmp_path, dtype=torch.bfloat16))


def test_one_weight_that_is_missing_is_enough(tmp_path: Path) -> None:
    """The output layer of a model whose files have none."""
    tiny_model("llama").model.save_pretrained(tmp_path)
    with pytest.raises(InvalidConfig, match=r"1 of its weights are random numbers, lm_head.weight"):
        take(transformers.LlamaForCausalLM.from_pretrained(tmp_path))


def replace_head(model: Any) -> Any:
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.detach().clone())
    return model


def write_head(model: Any) -> Any:
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def resize(model: Any) -> Any:
    model.resize_token_embeddings(230)
    return model


@pytest.mark.parametrize(("part", "change"), [
    ("model", replace_head), ("model", write_head), ("", resize), ("", copy.deepcopy),
    ("", lambda model: model.bfloat16()), ("", lambda model: type(model)(model.config)), ("", lambda model: model),
], ids=["replaced", "written", "resized", "copied", "converted", "of its configuration", "loaded"])
def test_other_models_are_taken(part: str, change: Callable[[Any], Any], tmp_path: Path) -> None:
    """What a caller set, and what transformers makes of a model that was loaded."""
    tiny_model("llama").get_submodule(part).save_pretrained(tmp_path)
    take(change(transformers.LlamaForCausalLM.from_pretrained(tmp_path)))


@pytest.mark.parametrize("family", ["mixtral", "gpt2", "qwen2"])
def test_names_that_transformers_changes_are_known(family: str, tmp_path: Path) -> None:
    """Experts that files have one by one, and a model saved without its prefix."""
    model = tiny_model(family, **({"tie_word_embeddings": True} if family == "qwen2" else {}))
    (model.base_model if family == "gpt2" else model).save_pretrained(tmp_path)
    take(copy.deepcopy(transformers.AutoModelForCausalLM.from_pretrained(tmp_path)))
    take(transformers.AutoModelForCausalLM.from_pretrained(tmp_path))


def test_llama_4_finds_its_weights_in_a_wrapper(tmp_path: Path) -> None:
    """It is the one class of text that does."""
    tiny_wrapper("llama4").save_pretrained(tmp_path)
    take(transformers.Llama4ForCausalLM.from_pretrained(tmp_path))
