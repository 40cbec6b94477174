"""Checkpoints whose linear layers are FP8 (e4m3) with float scales: DeepSeek's, Qwen's, and compressed-tensors'.

Owns what their configuration may say and what their tensors are. Of a layer [out, in]:

    quant_method "fp8"     weight  F8_E4M3 [out, in]    weight_scale_inv  float [ceil(out / rows), ceil(in / columns)]
    "float-quantized"      weight  F8_E4M3 [out, in]    weight_scale      the same by blocks, [out, 1] or [1]
    either, static rows                                 input_scale or activation_scale  float, one number

The first are what the weight is multiplied by; of one for all, "fp8" has the name ``weight_scale`` too. Numbers are
decoded to the number format of rows, rounded once, one layer at a time when the layer is packed, and rows keep it. On a
GPU that multiplies e4m3, ``float8_linear.py`` takes both as they are, but for blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn

from pagedcore.execution.memory_pages import FileMappings
from pagedcore.models.checkpoints.tensor_files import FLOATS, TensorFiles
from pagedcore.models.linears.packed_linear import can_pack
from pagedcore.models.linears.stored_weight import SEPARATOR, StoredWeight, decoded_late, refusal, stored_weights
from pagedcore_kernels.cpu.runtime.finite import all_finite

_FORMAT: Final = "F8_E4M3"
_AT_ONCE: Final = 2**20
"""Numbers that are decoded at a time, which takes 8 MiB besides the result."""
_ROW_SCALES: Final = ("input_scale", "activation_scale")
_MOST_OF_ROWS: Final = 2.0**100
_NAN: Final = 0x7F
"""The code of e4m3 that is no number, with either sign."""
_LARGEST: Final = torch.finfo(torch.float8_e4m3fn).max
_ALL: Final = 0
"""As the size of a block: all outputs, or all inputs."""


@dataclass(frozen=True, slots=True)
class FP8:
    """How the layers of one checkpoint are stored."""

    scale_name: str
    block: tuple[int, int]
    """Outputs and inputs that share a scale; ``_ALL`` for all of them."""
    is_late: bool = True
    """Whether linear layers are decoded when they are packed, not when the model is loaded."""
    quantizes_rows: bool = False
    """Whether the files say that rows are FP8 too, by a scale of their own or by one that the files have."""
    has_row_scales: bool = False
    """Whether the configuration says that they have one; otherwise those that are there mean nothing."""
    may_stay: bool = False
    """Whether there may be products of it where the model computes, so that layers are not decoded at once."""
    scheme: ClassVar[str] = "none"

    @property
    def has_product(self) -> bool:
        """Whether rows and scales are such that a GPU multiplies them; scales of blocks are not."""
        return self.quantizes_rows and self.block[0] in (_ALL, 1) and self.block[1] == _ALL

    @property
    def described(self) -> str:
        """What becomes of it, for people."""
        stays = ", but on a GPU that multiplies it, where it takes a byte a weight" if self.has_product else ""
        return f"FP8 in the files, decoded to the number format{stays}"

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> FP8:
        """Read a ``quantization_config`` of the method "fp8".

        Raises:
            ModelNotSupported: it says something that cannot be computed here, or that is not understood.
        """
        if (experts := config.get("expert_dtype") or "fp8") != "fp8":
            raise refusal(f"FP8 with experts in {experts!r}")
        if (kind := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise refusal(f"FP8 of the kind {kind!r}")
        if (rows := config.get("activation_scheme") or "dynamic") not in ("dynamic", "static"):
            raise refusal(f"FP8 with the activation_scheme {rows!r}")
        size = config.get("weight_block_size")
        return cls("weight_scale_inv", (_ALL, _ALL) if size is None else block_of(size), quantizes_rows=True,
                   has_row_scales=rows == "static")

    def weight(self, files: TensorFiles, name: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight | None:
        """Return the weight of a layer by its name, or ``None`` if the files hold it as numbers, or it is to be decoded
        at once.

        Raises:
            ModelNotSupported: its tensors are not what the configuration says.
        """
        weight = f"{name}.weight"
        self.require_no_scale(files, name)
        is_late = self.may_stay or (self.is_late and can_pack(dtype, shape[1]))
        if not is_late or weight not in files or files.format_of(weight) != _FORMAT:
            return None
        values, scales = self.tensors(files, name, shape)
        float8 = (values, scales, self._row_scale(files, name)) if self.may_stay and self.has_product else None
        return decoded_late(
            shape, dtype, [values, scales], lambda: self.decode(values, scales, dtype), float8, name)

    def _row_scale(self, files: TensorFiles, name: str) -> float:
        """Return what the files have as the scale of all rows of a layer; 0.0: nothing."""
        found = next((one for last in _ROW_SCALES if (one := f"{name}.{last}") in files), None)
        if found is None or not self.has_row_scales:
            return 0.0
        scale = files.scales(found, files.shape_of(found)).flatten().tolist()
        if len(scale) != 1 or not 1 / _MOST_OF_ROWS <= scale[0] <= _MOST_OF_ROWS:
            raise refusal(f"{found} is {scale[:4]}, needed is one number from 2**-100 to 2**100")
        return float(scale[0])

    def is_in(self, files: TensorFiles) -> bool:
        """Whether any tensor is FP8, whatever the configuration says; nothing is read."""
        return any(one.get_dtype() == _FORMAT for one in files.unread().values())

    def require_no_scale(self, files: TensorFiles, name: str) -> None:
        """Refuse a layer of other numbers than FP8 with a scale, which nobody could say what it is for; without one it
        is as it is, like those that a configuration leaves out.

        Raises:
            ModelNotSupported: it is such a layer.
        """
        weight, scale = f"{name}.weight", self.scale_of(files, name)
        if weight in files and scale in files and (kind := files.format_of(weight)) != _FORMAT:
            raise refusal(f"{weight} is {kind} and has a scale ({scale}), needed is {_FORMAT}, or none")

    def scale_of(self, files: TensorFiles, name: str) -> str:
        """Return the name of a layer's scales."""
        other = f"{name}.weight_scale"
        return other if self.block == (_ALL, _ALL) and other in files else f"{name}.{self.scale_name}"

    def tensors(self, files: TensorFiles, name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers [out, in] of a layer, mapped, and their scales [blocks of outputs, blocks of inputs]."""
        values = files.expect(f"{name}.weight", shape, _FORMAT)
        grid = [1 if size == _ALL else -(-length // size) for length, size in zip(shape, self.block, strict=True)]
        scale = self.scale_of(files, name)
        # Shape: a scale of a whole tensor is [1], or no array.
        is_one = grid == [1, 1] and scale in files and len(files.shape_of(scale)) < 2
        scales = files.scales(scale, files.shape_of(scale) if is_one else (grid[0], grid[1]))
        if scales.numel() != grid[0] * grid[1]:
            raise refusal(f"{scale} has {scales.numel()} values, needed are {grid[0] * grid[1]}")
        return values, scales.float().view(grid)

    def decode(self, values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight [out, in] in ``dtype``: each number times its scale in float32, rounded once."""
        (num_outputs, num_inputs), numbers = values.shape, torch.empty(values.shape, dtype=dtype)
        height, width = (min(size or length, length) for size, length in zip(self.block, values.shape, strict=True))
        at_once = max(1, _AT_ONCE // max(1, num_inputs))
        for start in range(0, num_outputs, at_once):
            rows = torch.arange(start, min(start + at_once, num_outputs))
            of_rows = scales[rows // height].repeat_interleave(width, 1)[:, :num_inputs]
            numbers[rows] = (values[start : start + at_once].float() * of_rows).to(dtype)
        return numbers


class FP8Files(TensorFiles):
    """The tensors of such a checkpoint, whose FP8 weights are decoded where numbers are asked for."""

    def __init__(self, directory: Path, rename: Any, stored: FP8, dtype: torch.dtype) -> None:
        super().__init__(directory, rename)
        self._stored, self._dtype = stored, dtype

    def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
        """Return a tensor of this shape, as ``TensorFiles`` does; of FP8, its numbers in the format of the model."""
        layer, _, last = name.rpartition(".")
        is_decoded = formats == FLOATS and last == "weight" and len(shape) == 2 and name in self
        if not is_decoded or self.format_of(name) != _FORMAT:
            self._stored.require_no_scale(self, layer)
            return super().expect(name, shape, *formats)
        values, scales = self._stored.tensors(self, layer, (shape[0], shape[1]))
        self._require_finite(layer, values, scales)
        return self._stored.decode(values, scales, self._dtype)

    def require_numbers(self, model: nn.Module) -> None:
        """Read the codes of all stored weights of a model, once, and give their pages back.

        Raises:
            ModelNotSupported: one is no number, or is none that is finite when it is decoded.
        """
        mappings = FileMappings()
        for module in model.modules():
            for weight in stored_weights(module):
                layers, tensors = weight.name.split(SEPARATOR), weight.tensors
                for layer, values, scales in zip(layers, tensors[::2], tensors[1::2], strict=True):
                    self._require_finite(layer, values, scales)
                    mappings.free_pages(values)

    def _require_finite(self, layer: str, values: torch.Tensor, scales: torch.Tensor) -> None:
        weight, scale = self.place_of(f"{layer}.weight"), self.place_of(self._stored.scale_of(self, layer))
        if not all_finite(values):
            codes = values.view(torch.uint8)
            wrong = ((codes & _NAN) == _NAN).nonzero()
            row, column = wrong[0].tolist()
            raise refusal(f"{weight} has {len(wrong)} codes of e4m3 that are no number, the first is "
                          f"{int(codes[row, column]):#x} at [{row}, {column}]")
        # Why first: it is all that is asked of files that are right.
        if _LARGEST * float(scales.abs().max()) <= torch.finfo(self._dtype).max:
            return
        wrong = (~self._stored.decode(values, scales, self._dtype).isfinite()).nonzero()
        if len(wrong):
            row, column = wrong[0].tolist()
            raise refusal(f"{weight} has {float(values[row, column])} at [{row}, {column}], which is not finite in "
                          f"{self._dtype} times its scale: {scale} is {float(scales.abs().max()):g}")


def block_of(size: Any) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale, as a configuration says it.

    Raises:
        ModelNotSupported: it is no pair of sizes.
    """
    sizes = list(size) if isinstance(size, list | tuple) else []
    if len(sizes) != 2 or not all(type(one) is int and one > 0 for one in sizes):
        raise refusal(f"FP8 with scales for blocks of {size!r}")
    return sizes[0], sizes[1]


def of_compressed_tensors(weights: Mapping[str, Any]) -> FP8:
    """Read how compressed-tensors describes the weights of one scheme, of numbers that are "float".

    Raises:
        ModelNotSupported: they are no FP8 that is decoded here.
    """
    blocks: Mapping[Any, tuple[int, int]] = {"tensor": (_ALL, _ALL), "channel": (1, _ALL)}
    strategy = weights["strategy"] or "tensor"
    if weights["num_bits"] != 8 or weights["symmetric"] is not True or weights["dynamic"]:
        raise refusal(f"its weights are {dict(weights)}")
    if strategy == "block":
        return FP8("weight_scale", block_of(weights["block_structure"]))
    if not isinstance(strategy, str) or strategy not in blocks or weights["group_size"] not in (None, -1):
        raise refusal(f"its weights have scales by {strategy!r} with a group_size of {weights['group_size']!r}")
    return FP8("weight_scale", blocks[strategy])
