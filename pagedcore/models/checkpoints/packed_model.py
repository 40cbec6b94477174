"""Loads a model whose products are in a file as they are computed with: nothing is packed, and nothing is copied.

Owns when such a file may be used: it is of this version and of this processor's instructions, and of the weights beside
it, if these are there. Owns what its header says: which layers are one product, and what the embedding reads. The other
tensors of the model are in the same file. Read ``packed_file.py`` for the file; ``convert/packing.py`` writes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.checkpoints.model_path import is_gguf, parts_of
from pagedcore.models.checkpoints.packed_file import PackedFile
from pagedcore.models.checkpoints.pretrained import as_refusals
from pagedcore.models.checkpoints.quantized import StoredFormat, map_tensors, tree_of
from pagedcore.models.checkpoints.stored_experts import expert_parts, put_experts
from pagedcore.models.checkpoints.weight_files import only_file
from pagedcore.models.families.model_facts import HEADLESS
from pagedcore.models.linears.int8_table import Int8Table
from pagedcore.models.linears.packed_experts import matrices_of_experts
from pagedcore.models.linears.packed_linear import matrix_of
from pagedcore.models.linears.packed_products import LAYOUT_VERSIONS, product_of
from pagedcore.models.linears.shared_embedding import RowsOfProduct
from pagedcore.models.linears.stored_weight import SEPARATOR, StoredMatrices, StoredWeight, packed_already
from pagedcore.protocols import Matmul, ModelFingerprint
from pagedcore_kernels.cpu.features import has_instructions
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul

_log = logging.getLogger("pagedcore")
FORMAT: Final = 1
"""Version of what headers say, and of which layers are one product."""
_NAME: Final = "model.packed"
CONFIGS: Final = ("config.json", "quantize_config.json", "quant_config.json")
"""What says how a directory's model is computed."""
_INSTRUCTIONS: Final = ("avx2", "fma", "avxvnni", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "amx-tile",
                        "amx-bf16", "amx-int8")  # fmt: skip
"""What decides how products are computed, in LLVM's words."""
_SAMPLES, _SAMPLE_BYTES, _HEAD_BYTES = 64, 2**12, 2**18
"""What is read of a file of weights to know it again: its beginning, and places spread over it."""
ROWS, INT8_ROWS, INT8, BLOCKS = "rows", "int8-rows", "int8", "blocks"
"""What an embedding reads: rows of a product of numbers or of int8, a table of int8, or blocks of a GGUF file."""
EMBEDDING: Final = ":embedding"
"""What the names of an embedding's own tensors begin with; those of products and of the model do not."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What an engine is asked for."""

    dtype: torch.dtype
    """Number format of rows."""
    is_chosen: bool
    """Whether the caller named it; else a model of packed weights alone has its own."""
    quantization: str
    """As in ``EngineConfig``: "none" for what the files have."""
    others: str = ""
    """What packed weights are not for, in words; "": nothing."""


def packed_path(source: str) -> Path | None:
    """Return where the packed weights of a directory or of a GGUF file are, or would be; ``None``: it is neither."""
    if is_gguf(source):
        return Path(f"{source}.packed")
    return Path(source) / _NAME if Path(source).is_dir() else None


def portable_files(source: str) -> list[Path]:
    """Return the files of weights that packed ones are made of; none if there are packed ones alone."""
    if is_gguf(source):
        return parts_of(source)
    try:
        return only_file(Path(source))
    except ModelNotSupported:
        return []


def instructions_here() -> list[str]:
    """Return which instructions products may be made of on this processor."""
    return [name for name in _INSTRUCTIONS if has_instructions(name)]


def facts_of_source(source: str, dtype: torch.dtype, scheme: str, fingerprint: ModelFingerprint) -> dict[str, Any]:
    """Return what a header says beside products and embedding.

    Raises:
        OSError: a file cannot be read.
    """
    identity = [fingerprint.architecture, fingerprint.config, fingerprint.weights]
    return {
        "format": FORMAT, "layouts": dict(LAYOUT_VERSIONS), "instructions": instructions_here(),
        "dtype": _name_of(dtype), "scheme": scheme, "identity": identity, "config": _digest_of_config(source),
        "weights": _digest_of_weights(portable_files(source)),
    }


def find_packed(source: str, wanted: Wanted) -> PackedFile | None:
    """Return the packed weights of a model, mapped, whose checksum is not compared yet; ``None``: there are none that
    may be used.

    Raises:
        ModelNotSupported: there are packed weights alone, which may not be used; the message says why.
        InvalidConfig: the file's header is damaged.
    """
    if (packed := packed_file(source)) is None:
        return None
    if not (reason := why_not_used(packed, source, wanted)):
        packed.map()
        return packed
    _log.info("The packed weights beside the model are not used: %s. Its weights are packed now.", reason)
    return None


def packed_file(source: str) -> PackedFile | None:
    """Return the file of a model's packed weights, not mapped; ``None``: there is none. Raises as ``PackedFile``."""
    path = packed_path(source)
    return PackedFile(path) if path is not None and path.is_file() else None


def why_not_used(packed: PackedFile, source: str, wanted: Wanted) -> str:
    """Return why packed weights are not used in the place of those beside them, or "" if they are.

    Raises:
        ModelNotSupported: there are none beside them.
        InvalidConfig: a file cannot be read.
    """
    portable = portable_files(source)
    with as_refusals(source):
        reason = _why_not(packed.header, source, portable, wanted)
        # Why besides the digest, which is one of samples: files that were changed in one place since are new ones.
        if not reason and any(path.stat().st_mtime_ns > packed.path.stat().st_mtime_ns for path in portable):
            reason = "the weights beside were written after them"
    if reason and not portable:
        raise ModelNotSupported(
            f"model: it has packed weights and no others, and {reason}. Pack the original once more, here."
        )
    return reason


def _why_not(header: Mapping[str, Any], source: str, portable: list[Path], wanted: Wanted) -> str:
    """Return why packed weights may not be used, or ""."""
    if header.get("format") != FORMAT or header.get("layouts") != LAYOUT_VERSIONS:
        return "they are of another version"
    if (here := instructions_here()) != (given := header.get("instructions")):
        return f"they are for a processor with {_words(given)}, and this one has {_words(here)}"
    if header.get("config") != _digest_of_config(source):
        return "its configuration is not the one that they were written with"
    if portable and header.get("weights") != _digest_of_weights(portable):
        return "they were made of other weights than those beside"
    if wanted.others:
        return f"they are not for {wanted.others}"
    if header.get("dtype") != _name_of(wanted.dtype) and (portable or wanted.is_chosen):
        return f"they are for rows of {str(header.get('dtype'))[:20]}, asked is {_name_of(wanted.dtype)}"
    if wanted.quantization not in ("none", header.get("scheme")):
        return f"they are of the scheme {str(header.get('scheme'))[:20]}, asked is {wanted.quantization}"
    return ""


def identity_of(packed: PackedFile) -> ModelFingerprint:
    """Return which model it is, as the weights that were packed said it."""
    given = packed.header.get("identity")
    if not isinstance(given, list) or len(given) != 3 or not all(isinstance(one, str) for one in given):
        raise ModelNotSupported("model: its packed weights do not say which model they are of.")
    return ModelFingerprint(*given)


@torch.no_grad()
def load_packed(
    source: str, stored: StoredFormat | None, packed: PackedFile, *, trust_remote_code: bool
) -> Any:
    """Load a model whose products are made of mapped memory when its layers are replaced.

    Args:
        source: a directory or a GGUF file.
        stored: as ``stored_format`` says.
        packed: what ``find_packed`` returned.
        trust_remote_code: whether code shipped with the model may run.

    Raises:
        ModelNotSupported: the architecture cannot run here, or has other layers than the file.
        InvalidConfig: the file is damaged.
    """
    dtype = getattr(torch, str(packed.header.get("dtype")), None)
    if dtype not in (torch.float32, torch.bfloat16):
        raise _refusal(f"are for rows of {str(packed.header.get('dtype'))[:20]!r}")
    model = tree_of(source, stored, dtype, trust_remote_code, is_quick=True, num_tensors=len(packed))
    with as_refusals(source):
        weights = _PackedWeights(packed, dtype)
        _place_products(model, weights)
        _place_embedding(model, weights, stored)
        if isinstance(stored, GGUF):
            _place_blocks(model, weights, stored)
        map_tensors(model, weights)
        if isinstance(stored, GGUF):
            stored.scale_angles(model)
    if packed.header.get("is_headless") is True:
        setattr(model.config, HEADLESS, True)
    return model


class _PackedWeights:
    """What a file has for a model in ``dtype``: products by the names of their layers, and other tensors by theirs."""

    def __init__(self, packed: PackedFile, dtype: torch.dtype) -> None:
        self.packed, self.dtype = packed, dtype
        products = packed.header.get("products")
        if not isinstance(products, dict):
            raise _refusal("name no products")
        self._products: dict[str, Any] = products

    @property
    def layers(self) -> list[tuple[str, str]]:
        """The name of each layer, and that of the product which has it."""
        return [(name, whole) for whole in self._products for name in whole.split(SEPARATOR)]

    def weight(self, name: str, whole: str, matrix: torch.Tensor) -> StoredWeight:
        """Return what a layer has in the place of its weight [out, in] until its product is asked for."""
        return packed_already(name, whole, (matrix.shape[0], matrix.shape[1]), matrix.dtype, self.product)

    def product(self, name: str, shape: tuple[int, int], bias: torch.Tensor | None) -> Matmul:
        """Return the product of one layer, or of several by their names together; ``ModelNotSupported``."""
        if name not in self._products:
            raise _refusal(f"have no product of {name[:200]}")
        return product_of(self._products[name], name, shape, bias, self.packed.tensor)

    def __contains__(self, name: str) -> bool:
        return name in self.packed

    def expect(self, name: str, shape: tuple[int, ...], *_: str) -> torch.Tensor:
        """Return a tensor of this shape; ``ModelNotSupported``."""
        if name not in self.packed or (found := self.packed.tensor(name)).shape != shape:
            raise _refusal(f"have no {name[:200]} of shape {list(shape)}")
        return found


def _place_products(model: nn.Module, weights: _PackedWeights) -> None:
    """Put a weight that is packed already in the place of each that the file has a product of."""
    left = dict(layers := weights.layers)
    if len(left) != len(layers):
        raise _refusal("have a layer twice")
    for name, module in list(model.named_modules()):
        for part, matrices in zip(expert_parts(module), matrices_of_experts(module), strict=False):
            if f"{name}.{part}.0" not in left:
                continue
            count = len(matrices)
            # Safety: a configuration may name more experts than files have.
            if f"{name}.{part}.{count - 1}" not in left:
                raise _refusal(f"have less than {count} experts in {name}")
            each = [f"{name}.{part}.{number}" for number in range(count)]
            if not left.keys() >= set(each):
                raise _refusal(f"lack experts in {name}")
            put_experts(module, part, StoredMatrices(
                weights.weight(one, left.pop(one), matrices[number]) for number, one in enumerate(each)
            ))
        if name in left and (matrix := matrix_of(module)) is not None:
            _place(model, name, weights.weight(name, left.pop(name), matrix))
    if left:
        raise _refusal(f"have {min(left)[:200]}, and the model has no such layer")


def _place(model: nn.Module, name: str, weight: StoredWeight) -> None:
    """Give a layer this weight; one with a transposed matrix becomes a linear layer."""
    module: Any = model.get_submodule(name)
    if type(module) is not nn.Linear:
        parent, _, last = name.rpartition(".")
        linear: Any = nn.Linear(weight.shape[1], weight.shape[0], device="meta").train(module.training)
        linear.bias, module = module.bias, linear
        setattr(model.get_submodule(parent), last, linear)
    del module.weight
    module.weight = weight


def _place_embedding(model: Any, weights: _PackedWeights, stored: StoredFormat | None) -> None:
    """Have the embedding read what the header says; without a word it is a tensor like others."""
    given = weights.packed.header.get("embedding")
    if given is None:
        return
    module = model.get_input_embeddings()
    shape = module.num_embeddings, module.embedding_dim
    kind, of = (given.get("kind"), given.get("of")) if isinstance(given, dict) else (None, None)
    if kind in (ROWS, INT8_ROWS):
        product = weights.product(str(of), shape, None)
        if kind == ROWS and isinstance(product, PackedMatmul):
            del module.weight
            module.weight = RowsOfProduct(product, shape, weights.dtype)
            return
        table = Int8Table.of_product(product, weights.dtype)
    elif kind == INT8:
        values, scales = (weights.expect(f"{EMBEDDING}.{one}", size) for one, size in (("0", shape), ("1", shape[:1])))
        if (values.dtype, scales.dtype) != (torch.int8, torch.float32):
            raise _refusal("have no int8 table with scales in float32")
        table = Int8Table(values, scales, weights.dtype)
    elif kind == BLOCKS and isinstance(stored, GGUF):
        name = next(name for name, one in model.named_modules() if one is module)
        stored.replace_embedding(name, module, weights.dtype, weights.packed.tensor(f"{EMBEDDING}.0"))
        return
    else:
        raise _refusal(f"have an embedding of the kind {str(kind)[:80]!r}")
    del module.weight
    module.weight = StoredWeight("none", shape, weights.dtype, 1, table.tensors, _no_values, look_up=table)


def _place_blocks(model: Any, weights: _PackedWeights, stored: GGUF) -> None:
    """Have tables beside the embedding read their blocks, where the file has them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (own := f"{name}:{ROWS}") in weights:
            stored.replace_embedding(name, module, weights.dtype, weights.packed.tensor(own))


def _no_values() -> Any:
    raise TypeError("the table of an embedding is not packed")


def _digest_of_config(source: str) -> str:
    """Return a digest of what says how a directory is computed; a GGUF file says it itself."""
    paths = [] if is_gguf(source) else [path for name in CONFIGS if (path := Path(source) / name).is_file()]
    return _digest([part for path in paths for part in (path.name.encode(), path.read_bytes())])


def _digest_of_weights(paths: list[Path]) -> str:
    """Return a digest of the sizes of files, of their beginnings, and of samples of all the rest."""
    parts = list[bytes]()
    for path in paths:
        size = path.stat().st_size
        parts += [path.name.encode(), str(size).encode()]
        with path.open("rb") as file:
            parts.append(file.read(_HEAD_BYTES))
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                parts.append(file.read(_SAMPLE_BYTES))
    return _digest(parts)


def _digest(parts: list[bytes]) -> str:
    return hashlib.sha256(json.dumps([hashlib.sha256(part).hexdigest() for part in parts]).encode()).hexdigest()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _words(given: Any) -> str:
    return " ".join(str(one)[:20] for one in given[:20]) or "none that matter" if isinstance(given, list) else "others"


def _refusal(what: str) -> ModelNotSupported:
    return ModelNotSupported(f"model: its packed weights {what}. Pack it once more.")
