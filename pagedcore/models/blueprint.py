"""What can be known of a model before its weights are there: the shapes of its K and V, and how large it is.

Owns a model tree on torch's device "meta", which has shapes and no memory, and asks it the same question as a loaded
model: two tokens are sent through and every attention call is recorded. So the sums are those of the engine, even
where architectures disagree on what a field of their configuration means.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.schemes import SCHEMES
from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.attention.recurrences import kept_layers
from pagedcore.models.attention.windows import WindowSplit
from pagedcore.models.checkpoints.fp8 import FP8
from pagedcore.models.checkpoints.pretrained import as_refusals, computing_dtype
from pagedcore.models.checkpoints.quantized import (
    StoredFormat,
    config_of,
    files_of,
    quick_tree,
    replace_weights,
    stored_format,
)
from pagedcore.models.checkpoints.quick_start import NotQuick
from pagedcore.models.decoders.fused_match import NotFused, recognise
from pagedcore.models.families import model_facts, supported_models
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.models.layouts import kv_shapes, layout_maker, redirect_attention, requirements_of
from pagedcore.models.linears.float8_linear import Float8Linear, keep_float8
from pagedcore.models.linears.int8_embedding import FIELD, embedding_bytes, kind_of_embedding
from pagedcore.models.linears.packed_experts import matrices_of_experts
from pagedcore.models.linears.packed_linear import can_pack, matrix_of
from pagedcore.models.linears.schemes import QuantizedLinears
from pagedcore.models.linears.shared_embedding import can_share
from pagedcore.models.linears.stored_weight import stored_weights
from pagedcore.protocols import AttentionFactory
from pagedcore_kernels.layout import BlockLayout
from pagedcore_kernels.state_layout import StateLayout


@dataclass(frozen=True, slots=True)
class Blueprint:
    """A model without its weights."""

    layout: BlockLayout
    """Of blocks as an engine would make them, one shape per layer that keeps K and V."""
    state_bytes: int
    """Of what recurrent layers keep of a sequence, at one position; 0: there are none."""
    windows: WindowSplit | None
    """Which layers can have window blocks; ``None``: none can."""
    max_model_len: int
    num_parameters: int
    """Numbers that the model was trained for; a matrix in two places counts once."""
    weight_bytes: int
    """Bytes of the weights as an engine keeps them: a matrix in two places is arranged, and held, for each, but for an
    embedding that reads its rows from the output layer's product."""


def read_blueprint(
    source: str | os.PathLike[str], attention_factory: AttentionFactory, settings: EngineConfig
) -> Blueprint:
    """Read a model's configuration, build its tree without memory, and see what its attention keeps.

    Args:
        source: a directory, a GGUF file, or a name on the hub if there is no such directory.
        attention_factory: its preferred block size counts, unless ``settings`` have one.
        settings: number formats, block size, and trust.

    Raises:
        ModelNotSupported: the architecture cannot run here, or its shapes depend on the weights.
        InvalidConfig: there is no such model, or no such KV with this attention.
    """
    make_layout = layout_maker(attention_factory, settings.kv_cache_dtype)
    is_on_gpu = settings.device.startswith("cuda")
    wanted = "bfloat16" if is_on_gpu and settings.dtype == "auto" else settings.dtype
    stored, dtype = stored_format(os.fspath(source)), computing_dtype(wanted, "cuda" if is_on_gpu else "cpu")
    model = read_tree(os.fspath(source), stored, dtype, settings.trust_remote_code)[0]
    config = model.config
    try:
        layers, _, states = attention_of(model)
        shapes = kv_shapes(layers)
    except RuntimeError as error:  # what torch raises for an operation that needs numbers
        raise ModelNotSupported(
            f"model: what {config.model_type!r} computes depends on its weights, so that the configuration does not "
            "show its size. Start an engine and look at Engine.stats().kv_bytes."
        ) from error
    needs, parameters = requirements_of(attention_factory), list(model.parameters())
    # Why all: what is chosen by product takes what int8 rows take, but for 4 bytes of an output.
    schemes = {name: QuantizedLinears(one) for name, one in SCHEMES.items()}
    scheme, kind = schemes.get(settings.quantization), ""
    if is_on_gpu:
        scheme = None
    elif stored is not None and stored.scheme != "none":
        # Why else an estimate: how many scales a layer has, some formats say in their files only.
        scheme, kind = schemes.get(stored.scheme), str(getattr(config, FIELD, ""))
        with as_refusals(os.fspath(source)):
            if (files := files_of(os.fspath(source), stored, model, dtype)) is not None:
                replace_weights(model, files, stored, dtype)
                scheme = None
    elif scheme is not None:
        kind = kind_of_embedding(model, scheme)
    return Blueprint(
        layout=make_layout(settings.block_size or needs.preferred_block_size(dtype), dtype, shapes),
        state_bytes=0 if states is None else states.state_bytes,
        windows=WindowSplit.of(layers, attention_factory) if states is None else None,
        max_model_len=model_facts.max_model_len(config),
        num_parameters=sum(parameter.numel() for parameter in parameters),
        weight_bytes=_bytes_on_gpu(os.fspath(source), stored, model, dtype) if is_on_gpu
                     else _weight_bytes(model, scheme, kind, layers) if can_pack(dtype)
                     else sum(parameter.nbytes for parameter in parameters),
    )


def _weight_bytes(
    model: Any, scheme: QuantizedLinears | None, kind: str, layers: Mapping[int, AttentionLayer]
) -> int:
    """Sum up what the modules hold, each its own, after ``scheme`` quantised linear layers and experts, and with an
    embedding of a kind that ``embedding.py`` names, or that reads its rows from the output layer's product.
    """
    total = sum(int(one.nbytes) for module in model.modules() for one in module.parameters(recurse=False))
    total += sum(weight.num_bytes for module in model.modules() for weight in stored_weights(module))
    if kind:
        table = model.get_input_embeddings().weight
        total += embedding_bytes(kind, *table.shape) - int(table.nbytes)
    elif scheme is None and _shares_rows(model, layers):
        total -= int(model.get_input_embeddings().weight.nbytes)
    if scheme is None:
        return total
    kept = kept_layers(model)
    for module in model.modules():
        weight = None if module in kept else matrix_of(module)
        for one in matrices_of_experts(module) if weight is None else (weight[None],):
            count, num_outputs, num_inputs = one.shape
            total += count * scheme.weight_bytes(num_outputs, num_inputs, one.dtype) - one.nbytes
    return total


def _bytes_on_gpu(source: str, stored: StoredFormat | None, model: Any, dtype: torch.dtype) -> int:
    """Sum up what the modules hold where FP8 is multiplied, as far as its files are here, and all else is numbers."""
    if isinstance(stored, FP8):
        stored = replace(stored, may_stay=True)
        with as_refusals(source):
            if (files := files_of(source, stored, model, dtype)) is not None:
                replace_weights(model, files, stored, dtype)
                keep_float8(model)
    kept = [module for module in model.modules() if isinstance(module, Float8Linear)]
    decoded = [weight for module in model.modules() for weight in stored_weights(module)]
    return (sum(int(one.nbytes) for one in model.parameters()) + sum(one.num_bytes for one in decoded)
            + sum(one.weight.nbytes + one.scale.nbytes for one in kept))


def _shares_rows(model: Any, layers: Mapping[int, AttentionLayer]) -> bool:
    """Whether a model's embedding has no matrix of its own in an engine; see ``shared_embedding.py``."""
    try:
        recognise(model, layers)
    except NotFused:
        return False
    return can_share(model.get_input_embeddings(), model.get_output_embeddings())


def read_tree(
    source: str, stored: StoredFormat | None, dtype: torch.dtype, trust_remote_code: bool
) -> tuple[Any, Any]:
    """Return a model without memory, of modules of ours where an engine has these, and the number format of its files.

    Args:
        source: a directory, a GGUF file, or a name on the hub.
        stored: how its files hold it; ``None``: as numbers.
        dtype: number format of the weights.
        trust_remote_code: whether code shipped with the model may run.

    Raises:
        ModelNotSupported: the architecture cannot run here.
        InvalidConfig: there is no such model.
    """
    if Path(source).is_dir():
        # Why: transformers' modules bring torch's compiler, whose import takes two seconds.
        with suppress(NotQuick):
            quick = quick_tree(source, stored, dtype)
            _share_one_number(quick)
            return quick, quick.config.dtype
    config = config_of(source, stored, trust_remote_code)
    # Why first: building the tree makes the configuration's format the tree's.
    number_format = config.dtype
    with as_refusals(source):
        return tree_of(config, dtype, trust_remote_code), number_format


def _share_one_number(model: ForCausalLM) -> None:
    """Let all weights be views of one number. Why not "meta": computing there imports torch's compiler too."""
    views: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, one in list(module.named_parameters(recurse=False)):
            view = views.setdefault(id(one), nn.Parameter(one.new_empty(1, device="cpu").expand(one.shape), False))
            setattr(module, name, view)


def attention_of(model: Any) -> tuple[dict[int, AttentionLayer], int, StateLayout | None]:
    """Send the attention of a tree of ``read_tree`` to the current step; returns and raises as ``redirect_attention``.
    """
    with nullcontext() if isinstance(model, ForCausalLM) else torch.device("meta"), torch.inference_mode():
        return redirect_attention(model)


def tree_of(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Return a model of transformers without memory.

    Raises:
        ModelNotSupported: it has modules that cannot run here.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code).eval()
    supported_models.check_modules(model, str(config.model_type))
    for module in model.modules():
        if type(module).__name__.endswith("Experts"):
            # Why: which expert a token goes to depends on numbers, and attention sees no more than the result's shape.
            module.forward = lambda rows, *_, **__: torch.zeros_like(rows)
    return model
