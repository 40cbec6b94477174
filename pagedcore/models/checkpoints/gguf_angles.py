"""What turns queries and keys in the model of a GGUF file: the parameters of the rotary embedding, and factors.

Owns what llama.cpp's entries ``rope.*`` and tensors ``rope_*`` are of transformers'.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from pagedcore.models.checkpoints.gguf_file import GGUFFile
from pagedcore.models.checkpoints.gguf_metadata import Metadata
from pagedcore.models.linears.stored_weight import refusal

FACTORS: Final = "rope_freqs.weight"
"""What frequencies are divided by, which files of Llama 3 have in the place of its parameters."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
ENTRIES: Final = frozenset({
    "rope.dimension_count", "rope.freq_base", "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.type",
    "rope.scaling.original_context_length", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
})
_BASE: Final = 10000.0


def rope_of(given: Metadata, file: GGUFFile, num_turned: int, context: int) -> dict[str, Any]:
    """Return the parameters as transformers has them.

    Args:
        given: of the architecture.
        file: for the factors of "longrope".
        num_turned: numbers of a head that are turned.
        context: the longest one.

    Raises:
        ModelNotSupported: the entries are not understood.
    """
    base = {"rope_theta": given.number("rope.freq_base", _BASE)}
    kind = given.get("rope.scaling.type", "none")
    if LONG in file.tensors or SHORT in file.tensors or kind == "longrope":
        return {"rope_type": "longrope", **base, **_of_longrope(given, file, num_turned, context)}
    if kind == "none":
        return {"rope_type": "default", **base}
    if kind == "linear":
        return {"rope_type": "linear", **base, "factor": given.number("rope.scaling.factor")}
    if kind == "yarn":
        return {"rope_type": "yarn", **base, **_of_yarn(given)}
    raise refusal(f"its rope.scaling.type is {str(kind)[:80]!r}")


def _of_yarn(given: Metadata) -> dict[str, Any]:
    given.require("rope.scaling.yarn_ext_factor", 1.0)
    found: dict[str, Any] = {
        "factor": given.number("rope.scaling.factor"),
        "original_max_position_embeddings": given.size("rope.scaling.original_context_length"),
    }
    for name, own in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"),
                      ("yarn_attn_factor", "attention_factor")):
        if given.get(f"rope.scaling.{name}") is not None:
            found[own] = given.number(f"rope.scaling.{name}")
    if given.get("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": given.number("rope.scaling.yarn_log_multiplier")}
    return found


def _of_longrope(given: Metadata, file: GGUFFile, num_turned: int, context: int) -> dict[str, Any]:
    names = (LONG, "long_factor"), (SHORT, "short_factor")
    factors = {own: factors_of(file, name, num_turned) for name, own in names}
    if None in factors.values():
        raise refusal(f"its rope.scaling.type is 'longrope', needed are {LONG} and {SHORT}")
    original = given.size("rope.scaling.original_context_length", context)
    found: dict[str, Any] = {**factors, "original_max_position_embeddings": original}
    if given.get("rope.scaling.attn_factor") is not None:
        found["attention_factor"] = given.number("rope.scaling.attn_factor")
    return found


def factors_of(file: GGUFFile, name: str, num_turned: int) -> list[float] | None:
    """Return the numbers of a tensor [turned / 2]; ``None``: there is none.

    Raises:
        ModelNotSupported: it is another tensor, or a number is not finite and above 0.
    """
    if (entry := file.tensors.get(name)) is None:
        return None
    if entry.shape != (num_turned // 2,) or entry.kind.dtype != torch.float32:
        raise refusal(f"{name} is {entry.kind.name} of shape {list(entry.shape)}, needed is f32 [{num_turned // 2}]")
    factors = file.rows(name).view(torch.float32)[0]
    if not (factors.isfinite() & (factors > 0)).all():
        raise refusal(f"{name} has values that are not finite and above 0")
    return [float(factor) for factor in factors]
