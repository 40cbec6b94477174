"""The module trees of the architectures of ``table.py`` without transformers, for models that
``quick_start.py`` reads.

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

from pagedcore.models.attention.interface import ATTENTION_KEY, paged_attention
from pagedcore.models.families.table import FAMILIES, Family
from pagedcore.models.linears.expert_modules import SparseMoeBlock

Weights = Mapping[str, torch.Tensor]


class RMSNorm(nn.Module):
    """Divides rows by their root mean square, in float32."""

    def __init__(self, weight: torch.Tensor, epsilon: float, offset: float | None) -> None:
        """Take a weight [n], and ``Family.norm_offset``."""
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(weight, requires_grad=False), epsilon
        self._offset = offset

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return ``rows`` [..., n] normed and weighed."""
        wide = rows.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self._offset is None:
            return self.weight * wide.to(rows.dtype)
        return (wide * (self._offset + self.weight.float())).to(rows.dtype)


class RotaryEmbedding(nn.Module):
    """Cosines and sines of positions, of one kind, or of one for each type of layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._is_wide, rope = FAMILIES[config.model_type].has_wide_angles, config.rope_parameters
        kinds = {"": rope} if "rope_type" in rope else {f"{kind}_": rope[kind] for kind in sorted(rope)}
        for kind, parameters in kinds.items():
            frequencies = inverse_frequencies(parameters, config.head_dim)
            self.register_buffer(f"{kind}inv_freq", frequencies, persistent=False)
        types = {kind[:-1]: parameters["rope_type"] for kind, parameters in kinds.items()}
        self.rope_type = types.get("", types)

    def forward(
        self, like: torch.Tensor, positions: torch.Tensor, layer_type: str = ""
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines [B, T, R] of ``positions`` [B, T], in the number format of ``like`` or wider."""
        angles = positions[..., None].float() * self.get_buffer(f"{layer_type}_inv_freq" if layer_type else "inv_freq")
        both = torch.cat((angles, angles), dim=-1)
        dtype = torch.float32 if self._is_wide else like.dtype
        return both.cos().to(dtype), both.sin().to(dtype)


class Attention(nn.Module):
    """Causal attention with rotary positions, and norms of heads where there are weights of such."""

    is_causal = True

    def __init__(self, config: Any, weights: Weights, layer_idx: int) -> None:
        super().__init__()
        family, fields = FAMILIES[config.model_type], vars(config)
        self.config, self.layer_idx, self.head_dim, self._names = config, layer_idx, config.head_dim, family.qkv
        self.scaling = _attention_scale(config, family)
        for name in (*family.qkv, "o_proj"):
            setattr(self, name, linear(weights, name))
        norms = [
            RMSNorm(weights[name], config.rms_norm_eps, family.norm_offset) if name in weights else None
            for name in ("q_norm.weight", "k_norm.weight")
        ]
        self.q_norm, self.k_norm = norms
        self._sizes = [n * self.head_dim for n in (config.num_attention_heads, *[config.num_key_value_heads] * 2)]
        turned, types = fields.get("no_rope_layers"), fields.get("layer_types")
        self._turns = turned is None or bool(turned[layer_idx])
        has_window = types is None or types[layer_idx] == "sliding_attention"
        self._window = fields.get("sliding_window") if has_window else None
        self._softcap = fields.get("attn_logit_softcapping")

    def forward(self, rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Attend over ``rows`` [1, T, hidden]."""
        products = [self.get_submodule(name)(rows) for name in self._names]
        if len(products) == 1:
            products = list(products[0].split(self._sizes, dim=-1))
        query, key, value = products
        query, key, value = self._heads(query, self.q_norm), self._heads(key, self.k_norm), self._heads(value, None)
        if self._turns:
            query, key = rotate(query, angles), rotate(key, angles)
        if self.config._attn_implementation == ATTENTION_KEY:
            attended = paged_attention(
                self, query, key, value, scaling=self.scaling, sliding_window=self._window, softcap=self._softcap
            )[0]
        else:
            attended = self._attend(query, key, value).transpose(1, 2)
        output: torch.Tensor = self.get_submodule("o_proj")(attended.flatten(-2))
        return output

    def _heads(self, product: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """Return heads [1, H, T, D] of a product [1, T, H * D], normed one by one or all of a row together."""
        # Why not -1: there may be no token.
        heads = (*product.shape[:-1], product.shape[-1] // self.head_dim, self.head_dim)
        if norm is not None:
            is_of_heads = len(norm.weight) == self.head_dim
            product = norm(product.view(heads)) if is_of_heads else norm(product)
        return product.view(heads).transpose(1, 2)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attend without a KV cache, as transformers does: by torch's function, or in single steps."""
        num_tokens, window = query.shape[2], self._window or 0
        is_eager = self.config._attn_implementation == "eager"
        if not is_eager and (not window or num_tokens <= window):
            return nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=self.scaling, enable_gqa=True
            )
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], dim=1) for one in (key, value))
        mask = create_sliding_window_causal_mask(num_tokens, window)
        if not is_eager:
            return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scaling)
        scores = query @ key.transpose(2, 3) * self.scaling
        if self._softcap:
            scores = torch.tanh(scores / self._softcap) * self._softcap
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ value


class GELUTanh(nn.GELU):
    """The activation of Gemma."""

    def __init__(self) -> None:
        super().__init__(approximate="tanh")


class MLP(nn.Module):
    """The gated half of a layer."""

    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__()
        family = FAMILIES[config.model_type]
        self._names, self._activation = family.gate_up, family.activation
        for name in (*family.gate_up, "down_proj"):
            setattr(self, name, linear(weights, name))
        setattr(self, family.activation, GELUTanh() if family.is_gemma else nn.SiLU())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute ``rows`` [..., hidden]."""
        products = [self.get_submodule(name)(rows) for name in self._names]
        gate, up = products if len(products) == 2 else products[0].chunk(2, dim=-1)
        output: torch.Tensor = self.get_submodule("down_proj")(self.get_submodule(self._activation)(gate) * up)
        return output


class DecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config: Any, weights: Weights, number: int) -> None:
        super().__init__()
        family = FAMILIES[config.model_type]
        self.self_attn = Attention(config, part(weights, "self_attn."), number)
        inner = part(weights, "mlp.")
        self.mlp: nn.Module = (
            SparseMoeBlock(config, inner, has_wide_shares=family.has_wide_shares) if "gate.weight" in inner
            else MLP(config, inner)
        )  # fmt: skip
        self._norms, self._multiplier = family.norms, config.residual_multiplier if family.has_multipliers else 1.0
        for name in filter(None, family.norms):
            setattr(self, name, RMSNorm(weights[f"{name}.weight"], config.rms_norm_eps, family.norm_offset))

    def forward(self, rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Add both halves to ``rows`` [1, T, hidden]."""
        before, attended, between, after = (self.get_submodule(name) if name else _same for name in self._norms)
        rows = rows + attended(self.self_attn(before(rows), angles)) * self._multiplier
        output: torch.Tensor = rows + after(self.mlp(between(rows))) * self._multiplier
        return output


class TextScaledWordEmbedding(nn.Embedding):
    """Gemma's embedding of tokens, multiplied."""

    scale = 1.0

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens."""
        return super().forward(token_ids) * self.scale


class Model(nn.Module):
    """Everything but the head."""

    def __init__(self, config: Any, weights: Weights) -> None:
        super().__init__()
        family, weight = FAMILIES[config.model_type], weights["embed_tokens.weight"]
        kind = TextScaledWordEmbedding if family.is_gemma else nn.Embedding
        self.embed_tokens: nn.Embedding = kind.from_pretrained(weight)  # type: ignore[no-untyped-call]
        self._multiplier = embedding_scale(config, weight.dtype)
        if isinstance(self.embed_tokens, TextScaledWordEmbedding):
            self.embed_tokens.scale, self._multiplier = self._multiplier, 1.0
        self.layers = nn.ModuleList(
            DecoderLayer(config, part(weights, f"layers.{number}."), number)
            for number in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(weights["norm.weight"], config.rms_norm_eps, family.norm_offset)
        self.rotary_emb = RotaryEmbedding(config)
        types = config.layer_types if isinstance(self.rotary_emb.rope_type, dict) else [""] * config.num_hidden_layers
        self._layer_types: list[str] = types

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the normed rows [1, T, hidden] of tokens [1, T]."""
        rows = self.embed_tokens(token_ids) * self._multiplier
        angles = {kind: self.rotary_emb(rows, positions, kind) for kind in sorted(set(self._layer_types))}
        for layer, kind in zip(self.layers, self._layer_types, strict=True):
            rows = layer(rows, angles[kind])
        output: torch.Tensor = self.norm(rows)
        return output


TextModel = Model
"""What transformers calls it where a model of images has the plain name."""


class ForCausalLM(nn.Module):
    """A whole model, with the members of a ``PreTrainedModel`` that a ``TransformersModel`` uses."""

    def __init__(self, config: Any, generation_config: Any, weights: Weights) -> None:
        """Take weights over, by the names that they have in files; a head without any is the embedding's.

        Args:
            config: as transformers would have it; ``head_dim`` is there for every architecture.
            generation_config: has ``eos_token_id``, and what else the model's file has.
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

    @property
    def base_model(self) -> Model:
        """All but the output layer."""
        return self.model

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding of tokens."""
        embedding: nn.Embedding = self.model.embed_tokens
        return embedding

    def get_output_embeddings(self) -> nn.Linear:
        """Return the output layer."""
        return self.lm_head

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
        return SimpleNamespace(logits=self._scaled(self.lm_head(rows[:, logits_to_keep])))

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        family = FAMILIES[self.config.model_type]
        divisor = self.config.logits_scaling if family.has_multipliers else 1.0
        cap: float | None = self.config.final_logit_softcapping if family.is_gemma else None
        return logits / divisor if cap is None else torch.tanh(logits / cap) * cap


def embedding_scale(config: Any, dtype: torch.dtype) -> float:
    """Return what a model of an architecture in ``FAMILIES`` multiplies embeddings by; ``dtype`` is the weights'."""
    family = FAMILIES[config.model_type]
    if family.has_multipliers:
        return float(config.embedding_multiplier)
    # Rule: Gemma's root is rounded to the model's number format.
    return float(torch.tensor(config.hidden_size**0.5, dtype=dtype)) if family.is_gemma else 1.0


def _attention_scale(config: Any, family: Family) -> float:
    if family.has_multipliers:
        return float(config.attention_multiplier)
    return float((config.query_pre_attn_scalar if family.is_gemma else config.head_dim) ** -0.5)


def create_sliding_window_causal_mask(num_tokens: int, window: int) -> torch.Tensor:
    """Return which positions each one sees, bool [T, T]: the last ``window`` up to itself, or with 0 all of them.

    ``attention/layers.py`` knows by the name, as of transformers' modules, that windows count here.
    """
    mask = torch.ones(num_tokens, num_tokens, dtype=torch.bool).tril()
    return mask.triu(1 - window) if window else mask


def _same(rows: torch.Tensor) -> torch.Tensor:
    return rows


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
    """Rotate the first R elements of heads [1, H, T, D], their halves paired, by cosines and sines [1, T, R]."""
    cosines, sines = (one.unsqueeze(1) for one in angles)
    turned, others = heads.tensor_split([cosines.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    rotated = (turned * cosines + torch.cat((-second, first), dim=-1) * sines).to(heads.dtype)
    return torch.cat((rotated, others), dim=-1)


def inverse_frequencies(rope: Mapping[str, Any], head_size: int) -> torch.Tensor:
    """Return float32 [R / 2] for rotary embeddings of type "default", "linear" or "llama3"."""
    size = int(head_size * rope.get("partial_rotary_factor", 1.0))
    plain: torch.Tensor = 1.0 / (rope["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float) / size))
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
