"""The fused decoder against transformers' own modules, and what it refuses to take over."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pagedcore.errors import ModelNotSupported
from pagedcore.execution.ragged_batch import RaggedBatch, assemble
from pagedcore.models.decoders.fused import FusedDecoder, best_decoder
from pagedcore.models.decoders.fused_layers import FusedPart
from pagedcore.models.decoders.fused_match import NotFused, recognise
from pagedcore.models.decoders.plain import Decoder, ModuleDecoder
from pagedcore.models.decoders.rotary_angles import RotaryAngles
from pagedcore.models.linears.packed_linear import PackedLinear
from pagedcore.models.linears.schemes import QUANTIZERS
from pagedcore.models.linears.shared_embedding import RowsOfProduct
from pagedcore.models.linears.stored_weight import StoredLinears
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from pagedcore_kernels.reference import ReferenceAttention
from support.families import VOCAB, tiny_model

BLOCK_SIZE = 16
LENGTHS = (40, 23, 9)

#: Architecture, changes of its configuration: everything the fused decoder is for.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one KV head": ("llama", {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama, rope of llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}}),
    "llama, rope of yarn": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "qwen3, linear rope": ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
}
#: The same of architectures that differ from Llama in more than biases and norms of heads.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {"sliding_window": None}),
    "phi3, half of a head turned": ("phi3", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 64, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 1.0,
        "original_max_position_embeddings": 64, "short_factor": [1.5] * 8, "long_factor": [4.0] * 8}}),
    "granite": ("granite", {}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 20.0}),
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "olmoe": ("olmoe", {}),
}

#: Those of them in which something is computed in another way than in the others.
DISTINCT = [name for name in OTHERS if name not in ("phi3", "phi3, longrope", "olmo3")]

Piece = tuple[int, int, int]
#: Steps of (sequence, start, end): prompts whole, in chunks, mixed with decoding, in changing order.
SCHEDULE: list[list[Piece]] = [
    [(0, 0, 21), (1, 0, 22)],
    [(1, 22, 23), (0, 21, 22), (2, 0, 5)],
    [(2, 5, 6)],
    [(0, 22, 40), (2, 6, 9)],
]


def model_of(name: str, **changes: Any) -> Any:
    """Return a tiny model whose norms have random weights too."""
    family, own = {**KNOWN, **OTHERS}[name]
    model = tiny_model(family, **own, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape) * 0.3
    return model


def sequences() -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """Return token ids of three sequences."""
    return [np.random.default_rng(length).integers(3, VOCAB, length) for length in LENGTHS]


def batch_of(pieces: list[Piece]) -> RaggedBatch:
    """Return a batch that wants the logits of every token; each sequence has blocks of its own."""
    tokens = sequences()
    ids, starts, ends = (np.array(column, dtype=np.int64) for column in zip(*pieces, strict=True))
    tables = [np.array([2 - i, 5 - i, 8 - i], dtype=np.int32) for i in ids]
    batch = assemble(
        np.concatenate([tokens[i][start:end] for i, start, end in pieces]), starts, ends - starts, seq_ids=ids,
        tables=tables, block_size=BLOCK_SIZE, is_sampled=np.ones(len(ids), dtype=np.bool_),
    )
    return dataclasses.replace(batch, logits_rows=np.arange(batch.num_tokens))


def run(backend: TransformersModel, schedule: list[list[Piece]]) -> list[torch.Tensor]:
    """Return the logits of every sequence after a schedule."""
    logits = [torch.zeros(length, VOCAB) for length in LENGTHS]
    for pieces in schedule:
        rows = backend.forward(batch_of(pieces)).split([end - start for _, start, end in pieces])
        for (sequence, start, end), part in zip(pieces, rows, strict=True):
            logits[sequence][start:end] = part
    return logits


def take_over(model: Any, attention: Any = NumbaCpuAttention, **options: Any) -> TransformersModel:
    """Return a backend with the best decoder and a small pool."""
    backend = TransformersModel(model, attention, block_size=BLOCK_SIZE, **options)
    backend.allocate_kv(9, BLOCK_SIZE)
    return backend


def decoder_of(backend: TransformersModel) -> Decoder:
    """Return what computes the backend's batches."""
    return backend._decoder


def expected_logits(model: Any) -> list[torch.Tensor]:
    """Return what transformers computes for each sequence by itself."""
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        return [model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].float() for tokens in sequences()]


@pytest.mark.parametrize(("name", "attention"), [
    *((name, attention) for name in KNOWN for attention in (NumbaCpuAttention, ReferenceAttention)),
    *((name, NumbaCpuAttention) for name in OTHERS),
])
def test_float32_is_what_transformers_computes(name: str, attention: Any) -> None:
    """In float32 a ragged, chunked schedule gives every logit of the plain model."""
    model = model_of(name)
    expected = expected_logits(model)
    backend = take_over(model, attention)
    assert type(decoder_of(backend)) is FusedDecoder
    for actual, wanted in zip(run(backend, SCHEDULE), expected, strict=True):
        assert (actual - wanted).norm() <= 1e-5 * wanted.norm()
        assert torch.equal(actual.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", *DISTINCT])
def test_bfloat16_is_close(name: str) -> None:
    """In bfloat16 the fused decoder is no further from the plain model than the general one, and next to it: it rounds
    after the same operations.
    """
    model = model_of(name, dtype=torch.bfloat16)
    expected = torch.cat(expected_logits(model))
    general = TransformersModel(
        model_of(name, dtype=torch.bfloat16), NumbaCpuAttention, decoder_factory=ModuleDecoder
    )
    general.allocate_kv(9, BLOCK_SIZE)
    fused, others = (torch.cat(run(backend, SCHEDULE)) for backend in (take_over(model), general))
    # Why not the mean: a near tie of two experts sends a token elsewhere.
    errors = [((one - expected).norm(dim=-1) / expected.norm(dim=-1)).median() for one in (fused, others)]
    assert errors[0] < 0.03
    assert errors[0] < 1.2 * errors[1]
    assert ((fused - others).norm(dim=-1) / others.norm(dim=-1)).median() < 1e-3


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, dtype) for name in ("qwen2", "qwen3") for dtype in (torch.float32, torch.bfloat16)),
    *((name, torch.bfloat16) for name in DISTINCT),
])
def test_same_bits_under_every_schedule(name: str, dtype: torch.dtype) -> None:
    """A token's logits are the same bits alone, in chunks, among others and in another order."""
    backend = take_over(model_of(name, dtype=dtype))
    assert backend.is_schedule_invariant
    whole = run(backend, [[(i, 0, length)] for i, length in enumerate(LENGTHS)])
    together = [[(2, 0, 9), (0, 0, 40), (1, 0, 23)]]
    one_by_one = [[(i, position, position + 1)] for i, length in enumerate(LENGTHS) for position in range(length)]
    for schedule in (SCHEDULE, together, one_by_one):
        assert all(map(torch.equal, run(backend, schedule), whole))


def test_no_logits_wanted() -> None:
    """A step that wants no logits writes its K and V all the same."""
    backend = take_over(tiny_model("llama"))
    whole = backend.forward(batch_of([(0, 0, 40)])).clone()
    silent = dataclasses.replace(batch_of([(0, 0, 30)]), logits_rows=np.zeros(0, dtype=np.int64))
    assert backend.forward(silent).shape == (0, VOCAB)
    assert torch.equal(backend.forward(batch_of([(0, 30, 40)])), whole[30:])


def test_rows_of_logits_are_chosen() -> None:
    """Only the wanted rows are computed to the end, and they are those of the full computation, a lone one too."""
    backend = take_over(tiny_model("qwen2"))
    batch = batch_of([(0, 0, 40), (1, 0, 23)])
    everything = backend.forward(batch).clone()
    for rows in ([39], [62, 3, 39]):
        chosen = dataclasses.replace(batch, logits_rows=np.array(rows, dtype=np.int64))
        assert torch.equal(backend.forward(chosen), everything[rows])


class LowRank(nn.Linear):
    """A linear layer with something added, as adapters make them."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply and add."""
        return super().forward(rows) * 1.5


def with_low_rank_adapter(model: Any) -> None:
    """Wrap one projection."""
    model.model.layers[1].self_attn.k_proj = LowRank(64, 32, bias=False)


def with_another_norm(model: Any) -> None:
    """Add a submodule that the architecture does not have."""
    model.model.layers[2].extra_norm = nn.LayerNorm(64)


def with_another_activation(model: Any) -> None:
    """Replace the activation behind the configuration's back."""
    model.model.layers[0].mlp.act_fn = nn.ReLU()


def with_a_hook(model: Any) -> None:
    """Hang a hook on a layer."""
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output * 2)


def with_its_own_forward(model: Any) -> None:
    """Replace a method of one module."""
    attention = model.model.layers[0].self_attn
    plain = attention.o_proj.forward
    attention.o_proj.forward = lambda rows: plain(rows) * 2


def with_weights_in_two_formats(model: Any) -> None:
    """Keep one norm in another number format."""
    model.model.norm.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change", [with_low_rank_adapter, with_another_norm, with_another_activation, with_a_hook]
)
def test_changed_models_keep_their_modules(change: Callable[[Any], None]) -> None:
    """A model that is not exactly its architecture runs through its own modules, with the right result."""
    model = tiny_model("llama")
    change(model)
    expected = expected_logits(model)
    backend = take_over(model)
    assert type(decoder_of(backend)) is ModuleDecoder
    for actual, wanted in zip(run(backend, SCHEDULE), expected, strict=True):
        assert (actual - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize(("family", "changes"), [
    ("helium", {}),
    ("llama", {"hidden_act": "relu"}),
    ("llama", {"intermediate_size": 100}),
    ("llama", {"head_dim": 12}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}}),
    ("olmoe", {"clip_qkv": 1.0}),
])
def test_other_models_keep_their_modules(family: str, changes: dict[str, Any]) -> None:
    """An architecture, activation, size or rotary embedding that the kernels do not know is left to its modules."""
    assert type(decoder_of(take_over(tiny_model(family, **changes)))) is ModuleDecoder


@pytest.mark.parametrize("change", [None, with_its_own_forward, with_weights_in_two_formats])
def test_recognition(change: Callable[[Any], None] | None) -> None:
    """A model is recognised as it comes, and not with a replaced method or a parameter in another number format."""
    model = tiny_model("llama")
    layers = take_over(tiny_model("llama")).layers
    if change is not None:
        change(model)
    if change is None:
        assert recognise(model, layers).activation == "silu"
        return
    with pytest.raises(NotFused, match=r"its modules are not|do not attend alike"):
        recognise(model, layers)


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_are_given_up(is_tied: bool) -> None:
    """Every packed weight is reported as unused once, one that the embedding shares with the output layer too."""
    model = tiny_model("qwen2", tie_word_embeddings=is_tied)
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    given_up: list[torch.Tensor] = []

    def factory(model: Any, layers: Any, on_unused: Any) -> Decoder:
        return best_decoder(model, layers, given_up.append)

    TransformersModel(model, NumbaCpuAttention, decoder_factory=factory)
    assert sorted(id(weight) for weight in given_up) == sorted(weights)
    assert isinstance(model.model.embed_tokens.weight, RowsOfProduct) == is_tied
    assert not any(isinstance(module, nn.Linear) for module in model.modules())


def test_the_module_tree_stays_usable() -> None:
    """Parts of fused products stand where the linear layers were, and compute the same."""
    model = tiny_model("qwen2")
    backend = take_over(model)
    fused = run(backend, SCHEDULE)
    attention = model.model.layers[0].self_attn
    assert type(attention.k_proj) is FusedPart
    assert isinstance(attention.k_proj.whole, PackedLinear)
    backend._decoder = ModuleDecoder(model, backend.layers, lambda weight: None)
    for actual, wanted in zip(run(backend, SCHEDULE), fused, strict=True):
        assert (actual - wanted).norm() <= 1e-5 * wanted.norm()


def test_failed_self_test_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the fused decoder does not pass the self-test, the model's own modules take its place."""
    model = tiny_model("llama")
    expected = expected_logits(model)
    broken: Callable[..., torch.Tensor] = lambda self, *arguments: torch.zeros(len(arguments[-1]), VOCAB)  # noqa: E731
    monkeypatch.setattr(FusedDecoder, "__call__", broken)
    backend = take_over(model)
    assert type(decoder_of(backend)) is ModuleDecoder
    assert backend.is_schedule_invariant
    for actual, wanted in zip(run(backend, SCHEDULE), expected, strict=True):
        assert (actual - wanted).norm() <= 1e-4 * wanted.norm()


def test_angles_grow_without_changing() -> None:
    """A longer table starts with the shorter one."""
    angles = RotaryAngles(tiny_model("llama").model.rotary_emb, torch.bfloat16, 5000, torch.device("cpu"))
    short = angles.table.clone()
    angles.grow(len(short))
    assert torch.equal(angles.table, short)
    angles.grow(len(short) + 1)
    assert len(angles.table) == 2 * len(short)
    assert torch.equal(angles.table[: len(short)], short)
    for _ in range(3):
        angles.grow(len(angles.table) + 1)
    assert len(angles.table) == 5001


def test_angles_of_interleaved_halves_are_refused() -> None:
    """A rotary module whose two halves differ rotates other pairs than the kernel."""
    def rotary(like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * torch.arange(16).repeat_interleave(1)
        return angles.cos(), angles.sin()

    with pytest.raises(ModelNotSupported, match="both halves"):
        RotaryAngles(rotary, torch.float32, 100, torch.device("cpu"))


@pytest.mark.parametrize(("name", "scheme"), list(zip(DISTINCT, itertools.cycle(QUANTIZERS), strict=False)))
def test_quantised_products_are_fused_too(name: str, scheme: str) -> None:
    """With quantised weights the fused decoder computes what transformers' modules compute with the same products."""
    if form_of_int8_product(16) is None:
        pytest.skip("no such vectors")
    options = {"linears": QUANTIZERS[scheme], "quantization": scheme}
    fused = take_over(model_of(name), **options)
    assert type(decoder_of(fused)) is FusedDecoder
    assert fused.is_schedule_invariant
    general = take_over(
        model_of(name), **options,
        decoder_factory=lambda *given: ModuleDecoder(*given, StoredLinears(QUANTIZERS[scheme])),
    )
    actual, wanted = (torch.cat(run(backend, SCHEDULE)) for backend in (fused, general))
    # Why far more: with rows of int8 the last bit of a sum can make a number its neighbour, and a near tie of two
    # experts is decided elsewhere.
    errors = (actual - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert errors.median() < (0.03 if scheme == "w8a8" else 1e-5)
