"""Tensors that say ``cuda:N`` on a torch without CUDA: a CPU tensor inside, and every operation on it queued.

Owns what torch does with a tensor of a GPU: which operations wait, which copies do, and which tensors do not go
together. Wrapper subclasses carry tensors; kernels for CUDA's dispatch key make new ones and catch what composite
operations call. The numbers are a CPU's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from virtual_gpu.machine import Item, Machine, in_use
from virtual_gpu.memory import Allocation, Memory

aten = torch.ops.aten
WAITS = {
    "aten::nonzero", "aten::masked_select", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave",
}
"""Operations whose result has a size, or is a number, that only the GPU knows."""
_INDEXING = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
_EMPTY = {"aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
"""Operations that allocate and launch nothing."""
_ALIASES = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}


def memory_of(machine: Machine, index: int) -> Memory:
    """The memory of one GPU."""
    memories: dict[int, Memory] = machine.__dict__.setdefault("memories", {})
    if index not in memories:
        memories[index] = Memory(machine, index)
    return memories[index]


class DeviceTensor(torch.Tensor):
    """A tensor on a virtual GPU: ``inner`` has its bytes, ``allocation`` keeps them from others."""

    inner: torch.Tensor
    index: int
    allocation: Allocation

    @staticmethod
    def __new__(cls, inner: torch.Tensor, index: int, allocation: Allocation) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("cuda", index), requires_grad=False,
        )
        made.inner, made.index, made.allocation = inner, index, allocation
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *_: Any) -> Any:
        return self.numpy()

    def __getitem__(self, key: Any) -> Any:
        # Why: C++ makes a tensor of a list by copying a wrapper without what it wraps.
        return super().__getitem__(torch.tensor(key) if isinstance(key, list) else key)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        self.allocation.streams.add(stream)

    def __repr__(self, **_: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def inner(one: Any) -> Any:
    """What a virtual GPU computes with in a tensor's place."""
    return one.inner if isinstance(one, DeviceTensor) else one


def changed(change: Callable[[Any], Any], value: Any) -> Any:
    """An operation's arguments with another leaf in the place of each: a third of the time that torch's own takes."""
    kind = type(value)
    if kind in (tuple, list):
        return kind([changed(change, one) for one in value])
    if kind is dict:
        return {name: changed(change, one) for name, one in value.items()}
    return change(value)


def leaves(value: Any) -> list[Any]:
    """What the lists, tuples and dictionaries of an operation's arguments hold."""
    found = list[Any]()
    changed(found.append, value)
    return found


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a host tensor is in memory that a GPU copies from and to by itself."""
    if isinstance(tensor, DeviceTensor) or tensor.device.type != "cpu":
        return False
    begin = tensor.untyped_storage().data_ptr()
    return any(low <= begin < high for low, high in in_use().pinned)


def new(index: int, size: Any, stride: Any, dtype: torch.dtype, *, is_poisoned: bool = False) -> DeviceTensor:
    """A tensor on a GPU, in memory for its current stream."""
    return DeviceTensor(
        *_pair(memory_of(in_use(), index).tensor(size, stride, dtype, is_poisoned=is_poisoned), index))


def _pair(made: tuple[torch.Tensor, Allocation], index: int) -> tuple[torch.Tensor, int, Allocation]:
    return made[0], index, made[1]


def dispatch(func: Any, args: Any, kwargs: Any) -> Any:
    """Do what torch asks for, sooner or later."""
    in_use().require_alive()
    name = func._schema.name
    # In inference mode composite operations come here whole.
    if name != "aten::copy_" and _is_composite(func):
        # Why not ``decompose``: it prefers torch's decompositions in Python, where hardware takes those in C++.
        return func._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
    flat = leaves((args, kwargs))
    tensors = [one for one in flat if isinstance(one, DeviceTensor)]
    if name == "aten::_fused_sdp_choice":
        return 0
    if func.is_view or name in _ALIASES:
        return _view(func, args, kwargs, tensors[0])
    if name == "aten::copy_":
        return copy_(*args, **kwargs)
    if name in ("aten::_to_copy", "aten::to"):
        return to_copy(*args, **kwargs)
    if name == "aten::_pin_memory":
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    index = _device_of(name, flat, tensors, kwargs)
    if name == "aten::_scaled_mm":
        _check_scaled(*args, **kwargs)
    if name in _EMPTY:
        like = _results_like(func, args, {**kwargs, "device": torch.device("meta")})[0]
        return new(index, like.size(), like.stride(), like.dtype, is_poisoned=True)
    if name in WAITS or (name in _INDEXING and _has_mask(flat)):
        in_use().counts[f"waits in {name}"] += 1
        in_use().stream(index).synchronize()
        if func._schema.is_mutable:
            return queued(func, args, kwargs, index)
        return _at_once(func, args, kwargs, index)
    return queued(func, args, kwargs, index)


def _check_scaled(
    first: Any, second: Any, scale_a: Any, scale_b: Any, bias: Any = None, scale_result: Any = None,
    out_dtype: Any = None, use_fast_accum: bool = False,
) -> None:
    """The rules of a scaled product of FP8 on a GPU, those of one scale and of a scale for each row; ATen's
    ``ScaledBlas.cpp`` has them, which has blocks too.
    """
    (rows, depth), columns, capability = first.shape, second.shape[1], in_use().capability
    is_whole, out_dtype = scale_a.numel() == scale_b.numel() == 1, out_dtype or first.dtype
    by_rows = (tuple(scale_a.shape), tuple(scale_b.shape)) == ((rows, 1), (1, columns))
    formats = {torch.float8_e4m3fn, torch.float8_e5m2}
    torch._check(capability >= (8, 9), lambda: "torch._scaled_mm is only supported on CUDA devices with compute "
                 "capability >= 9.0 or 8.9, or ROCm MI300+")
    torch._check(depth == second.shape[0], lambda: "mat1 and mat2 shapes cannot be multiplied")
    torch._check({first.dtype, second.dtype} <= formats and torch.float8_e4m3fn in (first.dtype, second.dtype),
                 lambda: f"Expected mat1 and mat2 to be Float8, one of them e4m3, got {first.dtype}, {second.dtype}")
    torch._check(scale_a.dtype == scale_b.dtype == torch.float32 and (is_whole or (by_rows and scale_b.is_contiguous()
                 and scale_a.is_contiguous())), lambda: "Invalid scaling configuration.")
    torch._check(depth % 16 == 0, lambda: "Expected trailing dimension of mat1 to be divisible by 16")
    torch._check(columns % 16 == 0, lambda: f"mat2 shape ({depth}x{columns}) must be divisible by 16")
    torch._check(first.stride(1) == 1 and first.stride(0) >= depth and second.stride(0) == 1
                 and second.stride(1) >= depth, lambda: "Only multiplication of row-major and column-major matrices is "
                 "supported by cuBLASLt")
    torch._check(out_dtype in (torch.bfloat16, torch.float16, torch.float32) or (is_whole and out_dtype in formats),
                 lambda: "Only bf16, fp16, and fp32 high precision output types are supported for row-wise scaling.")
    torch._check(bias is None or (bias.numel() == columns and bias.dtype == out_dtype != torch.float32),
                 lambda: f"Bias must be of {columns} numbers and the output's type, which is not Float32")
    torch._check(scale_result is None, lambda: "scale_result must be a float scalar")
    aligned = [first, second, *([] if bias is None else [bias])]
    torch._check(not any(one.data_ptr() % 16 for one in aligned), lambda: "CUBLAS_STATUS_NOT_SUPPORTED")


@cache
def _is_composite(func: Any) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


def _view(func: Any, args: Any, kwargs: Any, base: DeviceTensor) -> Any:
    with torch.inference_mode(False), torch.no_grad():
        out = func(*changed(inner, args), **changed(inner, kwargs))
    return changed(
        lambda one: DeviceTensor(one, base.index, base.allocation) if isinstance(one, torch.Tensor) else one, out)


def _device_of(name: str, flat: list[Any], tensors: list[DeviceTensor], kwargs: Any) -> int:
    """The one GPU of an operation's tensors.

    Raises:
        RuntimeError: they are on several devices.
    """
    if not tensors:
        return in_use().index_of(kwargs.get("device"))
    devices = {one.device for one in tensors}
    for one in flat:
        if isinstance(one, torch.Tensor) and not isinstance(one, DeviceTensor) and one.dim() > 0:
            # Why: torch copies indices to the GPU by itself.
            if name in _INDEXING and one is not flat[0] and not one.is_floating_point():
                continue
            devices.add(one.device)
    if len(devices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted(map(str, devices)))}! (in {name})"
        )
    return tensors[0].index


def _has_mask(flat: list[Any]) -> bool:
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) and one.dim() > 0
               for one in flat[1:] if one is not flat[-1] or len(flat) == 2)


def _at_once(func: Any, args: Any, kwargs: Any, index: int) -> Any:
    """Compute now; the stream has been waited for."""
    with torch.inference_mode(False), torch.no_grad():
        out = func(*changed(inner, args), **changed(inner, kwargs))
    return tree_map(lambda one: _filled(one, index) if isinstance(one, torch.Tensor) else one, out)


def _filled(values: torch.Tensor, index: int) -> DeviceTensor:
    made = new(index, values.size(), values.contiguous().stride(), values.dtype)
    with torch.inference_mode(False):
        made.inner.copy_(values)
    return made


def _seen_now(one: Any) -> Any:
    """An argument as a launch takes it: numbers and indices of the host are read when it is made."""
    if isinstance(one, DeviceTensor) or not isinstance(one, torch.Tensor):
        return inner(one)
    if one.dim() > 0:
        in_use().counts["copies to the device"] += 1
        _require_pinned_in_capture(one)
    return one.clone()


def queued(func: Any, args: Any, kwargs: Any, index: int) -> Any:
    """Queue an operation on the current stream; returns what its results will be in."""
    machine, schema = in_use(), func._schema
    stream = machine.stream(index)
    machine.counts["operations"] += 1
    in_args, in_kwargs = changed(_seen_now, args), changed(_seen_now, kwargs)
    if "device" in in_kwargs:
        in_kwargs["device"] = torch.device("cpu")
    written = _written(schema, args, kwargs)
    if written:
        stream.enqueue(Item(lambda: func(*in_args, **in_kwargs), schema.name))
        return written[0] if len(schema.returns) <= 1 else tuple(written)
    key = (func, _key(in_args), _key(in_kwargs))
    if key not in _KNOWN:
        _KNOWN[key] = _shapes(func, in_args, in_kwargs)
    outs, spec, function = _KNOWN[key]
    results = [new(index, *one) if isinstance(one, tuple) else one for one in outs]
    places = [one.inner if isinstance(one, DeviceTensor) else None for one in results]

    def run() -> None:
        made = function(*in_args, **in_kwargs)
        values = [made] if spec is None else tree_flatten(made)[0]
        for place, value in zip(places, values, strict=True):
            if place is not None:
                place.copy_(value)

    stream.enqueue(Item(run, schema.name))
    return results[0] if spec is None else tree_unflatten(results, spec)


def _written(schema: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    found = []
    for i, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.kwarg_only or i >= len(args) else args[i]
            if value is not None:
                found.append(value)
    return found


_Results = tuple[list[Any], Any, Callable[..., Any]]
"""Size, stride and format of each result, how they are arranged unless it is one tensor, and the function that computes
them on the CPU."""
_KNOWN: dict[Any, _Results] = {}


def _key(value: Any) -> Any:
    """What an operation's results can depend on, but for numbers in memory."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.size()), value.stride(), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(_key(one) for one in value)
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    return type(value), value


def _shapes(func: Any, args: Any, kwargs: Any) -> _Results:
    results, function = _results_like(func, args, kwargs)
    outs, spec = ([results], None) if isinstance(results, torch.Tensor) else tree_flatten(results)
    return [
        (tuple(one.size()), one.stride(), one.dtype) if isinstance(one, torch.Tensor) else one for one in outs
    ], spec, function


def _results_like(func: Any, args: Any, kwargs: Any) -> tuple[Any, Callable[..., Any]]:
    """Tensors like an operation's results, and the function that computes it on the CPU."""
    if func is aten.histc.default and not args[0].is_floating_point():
        # Why: a GPU counts integers, a CPU only floats.
        return torch.empty(args[1], dtype=args[0].dtype), (
            lambda values, *rest, **more: aten.histc.default(values.float(), *rest, **more).to(values.dtype))

    def meta(one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return torch.empty_strided(one.size(), one.stride(), dtype=one.dtype, device="meta")
        return torch.device("meta") if isinstance(one, torch.device) else one

    try:
        return func(*changed(meta, args), **changed(meta, kwargs)), func
    except (RuntimeError, NotImplementedError):  # a meta kernel that knows less than the CPU's
        with torch.inference_mode(False), torch.no_grad():
            known = changed(
                lambda one: torch.zeros_like(one) if isinstance(one, torch.Tensor) else one, (args, kwargs))
            return func(*known[0], **known[1]), func


def _require_pinned_in_capture(host: torch.Tensor) -> None:
    capture = in_use().stream().capture
    if capture is not None and not is_pinned(host):
        raise capture.refuse()


def copy_(self: Any, source: Any, non_blocking: bool = False) -> Any:
    """Copy to or from a GPU; the host waits where the memory is not pinned."""
    machine = in_use()
    if isinstance(self, DeviceTensor):
        return _copy_to_device(machine, self, source, non_blocking)
    if source.numel() == 0:  # torch returns early
        return self
    stream = machine.stream(source.index)
    machine.counts["copies to the host"] += 1
    machine.counts["bytes to the host"] += source.nbytes
    waits = not (non_blocking and is_pinned(self))
    if waits and stream.capture is not None:
        raise stream.capture.refuse()
    to, origin = self, source.inner
    stream.enqueue(Item(lambda: to.copy_(origin), "copy to the host"))
    if waits:
        stream.synchronize()
    return self


def _copy_to_device(machine: Machine, self: DeviceTensor, source: Any, non_blocking: bool) -> Any:
    stream, to, origin = machine.stream(self.index), self.inner, inner(source)
    if isinstance(source, DeviceTensor):
        machine.counts["copies on the device" if source.index == self.index else "copies between devices"] += 1
        if source.index != self.index:
            # Why both: torch orders such a copy behind what either GPU was given.
            stream.wait_stream(machine.stream(source.index))
    else:
        machine.counts["copies to the device"] += 1
        machine.counts["bytes to the device"] += source.nbytes
        if stream.capture is not None and not (non_blocking and is_pinned(source)):
            raise stream.capture.refuse()
        if not is_pinned(source):
            machine.counts["pageable copies to the device"] += bool(source.dim())
            with torch.inference_mode(False):
                origin = source.clone()
    stream.enqueue(Item(lambda: to.copy_(origin), "copy to the device"))
    if not isinstance(source, DeviceTensor) and not non_blocking:
        stream.synchronize()
    return self


def to_copy(
    self: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
    non_blocking: bool = False, memory_format: Any = None,
) -> Any:
    """``Tensor.to`` of a tensor on a GPU."""
    dtype = dtype or self.dtype
    target = torch.device(device) if device is not None else self.device
    if target.type == "cpu":
        if dtype != self.dtype:
            self = queued(aten._to_copy.default, (self,), {"dtype": dtype}, self.index)
        is_dense = self.inner.is_contiguous() or torch._prims_common.is_non_overlapping_and_dense_or_false(self.inner)
        with torch.inference_mode(False):
            out = torch.empty_strided(self.size(), self.stride(), dtype=dtype) if is_dense else torch.empty(
                self.size(), dtype=dtype)
        if non_blocking:
            pin(out)
        return copy_(out, self, non_blocking)
    if target.index not in (None, self.index):
        stride = torch.empty(self.size(), device="meta").stride()
        return copy_(new(target.index, self.size(), stride, dtype), self, non_blocking)
    more = {} if memory_format is None else {"memory_format": memory_format}
    return queued(aten._to_copy.default, (self,), {"dtype": dtype, **more}, self.index)


def pin(tensor: torch.Tensor) -> torch.Tensor:
    """Make a new host tensor's memory pinned, for as long as the machine is there."""
    begin = tensor.untyped_storage().data_ptr()
    in_use().pinned.append((begin, begin + max(1, tensor.untyped_storage().nbytes())))
    # Why kept: other host memory at this address would seem to be pinned.
    in_use().__dict__.setdefault("pinned_tensors", []).append(tensor.untyped_storage())
    return tensor


def _empty(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None,
           memory_format: Any = None) -> DeviceTensor:
    like = torch.empty(size, dtype=dtype, device="meta", memory_format=memory_format or torch.contiguous_format)
    return new(in_use().index_of(device), like.size(), like.stride(), like.dtype, is_poisoned=True)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None,
                   pin_memory: Any = None) -> DeviceTensor:
    return new(in_use().index_of(device), size, stride, dtype or torch.get_default_dtype(), is_poisoned=True)


def _from_host(op: Any) -> Callable[..., DeviceTensor]:
    """A factory that computes on the host, for operations that would resize their result."""

    def make(*args: Any, device: Any = None, pin_memory: Any = None, **kwargs: Any) -> DeviceTensor:
        index = in_use().index_of(device)
        with torch.inference_mode(False):
            values = op(*args, **kwargs)
        made = new(index, values.size(), values.stride(), values.dtype)
        place = made.inner
        in_use().counts["operations"] += 1
        in_use().stream(index).enqueue(Item(lambda: place.copy_(values), op._schema.name))
        return made

    return make


@cache
def register() -> list[Any]:
    """Give CUDA's dispatch key of this torch its kernels, once a process; nothing else uses that key."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    library.impl("empty.memory_format", _empty, "CUDA")
    library.impl("empty_strided", _empty_strided, "CUDA")
    for overload in ("default", "start", "start_step"):
        name = "arange" + ("" if overload == "default" else f".{overload}")
        library.impl(name, _from_host(getattr(aten.arange, overload)), "CUDA")
    # Operations inside of composite ones come by the backend's key.
    others = torch.library.Library("_", "IMPL", "CUDA")
    others.fallback(lambda op, *args, **kwargs: dispatch(op, args, kwargs), "CUDA")
    return [library, others]
