"""Checkpoints in the format compressed-tensors: W8A8 ("int-quantized"), W4A16 and W8A16 ("pack-quantized"), and FP8
("float-quantized"), whose tensors ``fp8.py`` reads.

Owns what their configuration may say and what their tensors are. Of a layer [out, in]:

    int-quantized    weight         int8 [out, in]                 weight_scale  float [out, 1]
    pack-quantized   weight_packed  int32 [out, in * bits / 32]    weight_scale  float [out, groups]
                     weight_shape   int64 [2]                      weight_zero_point  int32 [out * bits / 32, groups]
                     weight_g_idx   int32 [in], of files whose inputs were ordered by activation
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from pagedcore.config.schemes import AUTO_INT8, SCHEMES, scheme_of
from pagedcore.models.checkpoints.fp8 import FP8
from pagedcore.models.checkpoints.fp8 import of_compressed_tensors as fp8_of
from pagedcore.models.checkpoints.input_order import order_of
from pagedcore.models.checkpoints.packed_integers import num_words, unpack
from pagedcore.models.checkpoints.tensor_files import TensorFiles
from pagedcore.models.linears.stored_weight import QuantizedWeight, StoredWeight, refusal

_FIELDS: Final[Mapping[str, Any]] = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": None, "group_size": None, "dynamic": False,
    "block_structure": None,
}
"""How a scheme of weights or activations is written, with what a missing field means."""
_INT_QUANTIZED: Final = "int-quantized"
_INT8: Final = scheme_of(8, quantizes_rows=True)


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """How the layers of one checkpoint are quantised."""

    scheme: str
    bits: int
    is_symmetric: bool
    group_sizes: frozenset[int | None]
    """What sizes layers may have; ``None``: a scale for each output."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> CompressedTensors | FP8:
        """Read a ``quantization_config``.

        Raises:
            ModelNotSupported: it says something that cannot be computed here, or that is not understood.
        """
        for name in ("kv_cache_scheme", "transform_config"):
            if config.get(name):
                raise refusal(f"it has a {name}")
        if (sparsity := config.get("sparsity_config") or {}).get("format", "dense") != "dense":
            raise refusal(f"its weights are sparse ({sparsity['format']!r})")
        groups = config.get("config_groups")
        schemes = list(groups.values()) if isinstance(groups, Mapping) else []
        if not schemes or not all(isinstance(scheme, Mapping) for scheme in schemes):
            raise refusal("its config_groups are no schemes by name")
        if any(_is_float(scheme) for scheme in schemes):
            return _fp8(schemes, config.get("format"))
        read = [_scheme(scheme, config.get("format")) for scheme in schemes]
        if set(read) == _MIXED:
            return replace(read[0], scheme=AUTO_INT8)
        sizes = frozenset(size for one in read for size in one.group_sizes)
        if len({replace(one, group_sizes=sizes) for one in read}) > 1:
            raise refusal(f"its layers follow {len(schemes)} schemes in config_groups, which differ")
        return replace(read[0], group_sizes=sizes)

    def weight(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the files hold it as numbers.

        Raises:
            ModelNotSupported: its tensors are not what the configuration says.
        """
        if f"{name}.weight_scale" not in files:
            return None
        num_outputs, num_inputs = shape
        num_groups = math.prod(files.shape_of(f"{name}.weight_scale")[1:])
        # Why: which layer has which of the sizes, its scales show.
        if num_groups not in {num_inputs / (size or num_inputs) for size in self.group_sizes}:
            sizes = " or ".join(str(size or "all") for size in self.group_sizes)
            raise refusal(f"{name} has {num_inputs} inputs in {num_groups} groups, and groups are of {sizes}")
        scales = files.scales(f"{name}.weight_scale", (num_outputs, num_groups))
        scheme = SCHEMES[self.scheme]
        if scheme.sums_whole_rows and not (scheme.is_chosen and f"{name}.weight_packed" in files):
            values = files.expect(f"{name}.weight", shape, "I8")
            return StoredWeight(_INT8, shape, dtype, 1, [values, scales],
                                lambda: QuantizedWeight(values, scales.float(), None))
        return self._packed(files, name, shape, dtype, scales)

    def _packed(
        self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype, scales: torch.Tensor
    ) -> StoredWeight:
        num_outputs, num_inputs = shape
        words = files.expect(f"{name}.weight_packed", (num_outputs, num_words(num_inputs, self.bits)), "I32")
        if (given := files.expect(f"{name}.weight_shape", (2,), "I64", "I32").tolist()) != list(shape):
            raise refusal(f"{name} has a weight_shape of {given}, needed is {list(shape)}")
        zeros, order, bits = None, None, self.bits
        if not self.is_symmetric:
            packed_shape = num_words(num_outputs, bits), scales.shape[1]
            zeros = files.expect(f"{name}.weight_zero_point", packed_shape, "I32")
        if f"{name}.weight_g_idx" in files:
            order = order_of(files.expect(f"{name}.weight_g_idx", (num_inputs,), "I32"), scales.shape[1], name)

        def read() -> QuantizedWeight:
            values = unpack(words, bits)[:, :num_inputs]
            unpacked = None if zeros is None else unpack(zeros.t(), bits).t()[:num_outputs].contiguous()
            return QuantizedWeight(values if order is None else values[:, order], scales.float(), unpacked)

        tensors = [tensor for tensor in (words, scales, zeros, order) if tensor is not None]
        scheme = scheme_of(bits) if SCHEMES[self.scheme].is_chosen else self.scheme
        return StoredWeight(scheme, shape, dtype, scales.shape[1], tensors, read, order, has_zeros=zeros is not None)


_MIXED: Final = {CompressedTensors(scheme, 8, True, frozenset({None})) for scheme in (_INT8, scheme_of(8))}
"""What layers of one checkpoint may follow side by side: whether a layer has "weight_packed" tells them apart."""


def _scheme(scheme: Mapping[str, Any], default_format: Any) -> CompressedTensors:
    """Read one of the schemes: what it says of weights and activations must be one of those that are computed here."""
    layout = scheme.get("format") or default_format
    if scheme.get("output_activations"):
        raise refusal("its layers have output_activations")
    weights, rows = _arguments(scheme.get("weights"), "weights"), scheme.get("input_activations")
    bits, size, is_symmetric = weights["num_bits"], weights["group_size"], weights["symmetric"]
    if weights["strategy"] is None:
        weights["strategy"] = {None: "tensor", -1: "channel"}.get(size, "group")
    if weights["strategy"] == "channel" and size in (None, -1):
        size = None
    elif weights["strategy"] != "group" or type(size) is not int or size < 1:
        raise refusal(f"its weights have scales by {weights['strategy']!r} with a group_size of {size!r}")
    if weights["type"] != "int" or bits not in (4, 8) or weights["dynamic"] or not isinstance(is_symmetric, bool):
        raise refusal(f"its weights are {weights}")
    if not rows and layout == "pack-quantized":
        return CompressedTensors(scheme_of(bits), bits, is_symmetric, frozenset({size}))
    if rows and bits == 4 and layout == "pack-quantized" and _arguments(rows, "input_activations") == _rows(size):
        return CompressedTensors(scheme_of(4, quantizes_rows=True), bits, is_symmetric, frozenset({size}))
    is_int8 = bits == 8 and is_symmetric and size is None
    if rows and is_int8 and layout == _INT_QUANTIZED and _arguments(rows, "input_activations") == _rows(None):
        return CompressedTensors(_INT8, bits, is_symmetric, frozenset({size}))
    raise refusal(f"its format is {layout!r} with weights {weights} and input_activations {rows}")


def _rows(group_size: int | None) -> dict[str, Any]:
    """Say how rows in int8 are written: with a scale for each row, or for each group of so many of its inputs."""
    return {**_FIELDS, "strategy": "group" if group_size else "token", "group_size": group_size, "dynamic": True}


def _is_float(scheme: Mapping[str, Any]) -> bool:
    weights = scheme.get("weights")
    return isinstance(weights, Mapping) and weights.get("type") == "float"


def _fp8(schemes: Sequence[Mapping[str, Any]], default_format: Any) -> FP8:
    """Read schemes one of which has floating numbers: they must all be one FP8, whatever activations are rounded to."""
    read = set()
    for scheme in schemes:
        if (layout := scheme.get("format") or default_format) != "float-quantized":
            raise refusal(f"its format is {layout!r} with weights {scheme.get('weights')}")
        if scheme.get("output_activations"):
            raise refusal("its layers have output_activations")
        if not _is_float(scheme):
            raise refusal(f"its weights are {scheme.get('weights')}")
        read.add(fp8_of(_arguments(scheme["weights"], "weights")))
    if len(read) > 1:
        raise refusal(f"its layers follow {len(schemes)} schemes in config_groups, which differ")
    is_static = all(scheme["input_activations"].get("dynamic", False) is False for scheme in schemes
                    if isinstance(scheme.get("input_activations"), Mapping))
    return replace(read.pop(), quantizes_rows=all(_has_float8_rows(scheme) for scheme in schemes),
                   has_row_scales=is_static)


def _has_float8_rows(scheme: Mapping[str, Any]) -> bool:
    """Whether rows are FP8 with a scale for each, or one that the files have.

    Where one would be made of all rows of a step, each row has its own, too.
    """
    if not (rows := scheme.get("input_activations")):
        return False
    read = _arguments(rows, "input_activations")
    is_float8 = (read["num_bits"], read["type"], read["symmetric"]) == (8, "float", True)
    return is_float8 and read["strategy"] in ("token", "tensor", None)


def _arguments(given: Any, what: str) -> dict[str, Any]:
    """Return the fields that decide what numbers mean; the others say how they were found."""
    if not isinstance(given, Mapping):
        raise refusal(f"its {what} are {given!r}")
    return {name: given.get(name, default) for name, default in _FIELDS.items()}
