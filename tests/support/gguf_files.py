"""Tiny GGUF files, written with NumPy from the format's description, and the numbers of their tensors.

Nothing of ``pagedcore`` is used, so that what it reads can be compared with what was written.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from support.families import tiny_model

Array = npt.NDArray[Any]
#: Number, numbers of a block, bytes of a block.
TYPES = {
    "f32": (0, 1, 4), "f16": (1, 1, 2), "q4_0": (2, 32, 18), "q4_1": (3, 32, 20), "q5_0": (6, 32, 22),
    "q5_1": (7, 32, 24), "q8_0": (8, 32, 34), "q4_k": (12, 256, 144), "q5_k": (13, 256, 176), "q6_k": (14, 256, 210),
    "bf16": (30, 1, 2), "q2_k": (10, 256, 84), "q3_k": (11, 256, 110), "iq4_nl": (20, 32, 18),
    "iq4_xs": (23, 256, 136), "mxfp4": (39, 32, 17),
}
QUANTISED = [name for name, (_, size, _) in TYPES.items() if size > 1]
#: Where the float16 of a block are, and the largest integer of a number.
_HALVES = {"q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
           "q6_k": (208,), "q2_k": (80, 82), "q3_k": (108,), "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": ()}
_LARGEST = {"q4_0": 8, "q4_1": 15, "q5_0": 16, "q5_1": 31, "q8_0": 127, "q4_k": 15 * 63, "q5_k": 31 * 63,
            "q6_k": 32 * 127, "q2_k": 3 * 15, "q3_k": 4 * 32, "iq4_nl": 127, "iq4_xs": 127 * 32}
_CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass
class Tensor:
    """A tensor as a file has it."""

    kind: str
    shape: tuple[int, ...]
    """Inputs last."""
    content: bytes


def random_blocks(rng: np.random.Generator, kind: str, shape: tuple[int, int]) -> Tensor:
    """Return blocks of random bits, with scales that make numbers of about a trained weight's size."""
    _, size, num_bytes = TYPES[kind]
    blocks = rng.integers(0, 256, (shape[0] * shape[1] // size, num_bytes), dtype=np.uint8)
    for number, place in enumerate(_HALVES[kind]):
        # Least numbers are half of the largest ones, so that weights have both signs.
        sign = -1.0 if number and kind in ("q4_1", "q5_1") else 1.0
        most_least = {"q4_k": 63, "q5_k": 63, "q2_k": 15}.get(kind, 1)
        top = 0.3 / _LARGEST[kind] if not number else 0.15 / most_least
        scales = (sign * rng.uniform(0.5, 1.0, len(blocks)) * top).astype(np.float16)
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    if kind == "mxfp4":
        blocks[:, 0] = rng.integers(119, 123, len(blocks))
    return Tensor(kind, shape, blocks.tobytes())


def floats(kind: str, numbers: Array) -> Tensor:
    """Return numbers as they are, rounded."""
    if kind == "bf16":
        content = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        content = numbers.astype({"f32": np.float32, "f16": np.float16}[kind]).tobytes()
    return Tensor(kind, numbers.shape, content)


def numbers_of_blocks(tensor: Tensor) -> Array:
    """Return float32 of the tensor's shape, number by number as the format defines them."""
    _, size, num_bytes = TYPES[tensor.kind]
    if size == 1:
        kind = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[tensor.kind]
        read = np.frombuffer(tensor.content, kind)
        wide = (read.astype(np.uint32) << 16).view(np.float32) if tensor.kind == "bf16" else read.astype(np.float32)
        return wide.reshape(tensor.shape)
    blocks = np.frombuffer(tensor.content, np.uint8).reshape(-1, num_bytes)
    return np.stack([_number(tensor.kind, blocks, i) for i in range(size)], axis=1).reshape(tensor.shape)


def _number(kind: str, blocks: Array, i: int) -> Array:
    """Return number ``i`` of every block."""
    octets = blocks.T.astype(np.int32)
    if kind == "mxfp4":
        value = octets[1 + i % 16] >> 4 * (i // 16) & 15
        number = np.array([*_E2M1, *(-one for one in _E2M1)], np.float32)[value]
        return np.ldexp(number, octets[0] - 127).astype(np.float32)
    d = _half(blocks, _HALVES[kind][0])
    if kind in ("iq4_nl", "iq4_xs"):
        return _of_curve(kind, d, octets, i)
    if kind in ("q2_k", "q3_k"):
        return _of_two_bits(kind, d, blocks, octets, i)
    if kind == "q8_0":
        return d * blocks[:, 2 + i].view(np.int8).astype(np.float32)
    if kind == "q6_k":
        return d * blocks[:, 192 + i // 16].view(np.int8).astype(np.float32) * _six_bits(octets, i).astype(np.float32)
    if kind.endswith("k"):
        return _of_two_levels(kind, blocks, octets, i)
    begin = {"q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8}[kind]
    value = octets[begin + i % 16] >> 4 * (i // 16) & 15
    if kind.startswith("q5"):
        value |= (octets[begin - 4 + i // 8] >> i % 8 & 1) << 4
    if kind.endswith("1"):
        return d * value.astype(np.float32) + _half(blocks, 2)
    return d * (value - (16 if kind == "q5_0" else 8)).astype(np.float32)


def _of_curve(kind: str, d: Array, octets: Array, i: int) -> Array:
    begin, group, place = (2, 0, i) if kind == "iq4_nl" else (8 + 16 * (i // 32), i // 32, i % 32)
    number = np.array(_CURVE, np.float32)[octets[begin + place % 16] >> 4 * (place // 16) & 15]
    if kind == "iq4_nl":
        return d * number
    scale = octets[4 + group // 2] >> 4 * (group % 2) & 15 | (octets[2 + group // 4] >> 2 * (group % 4) & 3) << 4
    return d * (scale - 32).astype(np.float32) * number


def _of_two_bits(kind: str, d: Array, blocks: Array, octets: Array, i: int) -> Array:
    """Numbers of 16 have a scale; a byte has a number of each quarter of a half of the block."""
    group, begin = i // 16, 16 if kind == "q2_k" else 32
    value = octets[begin + 32 * (i // 128) + i % 32] >> 2 * (i // 32 % 4) & 3
    if kind == "q2_k":
        product = d * (octets[group] & 15).astype(np.float32) * value.astype(np.float32)
        return product - _half(blocks, 82) * (octets[group] >> 4).astype(np.float32)
    value = value + 4 * (octets[i % 32] >> i // 32 & 1) - 4
    low = octets[96 + group % 8] >> 4 * (group // 8) & 15
    scale = (low | (octets[104 + group % 4] >> 2 * (group // 4) & 3) << 4) - 32
    return d * scale.astype(np.float32) * value.astype(np.float32)


def _half(blocks: Array, place: int) -> Array:
    return np.ascontiguousarray(blocks[:, place : place + 2]).view(np.float16)[:, 0].astype(np.float32)


def _six_bits(octets: Array, i: int) -> Array:
    half, place = divmod(i, 128)
    low = octets[64 * half + place % 64] >> 4 * (place // 64) & 15
    high = octets[128 + 32 * half + place % 32] >> 2 * (place // 32) & 3
    return (low | high << 4) - 32


def _of_two_levels(kind: str, blocks: Array, octets: Array, i: int) -> Array:
    group, scales = i // 32, octets[4:16]
    if group < 4:
        scale, least = scales[group] & 63, scales[group + 4] & 63
    else:
        scale = scales[group + 4] & 15 | (scales[group - 4] >> 6) << 4
        least = scales[group + 4] >> 4 | (scales[group] >> 6) << 4
    begin = 16 if kind == "q4_k" else 48
    value = octets[begin + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
    if kind == "q5_k":
        value |= (octets[16 + i % 32] >> group & 1) << 4
    product = _half(blocks, 0) * scale.astype(np.float32) * value.astype(np.float32)
    return product - _half(blocks, 2) * least.astype(np.float32)


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    """Return type and value as the format has them."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, int):
        kind, letter = (4, "I") if 0 <= value < 2**32 else (11, "q") if value < 0 else (10, "Q")
        return struct.pack(f"<I{letter}", kind, value)
    if isinstance(value, float):
        return struct.pack("<Id", 12, value) if abs(value) > 1e38 else struct.pack("<If", 6, value)
    first = value[0] if value else 0
    kind = 8 if isinstance(first, str) else 6 if isinstance(first, float) else 7 if isinstance(first, bool) else 11
    elements = [_string(one) if kind == 8 else struct.pack({6: "<f", 7: "<?", 11: "<q"}[kind], one) for one in value]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(elements)


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], version: int = 3) -> None:
    """Write a file; metadata that are ``None`` are left out, and tensors without content are zeros, which the file has
    no room for.
    """
    given = {name: value for name, value in metadata.items() if value is not None}
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(given))
    head += b"".join(_string(name) + _value(value) for name, value in given.items())
    places = [0]
    for name, tensor in tensors.items():
        number, size, num_bytes = TYPES[tensor.kind]
        head += _string(name) + struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape[::-1])
        head += struct.pack("<IQ", number, places[-1])
        end = places[-1] + (len(tensor.content) or math.prod(tensor.shape) // size * num_bytes)
        places.append(end + -end % 32)
    with path.open("wb") as file:
        start = len(head) + -len(head) % 32
        file.write(head)
        for place, tensor in zip(places, tensors.values(), strict=False):
            file.seek(start + place)
            file.write(tensor.content)
        file.truncate(start + places[-1])


_LAYER = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate_up_proj": "ffn_up",
    "self_attn.qkv_proj": "attn_qkv", "mlp.gate": "ffn_gate_inp", "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
#: What families have under other names than the rest.
_OF_FAMILY = {
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "gemma4_text": {
        "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm", "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm",
    },
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"},
    "qwen3_5_text": {
        "post_attention_layernorm": "post_attention_norm", "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate", "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out",
    },
    "lfm2": {
        "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm", "self_attn.k_layernorm": "attn_k_norm", "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up", "feed_forward.w2": "ffn_down", "conv.in_proj": "shortconv.in_proj",
        "conv.out_proj": "shortconv.out_proj", "conv.conv": "shortconv.conv",
    },
}
_OTHERS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd", "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm", "model.embedding_norm": "token_embd_norm",
}
_OF_FAMILY["qwen3_5_moe_text"] = _OF_FAMILY["qwen3_5_text"] | {
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
#: llama.cpp's names of architectures that transformers calls otherwise.
_ARCHITECTURES = {"gpt_oss": "gpt-oss", "gemma3_text": "gemma3", "gemma4_text": "gemma4", "qwen3_moe": "qwen3moe",
                  "ministral3": "mistral3", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}
_TURNED = ("llama", "granite", "ministral3")


def name_in_file(name: str, family: str = "") -> str:
    """Return llama.cpp's name of a tensor of transformers."""
    module, _, last = name.rpartition(".")
    if module in _OTHERS:
        return f"{_OTHERS[module]}.{last}"
    _, _, number, rest = module.split(".", 3)
    return f"blk.{number}.{ {**_LAYER, **_OF_FAMILY.get(family, {})}[rest]}.{last}"


def _pieces(name: str, family: str, numbers: Any) -> list[tuple[str, Any]]:
    """Return the names that files have for a parameter, with the part of it that each is."""
    if name.endswith(".layer_scalar"):
        return [(f"blk.{name.split('.')[2]}.layer_output_scale.weight", numbers)]
    if name.endswith((".A_log", ".dt_bias")):
        return [(f"blk.{name.split('.')[2]}.{'ssm_a' if name.endswith('.A_log') else 'ssm_dt.bias'}", numbers)]
    if name.endswith(".sinks"):
        return [(f"blk.{name.split('.')[2]}.attn_sinks.weight", numbers)]
    if family == "gpt_oss" and ".experts." in name:
        return _pieces_of_gpt_oss(name, numbers)
    if ".experts." not in name:
        return [(name_in_file(name, family), numbers)]
    layer, kind = name.split(".")[2], name.rpartition(".")[2]
    parts = ("gate", "up") if kind == "gate_up_proj" else ("down",)
    pieces = zip(parts, numbers.chunk(len(parts), dim=1), strict=True)
    return [(f"blk.{layer}.ffn_{part}_exps.weight", piece) for part, piece in pieces]


def _pieces_of_gpt_oss(name: str, numbers: Any) -> list[tuple[str, Any]]:
    """Gates and the rest alternate, and matrices are the other way round than in files."""
    layer, kind = name.split(".")[2], name.rpartition(".")[2]
    last = "bias" if kind.endswith("_bias") else "weight"
    turned = numbers if last == "bias" else numbers.transpose(1, 2)
    if kind.startswith("down"):
        return [(f"blk.{layer}.ffn_down_exps.{last}", turned)]
    return [(f"blk.{layer}.ffn_{part}_exps.{last}", turned[:, place::2]) for place, part in enumerate(("gate", "up"))]


def _permuted(numbers: Array, head_size: int) -> Array:
    """Return rows as llama.cpp turns them: those of both halves of a head alternate."""
    halves = numbers.reshape(-1, 2, head_size // 2, *numbers.shape[1:])
    return halves.swapaxes(1, 2).reshape(numbers.shape)


def _unpermuted(numbers: Array, head_size: int) -> Array:
    pairs = numbers.reshape(-1, head_size // 2, 2, *numbers.shape[1:])
    return pairs.swapaxes(1, 2).reshape(numbers.shape)


def _grouped(numbers: Array, config: Any, size: int, first: int = 0) -> Array:
    """Return rows behind the ``first`` ones in the model's order: value heads of one key head are side by side, where
    files have the first one of every key head, then the second ones."""
    groups = config.linear_num_key_heads
    tiled = numbers[first:].reshape(-1, groups, size, *numbers.shape[1:])
    return np.concatenate((numbers[:first], tiled.swapaxes(0, 1).reshape(-1, *numbers.shape[1:])))


def _of_delta_rule(name: str, numbers: Array, config: Any) -> Array:
    """Return what the model has of a tensor that Qwen3.5's file has so."""
    size, last = config.linear_value_head_dim, name.rpartition("linear_attn.")[2]
    num_keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    match last.removesuffix(".weight"):
        case "A_log":
            return _grouped(np.log(-numbers), config, 1)
        case "dt_bias" | "in_proj_a" | "in_proj_b":
            return _grouped(numbers, config, 1)
        case "in_proj_z":
            return _grouped(numbers, config, size)
        case "in_proj_qkv" | "conv1d":
            return _grouped(numbers, config, size, num_keys)
        case "out_proj":
            return _grouped(numbers.T, config, size).T
        case "norm" if "linear_attn" in name:
            return numbers
    return numbers - np.float32(1) if name.endswith("norm.weight") else numbers


def metadata_of(config: Any, **more: Any) -> dict[str, Any]:
    """Return what llama.cpp's converter writes of a configuration."""
    name = _ARCHITECTURES.get(config.model_type, str(config.model_type))
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    fields = {
        "context_length": config.max_position_embeddings, "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(getattr(config, "rms_norm_eps", None) or config.norm_eps),
        "attention.key_length": config.head_dim,
        "rope.freq_base": float(rope["rope_theta"]), **_rope_fields(rope), **_fields_of_family(config),
    }
    return {"general.architecture": name, **{f"{name}.{field}": value for field, value in fields.items()}, **more}


def _rope_fields(rope: Mapping[str, Any]) -> dict[str, Any]:
    if rope["rope_type"] == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": float(rope["factor"])}
    if rope["rope_type"] != "yarn":
        return {}
    own = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor",
           "mscale_all_dim": "yarn_log_multiplier"}
    return {
        "rope.scaling.type": "yarn", "rope.scaling.factor": float(rope["factor"]),
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        **{f"rope.scaling.{name}": float(rope[key]) for key, name in own.items() if rope.get(key) is not None},
    }


def _fields_of_family(config: Any) -> dict[str, Any]:
    turned = int(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1.0))
    match config.model_type:
        case "qwen3_moe":
            return {"expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
                    "expert_feed_forward_length": config.moe_intermediate_size}
        case "gpt_oss":
            return {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok,
                    "expert_feed_forward_length": config.intermediate_size,
                    "attention.sliding_window": config.sliding_window}
        case "gemma3_text":
            local = config.rope_parameters["sliding_attention"]["rope_theta"]
            return {"attention.sliding_window": config.sliding_window, "rope.freq_base_swa": float(local),
                    "attention.value_length": config.head_dim}
        case "gemma4_text":
            return _fields_of_gemma4(config)
        case "phi3":
            rope = config.rope_parameters
            return {"attention.key_length": None, "attention.sliding_window": config.sliding_window or 0,
                    "rope.dimension_count": turned, "rope.scaling.attn_factor": rope.get("attention_factor"),
                    "rope.scaling.original_context_length": config.original_max_position_embeddings}
        case "granite":
            return {"attention.key_length": None, "attention.scale": float(config.attention_multiplier),
                    "embedding_scale": float(config.embedding_multiplier),
                    "residual_scale": float(config.residual_multiplier), "logit_scale": float(config.logits_scaling)}
        case "ministral3":
            return {"attention.temperature_scale": float(config.rope_parameters["llama_4_scaling_beta"])}
        case "qwen3_5_text" | "qwen3_5_moe_text":
            heads = config.linear_num_value_heads
            of_experts = {} if config.model_type == "qwen3_5_text" else {
                "expert_count": config.num_experts, "expert_used_count": config.num_experts_per_tok,
                "expert_feed_forward_length": config.moe_intermediate_size, "feed_forward_length": None,
                "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
            }
            return {**of_experts, "attention.value_length": config.head_dim, "rope.dimension_count": turned,
                    "rope.dimension_sections": [11, 11, 10, 0], "ssm.conv_kernel": config.linear_conv_kernel_dim,
                    "ssm.state_size": config.linear_key_head_dim, "ssm.group_count": config.linear_num_key_heads,
                    "ssm.time_step_rank": heads, "ssm.inner_size": heads * config.linear_value_head_dim,
                    "full_attention_interval": config.layer_types.index("full_attention") + 1}
        case "glm4":
            return {"rope.dimension_count": turned}
        case "lfm2":
            heads = [config.num_key_value_heads if kind != "conv" else 0 for kind in config.layer_types]
            return {"attention.head_count_kv": heads, "shortconv.l_cache": config.conv_L_cache, "vocab_size": 8}
        case _:
            return {}


def _fields_of_gemma4(config: Any) -> dict[str, Any]:
    local, count = [kind == "sliding_attention" for kind in config.layer_types], config.num_hidden_layers
    full = config.per_layer_config["full_attention"]
    num_shared, width = config.num_kv_shared_layers, config.intermediate_size
    widths = [width] * (count - num_shared) + [2 * width] * num_shared
    return {
        "attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": local,
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "attention.key_length": full.head_dim, "attention.value_length": full.head_dim,
        "attention.key_length_swa": config.head_dim, "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [config.num_key_value_heads if one else full.num_key_value_heads for one in local],
        "feed_forward_length": widths if config.use_double_wide_mlp else config.intermediate_size,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "rope.dimension_count": full.head_dim, "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": float(config.rope_parameters["sliding_attention"]["rope_theta"]),
        "final_logit_softcapping": config.final_logit_softcapping,
    }


def _turning(config: Any) -> dict[str, Tensor]:
    """Return the factors that say which numbers of a head Gemma 4 turns, in layers that see all."""
    if config.model_type != "gemma4_text":
        return {}
    half = config.per_layer_config["full_attention"].head_dim // 2
    num_turned = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    return {"rope_freqs.weight": floats("f32", np.array([1.0] * num_turned + [1e30] * (half - num_turned)))}


#: What a model's matrices are in, in turn: as in files that are called Q4_K_M, of several types.
MIXED = ("q4_k", "q4_k", "q6_k")
#: What llama.cpp takes every model of a family to be, windows of Qwen besides, which it does not have.
_MEANT: dict[str, dict[str, Any]] = {"gemma3_text": {"layer_types": None, "query_pre_attn_scalar": 16},
                                     "gemma4_text": {"hidden_size_per_layer_input": 256},
                                     "gpt_oss": {"attention_bias": True, "intermediate_size": 256},
                                     "qwen3_moe": {"norm_topk_prob": True, "moe_intermediate_size": 256},
                                     "qwen3_5_moe_text": {"moe_intermediate_size": 256,
                                                          "shared_expert_intermediate_size": 256}}
#: Heads of the sizes that other tests compile kernels for.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 16, "num_attention_heads": 16,
                         "num_key_value_heads": 8}


def write_model(
    path: Path, family: str = "llama", kinds: Sequence[str] = MIXED, metadata: Mapping[str, Any] | None = None,
    more_tensors: Mapping[str, Tensor] | None = None, kinds_of_experts: Sequence[str] = (), **changes: Any,
) -> Any:
    """Write a tiny model whose matrices are random blocks; return transformers' float32 model of the same numbers.

    Args:
        path: of the file.
        family: architecture.
        kinds: types of matrices, in turn.
        metadata: more of them, or others.
        more_tensors: that the model does not have, or in the place of its own.
        kinds_of_experts: types of gates and of what they open, in turn, in the place of those of the matrix of both.
        **changes: of the configuration.
    """
    import torch

    has_windows = family.startswith("qwen") and not family.startswith("qwen3_5")
    windows = {"use_sliding_window": False, "sliding_window": None} if has_windows else {}
    model = tiny_model(family, **{**SIZES, **windows, **_MEANT.get(family, {}), **changes})
    if family == "gemma4_text":
        model.config.allow_global_per_layer_attribute_access = True  # what is read below is that of layers with windows
    if not hasattr(model.config, "head_dim"):
        model.config.head_dim = model.config.hidden_size // model.config.num_attention_heads
    rng, tensors = np.random.default_rng(0), _turning(model.config)
    for number, (name, parameter) in enumerate(model.state_dict(keep_vars=True).items()):
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        # Shape: files leave out the middle dimension of a convolution.
        data = parameter.data.squeeze(1) if parameter.ndim == 3 and ".conv" in name else parameter.data
        for place, (own, piece) in enumerate(_pieces(name, family, data)):
            kind = kinds[number % len(kinds)]
            if kinds_of_experts and ".experts." in name:
                kind = kinds_of_experts[place]
            tensors[own], numbers = _tensor(rng, name, tuple(piece.shape), kind, model.config)
            numbers = _of_delta_rule(name, numbers, model.config) if family.startswith("qwen3_5") else numbers
            piece.copy_(torch.from_numpy(np.ascontiguousarray(numbers)))
    write_gguf(path, metadata_of(model.config, **(metadata or {})), {**tensors, **(more_tensors or {})})
    return model.float().eval()


def _tensor(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], kind: str, config: Any
) -> tuple[Tensor, Array]:
    """Return a tensor of random blocks or numbers as a file has it, and its numbers as the model has them."""
    is_turned = config.model_type in _TURNED and (".q_proj" in name or ".k_proj" in name)
    if len(shape) == 1:
        mean = 1.0 if "norm" in name or "scalar" in name else -1.0 if name.endswith(".A_log") else 0.0
        numbers = rng.normal(mean, 0.1, shape).astype(np.float32)
        tensor = floats("f32", _permuted(numbers, config.head_dim) if is_turned else numbers)
        return tensor, numbers - np.float32(config.model_type == "gemma3_text" and "norm" in name)
    is_number = name.endswith((
        ".gate.weight", "_expert_gate.weight", ".router.weight", "_bias", ".conv.conv.weight", ".conv1d.weight"))
    if kind in QUANTISED and not is_number:
        rows = random_blocks(rng, kind, (int(np.prod(shape[:-1])), shape[-1]))
        tensor = Tensor(kind, shape, rows.content)
    else:
        # Shape: files have the matrix of a router in float32.
        tensor = floats("f32" if is_number else kind, rng.normal(0, 0.15, shape).astype(np.float32))
    numbers = numbers_of_blocks(tensor)
    return tensor, _unpermuted(numbers, config.head_dim) if is_turned else numbers
