"""Attention that does not go through transformers' attention interface goes to the paged pool too.

Owns the list of the modules that compute it in a method of their own, what is computed in the place of that, and the
switch between the two. What else is in a module's ``forward`` goes on running; XGLM's has it inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn


def _of_heads(module: Any) -> tuple[float, int]:
    return float(vars(module).get("head_dim") or module.head_size) ** -0.5, 0


def _of_gpt_neo(module: Any) -> tuple[float, int]:
    return 1.0, int(module.config.window_size) if module.attention_type == "local" else 0


_ATTENDING, _WHOLE = "_attn", "forward"
_KNOWN: Final[Mapping[str, tuple[str, Callable[[Any], tuple[float, int]]]]] = {
    **dict.fromkeys(("GPTJAttention", "CodeGenAttention", "GPTNeoXJapaneseAttention"), (_ATTENDING, _of_heads)),
    "GPTNeoSelfAttention": (_ATTENDING, _of_gpt_neo), "XGLMAttention": (_WHOLE, _of_heads),
}
"""Classes of transformers: the method that is replaced, and how a module scales products of queries and keys, and its
window, 0 for none."""


def known_modules(model: nn.Module) -> list[Any]:
    """Return the modules that can be redirected."""
    return [module for module in model.modules() if is_known(module)]


def is_known(module: Any) -> bool:
    """Whether a module is of a kind that can be redirected."""
    kind = type(module)
    is_theirs = kind.__module__.startswith("transformers.models.")
    return is_theirs and kind.__name__ in _KNOWN and _KNOWN[kind.__name__][0] in vars(kind)


def redirect(model: nn.Module, current: Callable[[], Any]) -> bool:
    """Send such attention of ``model`` to the step that ``current()`` returns; return whether there is any."""
    known = known_modules(model)
    for module in known:
        if "layer_idx" not in vars(module):
            module.layer_idx = module.layer_id
        method, tuning_of = _KNOWN[type(module).__name__]
        scale, window = tuning_of(module)
        arguments = {"scaling": scale, **({"sliding_window": window} if window else {})}
        function = _attend_whole if method == _WHOLE else _attend
        setattr(module, method, partial(function, module, current, arguments))
    return bool(known)


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Let the modules attend by themselves in the ``with`` block."""
    methods = [(module, _KNOWN[type(module).__name__][0]) for module in known_modules(model)]
    redirected = [(module, name, vars(module).pop(name)) for module, name in methods if name in vars(module)]
    try:
        yield
    finally:
        for module, name, method in redirected:
            setattr(module, name, method)


def _attend(
    module: Any, current: Callable[[], Any], arguments: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attention_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Attend in the current step with heads [1, H, T, D]; the mask says what the pool says too."""
    query, key = query.to(value.dtype), key.to(value.dtype)
    return current().attend(module, query, key, value, None, arguments).transpose(1, 2), None


def _attend_whole(
    module: Any, current: Callable[[], Any], arguments: Mapping[str, Any], hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
    """Do what ``forward`` of XGLM's ``module`` does, without a cache and an encoder."""
    heads = [product(hidden_states).unflatten(-1, (module.num_heads, -1)).transpose(1, 2)
             for product in (module.q_proj, module.k_proj, module.v_proj)]  # fmt: skip
    attended: torch.Tensor = current().attend(module, *heads, None, arguments)
    return module.out_proj(attended.flatten(2)), None
