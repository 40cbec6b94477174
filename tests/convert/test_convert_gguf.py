"""``pagedcore convert`` of GGUF files: the bits of converting the same numbers as transformers' checkpoint."""

from __future__ import annotations

import json
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from pagedcore import EngineConfig, SamplingParams
from pagedcore.convert import conversion
from pagedcore.convert.conversion import convert
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints import gguf
from pagedcore.models.loading import load_tokenizer
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.gguf_files import MIXED, floats, write_model
from support.runner import try_invoke
from support.scores import PROMPTS, engine_of

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, return_logits=True)
#: What a file says of a tokenizer with six tokens, of a kind that is not known here.
TOKENS = ["a", "b", "c", "ab", "<end>", "<turn>"]
METADATA = {
    "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "falcon", "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.merges": ["a b"], "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 3],
    "tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 5,
}


def results_of(source: Path, dtype: str) -> list[Any]:
    """Greedy tokens of the prompts, and the logits that they were chosen from."""
    with engine_of(source, dtype=dtype) as engine:
        outputs = engine.generate(PROMPTS, GREEDY, show_progress=False)
    return [(one.outputs[0].token_ids, np.asarray(one.outputs[0].logits).tolist()) for one in outputs]


def require_equal(directory: Path, dtype: str, quantization: str) -> None:
    """Convert ``model.gguf`` and ``plain`` of a directory, and compare tensors and what the engine computes."""
    for source, out in (("model.gguf", "out"), ("plain", "wanted")):
        convert(str(directory / source), directory / out, quantization=quantization, dtype=dtype)
    wanted, actual = (load_file(directory / name / "model.safetensors") for name in ("wanted", "out"))
    assert wanted.keys() == actual.keys()
    assert all(wanted[name].dtype == actual[name].dtype and torch.equal(wanted[name], actual[name]) for name in wanted)
    assert results_of(directory / "out", dtype) == results_of(directory / "wanted", dtype)


@pytest.mark.parametrize(("quantization", "dtype", "family", "kinds"), [
    ("w8a8", "bfloat16", "llama", MIXED), ("w8a16", "float32", "llama", ("f16", "q5_1", "f32", "q8_0")),
    ("w4a16", "float32", "qwen3", MIXED), ("auto-int8", "bfloat16", "qwen2", MIXED),
    ("w8a8", "bfloat16", "gemma3_text", ("iq4_nl", "q3_k")), ("w4a16", "float32", "qwen3_moe", ("q4_0", "f16")),
    # Why slow: its heads are larger than any others, and their kernels take five seconds to compile.
    pytest.param("w8a16", "float32", "gemma4_text", ("q5_0", "bf16"), marks=pytest.mark.slow),
])
def test_it_is_what_the_dequantised_model_becomes(
    quantization: str, dtype: str, family: str, kinds: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tensor, every token and every logit, to the last bit: turned rows of query and key, blocks of several
    types, numbers of float16 and biases included. Tensors are decoded in several steps."""
    monkeypatch.setattr(gguf, "_AT_ONCE", 50_000)
    model = write_model(tmp_path / "model.gguf", family, kinds, num_hidden_layers=2, rms_norm_eps=1e-4)
    model.save_pretrained(tmp_path / "plain")
    require_equal(tmp_path, dtype, quantization)


LLAMA_3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
           "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def factors_of_llama_3() -> np.ndarray[Any, Any]:
    """What llama.cpp's converter writes for ``LLAMA_3`` and heads of 16, in its own words."""
    factors = []
    for frequency in 1.0 / 10000.0 ** (np.arange(0, 16, 2) / 16):
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if length < 8192 / 4 else 8.0 if length > 8192 else middle)
    assert len({*factors}) > 2
    return np.array(factors)


def test_factors_of_frequencies_become_the_parameters_of_llama_3(tmp_path: Path) -> None:
    """The engine computes with the same frequencies as for a configuration that has the parameters."""
    tensors = {"rope_freqs.weight": floats("f32", factors_of_llama_3())}
    model = write_model(tmp_path / "model.gguf", more_tensors=tensors, num_hidden_layers=1, rope_parameters=LLAMA_3)
    model.save_pretrained(tmp_path / "plain")
    require_equal(tmp_path, "float32", "w8a16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"] == LLAMA_3


def test_other_factors_are_refused_by_name(tmp_path: Path) -> None:
    """Those that no configuration can say, one of them a little off; nothing is written."""
    off = factors_of_llama_3() * np.where(np.arange(8) == 5, 1.001, 1.0)
    for factors in (np.full(8, 2.0), off):
        tensors = {"rope_freqs.weight": floats("f32", factors)}
        write_model(tmp_path / "model.gguf", more_tensors=tensors, num_hidden_layers=1)
        with pytest.raises(ModelNotSupported, match=r"rope_freqs\.weight has factors that are not those of Llama 3"):
            convert(str(tmp_path / "model.gguf"), tmp_path / "out", quantization="w8a16")
    assert os.listdir(tmp_path) == ["model.gguf"]


@pytest.mark.parametrize("is_beside", [False, True])
def test_tokenizer_and_ends_go_along(is_beside: bool, tmp_path: Path) -> None:
    """Text, chats and the tokens that end a completion are those of the file loaded as it is; a tokenizer beside the
    file is copied if the metadata's is not known, and its ``generation_config.json`` is not taken."""
    template = {"tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}<turn>{% endfor %}"}
    metadata = {**METADATA, **template, "tokenizer.ggml.suppress_tokens": [1],
                **({} if is_beside else {"tokenizer.ggml.pre": "gpt-2"})}
    write_model(tmp_path / "model.gguf", "qwen2", metadata=metadata, vocab_size=6, num_hidden_layers=1)
    if is_beside:
        own = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("a", "b")]))
        own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        own.add_special_tokens(["<end>", "<turn>"])
        own.save(str(tmp_path / "tokenizer.json"))
        settings = {"tokenizer_class": "TokenizersBackend", "eos_token": "<end>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        (tmp_path / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<end>")
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": 0}')
        (tmp_path / "tokenizers").mkdir()
    convert(str(tmp_path / "model.gguf"), tmp_path / "out", quantization="w8a16")
    wanted, actual = (load_tokenizer(path, EngineConfig()) for path in (tmp_path / "model.gguf", tmp_path / "out"))
    assert wanted is not None
    assert actual is not None
    assert actual.encode("abc<turn>a") == wanted.encode("abc<turn>a") == [3, 2, 5, 0]
    chat = [{"role": "user", "content": "ab"}]
    assert actual.render_chat(chat) == wanted.render_chat(chat) == ("ab<end>" if is_beside else "ab<turn>")  # type: ignore[attr-defined]
    held = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert held == {"eos_token_id": [4, 5], "suppress_tokens": [1]}
    with engine_of(tmp_path / "out") as engine:
        assert engine._runner.backend.eos_token_ids == frozenset({4, 5})


def test_what_cannot_be_converted_leaves_nothing(tmp_path: Path) -> None:
    """A calibration set, a tokenizer that is not known, sizes that no tensor can have, and half a file."""
    path, sizes = tmp_path / "model.gguf", dict.fromkeys(
        ("llama.embedding_length", "llama.attention.head_count", "llama.attention.head_count_kv"), 2**31 - 2)

    def refused(error: type[Exception], message: str, **more: Any) -> None:
        with pytest.raises(error, match=message):
            convert(str(path), tmp_path / "out", quantization="w8a8", **more)
        assert os.listdir(tmp_path) == ["model.gguf"]

    write_model(path, metadata=METADATA, vocab_size=6, num_hidden_layers=1)
    refused(InvalidConfig, "text split as 'falcon'")
    refused(ModelNotSupported, "calibration: got a GGUF file", calibration=tmp_path / "set.txt")
    write_model(path, metadata=sizes, num_hidden_layers=1)
    refused(InvalidConfig, "model: it could not be loaded")
    write_model(path, metadata={"llama.block_count": 1}, num_hidden_layers=2)
    refused(ModelNotSupported, r"blk\.1\.\S+ is no tensor of the architecture llama")
    path.write_bytes(path.read_bytes()[:5000])
    refused(InvalidConfig, "its GGUF file is damaged")


@pytest.mark.parametrize("quantization", ["w8a8", "auto-int8"])
def test_one_tensor_is_decoded_at_a_time(quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a matrix is decoded, the one before is gone."""
    alive, most = [0], [0]

    class Counted(conversion.GGUFSource):
        def expect(self, name: str, shape: tuple[int, ...], *formats: str) -> torch.Tensor:
            tensor = super().expect(name, shape, *formats)
            if len(shape) == 2:
                alive[0] += 1
                most[0] = max(most[0], alive[0])
                weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

    monkeypatch.setattr(conversion, "GGUFSource", Counted)
    write_model(tmp_path / "model.gguf", num_hidden_layers=2)
    convert(str(tmp_path), tmp_path / "out", quantization=quantization)
    assert most[0] == 1


@pytest.mark.parametrize(("kinds", "is_told"), [(("f16", "q8_0"), True), (("f16", "bf16", "f32"), False)])
def test_the_command_says_that_weights_are_rounded_twice(kinds: tuple[str, ...], is_told: bool, tmp_path: Path) -> None:
    """Of blocks, not of numbers."""
    write_model(tmp_path / "model.gguf", kinds=kinds, num_hidden_layers=1)
    result = try_invoke("convert", str(tmp_path), "--quantization", "w8a16", "--out", str(tmp_path / "out"))
    assert (result.exit_code, "they are rounded a second time" in result.output) == (0, is_told)
    assert "w8a16, " in result.output
