"""The recurrent layers of hybrid models, short convolutions among them, keep what they carry in state blocks.

Owns the list of modules that do this, what is computed in the place of the functions of transformers that carry it, the
switch between the two, and the record of what each module keeps. A module's own ``forward`` goes on running, but for
those functions, so that projections, norms and gates are transformers' own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, Final, Protocol

import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.models.linears.shared_matrices import read_by_others
from pagedcore_kernels.interface import StateBackend
from pagedcore_kernels.state_layout import StateLayout, StatePart

_CONVOLUTION, _RECURRENCE = 0, 1
"""Parts of what a layer keeps, in their order."""
_SMOOTH: Final = {None: "none", "silu": "silu", "swish": "silu"}
"""What may follow a convolution, by its name in transformers, and how kernels call it."""


class TakesStates(Protocol):
    """The step that is being computed, or one that records what would be."""

    @property
    def states(self) -> StateBackend | RecordedStates | None:
        """What advances states, or records them; ``None`` for a model that keeps none."""
        ...


class RecordedStates:
    """Records what layers keep, and returns zeros; otherwise as ``pagedcore_kernels.interface.StateBackend``."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], StatePart] = {}

    def layout(self, num_layers: int) -> StateLayout | None:
        """Return the layout of the states of layers 0 to ``num_layers``; ``None``: there are no layers.

        Raises:
            ModelNotSupported: one was not called.
        """
        layers = [
            tuple(part for (layer, _), part in sorted(self._parts.items()) if layer == number)
            for number in range(num_layers)
        ]
        if not all(layers):
            raise ModelNotSupported("model: some of its recurrent layers are not called; the rest is unknown.")
        return StateLayout(tuple(layers)) if layers else None

    def convolve(
        self, layer: int, part: int, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str
    ) -> torch.Tensor:
        """Record the inputs of a convolution."""
        return self._keep(layer, part, (weight.shape[0] - 1, rows.shape[1]), rows.dtype, like=rows)

    def delta_rule(
        self, layer: int, part: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        log_decay: torch.Tensor, beta: torch.Tensor, *, scale: float, normalizes: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Record a matrix for each head."""
        return self._keep(layer, part, (value.shape[1], key.shape[2], value.shape[2]), like=value)

    def mamba2(
        self, layer: int, part: int, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        c: torch.Tensor, d: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Record a matrix for each head."""
        return self._keep(layer, part, (x.shape[1], b.shape[2], x.shape[2]), like=x)

    def mamba1(
        self, layer: int, part: int, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, b: torch.Tensor,
        c: torch.Tensor, d: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Record a vector for each channel."""
        return self._keep(layer, part, (b.shape[1], x.shape[1]), like=x)

    def decaying_attention(
        self, layer: int, part: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor
    ) -> torch.Tensor:
        """Record a matrix for each head."""
        return self._keep(layer, part, (value.shape[1], key.shape[2], value.shape[2]), like=value)

    def linear_recurrence(self, layer: int, part: int, x: torch.Tensor, decay: torch.Tensor) -> torch.Tensor:
        """Record a number for each channel."""
        return self._keep(layer, part, (1, x.shape[1]), like=x)

    def _keep(
        self, layer: int, part: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, like: torch.Tensor
    ) -> torch.Tensor:
        if (layer, part) in self._parts:
            raise ModelNotSupported("model: a recurrent layer is called twice in one forward.")
        self._parts[layer, part] = StatePart(shape, dtype)
        return torch.zeros_like(like, memory_format=torch.contiguous_format)


class _Layer:
    """One recurrent layer, and what the functions that its ``forward`` calls do instead.

    Shape: transformers has the rows of all sequences as one, [1, T, ...].
    """

    def __init__(self, number: int, current: Callable[[], TakesStates]) -> None:
        self._number, self._current = number, current
        self._filter: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def _states(self) -> StateBackend | RecordedStates:
        states = self._current().states
        assert states is not None  # Invariant: the take-over has seen that the model keeps some
        return states

    def convolve(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None,
        activation: str | None = None, **_: Any,
    ) -> torch.Tensor:
        """Do what ``causal_conv1d_fn`` does with rows [1, C, T], for those of several sequences."""
        if activation not in _SMOOTH:
            raise ModelNotSupported(f"model: its convolutions are followed by {activation!r}, known is 'silu'.")
        if self._filter is None:
            # Why once: a weight changes with the model alone.
            self._filter = filter_of(weight, bias)
        out = self._states.convolve(
            self._number, _CONVOLUTION, rows[0].T, *self._filter, _SMOOTH[activation]
        )
        return out.T[None]

    def delta_rule(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Do what ``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention`` do; heads lie behind tokens."""
        out = self._states.delta_rule(
            self._number, _RECURRENCE, query[0], key[0], value[0],
            g[0].float().contiguous(), beta[0].float().contiguous(), scale=key.shape[-1] ** -0.5,
            normalizes=use_qk_l2norm_in_kernel,
        )  # fmt: skip
        return out[None], None

    def mamba2(
        self, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *,
        D: torch.Tensor, dt_bias: torch.Tensor, dt_limit: tuple[float, float] = (0.0, float("inf")), **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Do what ``mamba2_chunk_scan`` does with x [1, T, H, P], and time steps in float32."""
        steps = nn.functional.softplus(dt[0].float() + dt_bias.float()).clamp(*dt_limit)
        out = self._states.mamba2(
            self._number, _RECURRENCE, x[0], steps.contiguous(), A, B[0], C[0], D.float()
        )
        return out[None]

    def mamba1(
        self, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, *,
        D: torch.Tensor, z: torch.Tensor, **_: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Do what ``mamba_selective_scan`` does with x [1, C, T], and time steps in float32 that have their bias."""
        steps = nn.functional.softplus(dt[0].T.float()).contiguous()
        out = self._states.mamba1(
            self._number, _RECURRENCE, x[0].T, steps, A.T.contiguous(), B[0].T, C[0].T, D
        )
        gated = out * nn.functional.silu(z[0].T)
        return gated.T[None]

    def lightning(self, module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        """Do what ``forward`` of MiniMax's ``module`` does, which has its loop over tokens inside."""
        heads = module.act_fn(module.qkv_proj(hidden_states))[0].unflatten(-1, (module.num_attention_heads, -1))
        query, key, value = (one.contiguous() for one in heads.chunk(3, dim=-1))
        # Why the first part: there is no convolution.
        out = self._states.decaying_attention(
            self._number, 0, query, key, value, module.slope_rate.flatten().float()
        )
        attended = module.norm(out.flatten(1)[None])
        return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * attended), None

    def griffin(
        self, module: Any, input_states: torch.Tensor, position_ids: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, None]:
        """Do what ``forward`` of RecurrentGemma's ``module`` does, which keeps its states by itself."""
        opened = module.act_fn(module.linear_y(input_states))
        convolved = self.convolve(
            module.linear_x(input_states).transpose(1, 2), module.conv_1d.weight.squeeze(1), module.conv_1d.bias
        )  # fmt: skip
        unit = _Seen(module.rg_lru, recurrent_states=None, _rnn_scan=self._scan)
        mixed = type(module.rg_lru).forward(unit, convolved.transpose(1, 2), position_ids)
        return module.linear_out(mixed * opened), None

    def _scan(self, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        """Do what ``_rnn_scan`` of RecurrentGemma's gated unit does; a sequence begins from zeros anyway."""
        decay = recurrent_gate[0].float().contiguous()
        return self._states.linear_recurrence(self._number, _RECURRENCE, hidden_states[0], decay)[None], None


class _Seen:
    """A module as its own ``forward`` sees it, with other attributes in the place of some."""

    def __init__(self, module: Any, **others: Any) -> None:
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def filter_of(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a convolution's weight [C, taps] and its bias as ``StateBackend.convolve`` takes them."""
    weight = weight.detach().T.float().contiguous()
    return weight, weight.new_zeros(weight.shape[1]) if bias is None else bias.detach().float()


class _Columns:
    """The time projection: its product with columns [1, rank, T], and its bias in it."""

    bias = None

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def weight(self) -> _Columns:
        """Itself, for the product alone."""
        return self

    def __matmul__(self, columns: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self._module.dt_proj(columns.transpose(1, 2))
        return product.transpose(1, 2)


_Functions = Mapping[str, Callable[..., Any]]
_CONVOLVING: Final[_Functions] = {"causal_conv1d_fn": _Layer.convolve}
_DELTA: Final[_Functions] = {**_CONVOLVING, "torch_chunk_gated_delta_rule": _Layer.delta_rule}
_KIMI: Final[_Functions] = {**_CONVOLVING, "chunk_kimi_delta_attention": _Layer.delta_rule}
_MAMBA_2: Final[_Functions] = {**_CONVOLVING, "mamba2_chunk_scan": _Layer.mamba2}
_MAMBA_1: Final[_Functions] = {**_CONVOLVING, "mamba_selective_scan": _Layer.mamba1}
_OURS: Final[Mapping[str, Callable[..., Any]]] = {
    "MiniMaxLightningAttention": _Layer.lightning, "RecurrentGemmaRecurrentBlock": _Layer.griffin,
}
"""What takes the place of the whole of ``forward``."""
_REPLACED: Final[Mapping[str, _Functions]] = {
    **dict.fromkeys(
        ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet", "OlmoHybridGatedDeltaNet"), _DELTA
    ),
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), _KIMI),
    **dict.fromkeys(
        ("Mamba2Mixer", "GraniteMoeHybridMambaLayer", "BambaMixer", "FalconH1Mixer", "NemotronHMamba2Mixer",
         "Zamba2MambaMixer"), _MAMBA_2
    ),
    **dict.fromkeys(("MambaMixer", "FalconMambaMixer", "JambaMambaMixer"), _MAMBA_1),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _CONVOLVING),
    **{name: {} for name in _OURS},
}  # fmt: skip
"""Modules of transformers, the functions that carry a state there, and what takes their place; none with those of
``_OURS``."""


def is_known(module: nn.Module) -> bool:
    """Whether a module is a recurrent layer of a kind, and of a version of transformers, that can be redirected."""
    kind = type(module)
    if kind.__name__ not in _REPLACED or not kind.__module__.startswith("transformers.models."):
        return False
    called = inspect.unwrap(kind.forward).__code__.co_names
    return all(name in called for name in _REPLACED[kind.__name__])


def known_recurrences(model: nn.Module) -> list[Any]:
    """Return the layers that can be redirected, in the order of their states."""
    return [module for module in model.modules() if is_known(module)]


def kept_layers(model: nn.Module) -> frozenset[nn.Module]:
    """Return the linear layers whose weight another module reads, but for those of recurrent layers, which are called.
    """
    return read_by_others(model) - {child for module in known_recurrences(model) for child in module.children()}


def redirect(model: nn.Module, current: Callable[[], Any]) -> None:
    """Send the states of ``model`` to the step that ``current()`` returns, a ``TakesStates``."""
    for number, module in enumerate(known_recurrences(model)):
        name, layer = type(module).__name__, _Layer(number, current)
        module.forward = partial(_OURS[name], layer, module) if name in _OURS else _forward_of(
            module, {name: partial(function, layer) for name, function in _REPLACED[name].items()}
        )  # fmt: skip


def is_redirected(module: nn.Module) -> bool:
    """Whether a module is sent to the step, and computes as its class says otherwise."""
    forward = vars(module).get("forward")
    called = forward.func if isinstance(forward, partial) else None
    return isinstance(called, FunctionType) and called.__code__ is inspect.unwrap(type(module).forward).__code__


@contextmanager
def own_recurrences(model: nn.Module) -> Iterator[None]:
    """Let the layers carry their states by themselves in the ``with`` block, by transformers' functions in float32."""
    known = known_recurrences(model)
    before = [vars(module).get("forward") for module in known]
    try:
        for module in known:
            functions = inspect.unwrap(type(module).forward).__globals__
            # Why unwrapped: packages for GPUs take the place of these functions where they are installed.
            module.forward = _forward_of(module, {
                name: partial(_in_float32, inspect.unwrap(functions[name])) for name in _REPLACED[type(module).__name__]
            })  # fmt: skip
        yield
    finally:
        for module, forward in zip(known, before, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _in_float32(function: Callable[..., Any], rows: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return what a function makes of tensors, the first of which says the number format of the result."""
    # Why: in a coarse format its sums are further from ours than ours are from the truth.
    wide = [one.float() if isinstance(one, torch.Tensor) else one for one in (rows, *args)]
    result = function(*wide, **{
        name: one.float() if isinstance(one, torch.Tensor) else one for name, one in kwargs.items()
    })  # fmt: skip
    return (result[0].to(rows.dtype), *result[1:]) if isinstance(result, tuple) else result.to(rows.dtype)


def _forward_of(module: Any, functions: _Functions) -> Callable[..., Any]:
    """Return the ``forward`` of a module's class, which calls ``functions`` in the place of those of these names."""
    own = inspect.unwrap(type(module).forward)
    # Why a copy: other models of the class, an engine's or not, go on calling transformers' functions.
    copied = FunctionType(own.__code__, {**own.__globals__, **functions}, own.__name__, own.__defaults__)
    copied.__kwdefaults__ = own.__kwdefaults__
    # Why: what multiplies by a linear layer's weight there calls the layer instead.
    is_mamba_1 = _REPLACED[type(module).__name__] is _MAMBA_1
    return partial(copied, _Seen(module, dt_proj=_Columns(module)) if is_mamba_1 else module)
