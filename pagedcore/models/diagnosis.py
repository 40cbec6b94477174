"""How an engine would load and compute a model on this CPU, and why, from its configuration and the heads of its files.

Owns the questions that are answered by loading otherwise: which code reads the files, which decoder computes, whether
results can be the same bits under every schedule. The self-test and the probe of products at load have the last word.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from pagedcore.errors import show
from pagedcore.generation_defaults import GenerationDefaults, describe
from pagedcore.models.blueprint import attention_of, read_tree
from pagedcore.models.checkpoints import quantized
from pagedcore.models.checkpoints.auto_int8 import name_of_head
from pagedcore.models.checkpoints.classifier_files import is_classifier, labels_of
from pagedcore.models.checkpoints.fp8 import FP8
from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.checkpoints.model_path import is_gguf
from pagedcore.models.checkpoints.packed_model import Wanted, packed_file, why_not_used
from pagedcore.models.checkpoints.pair_files import NO_ROWS, heads_of
from pagedcore.models.checkpoints.pretrained import as_refusals, computing_dtype, find_file
from pagedcore.models.checkpoints.quick_start import why_not_quick
from pagedcore.models.checkpoints.sentence_files import read_embedding_defaults
from pagedcore.models.checkpoints.shipped_code import ships_code
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.checkpoints.weight_files import has_adapter
from pagedcore.models.decoders.fused_match import NotFused, recognise
from pagedcore.models.families.model_facts import configured_len, eos_token_ids, max_model_len, num_short_tokens
from pagedcore.models.families.wrappers import WHOLE, leaves_layers_out
from pagedcore.models.linears.packed_experts import left_alone
from pagedcore.models.linears.packed_products import shows_rows
from pagedcore.text_head import TextHead
from pagedcore.tokenizer.other_files import missing_packages, tokenizer_file
from pagedcore.tokenizer.quick_tokenizer import read_tokenizer


def diagnose(source: str | os.PathLike[str], trust_remote_code: bool = False) -> dict[str, str]:
    """Return what happens to a model with default settings, as one sentence for each question.

    Args:
        source: a directory, a GGUF file, or a name on the hub; no weight is read.
        trust_remote_code: whether code shipped with the model may run.

    Raises:
        ModelNotSupported: the model cannot run here.
        InvalidConfig: there is no such model.
    """
    name, directory = os.fspath(source), Path(source)
    stored = quantized.stored_format(name)
    dtype = computing_dtype("auto")
    model, number_format = read_tree(name, stored, dtype, trust_remote_code)
    config = model.config
    files = _files_of(name, stored, dtype, trust_remote_code)
    whole = getattr(config, WHOLE, None)
    facts = {
        "architecture": f"{config.model_type}, the language model in {whole}; images and audio are left out" if whole
                        else str(config.model_type),
        "files": files,
        "tokenizer": _reader_of_tokenizer(directory),
        "quantisation": _quantisation(name, stored),
        "number format": _format_of(number_format, dtype),
        "context": _context_of(config),
    }
    layers, vocab_size, states = attention_of(model)
    decoder, others = "fused kernels", left_alone(model)
    try:
        recognise(model, layers)
    except NotFused as why:
        decoder = f"transformers' modules with packed products: {why}"
    if not trust_remote_code and ships_code(directory):
        facts["code"] = "that which is shipped with it (auto_map) does not run: all tensors fit transformers' own class"
    if has_adapter(directory):
        facts["adapter"] = "the one beside the model is for requests that name it, where adapters= names its directory"
    sampling = _sampling(name, vocab_size, eos_token_ids(model))
    drafts = "none, as results depend on the schedule" if others else "yes, on a CPU"
    shows_rows_of_head = _shows_rows(name, dtype, model)
    texts = {} if is_gguf(name) else _texts(name, config, vocab_size, trust_remote_code, shows_rows_of_head)
    adapters = ("none: its layers have other numbers than those of the model that it is a part of"
                if leaves_layers_out(str(whole)) else "on a CPU, one for each request that names it (lora=)")
    if states is not None:
        facts["states"] = (f"{states.state_bytes:,} bytes for each sequence, whatever its length, in "
                           f"{len(states.layers)} recurrent layers")
    return facts | {"decoder": decoder, "schedule": _schedule(others), "speculation": drafts, "adapters": adapters,
                    "sampling": sampling} | texts


def _texts(
    source: str, config: Any, vocab_size: int, trust_remote_code: bool, shows_rows_of_head: bool
) -> dict[str, str]:
    """Say what a model makes of texts beside completions, as its files have it."""
    known, labels = read_embedding_defaults(source, trust_remote_code=trust_remote_code), tuple[str, ...]()
    embeds = f"no: {known.refusal}" if known.refusal else (
        f"yes: pooling {known.pooling!r}, " + ("of length 1" if known.normalize else "of any length"))
    head = None
    if is_classifier(vars(config).get("architectures")):
        labels = labels_of(config)
        head = TextHead(weight=np.zeros((len(labels), 1)), labels=labels)
    # Why such a layer: which tokens count is asked, and no weight is read.
    model = SimpleNamespace(config=config, get_output_embeddings=lambda: nn.Linear(1, vocab_size, bias=False))
    pairs = heads_of(source, model, head)[1]
    refusal = pairs.refusal or ("" if shows_rows_of_head or head else NO_ROWS)
    shown = ", ".join(map(show, labels[:3])) + (", ..." if len(labels) > 3 else "")
    return {
        "embeds": embeds,
        "classifies": f"yes: {len(labels)} class{'es' * (len(labels) > 1)}, {shown}; it generates nothing"
                      if labels else "no",
        "reranks": f"no: {refusal}" if refusal else
                   "yes: by its class" if labels else "yes: by the logits of the tokens that its LogitScore names",
    }


def _shows_rows(source: str, dtype: torch.dtype, model: Any) -> bool:
    """Whether the rows of the output layer are at hand: in all files but packed ones of some kinds."""
    packed = packed_file(source)
    if packed is None or why_not_used(packed, source, Wanted(dtype, False, "none")):
        return True
    products = packed.header.get("products")
    return isinstance(products, dict) and shows_rows(products.get(name_of_head(model)))


def _files_of(
    source: str, stored: quantized.StoredFormat | None, dtype: torch.dtype, trust_remote_code: bool
) -> str:
    """Say who reads the weights, or that packed ones are mapped."""
    not_used = ""
    if (packed := packed_file(source)) is not None:
        if not (why := why_not_used(packed, source, Wanted(dtype, False, "none"))):
            return "packed weights, which are mapped and shared"
        not_used = f"; its packed weights are not used: {why}"
    reason = "names on the hub are its to find"
    if stored is not None:
        reason = quantized.why_not_quick(source, stored)
    elif Path(source).is_dir():
        reason = why_not_quick(Path(source), trust_remote_code)
    files = "read without transformers" if not reason else f"loaded by transformers: {reason}"
    return ("mapped, for the modules of transformers" if isinstance(stored, GGUF) else files) + not_used


def _quantisation(source: str, stored: quantized.StoredFormat | None) -> str:
    if stored is None:
        return "none"
    if isinstance(stored, FP8) and any(Path(source).glob("*.safetensors")):
        with as_refusals(source):
            if not stored.is_in(TensorFiles(Path(source))):
                return "none: the configuration names FP8, and no weight in the files is"
    described = f": {stored.described}" if isinstance(stored, GGUF | FP8) else ", as the files have it"
    return stored.scheme + described


def _reader_of_tokenizer(directory: Path) -> str:
    if is_gguf(directory):
        return "made of the file's metadata, where their kind is known"
    if not directory.is_dir():
        return "loaded by transformers"
    if missing := missing_packages(name := tokenizer_file(directory)):
        return f"none: {name} takes {' and '.join(missing)}, and prompts are token ids"
    if not name and not any(directory.glob("tokenizer*")):
        return "none: prompts are token ids"
    return "loaded by transformers" if read_tokenizer(directory) is None else "read without transformers"


def _sampling(source: str, vocab_size: int, ends: frozenset[int]) -> str:
    path = None if is_gguf(source) else find_file(source, "generation_config.json")
    try:
        fields = {} if path is None else dict(json.loads(path.read_bytes()))
        if is_gguf(source):
            fields = {"suppress_tokens": GGUF(source).suppressed}
    except (OSError, ValueError, TypeError, RecursionError):
        return "generation_config.json is damaged"
    own: Any = fields.get("eos_token_id")
    defaults = GenerationDefaults.of(fields, vocab_size, ends.union(own if isinstance(own, list) else [own]))
    held = describe(defaults.as_mapping) or "nothing"
    others = f"; not applied: {', '.join(defaults.unread)}" if defaults.unread else ""
    return f"requests that do not say otherwise have of the model: {held}{others}"


def _format_of(stored: object, dtype: torch.dtype) -> str:
    old, new = str(stored).removeprefix("torch."), str(dtype).removeprefix("torch.")
    if old == new or stored is None:
        return f"{new}, in which this processor is fastest"
    rounded = "exactly" if dtype == torch.float32 else "rounded"
    return f"{new}, in which this processor is fastest; the files have {old}: {rounded}"


def _context_of(config: Any) -> str:
    length, configured, short = max_model_len(config), configured_len(config), num_short_tokens(config)
    if short is not None:
        return f"{length:,} tokens; with its {short + 1:,}th token a sequence is computed again, by the long factors"
    if length >= configured:
        return f"{length:,} tokens"
    return f"{length:,} of {configured:,} tokens: beyond, its angles follow the longest sequence of a whole batch"


def _schedule(others: tuple[str, ...]) -> str:
    if others:
        return f"results depend on it in their last bits: torch multiplies the matrices of {', '.join(others)}"
    return "results are the same bits whatever the schedule, if the probe at load confirms it"
