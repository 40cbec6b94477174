"""GGUF files against NumPy's reading of their format, and models in them against transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import EngineConfig, SamplingParams
from pagedcore.cli.size import size_model
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints.gguf import GGUF
from pagedcore.models.checkpoints.gguf_blocks import OTHER_TYPES, TYPES
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.diagnosis import diagnose
from pagedcore.models.linears.packed_linear import pack_linears
from pagedcore.models.linears.stored_weight import JoinedMatmul, StoredLinears, StoredWeight
from pagedcore.models.loading import load_tokenizer, model_source
from pagedcore_kernels.cpu.matmul.packed_grouped import form_of_grouped_product
from support import gguf_files
from support.gguf_files import QUANTISED, Tensor, floats, numbers_of_blocks, random_blocks, write_gguf, write_model
from support.largest_floats import LargestFloats
from support.products import require_same_bits_in_any_company
from support.scores import PROMPTS, SCORES, engine_of, scores_of, scores_of_transformers

pytestmark = pytest.mark.skipif(form_of_grouped_product(torch.float32) is None, reason="no such vectors")
BY_NAME = {kind.name: kind for kind in TYPES.values()}
SMALL: dict[str, Any] = {"num_hidden_layers": 2}


def stored_of(tensor: Tensor, dtype: torch.dtype = torch.float32) -> StoredWeight:
    """A layer's weight of a tensor's blocks."""
    kind, rows = BY_NAME[tensor.kind], torch.frombuffer(bytearray(tensor.content), dtype=torch.uint8)
    shape = tensor.shape[0], tensor.shape[1]
    return StoredWeight(
        f"w{kind.bits}a16", shape, dtype, shape[1] // kind.size * kind.num_groups, [rows],
        lambda: kind.weight(rows.view(shape[0], -1), "layer"), has_least=kind.has_least,
        has_halves=kind.has_halves, codebook=kind.codebook,
    )


@pytest.mark.parametrize("name", QUANTISED)
def test_blocks_are_the_numbers_of_the_format(name: str) -> None:
    """Every number of random blocks is NumPy's to the last bit, and a product meets each with its own input."""
    tensor = random_blocks(np.random.default_rng(3), name, (70, 512))
    weight, expected = stored_of(tensor), torch.from_numpy(numbers_of_blocks(tensor))
    assert torch.equal(weight.read().numbers(), expected)
    product = weight.product(None)
    assert torch.allclose(product(torch.eye(512)), expected.T, atol=1e-6)
    assert product.memory[1] == weight.num_bytes


@pytest.mark.parametrize("kinds", [("q4_k", "q6_k", "q5_0"), ("q4_0", "iq4_nl")])
def test_weights_of_several_types_are_one_product(kinds: tuple[str, ...]) -> None:
    """Outputs come side by side, with their biases, in the same bits in any company; also of types that differ in what
    their integers count only."""
    rng, sizes = np.random.default_rng(5), (100, 36, 64)
    tensors = [random_blocks(rng, name, (size, 256)) for name, size in zip(kinds, sizes, strict=False)]
    bias = torch.randn(sum(tensor.shape[0] for tensor in tensors))
    rows = torch.randn(300, 256)
    joined: Any = torch.cat([stored_of(tensor) for tensor in tensors])  # type: ignore[misc]
    product = joined.product(bias)
    assert isinstance(product, JoinedMatmul)
    expected = rows @ torch.cat([torch.from_numpy(numbers_of_blocks(tensor)) for tensor in tensors]).T + bias
    assert torch.allclose(product(rows), expected, atol=1e-4)
    require_same_bits_in_any_company(product, rows)


@pytest.mark.parametrize(("family", "kinds", "changes"), [
    ("llama", gguf_files.MIXED, {"tie_word_embeddings": False}),
    ("llama", ("q8_0", "bf16", "q5_1"), {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen2", ("q4_0",), {"tie_word_embeddings": True}),
    ("qwen3", ("q5_k", "q4_1", "q5_0"), {}),
])  # fmt: skip
def test_a_model_computes_its_numbers(
    family: str, kinds: tuple[str, ...], changes: dict[str, Any], tmp_path: Path
) -> None:
    """A directory with one file is loaded by its name; log-probabilities are those of transformers with the format's
    numbers, to float32's rounding."""
    model = write_model(tmp_path / "model.gguf", family, kinds, **SMALL, **changes)
    if "bf16" in kinds:
        # Why here: numbers beside blocks are no parts of one product, so the model's own modules compute.
        with engine_of(tmp_path / "model.gguf") as engine:
            outputs = engine.generate(PROMPTS, SCORES, show_progress=False)
        actual = np.array([one.logprob for output in outputs for one in (output.prompt_logprobs or ())[1:]])
    else:
        actual = scores_of(tmp_path, must_fuse=True)
    assert np.abs(actual - scores_of_transformers(model)).max() < 1e-4


def test_bfloat16_is_near(tmp_path: Path) -> None:
    """Rows in bfloat16 give nearly the same."""
    wanted = scores_of_transformers(write_model(tmp_path / "model.gguf", **SMALL))
    assert np.abs(scores_of(tmp_path, must_fuse=True, dtype="bfloat16") - wanted).mean() < 0.1 * wanted.std()


def test_factors_of_frequencies_are_those_of_llama_3(tmp_path: Path) -> None:
    """``rope_freqs.weight`` divides the frequencies, which is what the parameters of Llama 3 come to; one factor for
    all is "linear"."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config = write_model(tmp_path / "other.gguf", rope_parameters=rope, **SMALL).config
    wanted = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 1.0 / 10000.0 ** (np.arange(0, 16, 2, dtype=np.float32) / 16)
    factors = {"rope_freqs.weight": floats("f32", plain / wanted)}
    assert factors["rope_freqs.weight"].content != np.ones(8, np.float32).tobytes()
    model = write_model(tmp_path / "model.gguf", more_tensors=factors, rope_parameters=rope, **SMALL)
    assert np.abs(scores_of(tmp_path / "model.gguf", must_fuse=True) - scores_of_transformers(model)).max() < 1e-4
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    write_model(tmp_path / "linear.gguf", metadata=linear, **SMALL)
    assert GGUF(str(tmp_path / "linear.gguf")).config().rope_parameters == {
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.mark.parametrize("quantization", ["none", "w8a16"])
def test_a_file_of_numbers_is_a_model_like_any_other(quantization: str, tmp_path: Path) -> None:
    """A file without quantised tensors may be quantised at load."""
    wanted = scores_of_transformers(write_model(tmp_path / "model.gguf", kinds=("f16", "bf16", "f32"), **SMALL))
    difference = np.abs(scores_of(tmp_path, must_fuse=True, quantization=quantization) - wanted)
    assert difference.max() < 1e-4 if quantization == "none" else difference.mean() < 0.1 * wanted.std()


def test_no_matrix_is_dequantised(tmp_path: Path) -> None:
    """While a model is read and packed no float tensor is larger than the 256 outputs of a layer that are compared, of
    2048; embeddings stay as the file has them and are looked up row by row."""
    path = str(tmp_path / "model.gguf")
    write_model(tmp_path / "model.gguf", vocab_size=2048, tie_word_embeddings=True, num_hidden_layers=1)
    with LargestFloats() as count:
        model: Any = load_stored(path, GGUF(path), torch.bfloat16, trust_remote_code=False)
        pack_linears(model, linears=StoredLinears())
        rows = model.model.embed_tokens(torch.tensor([[5, 2000]]))
    assert (rows.shape, rows.dtype) == ((1, 2, 256), torch.bfloat16)
    assert count.largest <= 256 * 512
    assert model.model.embed_tokens.weight.tensors[0].nbytes == 2048 * 144


def test_size_counts_what_is_packed(tmp_path: Path) -> None:
    """``pagedcore size`` sums up products as they are packed, and an embedding as the file has it."""
    write_model(tmp_path / "model.gguf", vocab_size=128, tie_word_embeddings=True, num_hidden_layers=1)
    report = size_model(str(tmp_path), context=64, concurrency=1)
    stored = load_stored(str(tmp_path / "model.gguf"), GGUF(str(tmp_path / "model.gguf")), torch.bfloat16,
                         trust_remote_code=False)
    products = sum(module.weight.product(None).memory[1] for module in stored.modules()
                   if type(module) is torch.nn.Linear)
    norms = sum(one.nbytes for one in stored.parameters())
    assert report.weight_bytes == products + norms + 128 * 144
    assert report.num_parameters == 128 * 256 + 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512 + 3 * 256
    assert report.model == tmp_path.name


def test_doctor_says_what_the_file_holds(tmp_path: Path) -> None:
    """``pagedcore doctor`` names types, decoder and where the tokenizer comes from."""
    write_model(tmp_path / "model.gguf", **SMALL)
    facts = diagnose(model_source(tmp_path))
    assert facts["quantisation"] == "gguf: 11 matrices in q4_k, 5 matrices in q6_k"
    assert facts["decoder"] == "fused kernels"
    assert "metadata" in facts["tokenizer"]
    assert facts["files"] == "mapped, for the modules of transformers"


def test_a_file_brings_its_tokenizer(tmp_path: Path) -> None:
    """Text goes in and comes out by the file's own tokens, and its end token ends completions."""
    tokens = [bytes([octet]).decode("latin-1") for octet in range(33, 127)] + ["Ġ", "ab", "abc", "<end>"]
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b", "ab c"], "tokenizer.ggml.token_type": [1] * 97 + [3],
        "tokenizer.ggml.eos_token_id": 97,
    }
    write_model(tmp_path / "model.gguf", "qwen2", metadata=metadata, vocab_size=98, num_hidden_layers=1)
    tokenizer = load_tokenizer(tmp_path, EngineConfig())
    assert tokenizer is not None
    assert tokenizer.encode("abc ab<end>") == [96, 94, 95, 97]
    with engine_of(tmp_path) as engine:
        output = engine.generate(["abc"], SamplingParams(max_tokens=5, ignore_eos=True), show_progress=False)[0]
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
        assert engine._runner.backend.eos_token_ids == frozenset({97})


def test_directories(tmp_path: Path) -> None:
    """The only GGUF file of a directory is the model, unless there are other weights; of several one must be named."""
    write_model(tmp_path / "model.gguf", **SMALL)
    assert model_source(tmp_path) == str(tmp_path / "model.gguf")
    (tmp_path / "model.safetensors").touch()
    assert model_source(tmp_path) == str(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "second.gguf").touch()
    with pytest.raises(InvalidConfig, match="has 2 GGUF files"):
        engine_of(tmp_path)


def test_another_scheme_is_refused(tmp_path: Path) -> None:
    """What is quantised already is not quantised again."""
    write_model(tmp_path / "model.gguf", **SMALL)
    with pytest.raises(InvalidConfig, match="got 'w4a16' for a gguf checkpoint"):
        engine_of(tmp_path, quantization="w4a16")


@pytest.mark.parametrize(("metadata", "message"), [
    ({"general.architecture": "gemma3n"}, "its architecture is 'gemma3n'"),
    ({"general.architecture": None}, "its architecture is 'None'"),
    ({"llama.attention.logit_scale": 2.0}, r"llama\.attention\.logit_scale in its metadata is not known"),
    ({"llama.expert_count": 8}, "its expert_count is 8"),
    ({"llama.attention.sliding_window": 4096}, "sliding_window is 4096"),
    ({"llama.rope.scaling.type": "su"}, "its rope.scaling.type is 'su'"),
    ({"llama.rope.dimension_count": 8}, "rope.dimension_count is 8, and its heads are of 16"),
    ({"llama.attention.head_count": 0}, "attention.head_count is 0, needed is a size"),
    ({"llama.attention.head_count": "4"}, "attention.head_count is 4, needed is a size"),
    ({"llama.feed_forward_length": [512, 256]}, r"feed_forward_length is \[512, 256\], needed is a size"),
    ({"llama.attention.head_count_kv": 3}, "16 heads of 16 are in 3 groups"),
    ({"llama.block_count": 2**31 - 1}, "its block_count is 2147483647, with 21 tensors"),
    ({"llama.block_count": 1}, r"blk\.1\.\S+ is no tensor of the architecture llama"),
    ({"llama.block_count": 3}, r"blk\.2\.\S+ is missing in its file"),
    ({"llama.embedding_length": 512}, r"is of shape \[.*\], needed is \[.*512.*\]"),
    ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "rms_epsilon is nan, needed is a number above 0"),
    ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id is 1000000, with a vocabulary of"),
])  # fmt: skip
def test_other_models_are_refused(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    """What cannot be computed, or is not understood, is named before a tensor is read."""
    path = str(tmp_path / "model.gguf")
    write_model(tmp_path / "model.gguf", metadata=metadata, **SMALL)
    with pytest.raises(ModelNotSupported, match=message):
        load_stored(path, stored_format(path), torch.float32, trust_remote_code=False)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tensor", "message"), [
    ({"blk.0.attn_q.bias": floats("f32", np.ones(256))}, r"blk\.0\.attn_k\.bias is missing|attn_q\.bias"),
    ({"blk.0.attn_rot_embd.weight": floats("f32", np.ones(4))}, "attn_rot_embd.weight is no tensor"),
    ({"rope_freqs.weight": floats("f32", np.ones(31))}, r"rope_freqs.weight is f32 of shape \[31\]"),
    ({"rope_freqs.weight": floats("f32", np.zeros(8))}, "not finite and above 0"),
])  # fmt: skip
def test_other_tensors_are_refused(tensor: dict[str, Tensor], message: str, tmp_path: Path) -> None:
    """A tensor that the architecture does not have is not left out in silence."""
    path = str(tmp_path / "model.gguf")
    write_model(tmp_path / "model.gguf", more_tensors=tensor, **SMALL)
    with pytest.raises(ModelNotSupported, match=message):
        load_stored(path, stored_format(path), torch.float32, trust_remote_code=False)  # type: ignore[arg-type]


def test_other_types_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every type of ggml that is not computed is named; a number that is none is shown."""
    path = tmp_path / "model.gguf"
    for number, name in {**OTHER_TYPES, 77: "77"}.items():
        monkeypatch.setitem(gguf_files.TYPES, "q8_0", (number, 32, 34))
        write_gguf(path, {}, {"x": Tensor("q8_0", (2, 32), bytes(68))})
        with pytest.raises(ModelNotSupported, match=f"x is of the type {name} of ggml"):
            GGUF(str(path))


def test_scales_that_are_not_finite_are_refused() -> None:
    """A scale with an infinity, or a power of two with which the largest number is one, ends loading, and names the
    layer."""
    for kind, first in (("q4_k", b"\x00\x7c"), ("mxfp4", b"\xfd")):
        tensor = random_blocks(np.random.default_rng(0), kind, (2, 256))
        tensor.content = first + tensor.content[len(first) :]
        with pytest.raises(ModelNotSupported, match="layer has scales that are not finite"):
            stored_of(tensor).read()
    tensor.content = b"\xfc" + tensor.content[1:]
    assert stored_of(tensor).read().numbers().isfinite().all()


def test_another_file_is_another_model(tmp_path: Path) -> None:
    """Fingerprints differ by a bit of a block and by a factor of a frequency, and are equal for equal files."""
    def fingerprint(**more: Any) -> Any:
        write_model(tmp_path / "model.gguf", kinds=("q8_0",), **SMALL, **more)
        with engine_of(tmp_path) as engine:
            return engine._runner.backend.fingerprint  # type: ignore[attr-defined]

    first = fingerprint()
    content = bytearray((tmp_path / "model.gguf").read_bytes())
    content[-64] ^= 1
    (tmp_path / "model.gguf").write_bytes(content)
    with engine_of(tmp_path) as engine:
        assert engine._runner.backend.fingerprint != first  # type: ignore[attr-defined]
    factors = {"rope_freqs.weight": floats("f32", np.full(8, 2.0))}
    assert fingerprint(more_tensors=factors) != first
    assert fingerprint() == first
