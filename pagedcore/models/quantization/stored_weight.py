"""A quantised weight as a checkpoint holds it, in the place of a linear layer's parameter until the layer is packed.

Owns the common form of the formats, ``QuantizedWeight``, and ``StoredWeight``, which reads it from the tensors of a
file when the layer is packed, and does not keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.models.cpu.packed_linear import FASTEST, can_pack
from pagedcore.models.quantization.schemes import require_quantized
from pagedcore.protocols import Matmul
from pagedcore_kernels.cpu.matmul.packed_grouped import PackedGroupedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import PackedInt8Matmul


def refusal(found: str) -> ModelNotSupported:
    """Make the error for files that cannot be loaded here, of what was found in them."""
    return ModelNotSupported(
        f"model: its files cannot be loaded here: {found[:400]}. Supported are, beside floating numbers, "
        "compressed-tensors (W8A8 with dynamic activations, W4A16 and W8A16 packed), GPTQ with 4 or 8 bits, AWQ with "
        "4 bits, and bitsandbytes with 8 bits, nf4 or fp4."
    )


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``scales * (values - zeros)``; group ``g`` of an output is inputs ``g * in / groups`` and up.

    With a codebook number ``values & 15`` of it is in the place of each value.
    """

    values: torch.Tensor
    """int8 [out, in]; with 4 bits from -8 to 7."""
    scales: torch.Tensor
    """float32 [out, groups]."""
    zeros: torch.Tensor | None
    """int8 [out, groups] in the numbers of the values; ``None``: all are 0."""
    codebook: str = ""
    """Of ``CODEBOOKS``, with 4 bits and no zero points; "": values are numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight [out, in] that a product is made of.

    Of torch's functions it knows ``torch.cat`` over outputs, and ``F.linear``, whose results are zeros: what calls a
    model before it is packed looks at the way of its tensors, not at numbers. All others raise ``TypeError``.
    """

    scheme: str
    """"w8a8", "w8a16" or "w4a16"."""
    shape: tuple[int, int]
    dtype: torch.dtype
    """Number format of rows and outputs."""
    num_groups: int
    tensors: Sequence[torch.Tensor]
    """What the file holds, mapped, and the order of inputs."""
    read: Callable[[], QuantizedWeight]
    order: torch.Tensor | None = None
    """int64 [in]: which input each column of the values belongs to; ``None``: its own."""

    device = torch.device("cpu")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute; torch calls this in the place of its own functions."""
        if function is torch.nn.functional.linear:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        return joined(*args) if function is torch.cat else NotImplemented

    def detach(self) -> StoredWeight:
        """Return itself."""
        return self

    @property
    def layout(self) -> tuple[Any, ...]:
        """What weights have in common that may be parts of one product."""
        return self.scheme, self.num_groups, None if self.order is None else self.order.numpy().tobytes()

    def product(self, bias: torch.Tensor | None) -> Matmul:
        """Pack the weight with its bias [out].

        Raises:
            ModelNotSupported: the product is not what the weight says.
        """
        weight = self.read()
        if self.scheme == "w8a8":
            made: Matmul = PackedInt8Matmul(weight.values, weight.scales[:, 0], bias, self.dtype)
        else:
            bits = 4 if self.scheme == "w4a16" else 8
            made = PackedGroupedMatmul(
                weight.values, weight.scales, weight.zeros, bits, bias, self.dtype, weight.codebook
            )
        require_quantized(
            made, weight.values, weight.scales, bias, self.scheme == "w8a8", weight.zeros, weight.codebook
        )
        return made if self.order is None else ReorderedMatmul(made, self.order)


def joined(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Return weights of one layout as one of all their outputs."""

    def read() -> QuantizedWeight:
        parts = [weight.read() for weight in weights]
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.zeros_like(part.scales, dtype=torch.int8) if part.zeros is None else part.zeros
                               for part in parts])
        values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
        return QuantizedWeight(values, scales, zeros, parts[0].codebook)

    first = weights[0]
    return StoredWeight(
        first.scheme, (sum(weight.shape[0] for weight in weights), first.shape[1]), first.dtype, first.num_groups,
        [tensor for weight in weights for tensor in weight.tensors], read, first.order,
    )


class StoredMatrices(tuple[StoredWeight, ...]):
    """Weights of the experts of a layer, in the place of a parameter [experts, out, in]."""

    ndim = 3

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts, outputs and inputs."""
        return (len(self), *self[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of rows and outputs."""
        return self[0].dtype


class ReorderedMatmul:
    """A product whose weight has its inputs in another order than rows have them."""

    def __init__(self, product: Matmul, order: torch.Tensor) -> None:
        """Take a product, and the input of each of its columns, int64 [in]."""
        self._product, self._order = product, order
        self.weight, self.memory = product.weight, product.memory

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply; see ``Matmul``."""
        return self._product(rows.index_select(1, self._order))


class StoredLinears:
    """Products of the linear layers of a quantised checkpoint; layers that it holds as numbers stay as they are."""

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        """Whether layers of this format and number of inputs become products; see ``LinearFactory``."""
        return can_pack(dtype, num_inputs)

    def __call__(self, weight: Any, bias: torch.Tensor | None) -> Matmul:
        """Pack a weight [out, in], stored or a tensor, with its bias [out]."""
        return weight.product(bias) if isinstance(weight, StoredWeight) else FASTEST(weight, bias)


def can_join(weights: Iterable[Any]) -> bool:
    """Return whether weights of linear layers, stored or tensors, may be parts of one product."""
    return len({weight.layout if isinstance(weight, StoredWeight) else None for weight in weights}) == 1


def tensors_of(weight: Any) -> Sequence[torch.Tensor]:
    """Return what memory a weight of a linear layer or of experts, stored or a tensor, is in."""
    if isinstance(weight, StoredMatrices):
        return [tensor for one in weight for tensor in one.tensors]
    return weight.tensors if isinstance(weight, StoredWeight) else (weight,)


def stored_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's stored weights, by names of their own; no ``state_dict`` has them."""
    for name, module in model.named_modules():
        for kind, weight in vars(module).items():
            if isinstance(weight, StoredWeight | StoredMatrices):
                for number, tensor in enumerate(tensors_of(weight)):
                    yield f"{name}.{number}" if kind == "weight" else f"{name}.{kind}.{number}", tensor
