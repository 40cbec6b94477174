"""The short convolutions between a model's attention layers go to the paged pool too.

Owns the list of modules that do this, what is computed in the place of their ``forward``, and the switch between the
two. Inputs of a convolution are rows of the KV pool like values, so that sharing, swapping, forking and taking back
tokens are what they are for attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn

_GATED: Final = frozenset({"Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"})
"""Modules of transformers that multiply the projections of a row, convolve, and multiply again."""


class TakesConvolutions(Protocol):
    """The step that is being computed, or one that records what would be."""

    def convolve(self, module: Any, rows: torch.Tensor) -> torch.Tensor:
        """Convolve rows [1, T, 3 * C] of the layer ``module``, each with those before it in its sequence; return
        [1, T, C] as ``ConvolvesRows`` says.
        """
        ...


def is_known(module: nn.Module) -> bool:
    """Whether a module is a layer of a short convolution that can be redirected."""
    kind = type(module)
    return kind.__name__ in _GATED and kind.__module__.startswith("transformers.models.")


def known_convolutions(model: nn.Module) -> list[nn.Conv1d]:
    """Return the convolutions inside layers that can be redirected."""
    return [
        child for module in model.modules() if is_known(module) for child in module.children()
        if isinstance(child, nn.Conv1d)
    ]  # fmt: skip


def is_redirected(module: nn.Module) -> bool:
    """Whether a module is sent to the step, and computes as its class says otherwise."""
    forward = vars(module).get("forward")
    return isinstance(forward, partial) and forward.func is _gated_convolution


def redirect(model: nn.Module, current: Any) -> None:
    """Send the convolutions of ``model`` to the step that ``current()`` returns, a ``TakesConvolutions``."""
    for module in model.modules():
        if is_known(module):
            module.forward = partial(_gated_convolution, module, current)


@contextmanager
def own_convolutions(model: nn.Module) -> Iterator[None]:
    """Let the layers compute by themselves in the ``with`` block."""
    redirected = [(module, module.__dict__.pop("forward")) for module in model.modules()
                  if is_known(module) and "forward" in module.__dict__]  # fmt: skip
    try:
        yield
    finally:
        for module, forward in redirected:
            module.forward = forward


def weight_and_bias(convolution: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a convolution of single channels as float32 [taps, C], oldest tap first, and float32 [C]."""
    weight = convolution.weight.detach().squeeze(1).T.float().contiguous()
    bias = weight.new_zeros(weight.shape[1]) if convolution.bias is None else convolution.bias.detach().float()
    return weight, bias


def _gated_convolution(module: Any, current: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    """Do what ``forward`` of the LFM2 family's layers does, for the rows of several sequences."""
    mixed: torch.Tensor = module.out_proj(current().convolve(module, module.in_proj(hidden_states)))
    return mixed
