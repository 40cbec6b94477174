"""Quantised files on a GPU: the numbers that they stand for, in the model's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.test_mxfp4 import write_mxfp4
from pagedcore.errors import InvalidConfig
from pagedcore.sampling_params import SamplingParams
from support.engine_builders import run
from support.generate_oracle import make_prompts
from support.gguf_files import MIXED, write_model
from support.quantized_checkpoints import KINDS, write_checkpoint
from virtual_gpu.backends import on_gpu
from virtual_gpu.machine import Machine

REPRESENTATIVES = ("gptq-order",)


def answers_of(model: Any) -> list[Any]:
    """Log-probabilities of what an engine on a virtual GPU answers."""
    with on_gpu(model, attention="queued", dtype="bfloat16") as engine:
        asked = [engine.add_request(prompt, SamplingParams(max_tokens=6, ignore_eos=True, logprobs=3))
                 for prompt in make_prompts()]
        run(engine)
    return [request.output().outputs[0].logprobs for request in asked]


def answers_of_numbers(model: Any, directory: Path) -> list[Any]:
    """The same of a float32 model's numbers, which transformers writes and reads again in bfloat16."""
    model.save_pretrained(directory)
    return answers_of(directory)


@pytest.mark.parametrize("kind", [
    one if one in REPRESENTATIVES else pytest.param(one, marks=pytest.mark.kernels) for one in KINDS])
def test_a_quantised_checkpoint_computes_as_its_numbers_do(
    kind: str, tmp_path: Path, gpus: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every format an engine on a GPU computes what it computes of the format's numbers in bfloat16, bit for bit,
    and the log says that weights were decoded."""
    model = write_checkpoint(tmp_path, kind, tie_word_embeddings=True)
    assert answers_of(tmp_path) == answers_of_numbers(model, tmp_path / "numbers")
    assert f"({KINDS[kind].scheme}) are decoded to bfloat16" in caplog.text


@pytest.mark.parametrize(("family", "kind"), [
    ("qwen3_moe", "gptq"), *(pytest.param(family, kind, marks=pytest.mark.kernels) for family, kind in (
        ("mixtral", "gptq-order"), ("olmoe", "ct-w8a8"), ("qwen2_moe", "ct-w4a16")))])
def test_experts_of_a_checkpoint_compute_as_their_numbers_do(
    family: str, kind: str, tmp_path: Path, gpus: Machine
) -> None:
    """So it is with mixtures of experts, whose matrices are one parameter again."""
    model = write_checkpoint(tmp_path, kind, family)
    assert answers_of(tmp_path) == answers_of_numbers(model, tmp_path / "numbers")


@pytest.mark.kernels
def test_mxfp4_computes_as_its_numbers_do(tmp_path: Path, gpus: Machine) -> None:
    """So it is with the experts of gpt-oss, whose matrices are transposed in its modules."""
    model = write_mxfp4(tmp_path)
    assert answers_of(tmp_path) == answers_of_numbers(model, tmp_path / "numbers")


@pytest.mark.parametrize(("family", "kinds"), [
    ("llama", MIXED), pytest.param("gpt_oss", ("mxfp4", "q8_0"), marks=pytest.mark.kernels),
    pytest.param("qwen3_moe", ("q4_k", "q6_k"), marks=pytest.mark.kernels)])
def test_a_gguf_file_computes_as_its_numbers_do(
    family: str, kinds: tuple[str, ...], tmp_path: Path, gpus: Machine
) -> None:
    """So it is with a GGUF file of many types, its embedding included."""
    model = write_model(tmp_path / "model.gguf", family, kinds)
    assert answers_of(tmp_path / "model.gguf") == answers_of_numbers(model, tmp_path / "numbers")


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8"])
def test_what_would_need_a_product_is_refused(scheme: str, tmp_path: Path, gpus: Machine) -> None:
    """Neither floating numbers are quantised for a GPU, nor are rows of int4 weights."""
    write_checkpoint(tmp_path, "gptq")
    for model in (tmp_path,) if scheme == "w4a8" else ("demo",):
        with pytest.raises(InvalidConfig, match=f"device: got 'cuda', allowed with quantization='{scheme}' is 'cpu'"):
            on_gpu(model, quantization=scheme)
