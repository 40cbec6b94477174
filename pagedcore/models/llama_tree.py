"""The module tree of Llama, Mistral, Qwen2 and Qwen3 without transformers, for models that ``quick_start.py`` reads.

Owns the same modules under the same names, with the same operations in the same order, as transformers has for these
architectures, so that logits are equal bit for bit; importing those takes a second and more. ``FusedDecoder`` takes
the weights of this tree as it takes theirs; the forward here is for the self-test and for other decoders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from pagedcore.models.attention_interface import ATTENTION_KEY, paged_attention

Weights = Mapping[str, torch.Tensor]


class RMSNorm(nn.Module):
    """Divides rows by their root mean square, in float32."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), epsilon

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [..., n] normed and weighed."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(rows.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.rope_type = config.rope_parameters["rope_type"]
        self.inv_freq: torch.Tensor
        self.register_buffer("inv_freq", inverse_frequencies(config.rope_parameters, config.head_dim), persistent=False)

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B, T, D] of ``positions`` [B, T], in the number format of ``like``."""
        angles = positions[..., None].float() * self.inv_freq
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, and norms of heads where there are weights of such."""

    is_causal = True

    def __init__(self, config: Any, weights: Weights, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.head_dim = config, layer_idx, config.head_dim
        self.scaling = self.head_dim**-0.5
        self.q_proj, self.k_proj = linear(weights, "q_proj"), linear(weights, "k_proj")
        self.v_proj, self.o_proj = linear(weights, "v_proj"), linear(weights, "o_proj")
        norms = [
            RMSNorm(weights[name], config.rms_norm_eps) if name in weights else None
            for name in ("q_norm.weight", "k_norm.weight")
        ]
        self.q_norm, self.k_norm = norms

    def forward(self, rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend over ``rows`` [1, T, hidden]."""
        heads = (*rows.shape[:-1], -1, self.head_dim)
        query, key, value = (product(rows).view(heads) for product in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        query, key = rotate(query, angles), rotate(key, angles)
        if self.config._attn_implementation == ATTENTION_KEY:
            attended = paged_attention(self, query, key, value, scaling=self.scaling)[0]
        else:
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scaling, enable_gqa=True
            ).transpose(1, 2)
        output: torch.Tensor = self.o_proj(attended.reshape(*rows.shape[:-1], -1))
        return output


class MLP(nn.Module):
    """The gated half of a layer."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = linear(weights, "gate_proj"), linear(weights, "up_proj")
        self.down_proj = linear(weights, "down_proj")
        self.act_fn = nn.SiLU()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute ``rows`` [..., hidden]."""
        output: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(rows)) * self.up_proj(rows))
        return output


class DecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config: Any, weights: Weights, number: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, part(weights, "self_attn."), number)
        self.mlp = MLP(part(weights, "mlp."))
        self.input_layernorm = RMSNorm(weights["input_layernorm.weight"], config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(weights["post_attention_layernorm.weight"], config.rms_norm_eps)

    def forward(self, rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Add both halves to ``rows`` [1, T, hidden]."""
        rows = rows + self.self_attn(self.input_layernorm(rows), angles)
        output: torch.Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output


class Model(nn.Module):
    """Everything but the head."""

    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__()
        self.embed_tokens: nn.Embedding = nn.Embedding.from_pretrained(  # type: ignore[no-untyped-call]
            weights["embed_tokens.weight"]
        )
        self.layers = nn.ModuleList(
            DecoderLayer(config, part(weights, f"layers.{number}."), number)
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(config)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the normed rows [1, T, hidden] of tokens [1, T]."""
        rows = self.embed_tokens(token_ids)
        angles = self.rotary_emb(rows, positions)
        for layer in self.layers:
            rows = layer(rows, angles)
        output: torch.Tensor = self.norm(rows)
        return output


class ForCausalLM(nn.Module):
    """A whole model, with the members of a ``PreTrainedModel`` that a ``TransformersModel`` uses."""

    def __init__(self, config: Any, generation_config: Any, weights: Weights) -> None:
        """Take weights over, by the names that they have in files; a head without any is the embedding's.

        Args:
            config: as transformers would have it; ``head_dim`` is there for every architecture.
            generation_config: has ``eos_token_id``.
            weights: of one floating format, on the CPU.
        """
        super().__init__()
        self.config, self.generation_config = config, generation_config
        self.model = Model(config, part(weights, "model."))
        self.lm_head = linear({"lm_head.weight": weights["model.embed_tokens.weight"], **weights}, "lm_head")
        if "lm_head.weight" not in weights:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        dtype: torch.dtype = self.model.embed_tokens.weight.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.embed_tokens.weight.device
        return device

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens."""
        embedding: nn.Embedding = self.model.embed_tokens
        return embedding

    def set_attn_implementation(self, name: str) -> None:
        """Choose what attends: ``ATTENTION_KEY``, or torch."""
        self.config._attn_implementation = name

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, use_cache: bool = False,
        logits_to_keep: torch.Tensor | slice = slice(None),
    ) -> SimpleNamespace:
        """Return ``logits`` [1, S, vocabulary] of tokens [1, T] at positions [1, T], by default 0, 1, 2 ..."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        rows = self.model(input_ids, position_ids)
        return SimpleNamespace(logits=self.lm_head(rows[:, logits_to_keep]))


def part(weights: Weights, prefix: str) -> dict[str, torch.Tensor]:
    """Return the weights below one module, by the rest of their names."""
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def linear(weights: Weights, name: str) -> nn.Linear:
    """Return a linear layer with its own weight, and the bias if there is one."""
    weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
    module = nn.Linear(1, 1, bias=bias is not None, device="meta")
    module.out_features, module.in_features = weight.shape
    module.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def rotate(heads: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate both halves of heads [1, H, T, D] by cosines and sines [1, T, D]."""
    cosines, sines = (one.unsqueeze(1) for one in angles)
    first, second = heads.chunk(2, dim=-1)
    rotated: torch.Tensor = heads * cosines + torch.cat((-second, first), dim=-1) * sines
    return rotated


def inverse_frequencies(rope: Mapping[str, Any], head_size: int) -> torch.Tensor:
    """Return float32 [D / 2] for rotary embeddings of type "default", "linear" or "llama3"."""
    plain: torch.Tensor = 1.0 / (rope["rope_theta"] ** (torch.arange(0, head_size, 2, dtype=torch.float) / head_size))
    if rope["rope_type"] == "default":
        return plain
    if rope["rope_type"] == "linear":
        return plain.div(rope["factor"])
    # Llama 3 stretches long waves by the factor, leaves short ones, and takes a mean of both between two lengths.
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    stretched = torch.where(wavelength > length / low, plain / factor, plain)
    share = (length / wavelength - low) / (high - low)
    mean = (1 - share) * stretched / factor + share * stretched
    is_between = ~(wavelength < length / high) & ~(wavelength > length / low)
    return torch.where(is_between, mean, stretched)
