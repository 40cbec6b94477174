"""Experts that files have in one tensor for all of a layer, as those of each expert's layers.

Owns which way round such a tensor lies. The published files of Qwen3-VL's mixture have what a row is multiplied with
from the right, transformers writes [out, in], and so do Granite's:

    gate_up_proj   [experts, in, 2 * inner]   or   [experts, 2 * inner, in]
    down_proj      [experts, inner, in]       or   [experts, in, inner]

The shapes of both together fit one of the two, whatever the sizes are, so that nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pagedcore.models.checkpoints.tensor_part import TensorPart
from pagedcore.models.linears.stored_weight import refusal

_GATE_UP, _DOWN = "gate_up_proj", "down_proj"
_FUSED: Final = re.compile(rf"(.+\.(?:mlp|block_sparse_moe)\.experts)\.(?:{_GATE_UP}|{_DOWN})")
MAX_EXPERTS: Final = 4096
"""Of a layer; the largest mixtures have some hundred."""


def split_experts(slices: Mapping[str, Any]) -> Iterator[tuple[str, TensorPart]]:
    """Return the weights of experts by the names that files have elsewhere, ``….experts.0.gate_proj.weight``.

    Args:
        slices: of safetensors, by name; those of no experts are passed over.

    Raises:
        ModelNotSupported: the two tensors of a layer do not fit each other, one is missing, or there are too many
            experts.
    """
    for module in sorted({found[1] for name in slices if (found := _FUSED.fullmatch(name))}):
        pair = [slices.get(f"{module}.{kind}") for kind in (_GATE_UP, _DOWN)]
        if None in pair:
            raise refusal(f"{module} has one of {_GATE_UP} and {_DOWN}, needed are both")
        yield from _split(module, *pair)


def is_fused(name: str) -> bool:
    """Whether a tensor is one of all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def _split(module: str, gate_up: Any, down: Any) -> Iterator[tuple[str, TensorPart]]:
    shapes = tuple(gate_up.get_shape()), tuple(down.get_shape())
    inner, hidden, is_turned = _sizes(module, *shapes)
    count = shapes[0][0]
    # Safety: names are made for each expert that a file says it has.
    if count > MAX_EXPERTS:
        raise refusal(f"{module} has {count} experts, allowed are {MAX_EXPERTS}")
    halves = {"gate_proj": slice(0, inner), "up_proj": slice(inner, 2 * inner)}
    for number in range(count):
        name = f"{module}.{number}"
        for part, half in halves.items():
            place = (number, slice(None), half) if is_turned else (number, half)
            yield f"{name}.{part}.weight", TensorPart(gate_up, place, (inner, hidden), is_turned)
        yield f"{name}.{_DOWN}.weight", TensorPart(down, (number,), (hidden, inner), is_turned)


def _sizes(module: str, gate_up: tuple[int, ...], down: tuple[int, ...]) -> tuple[int, int, bool]:
    """Return the inner size, the outer one, and whether the tensors are turned."""
    if len(gate_up) == len(down) == 3 and gate_up[0] == down[0] and 0 not in (*gate_up, *down):
        (rows, columns), (first, second) = gate_up[1:], down[1:]
        if (rows, columns) == (2 * second, first):
            return second, first, False
        if (rows, columns) == (second, 2 * first):
            return first, second, True
    raise refusal(
        f"{module}.{_GATE_UP} of shape {list(gate_up)} and {_DOWN} of shape {list(down)} do not fit each other"
    )
