"""Writes a model's directory again with quantised weights, in the format compressed-tensors, one tensor at a time.

Owns the plan of the file: the shapes of all tensors follow from the configuration, so that its header is written first
and every tensor goes to its place. The directory gets its name when it is complete, and its ``config.json`` after that:
one that was not finished does not load.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pagedcore.config.engine_config import EngineConfig
from pagedcore.config.schemes import AUTO_INT8, SCHEMES, listed
from pagedcore.convert.activations import load_model, rows_seen
from pagedcore.convert.calibration_set import read_calibration_set
from pagedcore.convert.gguf_source import GGUFSource
from pagedcore.convert.smoothing import Smoothing, find_smoothing
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig, ModelNotSupported, describe
from pagedcore.execution.memory_pages import FileMappings
from pagedcore.models.attention.recurrences import kept_layers
from pagedcore.models.checkpoints import auto_int8
from pagedcore.models.checkpoints.classifier_files import require_generator
from pagedcore.models.checkpoints.fp8 import FP8, FP8Files
from pagedcore.models.checkpoints.model_path import gguf_in, is_gguf
from pagedcore.models.checkpoints.packed_integers import num_words, pack
from pagedcore.models.checkpoints.pretrained import as_refusals, load_config, resolve_dtype
from pagedcore.models.checkpoints.product_rows import Read
from pagedcore.models.checkpoints.quantized import stored_format
from pagedcore.models.checkpoints.sentence_files import (
    FOLDER,
    LIMITS,
    MODULES,
    PROMPTS,
    modules_of,
    read_json,
)
from pagedcore.models.checkpoints.shipped_code import AUTO_MAP
from pagedcore.models.checkpoints.stored_experts import (
    expert_parts,
    layers_of_experts,
    require_last_experts,
    shapes_of_expert,
)
from pagedcore.models.checkpoints.tensor_files import FLOATS, TensorFiles
from pagedcore.models.families import supported_models
from pagedcore.models.families.file_names import file_name, renaming_of
from pagedcore.models.families.model_facts import is_named_headless, max_model_len
from pagedcore.models.families.wrappers import WHOLE
from pagedcore.models.linears.int8_embedding import FIELD, OF_HEAD, OWN_TABLE, kind_of_embedding
from pagedcore.models.linears.packed_linear import can_pack, holders_of_matrices
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.tokenizer.tokenizer import HFTokenizer
from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

_OTHER_FILES: Final = ("tokenizer*", "*.model", "vocab.*", "merges.txt", "*_map.json", "added_tokens.json",
                       "generation_config.json", "chat_template*", "LICENSE*")  # fmt: skip
"""What goes along: everything about text, and how to generate. Code does not."""
_SENTENCES: Final = (MODULES, LIMITS, PROMPTS)
"""So does what sentence-transformers says of vectors and of relevance, with the folders that it names."""
_FORMATS: Final = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int8: "I8",
                   torch.int32: "I32", torch.int64: "I64"}  # fmt: skip
_CONFIG: Final = "config.json"

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of the new file that are made of one tensor of the old."""

    source: str
    shape: tuple[int, ...]
    """Of the old tensor."""
    shapes: Shapes
    """The number formats and shapes of the new ones, by name."""
    make: Callable[[torch.Tensor], Tensors]


def convert(
    model: str, out: str | os.PathLike[str], *, quantization: str, dtype: str = "auto",
    calibration: str | os.PathLike[str] | None = None, keep_output_layer: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[str, ...]:
    """Write the model of a directory to another one, such that loading it computes the same bits as loading the first
    with ``quantization``, in the number format ``dtype``, without a calibration set and if no output layer is kept.

    Args:
        model: a directory, a GGUF file, or "demo". FP8 and blocks of a file are decoded to numbers first, so that
            weights are rounded twice.
        out: a directory that is not there, or is empty.
        quantization: a scheme, as in ``EngineConfig``.
        dtype: number format of what is not quantised, and of what is before that.
        calibration: a file of prompts, over which the scales of ``smoothing.py`` are found first, or the rows that
            auto-int8 chooses by; no other scheme, and no GGUF.
        keep_output_layer: leave the output layer, and the embedding, in ``dtype``, as all readers of the format expect.
        on_progress: called with the number of prompts computed and of all, if there are any, then with the number of
            tensors written and of all.

    Returns:
        The names of quantised layers that the calibration set did not smooth; () without one, and with auto-int8.

    Raises:
        InvalidConfig: an argument is not allowed, weights are missing or not finite, or ``out`` cannot be written.
        ModelNotSupported: the architecture cannot run here, or has matrices that are no linear layers, or is none that
            can be smoothed.
    """
    source, target = os.fspath(DEMO_MODEL_DIR) if model == "demo" else gguf_in(model), Path(out)
    _check_arguments(model, source, target, quantization, dtype, has_calibration=calibration is not None)
    with DefaultFloatState(num_threads_of_torch()):
        modules, files = _open(source, resolve_dtype(dtype))
        prompts = None if calibration is None else _read_prompts(calibration, source, modules.config)
        seen, smoothing = dict[str, torch.Tensor](), Smoothing()
        if prompts is not None and quantization == AUTO_INT8:
            seen = rows_seen(load_model(source), auto_int8.modules_read(modules), prompts, on_progress)
        head = auto_int8.name_of_head(modules)
        quantized = _schemes(modules, files, quantization, seen, head if keep_output_layer else None)
        if prompts is not None and quantization != AUTO_INT8:
            smoothing = find_smoothing(source, prompts, quantized, modules.dtype, on_progress)
        linears = QUANTIZERS.get(quantization) or QUANTIZERS.get(quantized.get(head, ""))
        kind = "" if linears is None or keep_output_layer else kind_of_embedding(modules, linears)
        if kind == OF_HEAD and head in smoothing.columns:
            kind = OWN_TABLE  # the columns of the output layer are no longer those of the embedding
        parts = _parts(modules, quantized, smoothing)
        config = _config(_own_config(source, modules), modules, quantized, kind)
        _write(target, parts, files, config, on_progress)
    return smoothing.unsmoothed


def _open(source: str, dtype: torch.dtype) -> tuple[Any, TensorFiles | GGUFSource]:
    """Return a model without memory, and the tensors of its files."""
    if not is_gguf(source):
        stored = _fp8_of(source)
        own = load_config(source, is_quantised=stored is not None)
        require_generator(own)
        modules = _modules(own, dtype)
        with as_refusals(source):
            rename = _named_as_modules(modules)
            directory = (TensorFiles(Path(source), rename) if stored is None
                         else FP8Files(Path(source), rename, stored, dtype))
            require_last_experts(modules, directory)
            if is_named_headless(own):
                _require_output_layer(modules, directory)
            return modules, directory
    with as_refusals(source):
        files = GGUFSource(source, dtype)
        modules = _modules(files.config(), dtype)
        files.require_names(modules)
    return modules, files


def _named_as_modules(model: Any) -> Callable[[str], str]:
    """Return what makes of a tensor's name in files the module's; files of a body alone, as those of embedders are, do
    not name it.
    """
    parts, body, rename_part = {name for name, _ in model.named_children()}, model.base_model_prefix, renaming_of(model)

    def rename(name: str) -> str:
        new = rename_part(name)
        # Why not all: a wrapper's other parts have no name here.
        return new if not new or new.partition(".")[0] in parts or body not in parts else f"{body}.{new}"

    return rename


def _require_output_layer(model: Any, files: TensorFiles) -> None:
    """Refuse files without an output layer, where it is not the embedding. Raises ``ModelNotSupported``."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is not embedding.weight and f"{auto_int8.name_of_head(model)}.weight" not in files:
        raise ModelNotSupported(
            "model: its files have no output layer, as it makes embeddings only, and files in this format need one. "
            "Load it with quantization=..., or write it with pagedcore pack."
        )


def _fp8_of(source: str) -> FP8 | None:
    """Return how a directory's layers are stored in FP8; ``None``: as numbers.

    Raises:
        ModelNotSupported: they are quantised in another way.
    """
    stored = stored_format(source)
    if stored is not None and not isinstance(stored, FP8):
        raise ModelNotSupported(
            f"model: its weights are quantised already ({stored.scheme}), and would be rounded a second time. Allowed "
            "are directories with floating numbers or FP8, and GGUF files; load this one as it is."
        )
    return stored


def _write(
    target: Path, parts: Sequence[Part], files: TensorFiles | GGUFSource, config: Mapping[str, Any],
    on_progress: Callable[[int, int], None],
) -> None:
    """Write the new directory under another name, and ``config.json`` when it has its own; all of it, or nothing."""
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        unfinished.mkdir()
        _write_weights(unfinished / "model.safetensors", parts, files, on_progress)
        if files.directory is not None:
            copy_others(files.directory, unfinished)
        if isinstance(files, GGUFSource):
            files.write_others(unfinished)
        (unfinished / f"{_CONFIG}.new").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        unfinished.rename(target)
        (target / f"{_CONFIG}.new").rename(target / _CONFIG)
    except OSError as error:
        raise InvalidConfig(f"out: it cannot be written ({error.strerror}).") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def copy_others(source: Path, target: Path) -> None:
    """Copy what goes along with a model's weights: text, how to generate, and how states of texts are read; raises
    ``OSError``.
    """
    # Why the folders: without what they say, vectors would be pooled in another way, and nobody would be told.
    _, folders = modules_of(read_json(os.fspath(source), MODULES))
    configs = [f"{name}/{_CONFIG}" for name in folders if FOLDER.fullmatch(name)]
    paths = {path for pattern in _OTHER_FILES for path in source.glob(pattern)}
    for path in paths | {source / name for name in (*_SENTENCES, *configs)}:
        if path.is_file():
            new = target / path.relative_to(source)
            new.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, new)


def _check_arguments(
    model: str, source: str, target: Path, quantization: str, dtype: str, *, has_calibration: bool
) -> None:
    """Refuse what can be refused without a look at the model."""
    EngineConfig(quantization=quantization, dtype=dtype)
    if quantization == "none" or not can_pack(resolve_dtype(dtype)):
        raise InvalidConfig(
            f"quantization: got {quantization!r} with dtype {dtype!r}, allowed are "
            f"{', '.join(SCHEMES)} with dtype 'float32' or 'bfloat16'."
        )
    if has_calibration and not SCHEMES[quantization].quantizes_rows:
        raise InvalidConfig(
            f"calibration: got a file with quantization {quantization!r}, allowed are "
            f"{listed(name for name, scheme in SCHEMES.items() if scheme.quantizes_rows)}: "
            "others keep activations as they are."
        )
    if not is_gguf(source) and not Path(source).is_dir():
        raise InvalidConfig(f"model: got {describe(model)}, needed is a directory or a GGUF file. Download it first.")
    if has_calibration and (is_gguf(source) or _fp8_of(source) is not None):
        kind = "a GGUF file" if is_gguf(source) else "a checkpoint in FP8"
        raise ModelNotSupported(f"calibration: got {kind}, allowed are directories with floating numbers.")
    require_new(target)


def require_new(target: Path) -> None:
    """Refuse a directory to write that is there and has something in it; ``InvalidConfig``."""
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise InvalidConfig("out: it exists and is no empty directory. Name one that is not there.")


def _schemes(
    modules: Any, files: TensorFiles | GGUFSource, quantization: str, seen: Mapping[str, torch.Tensor],
    left_out: str | None,
) -> dict[str, str]:
    """Return the scheme of each layer that is quantised, experts' too, by its name; of one that is left out none."""
    if quantization == AUTO_INT8:
        quantized = auto_int8.choose(modules, _reader(modules, files), seen)
    else:
        kept = kept_layers(modules)
        quantized = {name: quantization for name, module in modules.named_modules()
                     if type(module) is nn.Linear and module not in kept
                     and QUANTIZERS[quantization].can_quantize(module.in_features)}
        quantized |= dict.fromkeys(layers_of_experts(modules), quantization)
    quantized = {name: scheme for name, scheme in quantized.items() if name != left_out}
    if not quantized:
        raise ModelNotSupported(f"model: it has no linear layers that can be {quantization}.")
    return quantized


def _read_prompts(path: str | os.PathLike[str], source: str, config: Any) -> list[list[int]]:
    """Read a calibration set with the model's own tokenizer, if there is text in it."""
    tokenizer = cache(lambda: HFTokenizer.from_directory(source))
    return read_calibration_set(
        path, lambda text: tokenizer().encode(text), vocab_size=int(config.vocab_size),
        max_model_len=max_model_len(config),
    )


def _modules(config: Any, dtype: torch.dtype) -> Any:
    """Build a model without memory, and refuse one whose matrices are not all in linear layers and embeddings."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    supported_models.check_modules(model, str(config.model_type))
    others = set(holders_of_matrices(model))
    for name, module in model.named_modules():
        is_known = type(module) is nn.Linear or shapes_of_expert(module) or type(module).__name__.endswith("Router")
        if module in others and not is_known:
            raise ModelNotSupported(
                f"model: {name} ({type(module).__name__}) has matrices and is no linear layer; such models are "
                "quantised when they are loaded, not converted."
            )
    return model


def _reader(model: nn.Module, files: TensorFiles | GGUFSource) -> Read:
    """Return what reads a model's weights by the names of ``Read``, in its number format; tied ones by each name."""
    tensors = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    shapes, dtype = layers_of_experts(model), next(model.parameters()).dtype

    def read(name: str) -> torch.Tensor:
        parent, _, last = name.rpartition(".")
        if last.isdigit():
            experts, _, kind = parent.rpartition(".")
            layers = [f"{experts}.{last}.{part}" for part in expert_parts(model.get_submodule(experts))[kind]]
            return torch.cat([files.expect(f"{one}.weight", shapes[one], *FLOATS).to(dtype) for one in layers])
        tensor = tensors[name]
        return files.expect(first_names[id(tensor)], tuple(tensor.shape), *FLOATS).to(tensor.dtype)

    return read


def _parts(model: Any, quantized: Mapping[str, str], smoothing: Smoothing) -> list[Part]:
    """Say what the new file holds and of which tensors it is made; a tied output layer is quantised on its own."""
    parts, tensors = [], model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    for name, tensor in tensors.items():
        source, (layer, _, last) = first_names[id(tensor)], name.rpartition(".")
        if shapes_of_expert(model.get_submodule(layer)):
            continue
        if layer in quantized and last == "weight":
            parts.append(_quantized_part(source, layer, tensor.shape, tensor.dtype, quantized[layer], smoothing))
        elif source == name:
            parts.append(_part(name, tensor.shape, tensor.dtype, smoothing))
    dtype = next(model.parameters()).dtype
    for layer, shape in layers_of_experts(model).items():
        name = f"{layer}.weight"
        parts.append(_quantized_part(name, layer, shape, dtype, quantized[layer], smoothing) if layer in quantized
                     else _part(name, shape, dtype, smoothing))
    return [_named_as_in_files(part, model.config.model_type) for part in parts]


def _named_as_in_files(part: Part, model_type: str) -> Part:
    shapes = {file_name(name, model_type): shape for name, shape in part.shapes.items()}
    return replace(part, shapes=shapes, make=lambda tensor: {
        file_name(name, model_type): made for name, made in part.make(tensor).items()
    })


def _part(name: str, shape: Sequence[int], dtype: torch.dtype, smoothing: Smoothing) -> Part:
    """Describe a tensor that is not quantised."""
    return Part(name, tuple(shape), {name: (dtype, tuple(shape))},
                lambda tensor: {name: smoothing.scaled(name, tensor.to(dtype)).to(dtype)})


def _quantized_part(
    source: str, layer: str, shape: Sequence[int], dtype: torch.dtype, quantization: str, smoothing: Smoothing
) -> Part:
    """Describe a layer [out, in] as compressed-tensors stores it."""
    (num_outputs, num_inputs), linears = shape, QUANTIZERS[quantization]
    scales = torch.float32, (num_outputs, linears.num_groups(num_inputs))
    shapes: Shapes = {f"{layer}.weight": (torch.int8, (num_outputs, num_inputs)), f"{layer}.weight_scale": scales}
    if not linears.scheme.sums_whole_rows:
        words = torch.int32, (num_outputs, num_words(num_inputs, linears.scheme.bits))
        shapes = {f"{layer}.weight_packed": words, f"{layer}.weight_scale": scales,
                  f"{layer}.weight_shape": (torch.int64, (2,))}  # fmt: skip

    def make(weight: torch.Tensor) -> Tensors:
        values, scales = smoothing.quantize(linears, layer, weight.to(dtype))
        if not scales.isfinite().all():
            raise InvalidConfig(f"model: {layer} has weights that are not finite; its files are damaged.")
        stored = (values,) if linears.scheme.sums_whole_rows else (pack(values, linears.scheme.bits),)
        return dict(zip(shapes, (*stored, scales, torch.tensor([num_outputs, num_inputs])), strict=False))

    return Part(source, (num_outputs, num_inputs), shapes, make)


def _own_config(source: str, model: Any) -> dict[str, Any]:
    """Return what a directory's file says, or what one of a GGUF file's model, or of a wrapper's language model
    alone, would."""
    if is_gguf(source) or hasattr(model.config, WHOLE):
        fields = {name: value for name, value in model.config.to_dict().items() if name != WHOLE}
        return {**fields, "architectures": [type(model).__name__]}
    own: dict[str, Any] = json.loads((Path(source) / _CONFIG).read_text(encoding="utf-8"))
    own.pop(AUTO_MAP, None)  # Why: code does not go along, and did not run.
    return own


def _config(own: dict[str, Any], model: Any, quantized: Mapping[str, str], kind: str) -> dict[str, Any]:
    """Return the model's own configuration with what says how layers, by name and scheme, and the embedding are
    quantised.
    """
    experts, head = layers_of_experts(model), auto_int8.name_of_head(model)
    layers: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for layer, scheme in quantized.items():
        num_inputs = experts[layer][1] if layer in experts else model.get_submodule(layer).in_features
        linears, name = QUANTIZERS[scheme], file_name(layer, model.config.model_type)
        layers[scheme, num_inputs // linears.num_groups(num_inputs) if linears.scheme.has_groups else None].append(name)
    formats = {scheme: "int-quantized" if SCHEMES[scheme].sums_whole_rows else "pack-quantized" for scheme, _ in layers}
    weights = {"type": "int", "symmetric": True, "dynamic": False}
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    groups = {
        f"group_{number}": {
            # Why by name: readers that take an output layer for an embedding quantise it where it is named.
            "targets": ["Linear", *({head} & {*names})] if len(layers) == 1 else names,
            "weights": {"num_bits": SCHEMES[scheme].bits, **weights,
                        "strategy": "group" if size else "channel", "group_size": size},
            "input_activations": None if not SCHEMES[scheme].quantizes_rows
            else {**rows, "strategy": "group", "group_size": size} if size else rows,
            **({"format": formats[scheme]} if len(formats) > 1 else {}),
        }
        for number, ((scheme, size), names) in enumerate(layers.items())
    }
    linears_and_routers = [name for name, module in model.named_modules()
                           if type(module) is nn.Linear or type(module).__name__.endswith("Router")]
    others = [file_name(name, model.config.model_type) for name in (*linears_and_routers, *experts)
              if name not in quantized]
    own.pop("torch_dtype", None)
    # Why beside the format's own part: other readers take the embedding as numbers, which are in the file too.
    return {
        **own, "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        # Why: an output layer that shared the embedding's weight has one of its own.
        "tie_word_embeddings": bool(own.get("tie_word_embeddings")) and "lm_head" not in quantized,
        **({FIELD: kind} if kind else {}),
        "quantization_config": {
            "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": others,
            "format": next(iter(formats.values())) if len(formats) == 1 else "mixed-precision",
            "config_groups": groups, "kv_cache_scheme": None,
        },
    }


def _write_weights(
    path: Path, parts: Sequence[Part], files: TensorFiles | GGUFSource, on_progress: Callable[[int, int], None]
) -> None:
    """Write the header, then each tensor to its place; large numbers come first, so that all are aligned."""
    shapes = {name: shape for part in parts for name, shape in part.shapes.items()}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(shapes.items(), key=lambda one: (-one[1][0].itemsize, one[0])):
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _FORMATS[dtype], "shape": shape, "data_offsets": [begin, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    mappings = FileMappings()
    with path.open("wb") as file:
        file.write(len(described).to_bytes(8, "little") + described)
        start = file.tell()
        for number, part in enumerate(parts, 1):
            old = files.expect(part.source, part.shape, *FLOATS)
            for name, tensor in part.make(old).items():
                file.seek(start + header[name]["data_offsets"][0])
                file.write(tensor.flatten().view(torch.uint8).numpy().data)
            mappings.free_pages(old)
            # Why: the next tensor is decoded, where blocks are, when this one's memory is free.
            del old, tensor
            on_progress(number, len(parts))
        file.flush()
        os.fsync(file.fileno())
