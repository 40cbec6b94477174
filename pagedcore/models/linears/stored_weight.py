"""A quantised weight as a checkpoint holds it, in the place of a linear layer's parameter until the layer is packed.

Owns the common form of the formats, ``QuantizedWeight``, and ``StoredWeight``, which reads it from the tensors of a
file when the layer is packed, and does not keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from pagedcore.config.schemes import STORED_SCHEMES
from pagedcore.errors import InternalError, ModelNotSupported
from pagedcore.models.linears.int8_table import Int8Table, ShowsRows
from pagedcore.models.linears.packed_linear import FASTEST
from pagedcore.models.linears.schemes import dequantize, packed_product
from pagedcore.protocols import LinearFactory, Matmul
from pagedcore_kernels.cpu.matmul import packed_grouped, packed_int8
from pagedcore_kernels.cpu.runtime.huge_pages import move_to_huge_pages

SEPARATOR: Final = "+"
"""Between the names of layers that are one product."""


def refusal(found: str) -> ModelNotSupported:
    """Make the error for files that cannot be loaded here, of what was found in them."""
    return ModelNotSupported(
        f"model: its files cannot be loaded here: {found[:400]}. Supported are, beside floating numbers, "
        "compressed-tensors (W8A8 with dynamic activations, W4A16 and W8A16 packed, FP8), FP8 in blocks, GPTQ with 4 "
        "or 8 bits, AWQ with 4 bits, bitsandbytes with 8 bits, nf4 or fp4, MXFP4 of experts as gpt-oss has it, and "
        "GGUF of the architectures gemma3, gemma4, glm4, gpt-oss, granite, lfm2, llama, mistral3, phi3, qwen2, qwen3, "
        "qwen35, qwen35moe and qwen3moe with q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, "
        "iq4_xs and mxfp4."
    )


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A weight ``scales * (values - zeros)``, or ``scales * values - zeros`` with zeros that are no integers; group
    ``g`` of an output is inputs ``g * in / groups`` and up.

    With a codebook number ``values & 15`` of it is in the place of each value.
    """

    values: torch.Tensor
    """int8 [out, in]; with 4 bits from -8 to 7, or from 0 to 15 with zeros that are no integers."""
    scales: torch.Tensor
    """float32 or float16 [out, groups]."""
    zeros: torch.Tensor | None
    """int8 [out, groups] in the numbers of the values, or in those of the weight in the format of the scales; ``None``:
    all are 0."""
    codebook: str = ""
    """Of ``CODEBOOKS``, with 4 bits and no zero points; "": values are numbers."""

    def numbers(self) -> torch.Tensor:
        """Return the weight, float32 [out, in]."""
        return dequantize(self.values, self.scales, self.zeros, self.codebook)


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight:
    """A weight [out, in] that a product is made of.

    Of torch's functions it knows ``torch.cat`` over outputs, ``F.embedding`` where there is ``look_up``, and
    ``F.linear`` and the product of rows with what was its transpose, whose results are zeros: what calls a model before
    it is packed looks at the way of its tensors, not at numbers. All others raise ``TypeError``.
    """

    scheme: str
    """Name of one of ``STORED_SCHEMES``, none of those that choose."""
    shape: tuple[int, int]
    dtype: torch.dtype
    """Number format of rows and outputs."""
    num_groups: int
    tensors: Sequence[torch.Tensor]
    """What the file holds, mapped, and the order of inputs."""
    read: Callable[[], QuantizedWeight]
    order: torch.Tensor | None = None
    """int64 [in]: which input each column of the values belongs to; ``None``: its own."""
    has_least: bool = False
    """Whether zeros are no integers."""
    has_halves: bool = False
    """Whether scales, and such zeros, are float16."""
    has_zeros: bool = False
    """Whether zeros are int8."""
    codebook: str = ""
    """As in ``QuantizedWeight``, where weights of one size may differ in it."""
    look_up: Callable[[torch.Tensor], torch.Tensor] | None = None
    """``token ids -> rows [..., in]`` of an embedding, in ``dtype``."""
    decode: Callable[[], torch.Tensor] | None = None
    """Returns the numbers [out, in] of a weight that is none of a scheme, in ``dtype``; ``read`` is of no use then."""
    float8: tuple[torch.Tensor, torch.Tensor, float] | None = None
    """Of a weight that is decoded, and may stay in e4m3: numbers [out, in], a scale in float32 of all or each output,
    and the scale of rows; 0.0: each has its own."""
    parts: Sequence[StoredWeight] = ()
    """Weights of several layouts whose outputs are this one's; ``read`` is of no use then."""
    alternates: bool = False
    """Whether outputs of the parts take turns, and are not one behind the other."""
    ready: Callable[[str, tuple[int, int], torch.Tensor | None], Matmul] | None = None
    """``(name, shape, bias) -> product`` of a weight that is packed already; ``read`` is of no use then."""
    name: str = ""
    """Of such a weight, or of one that is decoded; those of its parts, with ``SEPARATOR``, of several layers."""
    whole: str = ""
    """Name of the product that has it."""

    device = torch.device("cpu")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute; torch calls this in the place of its own functions."""
        if function in (torch.nn.functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__):
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        if function is torch.nn.functional.embedding and (look_up := args[1].look_up) is not None:
            return look_up(args[0])
        return joined(*args) if function is torch.cat else NotImplemented

    def detach(self) -> StoredWeight:
        """Return itself."""
        return self

    @property
    def layout(self) -> tuple[Any, ...]:
        """What weights have in common whose values are packed side by side."""
        order = None if self.order is None else self.order.numpy().tobytes()
        return self.scheme, self.num_groups, self.has_least, self.has_halves, self.codebook, order

    @property
    def num_bytes(self) -> int:
        """Bytes of its product, or of an embedding."""
        if self.look_up is not None:
            return sum(tensor.nbytes for tensor in self.tensors)
        if self.parts:
            return sum(part.num_bytes for part in self.parts)
        if self.decode is not None:
            return self.shape[0] * self.shape[1] * self.dtype.itemsize
        scheme = STORED_SCHEMES[self.scheme]
        if scheme.sums_whole_rows:
            return packed_int8.packed_bytes(*self.shape)
        packed = packed_grouped.packed_bytes(
            *self.shape, self.num_groups, scheme.bits, has_least=self.has_least, has_zeros=self.has_zeros,
            halves=self.has_halves,
        )
        return packed + (0 if self.order is None else self.order.nbytes)

    def product(self, bias: torch.Tensor | None) -> Matmul:
        """Pack the weight with its bias [out].

        Raises:
            ModelNotSupported: the product is not what the weight says.
        """
        if self.ready is not None:
            return self.ready(self.name, self.shape, bias)
        if self.parts:
            biases = shares_of(bias, [part.shape[0] for part in self.parts], alternates=self.alternates)
            products = [part.product(share) for part, share in zip(self.parts, biases, strict=True)]
            return JoinedMatmul(products, alternates=self.alternates)
        weight = self.read()
        made = packed_product(
            STORED_SCHEMES[self.scheme], weight.values, weight.scales, weight.zeros, bias, self.dtype, weight.codebook
        )
        if isinstance(self.look_up, Int8Table):
            self.look_up.share(made)
        return made if self.order is None else ReorderedMatmul(made, self.order)


def decoded_late(
    shape: tuple[int, int], dtype: torch.dtype, tensors: Sequence[torch.Tensor], decode: Callable[[], torch.Tensor],
    float8: tuple[torch.Tensor, torch.Tensor, float] | None = None, name: str = "",
) -> StoredWeight:  # fmt: skip
    """Return a weight of floating numbers that ``decode`` makes of ``tensors`` when it is packed; ``name`` is its
    layer's in the files.
    """

    def read() -> QuantizedWeight:
        raise TypeError("a weight of floating numbers is of no scheme")

    return StoredWeight("none", shape, dtype, 1, tensors, read, decode=decode, float8=float8, name=name)


def packed_already(
    name: str, whole: str, shape: tuple[int, int], dtype: torch.dtype,
    ready: Callable[[str, tuple[int, int], torch.Tensor | None], Matmul],
) -> StoredWeight:
    """Return a weight whose product ``ready`` returns, as it does that of several such weights together, by ``whole``.
    """

    def read() -> QuantizedWeight:
        raise TypeError("a weight that is packed already is not packed once more")

    return StoredWeight("none", shape, dtype, 1, (), read, ready=ready, name=name, whole=whole)


def numbers_of(weight: Any) -> torch.Tensor:
    """Return the numbers of a weight that is a tensor, or is decoded late."""
    numbers: torch.Tensor = weight.decode() if isinstance(weight, StoredWeight) and weight.decode else weight
    return numbers


def joined(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Return weights as one of all their outputs."""

    def decode() -> torch.Tensor:
        return torch.cat([numbers_of(weight) for weight in weights])

    def read() -> QuantizedWeight:
        parts = [weight.read() for weight in weights]
        zeros = None
        if any(part.zeros is not None for part in parts):
            zeros = torch.cat([torch.zeros_like(part.scales, dtype=torch.int8) if part.zeros is None else part.zeros
                               for part in parts])
        values, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("values", "scales"))
        return QuantizedWeight(values, scales, zeros, parts[0].codebook)

    first, is_uniform = weights[0], len({weight.layout for weight in weights}) == 1
    if first.ready is not None:
        shape = sum(weight.shape[0] for weight in weights), first.shape[1]
        return packed_already(_name_of_all(weights), first.whole, shape, first.dtype, first.ready)
    return StoredWeight(
        first.scheme, (sum(weight.shape[0] for weight in weights), first.shape[1]), first.dtype, first.num_groups,
        [tensor for weight in weights for tensor in weight.tensors], read, first.order, first.has_least,
        first.has_halves, any(weight.has_zeros for weight in weights), first.codebook,
        parts=() if is_uniform else weights, decode=decode if first.decode is not None else None,
        name=_name_of_all(weights),
    )


def alternating(weights: Sequence[StoredWeight]) -> StoredWeight:
    """Return weights of any layouts and one shape [out, in] as one whose outputs take turns."""

    def read() -> QuantizedWeight:
        raise TypeError("a weight of several layouts has no values of one")

    first, num_outputs = weights[0], sum(weight.shape[0] for weight in weights)
    return StoredWeight(
        first.scheme, (num_outputs, first.shape[1]), first.dtype, first.num_groups,
        [tensor for weight in weights for tensor in weight.tensors], read, parts=weights, alternates=True,
    )


def shares_of(bias: torch.Tensor | None, sizes: Sequence[int], *, alternates: bool) -> Sequence[torch.Tensor | None]:
    """Return the bias [out] of each of several weights, whose outputs may take turns; ``None``: there is none."""
    if bias is None:
        return [None] * len(sizes)
    if alternates:
        return [bias[place :: len(sizes)].contiguous() for place in range(len(sizes))]
    return torch.split(bias, list(sizes))


class JoinedMatmul:
    """Products of one row with weights of several layouts, side by side, or output by output in turn."""

    def __init__(self, products: Sequence[Matmul], *, alternates: bool = False) -> None:
        """Take products of rows of one format and one size, of as many outputs each if they take turns."""
        self.products, self.alternates = products, alternates
        for product in products:
            move_to_huge_pages(*product.memory)
        self.weight = products[0].weight
        self.memory = 0, 0
        """None of its own."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply; see ``Matmul``."""
        outputs = [product(rows) for product in self.products]
        return torch.stack(outputs, dim=2).flatten(1) if self.alternates else torch.cat(outputs, dim=1)


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
        self.product, self.order = product, order
        self.weight, self.memory = product.weight, product.memory

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply; see ``Matmul``."""
        return self.product(rows.index_select(1, self.order))


class StoredLinears:
    """Products of stored weights; those of tensors another factory makes, by default in the tensors' number format."""

    def __init__(self, others: LinearFactory = FASTEST) -> None:
        self._others = others

    def supports(self, dtype: torch.dtype, num_inputs: int) -> bool:
        """Whether layers of this format and number of inputs become products; see ``LinearFactory``."""
        return self._others.supports(dtype, num_inputs)

    def __call__(self, weight: Any, bias: torch.Tensor | None) -> Matmul:
        """Pack a weight [out, in], stored or a tensor, with its bias [out]."""
        is_of_scheme = isinstance(weight, StoredWeight) and weight.decode is None
        return weight.product(bias) if is_of_scheme else self._others(numbers_of(weight), bias)


def can_join(weights: Sequence[Any]) -> bool:
    """Return whether weights of linear layers are all stored ones, or all tensors, and so may be parts of a product.

    Weights that are packed already may if they are all parts of the same one.
    """
    if len({isinstance(weight, StoredWeight) for weight in weights}) > 1:
        return False
    first = weights[0]
    return not isinstance(first, StoredWeight) or first.ready is None or first.whole == _name_of_all(weights)


def _name_of_all(weights: Sequence[StoredWeight]) -> str:
    return SEPARATOR.join(weight.name for weight in weights)


def rows_of(weight: StoredWeight, outputs: Sequence[int]) -> torch.Tensor | None:
    """Return the numbers [n, in] of some outputs; ``None``: its product, packed already, does not show them."""
    if weight.ready is not None:
        product = weight.product(None)
        try:
            return product.weight_rows(torch.tensor(outputs)) if isinstance(product, ShowsRows) else None
        except InternalError:  # its weights have several scales for an output, or zero points
            return None
    if weight.decode is not None:
        return weight.decode()[outputs]
    read = weight.read()
    zeros = None if read.zeros is None else read.zeros[outputs]
    # Why chosen first: the numbers of a whole vocabulary would be many times its values.
    numbers = replace(read, values=read.values[outputs], scales=read.scales[outputs], zeros=zeros).numbers()
    return numbers if weight.order is None else torch.empty_like(numbers).index_copy_(1, weight.order, numbers)


def tensors_of(weight: Any) -> Sequence[torch.Tensor]:
    """Return what memory a weight of a linear layer or of experts, stored or a tensor, is in."""
    if isinstance(weight, StoredMatrices):
        return [tensor for one in weight for tensor in one.tensors]
    return weight.tensors if isinstance(weight, StoredWeight) else (weight,)


def has_unpacked(model: torch.nn.Module) -> bool:
    """Return whether a stored weight is left that is no embedding's."""
    values = (value for module in model.modules() for value in vars(module).values())
    return any(isinstance(value, StoredMatrices) or (isinstance(value, StoredWeight) and value.look_up is None)
               for value in values)


def stored_weights(module: torch.nn.Module) -> Iterator[StoredWeight]:
    """Yield the stored weights of one module, those of experts one by one."""
    for value in vars(module).values():
        yield from value if isinstance(value, StoredMatrices) else [value] if isinstance(value, StoredWeight) else []


def shapes_of_tensors(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight of a model by its name, stored ones too; a tied one has the first of its names.
    """
    known = {id(tensor): (name, tuple(tensor.shape)) for name, tensor in reversed(_tensors(model))}
    shapes = dict(sorted(known.values()))
    for name, module in model.named_modules():
        for kind, weight in vars(module).items():
            if isinstance(weight, StoredWeight | StoredMatrices):
                shapes[f"{name}.{kind}"] = tuple(weight.shape)
    return shapes


def tied_names(model: torch.nn.Module) -> dict[str, str]:
    """Return each further name of a tied weight, and its first one."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(tensor), name) for name, tensor in _tensors(model)}
    return {name: known for name, known in names.items() if name != known}


def stored_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's stored weights, by names of their own; no ``state_dict`` has them."""
    for name, module in model.named_modules():
        for kind, weight in vars(module).items():
            if isinstance(weight, StoredWeight | StoredMatrices):
                for number, tensor in enumerate(tensors_of(weight)):
                    yield f"{name}.{number}" if kind == "weight" else f"{name}.{kind}.{number}", tensor


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    # Why not all: modules that torch has quantised keep number formats and packed parameters beside tensors.
    state = model.state_dict(keep_vars=True)
    return [(name, one) for name, one in state.items() if isinstance(one, torch.Tensor)]
