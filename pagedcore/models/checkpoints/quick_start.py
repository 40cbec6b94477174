"""Reads models of known architectures from a directory without transformers, whose import takes two seconds.

Owns the decision which directories these are: those in which every field of ``config.json`` is known and every tensor
of the safetensors files has the name, the shape and a format that the architecture has. Anything else, a damaged file
too, is left to transformers (``pretrained.py``), which knows more and whose errors say what is wrong. So nothing is
refused here, and a model that is read here computes as it would there, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.tensor_files import name_of_text
from pagedcore.models.checkpoints.weight_files import weight_files
from pagedcore.models.families import wrappers
from pagedcore.models.families.field_checks import (
    Check,
    is_anything,
    is_flag,
    is_positive,
    is_size,
    names_tokens,
)
from pagedcore.models.families.file_names import module_name
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.models.families.table import FAMILIES, Family
from pagedcore.models.families.tensor_shapes import EMBEDDING, EXPERT_COUNTS, Shapes, is_mixture, num_experts, shapes_of


class NotQuick(Exception):
    """A model that transformers has to load; the message says why."""


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


_FIELDS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
                     "num_hidden_layers", "num_key_value_heads", "vocab_size"), is_size),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), names_tokens),
    **dict.fromkeys(("_name_or_path", "architectures", "attention_dropout", "dtype", "initializer_range", "model_type",
                     "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype", "transformers_version",
                     "use_cache"), is_anything),
    "hidden_act": lambda value: value == "silu", "rms_norm_eps": is_positive, "tie_word_embeddings": is_flag,
}
"""What the fields of all architectures must be, ``None`` if they are not there."""
_KEPT: Final = (
    "attention_bias", "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "intermediate_size",
    "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pad_token_id", "rms_norm_eps", "tie_word_embeddings", "vocab_size",
)
"""What is read here or by a backend, beside an architecture's own fields."""
_ROPE: Final = {
    "default": {"rope_type", "rope_theta"},
    "linear": {"rope_type", "rope_theta", "factor"},
    "llama3": {"rope_type", "rope_theta", "factor", "high_freq_factor", "low_freq_factor",
               "original_max_position_embeddings"},
}
"""Parameters of each type of rotary embedding."""


def read_model(directory: Path, dtype: torch.dtype, *, trust_remote_code: bool = False) -> ForCausalLM:
    """Read a model.

    Args:
        directory: has config.json and safetensors.
        dtype: number format to convert weights to; weights that have it are mapped and not copied.
        trust_remote_code: whether code that the configuration names runs, which transformers does.

    Raises:
        NotQuick: transformers has to load it.
    """
    config, generation = read_config(directory, _not_run(trust_remote_code))
    with _weights(directory, config) as files:
        # Why cut: a wrapper's embedding may have rows more than the vocabulary.
        weights = {module_name(name): files[name][0].get_tensor(files[name][1])[:size].to(dtype)
                   for name, (size, *_) in shapes_of(config).items()}
    return ForCausalLM(config, generation, weights).eval()


def build_tree(directory: Path, dtype: torch.dtype, num_tensors: int, left_out: AbstractSet[str]) -> ForCausalLM:
    """Build the modules of a model whose weights have shapes and no memory (torch's "meta"): those of a quantised one.

    Args:
        directory: has config.json.
        dtype: number format of the weights.
        num_tensors: how many its files have.
        left_out: fields of config.json that say how weights are stored, which others read.

    Raises:
        NotQuick: transformers has to build it.
    """
    config, generation = read_config(directory, left_out)
    _require(not FAMILIES[config.model_type].has_experts, "it is a quantised mixture of experts")
    # Safety: layers that files do not have are found before anything of their number is made.
    _require(config.num_hidden_layers <= num_tensors, "its files lack tensors")
    shapes = shapes_of(config).items()
    weights = {module_name(name): torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes}
    return ForCausalLM(config, generation, weights).eval()


def why_not_quick(directory: Path, trust_remote_code: bool = False) -> str:
    """Return why ``read_model`` leaves a directory to transformers, or "" if it does not; no weight is read."""
    try:
        with _weights(directory, read_config(directory, _not_run(trust_remote_code))[0]):
            return ""
    except NotQuick as reason:
        return str(reason)


def _not_run(trust_remote_code: bool) -> frozenset[str]:
    """Return the field that names code, where that does not run: what is read here is known without it."""
    return frozenset() if trust_remote_code else frozenset({"auto_map"})


def read_config(directory: Path, left_out: AbstractSet[str] = frozenset()) -> tuple[_Config, SimpleNamespace]:
    """Return the configurations of a model and of its generation, as transformers would have them in what is read here.

    Args:
        directory: has config.json.
        left_out: as of ``build_tree``.

    Raises:
        NotQuick: as ``read_model``.
    """
    raw = {name: value for name, value in _read_json(directory / "config.json").items() if name not in left_out}
    is_part, whole = wrappers.is_wrapper(raw), raw.get("model_type")
    if is_part and (raw := wrappers.raw_text_config(raw) or {}):
        raw = {name: value for name, value in raw.items() if name not in left_out}
    # Why also of a part: its files may have all that generates, beside a head that is no language model's.
    named = raw.get("architectures") or [""]
    _require(isinstance(named, list) and not any("ForSequence" in str(one) or "ForToken" in str(one) for one in named),
             "its class has another head")
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None or not (is_part or raw.get("architectures") == [f"{family.classes}ForCausalLM"]):
        raise NotQuick(f"it is none of {', '.join(FAMILIES)}")
    # Rule: files have either name, and transformers makes it its own.
    if len(old := [name for name in EXPERT_COUNTS if name in raw]) == 1:
        raw[next((name for name in EXPERT_COUNTS if name in family.fields), old[0])] = raw.pop(old[0])
    fields = {**_FIELDS, **family.fields}
    for name in sorted({*raw, *fields}):
        is_known = name in fields and fields[name](raw.get(name))
        _require(is_known, f"{name} in its configuration is not known to be harmless")
    _require(family.special_tokens <= raw.keys(), "its configuration does not say which tokens are special")
    _require(raw["num_attention_heads"] % raw["num_key_value_heads"] == 0, "its heads form no groups")
    kept = {*_KEPT, *family.fields.keys() - family.replaced_fields} - {"head_dim"}
    config = _Config(**{name: raw.get(name) for name in sorted(kept)}, rope_parameters=_rope(raw, family))
    if is_part:
        setattr(config, wrappers.WHOLE, whole)
    config._attn_implementation = family.attention
    config.dtype = raw.get("dtype") or raw.get("torch_dtype")
    config.head_dim = raw.get("head_dim") or config.hidden_size // config.num_attention_heads
    _require(is_size(config.head_dim) and config.head_dim % 2 == 0, "head_dim is no size")
    _require(vars(config).get("num_experts_per_tok", 0) <= num_experts(config), "it chooses more experts than it has")
    _require_layers(config, raw, family)
    generation = directory / "generation_config.json"
    settings = {"eos_token_id": None, **(_read_json(generation) if generation.exists() else {})}
    _require(names_tokens(settings["eos_token_id"]), "its generation ends with unknown tokens")
    return config, SimpleNamespace(**settings)


def _require_layers(config: _Config, raw: Mapping[str, Any], family: Family) -> None:
    """Complete and check what the configuration says of single layers."""
    num_layers = config.num_hidden_layers
    if "layer_types" in family.replaced_fields:
        config.layer_types = ["full_attention"] * num_layers
        _require(raw.get("layer_types") in (None, config.layer_types), "its layers are of several types")
    for name in family.fields.keys() & {"layer_types", "no_rope_layers"}:
        _require(len(raw.get(name) or [0] * num_layers) == num_layers, f"{name} does not have an entry for each layer")
    if "sliding_attention" in (raw.get("layer_types") or ()):
        is_used = raw.get("use_sliding_window", True) and raw.get("sliding_window")
        _require(is_used, "its layers have windows of no size, or none that are used")
    turned = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    _require(0 < turned <= config.head_dim and turned % 2 == 0, "partial_rotary_factor is no part of a head")


def _rope(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    new, old = raw.get("rope_parameters"), raw.get("rope_scaling")
    _require(new is None or old is None, "its rotary embedding is described twice")
    given = new or old or {}
    _require(isinstance(given, dict), "its rotary embedding is no object")
    if family.has_rope_by_type:
        kinds = ("full_attention", "sliding_attention")
        _require(new is not None and given.keys() == {*kinds}, "its rotary embedding is not described by layer types")
        return {kind: _rope_of_one_kind(given[kind]) for kind in kinds}
    rope = {"rope_type": "default", "rope_theta": raw.get("rope_theta"), **given}
    if not family.may_turn_parts:
        return _rope_of_one_kind(rope)
    return _rope_of_one_kind({"partial_rotary_factor": 1.0, **rope}, {"partial_rotary_factor"})


def _rope_of_one_kind(rope: Any, others: AbstractSet[str] = frozenset()) -> dict[str, Any]:
    is_known = isinstance(rope, dict) and isinstance(rope.get("rope_type"), str)
    is_known = is_known and rope.keys() == _ROPE.get(rope["rope_type"], set()) | others
    _require(is_known and all(is_positive(rope[name]) for name in rope.keys() - {"rope_type"}),
             "its rotary embedding is of another kind")
    return dict(rope)


@contextmanager
def _weights(directory: Path, config: _Config) -> Iterator[dict[str, tuple[Any, str]]]:
    """Open the files of weights and yield the one that has each tensor, and its name there, when all are as they should
    be.
    """
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(safe_open(path, framework="pt")) for path in weight_files(directory)]
            own_name = name_of_text(directory)
            names = [(new, file, name) for file in files for name in file.keys() if (new := own_name(name))]  # noqa: SIM118
            holders = {new: (file, name) for new, file, name in names}
            _require(len(names) == len(holders), "a tensor is there twice")
            # Safety: layers or experts that files do not have are found before anything of their number is made.
            _require(config.num_hidden_layers <= len(holders), "its files lack tensors")
            num_mixtures = sum(is_mixture(config, number) for number in range(config.num_hidden_layers))
            _require(num_mixtures * num_experts(config) <= len(holders), "its files lack experts")
            shapes = _shapes_in_files(config)
            _require(holders.keys() == shapes.keys(), "its files have other tensors than the architecture")
            for name, shape in shapes.items():
                file, stored_name = holders[name]
                header = file.get_slice(stored_name)
                is_plain = tuple(header.get_shape()) == shape and header.get_dtype() in ("BF16", "F16", "F32")
                _require(is_plain, f"{name} has another shape or format")
        except ModelNotSupported as error:
            raise NotQuick(str(error)) from error
        except (OSError, RuntimeError, SafetensorError) as error:  # RuntimeError is torch's for a file not mapped
            raise NotQuick(f"its weights could not be read ({type(error).__name__})") from error
        yield holders


def _shapes_in_files(config: _Config) -> Shapes:
    shapes, num_spare = shapes_of(config), wrappers.num_spare_rows({"model_type": vars(config).get(wrappers.WHOLE)})
    rows, hidden = shapes[EMBEDDING]
    return {**shapes, EMBEDDING: (rows + num_spare, hidden)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise NotQuick(f"{path.name} could not be read ({type(error).__name__})") from error
    _require(isinstance(value, dict), f"{path.name} is no object")
    return dict(value)


def _require(is_known: object, reason: str) -> None:
    if not is_known:
        raise NotQuick(reason)
