"""What the metadata and tensors of Qwen3.5's files are of transformers' model.

Owns the order of value heads: transformers has those that read one key head side by side, files have the first one of
every key head, then the second ones. Decay rates are negative there, and norms but for that of the delta rule have one
added to their weight. Layers that only guess tokens further on are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from pagedcore.models.checkpoints.gguf_metadata import Metadata
from pagedcore.models.linears.stored_weight import refusal

GUESSING: Final = "nextn_predict_layers"
"""How many of a file's last layers only guess."""
_INTERVAL: Final = 4
_MOST_TAPS: Final = 8
_OF_CHANNELS: Final = ("in_proj_qkv.weight", "conv1d.weight")
_OF_HEADS: Final = ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
_RATES, _OWN_NORM = "linear_attn.A_log", "linear_attn.norm.weight"


def fields_of_qwen35(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that are not those of every architecture.

    Args:
        given: what the file says.
        fields: of every architecture.

    Raises:
        ModelNotSupported: an entry is not understood.
    """
    num_layers = fields["num_hidden_layers"]
    count = num_layers - given.at_most(GUESSING, given.count(GUESSING), num_layers - 1)
    key_heads, value_heads = given.size("ssm.group_count"), given.size("ssm.time_step_rank")
    inner, taps = given.size("ssm.inner_size"), given.size("ssm.conv_kernel")
    if value_heads % key_heads:
        given.refuse("ssm.time_step_rank", f"a multiple of its ssm.group_count, {key_heads}")
    if inner % value_heads:
        given.refuse("ssm.inner_size", f"a multiple of its ssm.time_step_rank, {value_heads}")
    return {
        "num_hidden_layers": count, "layer_types": _layer_types(given, num_layers)[:count],
        "linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads,
        "linear_key_head_dim": given.size("ssm.state_size"), "linear_value_head_dim": inner // value_heads,
        "linear_conv_kernel_dim": given.at_most("ssm.conv_kernel", taps, _MOST_TAPS),
    }


def _layer_types(given: Metadata, count: int) -> list[str]:
    if given.get("attention.recurrent_layers") is not None:
        is_recurrent = given.flags("attention.recurrent_layers", count)
    else:
        interval = given.size("full_attention_interval", _INTERVAL)
        is_recurrent = [(number + 1) % interval > 0 for number in range(count)]
    return ["linear_attention" if one else "full_attention" for one in is_recurrent]


def rows_of_qwen35(fields: Mapping[str, Any], name: str, count: int) -> torch.Tensor | None:
    """Return the file's row of each of transformers' ``count`` rows of a tensor; ``None``: they are in its order."""
    if ".linear_attn." not in name or (heads := _heads(fields)) is None:
        return None
    size = fields["linear_value_head_dim"]
    if name.endswith("in_proj_z.weight"):
        return _places(heads, size)
    if name.endswith(_OF_HEADS):
        return heads
    if name.endswith(_OF_CHANNELS):
        first = count - len(heads) * size
        return torch.cat((torch.arange(first), first + _places(heads, size)))
    return None


def columns_of_qwen35(fields: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """Return the same of the inputs of a matrix."""
    if not name.endswith("linear_attn.out_proj.weight") or (heads := _heads(fields)) is None:
        return None
    return _places(heads, fields["linear_value_head_dim"])


def numbers_of_qwen35(name: str, numbers: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as transformers has them.

    Raises:
        ModelNotSupported: there is a decay rate that grows.
    """
    if name.endswith(_RATES):
        if not bool((numbers < 0).all()):
            raise refusal("a tensor ssm_a has a number that is not below 0")
        return (-numbers.float()).log()
    return numbers.float() - 1.0 if name.endswith("norm.weight") and not name.endswith(_OWN_NORM) else numbers


def _heads(fields: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the file's place of each value head; ``None``: it is its own."""
    key_heads, value_heads = fields["linear_num_key_heads"], fields["linear_num_value_heads"]
    if key_heads in (1, value_heads):
        return None
    return torch.arange(value_heads).view(-1, key_heads).T.flatten()


def _places(heads: torch.Tensor, size: int) -> torch.Tensor:
    return (heads[:, None] * size + torch.arange(size)).flatten()
