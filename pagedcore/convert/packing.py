"""Writes a model's packed weights to a file, beside its own or in a directory without them.

Owns which tensors the file has: those of every product that an engine computes with, once each was compared with its
weight, and whatever else of the model is left. A file gets its name when an engine was made of it.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from pagedcore.config.engine_config import EngineConfig
from pagedcore.convert.conversion import copy_others, require_new
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig, ModelNotSupported, describe
from pagedcore.models.checkpoints.classifier_files import require_generator
from pagedcore.models.checkpoints.model_path import gguf_in, is_gguf
from pagedcore.models.checkpoints.packed_file import PackedFile, write_packed
from pagedcore.models.checkpoints.packed_model import (
    BLOCKS,
    CONFIGS,
    EMBEDDING,
    INT8,
    INT8_ROWS,
    ROWS,
    facts_of_source,
    packed_path,
    portable_files,
)
from pagedcore.models.checkpoints.quantized import stored_format
from pagedcore.models.decoders.fused_layers import FusedPart
from pagedcore.models.linears.int8_table import Int8Table
from pagedcore.models.linears.packed_experts import PackedExperts
from pagedcore.models.linears.packed_linear import PackedLinear, probe_invariance
from pagedcore.models.linears.packed_products import Tensors, describe_product
from pagedcore.models.linears.shared_embedding import RowsOfProduct
from pagedcore.models.linears.stored_weight import SEPARATOR, StoredWeight
from pagedcore.models.loading import Loader, backend_of_packed, portable_backend
from pagedcore_kernels.cpu.runtime.float_state import DefaultFloatState
from pagedcore_kernels.cpu.runtime.threads import num_threads_of_torch

OnProgress = Callable[[int, int], None]


def pack(
    model: str, out: str | os.PathLike[str] | None, load: Loader, *, dtype: str = "auto",
    on_progress: OnProgress = lambda done, total: None,
) -> Path:
    """Write a model's weights as an engine on this machine's CPU has them, so that the next one maps them.

    Args:
        model: a directory, a GGUF file, or "demo" with ``out``.
        out: a directory that is not there, or is empty, for packed weights and all but the weights; ``None``: they are
            written beside the weights, in the place of earlier ones.
        load: returns an entry of a plugin table.
        dtype: number format of rows, and of what is not quantised.
        on_progress: called with the number of tensors written and of all.

    Returns:
        The file.

    Raises:
        InvalidConfig: an argument is not allowed, or ``out`` cannot be written.
        ModelNotSupported: the model cannot run here, or not with products that a file can hold.
    """
    source = os.fspath(DEMO_MODEL_DIR) if model == "demo" else gguf_in(model)
    path = packed_path(source)
    if path is None or not portable_files(source):
        raise InvalidConfig(f"model: got {describe(model)}, needed is a directory with weights, or a GGUF file.")
    if out is not None and is_gguf(source):
        raise InvalidConfig("out: a GGUF file's packed weights lie beside it, as its metadata are read too. Leave it.")
    config = EngineConfig(dtype=dtype)
    try:
        with DefaultFloatState(num_threads_of_torch()):
            if out is None:
                _write(path, source, config, load, on_progress)
                return path
            return _write_directory(Path(out), source, config, load, on_progress)
    except OSError as error:
        raise InvalidConfig(f"out: it cannot be written ({error.strerror}).") from error


def _write_directory(
    target: Path, source: str, config: EngineConfig, load: Loader, on_progress: OnProgress
) -> Path:
    """Write a directory under another name, and give it its own when it is complete."""
    require_new(target)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    try:
        unfinished.mkdir()
        copy_others(Path(source), unfinished)
        for name in CONFIGS:
            if (Path(source) / name).is_file():
                shutil.copyfile(Path(source) / name, unfinished / name)
        path = packed_path(os.fspath(unfinished))
        assert path is not None  # Invariant: it is a directory
        _write(path, source, config, load, on_progress)
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target / path.name


def _write(path: Path, source: str, config: EngineConfig, load: Loader, on_progress: OnProgress) -> None:
    """Load a model as an engine does, and write what that has; an engine of the file is made before it has its name."""
    given = dict[str, torch.Tensor]()
    stored = stored_format(source)
    backend, model = portable_backend(
        source, config, load, lambda model: given.update(model.state_dict(keep_vars=True))
    )
    scheme = "none" if stored is None else stored.scheme
    header = facts_of_source(source, backend.dtype, scheme, backend.fingerprint)
    require_generator(model.config)
    header["is_headless"] = not backend.embedding_defaults.generates
    products, covered = _products_of(model)
    # Why here: starts with the file do without.
    if shapes := probe_invariance(products.values()):
        raise ModelNotSupported(f"model: products of the shapes {shapes} depend on the number of rows on this machine.")
    header["embedding"], tensors = _embedding_of(model, products, is_gguf(source))
    if header["embedding"] is not None:
        embedding = model.get_input_embeddings()
        covered |= {f"{name}.weight" for name, module in model.named_modules() if module is embedding}
    tensors |= _rows_of_others(model)
    header["products"] = entries = dict[str, Any]()
    for names, layer in products.items():
        entries[names], of_product = describe_product(layer.multiply, names)
        tensors |= of_product
    # Why by identity: tied ones are in one place.
    others = {id(one): name for name, one in reversed(given.items()) if name not in covered}
    tensors |= {name: given[name] for name in others.values()}

    def check(beside: Path) -> None:
        packed = PackedFile(beside)
        packed.map()
        backend_of_packed(source, packed, config, load)

    write_packed(path, header, tensors, check, on_progress)


def _products_of(model: Any) -> tuple[dict[str, PackedLinear], set[str]]:
    """Return a taken model's products by the names of their layers, in their order, and the parameters they were of."""
    parts: dict[int, list[tuple[int, str]]] = defaultdict(list)
    wholes, covered = dict[int, PackedLinear](), set[str]()
    for name, module in model.named_modules():
        if isinstance(module, FusedPart):
            parts[id(module.whole)].append((module.begin, name))
            wholes[id(module.whole)] = module.whole
    for name, module in model.named_modules():
        if isinstance(module, PackedExperts):
            for part, each in zip(module.names, (module.gate_up, module.down), strict=True):
                covered.add(f"{name}.{part}")
                for number, one in enumerate(each):
                    parts[id(one)], wholes[id(one)] = [(0, f"{name}.{part}.{number}")], one
        elif isinstance(module, PackedLinear) and id(module) not in wholes:
            parts[id(module)], wholes[id(module)] = [(0, name)], module
    products = {SEPARATOR.join(name for _, name in sorted(found)): wholes[key] for key, found in parts.items()}
    covered |= {f"{name}.weight" for found in parts.values() for _, name in found}
    return products, covered


def _embedding_of(
    model: Any, products: Mapping[str, PackedLinear], is_of_blocks: bool
) -> tuple[dict[str, str] | None, Tensors]:
    """Return what a header says of the embedding of a taken model, and the tensors of its own; ``None``: it is a
    parameter.
    """
    weight = model.get_input_embeddings().weight
    if isinstance(weight, RowsOfProduct):
        return {"kind": ROWS, "of": _name_of(weight.product, products)}, {}
    if not isinstance(weight, StoredWeight):
        return None, {}
    own = {f"{EMBEDDING}.{number}": tensor for number, tensor in enumerate(weight.tensors)}
    if not isinstance(table := weight.look_up, Int8Table):
        if not is_of_blocks:
            raise ModelNotSupported("model: its embedding is none that a file can hold.")
        return {"kind": BLOCKS}, own
    return ({"kind": INT8}, own) if own else ({"kind": INT8_ROWS, "of": _name_of(table.product, products)}, {})


def _rows_of_others(model: Any) -> Tensors:
    """Return the blocks of tables beside the embedding, such as those of embeddings of each layer."""
    first = model.get_input_embeddings()
    return {
        f"{name}:{ROWS}": module.weight.tensors[0] for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding) and module is not first and isinstance(module.weight, StoredWeight)
    }


def _name_of(product: object, products: Mapping[str, PackedLinear]) -> str:
    return next(name for name, layer in products.items() if layer.multiply is product)
