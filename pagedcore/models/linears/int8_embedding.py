"""The embedding of tokens in int8: a scale for each token, in a table of its own or in that of the output layer.

Owns which embeddings are quantised, what is put in the place of their parameter, and what a converted checkpoint says
of it. ``int8_table.py`` looks tokens up.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn

from pagedcore.config.schemes import SCHEMES
from pagedcore.models.linears.int8_table import Int8Table
from pagedcore.models.linears.schemes import QuantizedLinears, quantize_per_output
from pagedcore.models.linears.stored_weight import QuantizedWeight, StoredWeight, refusal

FIELD: Final = "embedding_quantization"
"""A field of ``config.json``, with ``OWN_TABLE`` or ``OF_HEAD``; without it an embedding is what the file holds."""
OWN_TABLE: Final = "int8"
OF_HEAD: Final = "lm_head"


def kind_of_embedding(model: Any, linears: QuantizedLinears) -> str:
    """Return how the embedding of a model of floating numbers is kept when ``linears`` quantise its layers.

    Returns:
        ``OF_HEAD`` where it shares its matrix with an output layer that becomes int8, else ``OWN_TABLE``; "" where it
        stays as it is: modules that compute something else, and matrices that a third module has.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_known = type(embedding) is nn.Embedding or type(embedding).__name__.endswith("TextScaledWordEmbedding")
    if not is_known or embedding.max_norm is not None or not embedding.weight.is_floating_point():
        return ""
    users = [module for module in model.modules() if any(
        one is embedding.weight for one in module.parameters(recurse=False)
    )]  # fmt: skip
    if any(user is not embedding and (user is not head or type(head) is not nn.Linear) for user in users):
        return ""
    num_inputs, dtype = embedding.embedding_dim, embedding.weight.dtype
    is_by_token = linears.scheme.bits == 8 and not linears.scheme.has_groups
    is_int8 = is_by_token and linears.can_quantize(num_inputs) and linears.supports(dtype, num_inputs)
    return OF_HEAD if len(users) == 2 and is_int8 else OWN_TABLE


def embedding_bytes(kind: str, num_tokens: int, size: int) -> int:
    """Return what an int8 embedding takes beside the output layer's product."""
    return num_tokens * (size + 4) if kind == OWN_TABLE else 0


@torch.no_grad()
def quantize_embedding(model: Any, linears: QuantizedLinears, scheme: str) -> torch.Tensor | None:
    """Put int8 in the place of a model's embedding, and of the output layer's matrix if that is the same.

    Args:
        model: of floating numbers, on the CPU; changed in place.
        linears: what its layers are quantised by.
        scheme: the name of ``linears``.

    Returns:
        The matrix, if no module has it any more.
    """
    if not (kind := kind_of_embedding(model, linears)):
        return None
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    weight, is_tied = embedding.weight.detach(), head is not None and head.weight is embedding.weight
    values, scales = quantize_per_output(weight)
    _replace(embedding, head if kind == OF_HEAD else None, Int8Table(values, scales[:, 0], weight.dtype), scheme)
    return None if is_tied and kind == OWN_TABLE else weight


@torch.no_grad()
def restore_embedding(model: Any, kind: Any, scheme: str) -> None:
    """Make of a converted checkpoint's embedding what ``kind``, the value of ``FIELD``, says.

    Raises:
        ModelNotSupported: the checkpoint has no such embedding or output layer.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    shape = embedding.num_embeddings, embedding.embedding_dim
    if kind == OWN_TABLE and isinstance(embedding.weight, torch.Tensor):
        weight = embedding.weight
        values, scales = quantize_per_output(weight)
        _replace(embedding, None, Int8Table(values, scales[:, 0], weight.dtype), scheme)
        return
    stored = None if head is None else head.weight
    if kind != OF_HEAD or not isinstance(stored, StoredWeight) or stored.shape != shape:
        raise refusal(f"its {FIELD} is {str(kind)[:80]!r}, and no matrix is like that")
    is_int8 = SCHEMES[stored.scheme].bits == 8 and stored.num_groups == 1 and stored.order is None
    read = stored.read() if is_int8 else None
    if read is None or read.zeros is not None:
        raise refusal(f"its {FIELD} is {kind!r}, and that layer is no int8 with a scale for each token")
    _replace(embedding, head, Int8Table(read.values, read.scales[:, 0], stored.dtype), stored.scheme)


def _replace(embedding: Any, head: Any, table: Int8Table, scheme: str) -> None:
    """Put a weight in the place of an embedding's parameter and of an output layer's, if there is one."""
    values = table.values
    weight = StoredWeight(
        scheme, (values.shape[0], values.shape[1]), table.dtype, 1, table.tensors,
        lambda: QuantizedWeight(table.values, table.scales[:, None], None), look_up=table,
    )  # fmt: skip
    for module in (embedding,) if head is None else (embedding, head):
        del module.weight
        module.weight = weight
