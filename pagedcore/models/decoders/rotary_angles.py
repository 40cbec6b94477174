"""Cosines and sines of positions, as the kernel that turns heads reads them.

Owns the tables: one for each kind of layers, which grow with the longest context seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.models.attention.layers import AttentionLayer
from pagedcore.models.decoders.long_angles import by_place
from pagedcore.models.families.model_facts import max_model_len, num_short_tokens
from pagedcore.models.families.table import Family


class RotaryAngles:
    """Cosines and sines by place (see ``long_angles.py``), as ``RotaryEmbedding`` reads them, up to the longest context
    seen.

    Every variant whose angles depend on the place alone works, because the model's own module computes them.

    Invariant: a row never changes once it is in the table.
    """

    def __init__(self, rotary: Any, dtype: torch.dtype, limit: int, device: torch.device) -> None:
        """Make the first rows.

        Args:
            rotary: called with a tensor of the model's dtype and positions [1, n]; returns cosines and sines [1, n, R].
            dtype: number format of the model.
            limit: most places; with more, angles may depend on more than the place.
            device: where the module computes, and the table is.

        Raises:
            ModelNotSupported: the module does not rotate two halves alike.
        """
        self._rotary, self._dtype, self._limit, self._device = rotary, dtype, limit, device
        self.table = self._rows(0, min(1024, limit))
        """float32 [n, R]: R / 2 cosines, then R / 2 sines."""

    def grow(self, num_positions: int) -> None:
        """Make the table at least ``num_positions`` long."""
        known = len(self.table)
        if num_positions > known:
            end = max(num_positions, min(2 * known, self._limit))
            self.table = torch.cat([self.table, self._rows(known, end)])

    def fill(self) -> None:
        """Make the table as long as it gets."""
        self.grow(self._limit)

    @property
    def size(self) -> int:
        """R."""
        return self.table.shape[1]

    def _rows(self, begin: int, end: int) -> torch.Tensor:
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        cosines, sines = self._rotary(like, torch.arange(begin, end, device=self._device)[None])
        half = cosines.shape[-1] // 2
        for angles in (cosines, sines):
            if angles.shape != (1, end - begin, 2 * half) or not torch.equal(angles[..., :half], angles[..., half:]):
                raise ModelNotSupported("model: its rotary embedding does not turn both halves of a head alike.")
        self.is_rounded = cosines.dtype == self._dtype
        """Whether angles, and so their products, have the model's number format."""
        return torch.cat([cosines[0, :, :half], sines[0, :, :half]], dim=-1).float().contiguous()


def angles_by_layer(
    model: Any, layers: Mapping[int, AttentionLayer], family: Family, device: torch.device,
    most_positions: int | None = None,
) -> dict[int, RotaryAngles]:
    """Return the angles of each layer by its number, made once for all of a kind; layers without positions turn by
    nothing.

    Args:
        model: recognised, as of such a ``family``.
        layers: by number.
        family: what it is.
        device: where it is.
        most_positions: of a sequence; ``None``: what the model was made for.
    """
    config, short = model.config, num_short_tokens(model.config)
    rotary = model.model.get_submodule(family.name_of("rotary_emb"))
    head_size = next(iter(layers.values())).key_head_size
    most = max_model_len(config) if most_positions is None else min(max_model_len(config), most_positions)
    # Rule: modules with several kinds of angles have a dictionary of their types.
    count = config.num_hidden_layers
    kinds = config.layer_types if isinstance(rotary.rope_type, dict) else [None] * count
    is_turned = config.to_dict().get("no_rope_layers") or [1] * count

    def still(like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosines = like.new_ones(*positions.shape, head_size)
        return cosines, torch.zeros_like(cosines)

    made: dict[Any, RotaryAngles] = {}
    keys = {number: (kinds[number], bool(is_turned[number])) for number in layers}
    for key in keys.values():
        kind, turns = key
        if key not in made:
            turned = by_place(rotary if kind is None else partial(rotary, layer_type=kind), short)
            made[key] = RotaryAngles(turned if turns else still, model.dtype, most + (short or 0), device)
    return {number: made[key] for number, key in keys.items()}
