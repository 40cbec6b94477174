"""Linear layers with weights rearranged once for the matrix product that runs on this CPU.

Owns ``PackedLinear`` and the walk over a module tree that puts it in the place of ``nn.Linear`` and of GPT-2's
``Conv1D``, one layer at a time so that memory never holds two copies of the model. It never touches a module of
another type. Owns also the check that a product gives a row the same bits in any batch.

A ``LinearFactory`` makes what does the arithmetic: ``pagedcore_kernels/cpu/matmul`` on x86 processors with AVX2 or
AVX-512, oneDNN elsewhere, or an entry of the plugin table ``linears``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.linears.shared_matrices import read_by_others
from pagedcore.models.lora.slots import adapters_now
from pagedcore.protocols import LinearFactory, Matmul
from pagedcore_kernels.cpu.matmul.low_rank import LowRankUpdate
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul, can_multiply
from pagedcore_kernels.cpu.matmul.product import PackedProduct
from pagedcore_kernels.cpu.runtime.huge_pages import move_to_huge_pages

OnUnused = Callable[[torch.Tensor], None]
"""Called with a weight that was packed and that no module needs any more."""

_NUM_ROWS: Final = (2, 3, 8, 17, 33, 64, 256, 512)
"""Rows per product that is checked: the smallest, odd ones, and both sides of the sizes at which libraries change their
blocking."""
_WIDE: Final = 32768
"""Wider layers are output layers: they see one row per sequence, never a whole prompt."""
_NUM_ROWS_WIDE: Final = (2, 3, 8, 17, 33, 64)
VECTOR: Final = 64
"""Most elements that a loop of torch takes at a time with vectors."""
_NUM_CHECKED_ROWS: Final = 5
"""Rows and most outputs that ``require_right`` computes again."""
_NUM_CHECKED_OUTPUTS: Final = 256


class OneDnnMatmul:
    """A product by oneDNN, with the weight in its own arrangement.

    No batch-size hint is given when packing: a hint of 1 makes every other size slow.
    """

    @staticmethod
    def supports(dtype: torch.dtype, num_inputs: int) -> bool:
        """Whether this torch has such products; see ``LinearFactory``."""
        if not torch._C._has_mkldnn or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return False
        if dtype == torch.bfloat16:
            return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        return dtype == torch.float32

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        self._bias = None if bias is None else bias.clone()

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply; see ``Matmul``."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self._bias, "none", [], "")
        return product

    @property
    def memory(self) -> tuple[int, int]:
        """Address and bytes of the weight; no bytes if torch does not tell."""
        operations = torch.ops.mkldnn
        if not hasattr(operations, "data_ptr") or not hasattr(operations, "_nbytes"):
            return 0, 0
        return operations.data_ptr(self.weight), operations._nbytes(self.weight)


class _Fastest:
    """Our product where this processor has it, else oneDNN's; each is compared with its weight."""

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        return can_pack(dtype, num_inputs)

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Matmul:
        return self.join([weight], bias)

    def join(self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None) -> Matmul:
        """Return the product of weights one below the other, which are read from where they are."""
        is_ours = can_multiply(parts[0].dtype, parts[0].shape[1])
        product: Matmul = PackedMatmul(parts, bias) if is_ours else OneDnnMatmul(torch.cat(list(parts)), bias)
        chosen = checked_outputs(sum(len(part) for part in parts))
        owners, begin = list[torch.Tensor](), 0
        for part in parts:
            owners.append(part[chosen[(begin <= chosen) & (chosen < begin + len(part))] - begin])
            begin += len(part)
        require_right(product, torch.cat(owners).float(), chosen, bias)
        return product


FASTEST: Final = _Fastest()
"""What ``linear_backend="auto"`` means."""


class PackedLinear(nn.Module):
    """A linear layer whose weight is rearranged for the product that runs here.

    Invariant: the product runs over two rows or more; a lone row is doubled and the copy dropped, so that a row's
    result does not depend on whether it was alone.
    """

    update: LowRankUpdate | None = None
    """Adds what adapters make of rows that have one; ``None``: no row can have one."""

    def __init__(
        self, weight: torch.Tensor | Sequence[torch.Tensor], bias: torch.Tensor | None, factory: LinearFactory = FASTEST
    ) -> None:
        """Pack a weight [out, in], in a format of the factory's and any strides, and a bias [out]; neither is kept.

        Several weights of one ``in`` become the parts of one.
        """
        super().__init__()
        parts = [part.detach() for part in (weight if isinstance(weight, Sequence) else [weight])]
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        bias = None if bias is None else bias.detach()
        self.multiply: Matmul = (
            factory.join(parts, bias) if isinstance(factory, _Fastest)
            else factory(parts[0] if len(parts) == 1 else torch.cat(parts), bias)
        )  # fmt: skip
        """What computes; may be called directly with two rows or more, [M, in] and contiguous."""

    @property
    def weight(self) -> torch.Tensor:
        """The packed weight: some modules ask their layers' weights for number format and device, all that is left."""
        return self.multiply.weight

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply ``rows`` [..., in] and return [..., out]."""
        flat = rows.reshape(-1, self.in_features).contiguous()
        is_alone = len(flat) == 1
        product = self.multiply(flat.expand(2, -1).contiguous())[:1] if is_alone else self.multiply(flat)
        if self.update is not None and (adapters := adapters_now()) is not None:
            self.update.add_to(product, flat, adapters.updates)
        if self.out_features < VECTOR:
            # Why: with a gap between rows, a sigmoid that follows takes row by row, not vectors of several rows, past
            # the last of which torch computes single elements in another way.
            product = nn.functional.pad(product, (0, 2))[:, :-2]
        return product.view(*rows.shape[:-1], self.out_features)

    def use_huge_pages(self) -> None:
        """Move the weight into huge pages, where the system has them."""
        move_to_huge_pages(*self.multiply.memory)

    def extra_repr(self) -> str:
        """Describe the layer's shape and what computes it."""
        return f"{self.in_features}, {self.out_features}, {type(self.multiply).__name__}"


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What ``pack_linears`` found."""

    packed: tuple[PackedLinear, ...]
    unpacked: tuple[str, ...]
    """Types of modules that still hold matrices of their own: experts, routers, unpackable linears."""


def can_pack(dtype: torch.dtype, num_inputs: int = 2) -> bool:
    """Return whether linear layers of this format and number of inputs are packed on this machine."""
    return can_multiply(dtype, num_inputs) or OneDnnMatmul.supports(dtype, num_inputs)


def pack_linears(
    model: nn.Module, *, linears: LinearFactory = FASTEST, on_unused: OnUnused = lambda weight: None
) -> PackingReport:
    """Replace every linear layer inside ``model`` but those whose weight another module reads, and free each original
    before the next one is packed.

    An embedding that shares its weight with the output layer keeps it; the output layer is packed separately.

    Args:
        model: changed in place.
        linears: makes the products; layers of formats that it does not support are left alone.
        on_unused: not called with weights that another module of the model has.
    """
    packed = []
    kept = read_by_others(model)
    num_uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in kept or (replacement := _pack(child, linears)) is None:
                continue
            packed.append(replacement)
            setattr(parent, name, replacement)
            if num_uses[id(child.weight)] == 1:
                on_unused(child.get_parameter("weight"))
            # Why: another reference to the old layer must not keep its memory.
            child.weight = None  # type: ignore[assignment]
    return PackingReport(tuple(packed), tuple(sorted({type(m).__name__ for m in holders_of_matrices(model)})))


def matrix_of(module: Any) -> torch.Tensor | None:
    """Return the weight [out, in] of exactly a linear layer, as a subclass may compute something else."""
    kind = type(module)
    if kind is nn.Linear:
        return module.weight  # type: ignore[no-any-return]
    # Shape: that of ``Conv1D`` is [in, out]
    return module.weight.t() if kind.__name__ == "Conv1D" and kind.__bases__ == (nn.Module,) else None


def packable_weight(module: Any, factory: LinearFactory) -> torch.Tensor | None:
    """Return the weight [out, in] of a module that is exactly a linear layer of a supported format."""
    weight = matrix_of(module)
    return weight if weight is not None and factory.supports(weight.dtype, weight.shape[1]) else None


def _pack(module: Any, factory: LinearFactory) -> PackedLinear | None:
    weight = packable_weight(module, factory)
    return None if weight is None else PackedLinear(weight, module.bias, factory).train(module.training)


def holders_of_matrices(model: nn.Module) -> Iterator[nn.Module]:
    """Yield modules with parameters of two dimensions or more that no packed layer, embedding or norm accounts for."""
    for module in model.modules():
        # Why not convolutions: those that are not of recurrent layers are refused before this is asked.
        if not isinstance(module, nn.Embedding | nn.Conv1d | PackedLinear) and not _is_norm(module) and any(
            # Why: what is called a bias is added, and of the logarithms of decays each has its own channel.
            parameter.ndim >= 2 and not name.endswith(("bias", "A_log"))
            for name, parameter in module.named_parameters(recurse=False)
        ):
            yield module


def _is_norm(module: nn.Module) -> bool:
    """Whether it is a norm of transformers: what it has of two dimensions are factors, one row for each head."""
    kind = type(module)
    return kind.__name__.endswith("Norm") and kind.__module__.startswith("transformers.models.")


def checked_outputs(num_outputs: int) -> torch.Tensor:
    """Return the numbers of the outputs that ``require_right`` computes again, spread over all."""
    return torch.linspace(0, num_outputs - 1, min(num_outputs, _NUM_CHECKED_OUTPUTS)).long()


@torch.inference_mode()
def require_right(
    product: Matmul, weight: torch.Tensor, outputs: torch.Tensor, bias: torch.Tensor | None,
    quantizes_rows: bool = False, relative: float = 2**-14,
) -> None:
    """Compare ``outputs`` of a product with their float32 weight [outputs, in] and the bias [out], computed by torch.

    The bound holds for every order of additions in float32, with ``relative`` the error of a weight, and for rows that
    are rounded to 255 numbers, if they are.
    Outputs that are not finite by their weights may be anything.

    Raises:
        ModelNotSupported: an output is further away.
    """
    num_inputs, dtype = weight.shape[1], product.weight.dtype
    rows = torch.randn(_NUM_CHECKED_ROWS, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = rows.float() @ weight.T + (0 if bias is None else bias[outputs].float())
    largest = rows.float().abs() @ weight.abs().T + expected.abs()
    # The last is for numbers so small that processors may take them as zero.
    allowed = largest * relative + expected.abs() * torch.finfo(dtype).eps + 2**-100
    if quantizes_rows:
        allowed += rows.float().abs().amax(1, keepdim=True) / 250 * weight.abs().sum(1)
    error = (product(rows)[:, outputs].float() - expected).abs()
    if not ((error <= allowed) | ~expected.isfinite()).all():
        raise ModelNotSupported(
            f"model: self-test failed. A product of {num_inputs} inputs differs from its weight by up to "
            f"{(error / allowed).nan_to_num(torch.inf).max().item():.3g} times what rounding explains."
        )


@torch.inference_mode()
def probe_invariance(layers: Iterable[PackedLinear]) -> tuple[tuple[int, int, torch.dtype], ...]:
    """Return the shapes (out, in, dtype) whose rows depend on the number of rows or on their place; empty is good.

    Our own product adds up in one order by construction. oneDNN chooses its path by shape, processor and number of
    threads; on those tried, packed products of two rows or more add up in one order. That is an observation, not a
    promise, so one layer of each shape is tried, with its own weights and the number of threads that is set. Our own
    products of mapped weights were tried before their file was written, on a processor with the same instructions.
    """
    of_shape = {(layer.out_features, layer.in_features, layer.weight.dtype): layer for layer in layers
                if not (isinstance(layer.multiply, PackedProduct) and layer.multiply.packed.is_mapped)}
    return tuple(shape for shape, layer in of_shape.items() if not _is_invariant(layer))


def _is_invariant(layer: PackedLinear) -> bool:
    sizes = _NUM_ROWS_WIDE if layer.out_features > _WIDE else _NUM_ROWS
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(max(sizes), layer.in_features, generator=generator).to(layer.weight.dtype)
    expected = layer(rows)
    # Shape: the first rows, the last rows, and all of them in another order
    in_company = all(
        torch.equal(layer(rows[:n].contiguous()), expected[:n])
        and torch.equal(layer(rows[-n:].contiguous()), expected[-n:])
        for n in sizes[:-1]
    )
    return in_company and torch.equal(layer(rows.roll(1, 0)), expected.roll(1, 0))
