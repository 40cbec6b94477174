"""What the metadata of Gemma 4's files are of transformers' configuration.

Owns how layers differ in them: those with a window have heads, groups and angles of their own; the last ones may read
the keys and values of earlier ones, and may be wider; values may be keys; and of the angles of layers that see all,
which numbers of a head are turned, a tensor of factors says, that are 1 or so large that nothing is left.
"""

from __future__ import annotations

from typing import Any, Final

from pagedcore.models.checkpoints.gguf_metadata import Metadata
from pagedcore.models.linears.stored_weight import refusal

_NOT_TURNED: Final = 1e20
"""A factor of at least this leaves no angle that a cosine in float32 would show; files have 1e30."""
_LOCAL_BASE: Final = 10000.0


def fields_of_gemma4(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the configuration that are not those of every architecture.

    Args:
        given: what the file says.
        fields: of every architecture; sizes are those of layers that see all, or of the first layer.

    Raises:
        ModelNotSupported: an entry is not understood, or is one that transformers' class cannot have.
    """
    count = fields["num_hidden_layers"]
    num_shared = given.at_most("attention.shared_kv_layers", given.count("attention.shared_kv_layers"), count - 1)
    is_local = given.flags("attention.sliding_window_pattern", count)
    kinds = ["sliding_attention" if one else "full_attention" for one in is_local]
    if is_local[-1] or not {*kinds} <= {*kinds[: count - num_shared]}:
        given.refuse("attention.sliding_window_pattern", "false for the last layer, and no kind of layers that only "
                                                         "reads keys and values")
    per_layer = given.count("embedding_length_per_layer_input")
    return {
        "hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds, "num_kv_shared_layers": num_shared,
        "sliding_window": given.size("attention.sliding_window"),
        "hidden_size_per_layer_input": per_layer, "vocab_size_per_layer_input": fields["vocab_size"],
        "final_logit_softcapping":
            given.number("final_logit_softcapping") if given.get("final_logit_softcapping") else None,
        "attention_k_eq_v": _has_no_values(given, kinds[: count - num_shared]),
        "rope_parameters": _angles(given, fields), "rope_frequency_factors": None,
        **_heads(given, fields, kinds), **_widths(given, fields, num_shared),
    }


def _has_no_values(given: Metadata, kinds: list[str]) -> bool:
    """Whether layers that see all have keys for values, which their files do not have twice."""
    layers = [f"blk.{number}.attn_v.weight" for number, kind in enumerate(kinds) if kind == "full_attention"]
    missing = [name for name in layers if name not in given.tensors]
    if missing and len(missing) < len(layers):
        raise refusal(f"{missing[0]} is missing in its file, and other layers have it")
    return bool(missing)


def _heads(given: Metadata, fields: dict[str, Any], kinds: list[str]) -> dict[str, Any]:
    """Return what says of each kind of layers how large heads are and how many there are of keys."""
    full = fields["head_dim"]
    local = given.size("attention.key_length_swa", full)
    for name in ("attention.value_length_swa", "rope.dimension_count_swa"):
        if given.size(name, local) != local:
            given.refuse(name, f"{local}, the size of heads with a window")
    of_layers = given.sizes("attention.head_count_kv", len(kinds), fields["num_attention_heads"])
    groups = {kind: {number for number, one in zip(of_layers, kinds, strict=True) if one == kind} for kind in kinds}
    if any(len(some) > 1 or fields["num_attention_heads"] % max(some) for some in groups.values()) or local % 2:
        given.refuse("attention.head_count_kv", "one number for each kind of layers, and divisors of the heads")
    most, = groups["full_attention"]
    override = {"head_dim": full, "num_key_value_heads": most}
    return {
        "head_dim": local, "num_key_value_heads": min(groups.get("sliding_attention", {most})),
        "per_layer_config": {number: override for number, kind in enumerate(kinds) if kind == "full_attention"},
    }


def _widths(given: Metadata, fields: dict[str, Any], num_shared: int) -> dict[str, Any]:
    """Return how wide layers are: those that only read keys and values may be twice as wide as the rest."""
    count, width = fields["num_hidden_layers"], fields["intermediate_size"]
    widths = given.sizes("feed_forward_length", count)
    is_double = num_shared > 0 and widths[-1] == 2 * width
    own = count - num_shared
    if widths != [width] * own + [2 * width if is_double else width] * num_shared:
        given.refuse("feed_forward_length", "one size, and one or twice that of layers that only read keys and values")
    return {"use_double_wide_mlp": is_double}


def _angles(given: Metadata, fields: dict[str, Any]) -> dict[str, Any]:
    rope, factors, head = fields["rope_parameters"], fields["rope_frequency_factors"], fields["head_dim"]
    if rope["rope_type"] != "default":
        given.refuse("rope.scaling.type", "none")
    if factors is None:
        raise refusal("rope_freqs.weight is missing in its file")
    num_turned = sum(factor == 1.0 for factor in factors)
    share = 2 * num_turned / head
    is_known = all(factor == 1.0 for factor in factors[:num_turned])
    is_known &= all(factor >= _NOT_TURNED for factor in factors[num_turned:])
    if not is_known or int(share * head // 2) != num_turned:
        raise refusal(f"rope_freqs.weight has other values than 1, and then {_NOT_TURNED:.0e} and more")
    return {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": share,
                           "rope_theta": rope["rope_theta"]},
        "sliding_attention": {"rope_type": "default",
                              "rope_theta": given.number("rope.freq_base_swa", _LOCAL_BASE)},
    }
