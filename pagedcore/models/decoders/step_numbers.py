"""A step's numbers on their way to where the model computes: on a GPU all of them in one copy.

Owns what a decoder is told of a batch besides its attention.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from pagedcore.execution.devices import Device
from pagedcore.models.decoders.long_angles import places_of
from pagedcore.protocols import AttentionBackend, Int64Array, RaggedRows
from pagedcore_kernels.interface import SendsNumbers

_NO_ROWS: Final = np.empty(0, np.int64)


def send_numbers(
    device: Device, attention: AttentionBackend, batch: RaggedRows, num_short_tokens: int | None,
    further: Int64Array | None = None, latest: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Let an attention backend plan a step, and send what else a decoder reads of it.

    On a GPU all of it is int32, and goes there in one copy where the attention backend can send it along.

    Args:
        device: where the model computes.
        attention: plans the step.
        batch: the step.
        num_short_tokens: as in ``places_of``.
        further: rows that are wanted besides ``batch.logits_rows``.
        latest: as of ``DeviceTokens``.

    Returns:
        Positions, token ids and places [T], rows whose logits are wanted, and further ones. A lone row is there twice,
        because no product runs over one row.
    """
    rows = _NO_ROWS if further is None else further
    numbers = [batch.positions, batch.token_ids, _twice(batch.logits_rows), _twice(rows)]
    if num_short_tokens is not None:
        numbers.append(places_of(batch, num_short_tokens))
    if isinstance(attention, SendsNumbers):
        sent = attention.plan_with(batch, numbers)
    else:
        attention.plan(batch)
        sent = device.upload(numbers)
    positions, token_ids, wanted, others, *places = sent
    if latest is not None and (batch.token_ids < 0).any():
        token_ids = look_up(token_ids, latest)
    return positions, token_ids, places[0] if places else positions, wanted, others


def look_up(token_ids: torch.Tensor, latest: torch.Tensor) -> torch.Tensor:
    """Return token ids [T], int32, where ``-1 - place`` stood for one of the ``latest``, as of ``DeviceTokens``."""
    places = token_ids.bitwise_not().clamp(min=0)
    return torch.where(token_ids < 0, latest.index_select(0, places), token_ids)


def _twice(rows: Int64Array) -> Int64Array:
    return np.repeat(rows, 2) if len(rows) == 1 else rows
