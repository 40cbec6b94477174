"""Attention that does not go through transformers' attention interface goes to the paged pool too.

Owns the list of the modules that compute it in a method of their own, what is computed in the place of that, and the
switch between the two. What else is in a module's ``forward`` goes on running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn

_METHOD: Final = "_attn"


def _of_heads(module: Any) -> tuple[float, int]:
    return float(vars(module).get("head_dim") or module.head_size) ** -0.5, 0


def _of_gpt_neo(module: Any) -> tuple[float, int]:
    return 1.0, int(module.config.window_size) if module.attention_type == "local" else 0


_KNOWN: Final[Mapping[str, Callable[[Any], tuple[float, int]]]] = {
    "GPTJAttention": _of_heads, "CodeGenAttention": _of_heads, "GPTNeoXJapaneseAttention": _of_heads,
    "GPTNeoSelfAttention": _of_gpt_neo,
}
"""Classes of transformers, and how a module scales products of queries and keys, and its window, 0 for none."""


def known_modules(model: nn.Module) -> list[Any]:
    """Return the modules that can be redirected."""
    return [module for module in model.modules() if is_known(module)]


def is_known(module: Any) -> bool:
    """Whether a module is of a kind that can be redirected."""
    kind = type(module)
    return kind.__name__ in _KNOWN and kind.__module__.startswith("transformers.models.") and _METHOD in vars(kind)


def redirect(model: nn.Module, current: Callable[[], Any]) -> bool:
    """Send such attention of ``model`` to the step that ``current()`` returns; return whether there is any."""
    known = known_modules(model)
    for module in known:
        if "layer_idx" not in vars(module):
            module.layer_idx = module.layer_id
        scale, window = _KNOWN[type(module).__name__](module)
        arguments = {"scaling": scale, **({"sliding_window": window} if window else {})}
        setattr(module, _METHOD, partial(_attend, module, current, arguments))
    return bool(known)


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Let the modules attend by themselves in the ``with`` block."""
    redirected = [(module, vars(module).pop(_METHOD)) for module in known_modules(model) if _METHOD in vars(module)]
    try:
        yield
    finally:
        for module, method in redirected:
            setattr(module, _METHOD, method)


def _attend(
    module: Any, current: Callable[[], Any], arguments: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Attend in the current step with heads [1, H, T, D]; the mask says what the pool says too."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    return current().attend(module, query, key, value, None, arguments).transpose(1, 2), None
