"""The sum that is reported before a model is loaded is what an engine then takes, and its advice helps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine, MemoryBudget
from pagedcore.cli.size import SizeReport, size_model
from pagedcore.errors import InvalidConfig
from pagedcore.models.linears.stored_weight import stored_tensors
from pagedcore.models.self_test import SelfTest
from support.families import config_of, tiny_model
from support.runner import invoke

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "padded value rows": ("llama", {"hidden_size": 80}),
    "K and V of different sizes": ("deepseek_v3", {}),
    "layers that differ": ("gemma4_text", {"head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4}),
    "layers that share K and V": ("gemma3n_text", {}),
}


def save(path: Path, family: str, **changes: Any) -> Path:
    """Write a tiny model to a directory."""
    tiny_model(family, **changes).save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are counted here and asked nothing: no kernel has to be compiled for their layers."""
    monkeypatch.setattr(SelfTest, "check", lambda *_, **__: True)


@pytest.mark.parametrize(("context", "concurrency", "dtype", "kv_cache_dtype"), [
    (1, 1, "auto", "auto"), (100, 3, "float32", "auto"), (2048, 600, "auto", "auto"), (100, 3, "bfloat16", "int8"),
])
def test_an_engine_takes_what_was_told(context: int, concurrency: int, dtype: str, kv_cache_dtype: str) -> None:
    """An engine with the settings of the report has its blocks and bytes, to the byte."""
    report = size_model("demo", context=context, concurrency=concurrency, dtype=dtype, memory="64GiB",
                        kv_cache_dtype=kv_cache_dtype)
    with Engine.from_pretrained("demo", **report.settings) as engine:
        stats = engine.stats()
    assert (stats.num_blocks, stats.kv_bytes) == (report.num_blocks, report.kv_bytes)
    assert (stats.block_size, stats.dtype, stats.max_model_len) == (report.block_size, report.dtype, context)


def test_a_model_that_guesses_is_in_the_sum() -> None:
    """Its weights, and a block of its own for each of the model's: what an engine draws from a budget."""
    for memory in ("64GiB", "9MiB"):
        given: dict[str, Any] = {"context": 100, "concurrency": 3, "dtype": "float32", "memory": memory}
        report, alone = size_model("demo", speculative_model="demo", **given), size_model("demo", **given)
        assert report.kv_bytes == 2 * alone.kv_bytes
        assert report.total_bytes == 2 * alone.total_bytes
        assert report.fits == (memory == "64GiB")
        assert ("leave speculative_model" in report.advice) == (alone.fits and not report.fits)
        budget = MemoryBudget("1GiB")
        with Engine.from_pretrained("demo", **report.settings, kv_cache_memory=budget) as engine:
            num_blocks = engine.stats().num_blocks
            drawn = budget.total_bytes - budget.left_bytes
        assert drawn == report.draft_weight_bytes + num_blocks * report.pair_bytes


def test_a_model_without_limits_given_is_sized_as_an_engine_without_settings() -> None:
    """Context and concurrency default to what an engine takes by itself where memory is no matter."""
    report = size_model("demo")
    with Engine.from_pretrained("demo") as engine:
        assert (report.num_blocks, report.kv_bytes) == (engine.stats().num_blocks, engine.stats().kv_bytes)


@pytest.mark.parametrize(("name", "kv_cache_dtype"), [
    (name, dtype) for name in SHAPES for dtype in ("auto", "int8")
])
def test_padding_and_uneven_layers_are_in_the_sum(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    """Layers are counted one by one: the sum is the engine's also where the short formula does not hold."""
    family, changes = SHAPES[name]
    path = save(tmp_path, family, **changes)
    report = size_model(path, context=40, concurrency=2, dtype="float32", kv_cache_dtype=kv_cache_dtype)
    with Engine.from_pretrained(path, **report.settings) as engine:
        assert engine.stats().kv_bytes == report.kv_bytes
    assert report.kv_bytes == report.num_blocks * (report.block_size * report.bytes_per_token + report.padding_bytes)
    assert report.as_json()["layers"]
    if name == "padded value rows":
        num_bytes, scales = (4, 0) if kv_cache_dtype == "auto" else (1, 8)
        assert report.bytes_per_token == 3 * 2 * ((20 + 20) * num_bytes + scales)
        assert report.padding_bytes == 3 * 2 * (32 - 20) * num_bytes * report.block_size
    if name == "layers that differ":
        assert len(report.layers) == 2


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba"])
def test_states_are_in_the_sum(family: str, tmp_path: Path) -> None:
    """An engine has as many as were told; a model without attention has states alone, and what is missing is told."""
    path = save(tmp_path, family)
    given: dict[str, Any] = {"context": 40, "concurrency": 3, "dtype": "float32"}
    report = size_model(path, **given)
    with Engine.from_pretrained(path, **report.settings) as engine:
        stats = engine.stats()
    assert (stats.kv_bytes, stats.num_states, stats.state_bytes) == (report.kv_bytes, report.num_states,
                                                                     report.state_bytes)
    assert report.total_bytes == report.weight_bytes + report.kv_bytes + report.num_states * report.bytes_per_state
    assert (report.kv_bytes == 0) == (family == "mamba")
    enough = size_model(path, **given, memory=report.total_bytes)
    short = size_model(path, **given, memory=report.total_bytes - 1)
    assert (enough.fits, enough.num_sequences_that_fit) == (True, 3)
    assert (short.fits, short.num_sequences_that_fit) == (False, 2)


@pytest.mark.parametrize("memory", ["5MiB", "6MiB", "9MiB"])
def test_the_blocks_that_fit_are_those_of_a_pool_of_that_size(memory: str) -> None:
    """The room beside the weights, given to an engine, makes as many blocks as were reported."""
    report = size_model("demo", memory=memory, dtype="bfloat16")
    room = report.memory - report.weight_bytes
    with Engine.from_pretrained("demo", dtype="bfloat16", kv_cache_memory=room) as engine:
        assert engine.stats().num_blocks == report.num_blocks_that_fit


def again(report: SizeReport, **changes: Any) -> SizeReport:
    """The same question with something changed."""
    question = {"context": report.context, "concurrency": report.concurrency, "dtype": report.dtype,
                "memory": report.memory, "kv_cache_dtype": report.kv_cache_dtype}
    return size_model("demo", **{**question, **changes})


def test_each_advice_makes_it_fit_and_one_more_would_not() -> None:
    """Concurrency, context, number format and memory named in the advice are the largest that fit."""
    report = size_model("demo", context=512, concurrency=8, dtype="float32", memory="15MiB")
    assert not report.fits
    assert again(report, concurrency=report.num_sequences_that_fit).fits
    assert not again(report, concurrency=report.num_sequences_that_fit + 1).fits
    assert again(report, context=report.context_that_fits).fits
    assert not again(report, context=report.context_that_fits + 1).fits
    assert again(report, dtype="bfloat16").fits
    assert again(report, memory=report.total_bytes).fits
    assert not again(report, memory=report.total_bytes - 1).fits
    assert again(report, kv_cache_dtype="int8").kv_bytes == report.int8_kv_bytes
    assert len({again(report, kv_cache_dtype=name).bytes_per_token for name in ("int8", "e4m3")}) == 1
    assert again(report, kv_cache_dtype="int8").fits == ("kv_cache_dtype int8" in report.advice)
    for words in (f"num_kv_blocks={report.num_blocks_that_fit}", f"concurrency to {report.num_sequences_that_fit}",
                  f"context to {report.context_that_fits} tokens", "bfloat16", "of memory"):
        assert words in report.advice


@pytest.mark.parametrize("memory", ["11MiB", "12MiB", "14MiB", "15MiB", "24MiB"])
def test_int8_kv_and_coarser_weights_are_advised_where_they_help(memory: str) -> None:
    """int8 KV is named where all fits with it; bfloat16 is where halves of what it halves are enough."""
    for kv_cache_dtype in ("auto", "int8"):
        report = size_model("demo", context=512, concurrency=8, dtype="float32", memory=memory,
                            kv_cache_dtype=kv_cache_dtype)
        if not report.fits:
            in_int8 = again(report, kv_cache_dtype="int8")
            assert (in_int8.fits and kv_cache_dtype == "auto") == ("kv_cache_dtype int8" in report.advice)
            assert again(report, dtype="bfloat16").fits == ("bfloat16" in report.advice)


def test_weights_that_do_not_fit_are_said() -> None:
    """Without room for a block, neither fewer sequences nor shorter ones are proposed."""
    report = size_model("demo", memory="1MiB")
    assert (report.num_blocks_that_fit, report.num_sequences_that_fit, report.context_that_fits) == (0, 0, 0)
    assert "smaller model" in report.advice
    assert "lower the" not in report.advice


def test_free_memory_is_the_measure_when_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is free now counts, and a float is a share of it."""
    monkeypatch.setattr("pagedcore.execution.machine.free_memory_bytes", lambda: 2**30)
    assert size_model("demo").memory == 2**30
    assert size_model("demo", memory=0.5).memory == 2**29


@pytest.mark.parametrize(("arguments", "message"), [
    ({"context": 4096}, "max_model_len: got 4096, allowed is up to 2048"),
    ({"context": 0}, "max_model_len: got 0"),
    ({"concurrency": 0}, "max_num_seqs: got 0"),
    ({"dtype": "int8"}, "dtype: got"),
    ({"kv_cache_dtype": "float16"}, "kv_cache_dtype: got"),
    ({"quantization": "int8"}, "quantization: got"),
    ({"memory": "much"}, "memory: got 'much'"),
])
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    """Arguments have the limits of the settings they become."""
    with pytest.raises(InvalidConfig, match=message):
        size_model("demo", **arguments)


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    """A directory with nothing but a configuration is sized, and the report can be written as JSON."""
    config_of("qwen2").save_pretrained(tmp_path)
    data = json.loads(json.dumps(size_model(tmp_path, context=32, concurrency=2, dtype="float32").as_json()))
    assert data["bytes_per_token"] == 2 * 3 * 2 * 16 * 4
    assert data["kv_bytes"] == data["num_blocks"] * data["block_bytes"]
    assert data["model"] == tmp_path.name


@pytest.mark.parametrize(("family", "quantization"), [
    # Each family and each scheme once; `make slow` takes all pairs.
    pytest.param(family, quantization, marks=[pytest.mark.slow] if row != column else [])
    for row, family in enumerate(("gpt2", "qwen2_moe", "llama"))
    for column, quantization in enumerate(("w8a8", "w8a16", "w4a16"))
])
def test_quantised_weights_are_those_of_an_engine(family: str, quantization: str, tmp_path: Path) -> None:
    """Products, what belongs to them and what was not quantised add up to the report, filled up to whole panels."""
    changes = ({"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
               if family == "llama" else {})
    path = save(tmp_path, family, **changes)
    report = size_model(path, context=32, concurrency=2, dtype="bfloat16", quantization=quantization)
    with Engine.from_pretrained(path, **report.settings) as engine:
        assert engine.stats().kv_bytes == report.kv_bytes
        decoder = engine._runner.backend._decoder  # type: ignore[attr-defined]
        held = 0
        for product in decoder.products:
            multiply = product.multiply
            if multiply.weight.dtype == torch.float32:  # a router's, which the report counts in the model's format
                held += product.out_features * product.in_features * 2
                continue
            held += multiply.memory[1] + (3 * multiply._scales.nbytes if quantization == "w8a8" else 0)
        model = decoder._general.args[0] if family == "llama" else decoder._model
        held += sum(one.nbytes for module in model.modules() for one in module.parameters(recurse=False))
        held += sum(one.nbytes for _, one in stored_tensors(model))
    # Biases were packed too, and are no parameters any more; fused layers are filled up once.
    assert 0 <= report.weight_bytes - held < 0.03 * held
    assert report.weight_bytes < 0.8 * size_model(path, context=32, concurrency=2, dtype="bfloat16").weight_bytes


def test_quantisation_makes_room() -> None:
    """What fits grows, and the settings make such an engine."""
    plain, small = (size_model("demo", memory="4MiB", quantization=name) for name in ("none", "w4a16"))
    assert small.num_blocks_that_fit > plain.num_blocks_that_fit
    assert ("quantization" in plain.settings, small.settings["quantization"]) == (False, "w4a16")


def test_a_converted_directory_is_sized_as_what_it_holds(tmp_path: Path) -> None:
    """Weights are counted as quantised, and the title names what was asked for and no default."""
    out = tmp_path / "converted"
    invoke("convert", "demo", "--quantization", "w8a8", "--out", str(out))
    assert size_model(out, context=64).weight_bytes == size_model("demo", context=64, quantization="w8a8").weight_bytes
    assert "None" not in invoke("size", "demo").split("what", 1)[0]


def test_what_an_engine_does_without_is_not_imported() -> None:
    """Neither transformers nor what its models bring, torch's compiler above all, which takes two seconds."""
    code = ("import sys; from pagedcore.cli.main import main\n"
            "for command in sys.argv[1:]:\n"
            "    sys.argv = ['pagedcore', *command.split()]\n"
            "    try: main()\n"
            "    except SystemExit as end: assert not end.code\n"
            "    heavy = {'transformers', 'torch._dynamo', 'torch.distributed.tensor', 'sympy'} & {*sys.modules}\n"
            "    assert not heavy, (command, heavy)")
    commands = ["demo --help", "doctor", "doctor demo", "size demo"]
    done = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0, done.stderr
