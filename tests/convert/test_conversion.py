"""What ``pagedcore convert`` writes: the bits of quantising at load, in the format's layout, or nothing at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pagedcore import Engine, SamplingParams
from pagedcore.convert import conversion
from pagedcore.convert.conversion import convert
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.embedders import TEXTS, write_embedder
from support.families import VOCAB, tiny_model
from support.host_floats import host_floats, x86_glibc_only
from support.quantized_checkpoints import change_config, change_tensors, write_checkpoint
from support.runner import invoke

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
PROMPTS = [[(7 * i + n) % VOCAB for i in range(n)] for n in (5, 19, 33)]
SCORES = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, prompt_logprobs=1, logprobs=1)
SCHEMES = ("w8a8", "w8a16", "w4a16", "w4a8")


def save(directory: Path, family: str = "llama", **changes: Any) -> str:
    tiny_model(family, **changes).save_pretrained(directory)
    return str(directory)


def results_of(source: str | Path, **settings: Any) -> list[Any]:
    """Tokens and all log-probabilities of the prompts."""
    with Engine.from_pretrained(source, num_kv_blocks=64, num_threads=1, **settings) as engine:
        outputs = engine.generate(PROMPTS, SCORES, show_progress=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs, one.prompt_logprobs) for one in outputs]


ODD = {"hidden_size": 40, "num_attention_heads": 2, "head_dim": 20, "intermediate_size": 30}


@pytest.mark.parametrize(("quantization", "dtype", "family", "changes"), [
    *((scheme, dtype, "llama", {"tie_word_embeddings": True})
      for scheme in SCHEMES for dtype in ("float32", "bfloat16")),
    *(("w4a16", "bfloat16", family, {}) for family in ("gemma3_text", "phi3", "stablelm")),
    ("w4a16", "bfloat16", "qwen2", {"intermediate_size": 256}),
    pytest.param("w8a8", "bfloat16", "llama", ODD, marks=pytest.mark.slow),
    ("w4a16", "float32", "llama", ODD), ("w8a8", "bfloat16", "mixtral", {}), ("w4a16", "float32", "mixtral", {}),
    ("w8a16", "float32", "qwen3_moe", {"moe_intermediate_size": 40, "decoder_sparse_step": 2}),
    ("w8a8", "bfloat16", "granitemoehybrid", {}), ("w4a16", "float32", "nemotron_h", {}),
    ("w4a16", "bfloat16", "olmoe", {}), ("w4a8", "bfloat16", "qwen2", {"intermediate_size": 256}),
])
def test_a_converted_model_computes_the_same_bits(
    quantization: str, dtype: str, family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """Tokens and log-probabilities are those of the model quantised when it is loaded: heads that shared the embedding,
    groups of several sizes, biases, buffers and norms included."""
    source, out = save(tmp_path / "model", family, **changes), tmp_path / "out"
    convert(source, out, quantization=quantization, dtype=dtype)
    assert results_of(out, dtype=dtype) == results_of(source, dtype=dtype, quantization=quantization)
    # Why: a reader that shares the embedding's weight would leave the quantised output layer out.
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("has_head", [False, True])
def test_a_converted_embedder_makes_the_same_vectors(has_head: bool, tmp_path: Path) -> None:
    """Names of its files that leave the body's out included, and pooled as the files of sentence-transformers say."""
    source, out = tmp_path / "model", tmp_path / "out"
    write_embedder(source, pooling="pooling_mode_mean_tokens", normalizes=False, prompts={"q": "over"},
                   has_head=has_head, tie_word_embeddings=True)
    convert(str(source), out, quantization="w8a8", dtype="float32")

    def vectors_of(path: Path, **settings: Any) -> list[bytes]:
        with Engine.from_pretrained(path, num_kv_blocks=64, num_threads=1, dtype="float32", **settings) as engine:
            found = engine.embed(TEXTS, prompt_name="q", show_progress=False)
        return [one.vector.tobytes() for one in found]

    assert vectors_of(out) == vectors_of(source, quantization="w8a8")


def test_files_without_an_output_layer_are_not_converted(tmp_path: Path) -> None:
    """Unless the embedding is one, which nothing but the configuration says; the refusal names what can be done."""
    write_embedder(tmp_path / "model")
    with pytest.raises(ModelNotSupported, match=r"no output layer.*Load it with quantization=.*pagedcore pack"):
        convert(str(tmp_path / "model"), tmp_path / "out", quantization="w8a8", dtype="float32")
    assert not (tmp_path / "out").exists()


def values_and_scales(tensors: dict[str, torch.Tensor], name: str, num_inputs: int, scheme: str) -> tuple[Any, Any]:
    """What a quantised weight [out, in] is the product of, read by NumPy from the format's description."""
    layer, bits = name.removesuffix(".weight"), int(scheme[1])
    scales = tensors[f"{layer}.weight_scale"].numpy()
    if scheme == "w8a8":
        values = tensors[name].numpy().astype(np.float32)
    else:
        words = tensors[f"{layer}.weight_packed"].numpy().view(np.uint32)
        unsigned = np.stack([words >> np.uint32(bits * i) & np.uint32(2**bits - 1) for i in range(32 // bits)], -1)
        values = unsigned.reshape(len(words), -1)[:, :num_inputs].astype(np.float32) - 2 ** (bits - 1)
        assert tensors[f"{layer}.weight_shape"].tolist() == [len(words), num_inputs]
    return values, np.repeat(scales, num_inputs // scales.shape[1], axis=1)


@pytest.mark.parametrize("quantization", SCHEMES)
def test_the_file_holds_the_weights_of_its_format(quantization: str, tmp_path: Path) -> None:
    """Read by NumPy from the format's description, the weights are those of the model to half a step of their scales;
    the library for safetensors accepts the file, and each tensor lies at a multiple of its items."""
    source, out = save(tmp_path / "model"), tmp_path / "out"
    convert(source, out, quantization=quantization, dtype="float32")
    before, after = load_file(f"{source}/model.safetensors"), load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    for name, weight in before.items():
        if not name.endswith("proj.weight") and name != "lm_head.weight":
            assert torch.equal(after[name], weight)
            continue
        bits = int(quantization[1])
        values, wide = values_and_scales(after, name, weight.shape[1], quantization)
        assert np.all(np.abs(values * wide - weight.numpy()) <= np.abs(wide) * (1.01 if bits == 4 else 0.51))
    header_bytes = int.from_bytes((out / "model.safetensors").read_bytes()[:8], "little")
    header = json.loads((out / "model.safetensors").read_bytes()[8 : 8 + header_bytes])
    sizes = {"F32": 4, "I8": 1, "I32": 4, "I64": 8}
    assert header.pop("__metadata__") == {"format": "pt"}
    assert all((8 + header_bytes + one["data_offsets"][0]) % sizes[one["dtype"]] == 0 for one in header.values())


@pytest.mark.parametrize("is_tied", [False, True])
def test_an_output_layer_that_is_kept(is_tied: bool, tmp_path: Path) -> None:
    """It and the embedding are those of the model, which other readers of the format take, and the engine computes with
    them: its tokens are those of transformers with the numbers that the file stands for."""
    changes = {"tie_word_embeddings": is_tied, "intermediate_size": 64}
    source, out = save(tmp_path / "model", "llama", **changes), tmp_path / "out"
    invoke("convert", source, "--quantization", "w4a16", "--out", str(out), "--dtype", "float32", "--keep-output-layer")
    before, after = load_file(f"{source}/model.safetensors"), load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert ("lm_head.weight" in after) != is_tied == config["tie_word_embeddings"]
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert config["quantization_config"]["config_groups"]["group_0"]["targets"] == ["Linear"]
    model, numbers = tiny_model("llama", **changes), {}
    for name, weight in before.items():
        if name.endswith("proj.weight"):
            values, scales = values_and_scales(after, name, weight.shape[1], "w4a16")
            numbers[name] = torch.from_numpy(values * scales)
        else:
            numbers[name] = after[name]
            assert torch.equal(after[name], weight)
    model.load_state_dict(numbers, strict=not is_tied)
    assert [one[0] for one in results_of(out, dtype="float32")] == [
        tuple(model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=6, eos_token_id=None,
                             pad_token_id=0)[0, len(prompt):].tolist()) for prompt in PROMPTS
    ]


def test_a_quantised_output_layer_is_named(tmp_path: Path) -> None:
    """Readers that take it for an embedding, whose class is no linear layer, find it among the targets."""
    out = tmp_path / "out"
    convert(save(tmp_path / "model"), out, quantization="w8a8")
    quantised = json.loads((out / "config.json").read_text())["quantization_config"]
    assert quantised["config_groups"]["group_0"]["targets"] == ["Linear", "lm_head"]
    assert quantised["ignore"] == []


def test_tensors_are_converted_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a tensor is read, the one before is written and gone: no more than one is referred to."""
    source, alive, most = save(tmp_path / "model"), [0], [0]

    class Counted(conversion.TensorFiles):
        def expect(self, *arguments: Any) -> torch.Tensor:
            import weakref

            tensor = super().expect(*arguments)
            alive[0] += 1
            most[0] = max(most[0], alive[0])
            weakref.finalize(tensor, lambda: alive.__setitem__(0, alive[0] - 1))
            return tensor

    monkeypatch.setattr(conversion, "TensorFiles", Counted)
    seen: list[tuple[int, int]] = []
    convert(source, tmp_path / "out", quantization="w8a8", on_progress=lambda *done: seen.append(done))
    with safe_open(f"{source}/model.safetensors", framework="pt") as file:
        assert seen == [(number, len(file.keys())) for number in range(1, len(file.keys()) + 1)]
    assert most[0] == 1


@pytest.mark.parametrize("last_call", [0, 30])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError(28, "No space left on device")])
def test_a_conversion_that_is_broken_off_leaves_nothing(error: Any, last_call: int, tmp_path: Path) -> None:
    """Ctrl-C, an exit and a full disk leave neither the directory nor an unfinished one."""
    source, calls = save(tmp_path / "model"), [0]

    def stop(done: int, total: int) -> None:
        calls[0] += 1
        if calls[0] > last_call or done == total:
            raise error

    wanted = InvalidConfig if isinstance(error, OSError) else error
    with pytest.raises(wanted):
        convert(source, tmp_path / "out", quantization="w4a16", on_progress=stop)
    assert os.listdir(tmp_path) == ["model"]


def test_a_conversion_that_is_killed_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at each of its steps it cleans nothing up, and no directory that is left is taken for a model; the next
    conversion to the same place is not in its way unless the place has its name already."""
    source, steps = save(tmp_path / "model"), 0
    monkeypatch.setattr(conversion.shutil, "rmtree", lambda *_, **__: None)

    class Killed(BaseException):
        pass

    def die_at(number: int) -> None:
        count = [0]
        for owner, name in ((Path, "mkdir"), (Path, "rename"), (Path, "write_text"), (conversion.shutil, "copyfile"),
                            (os, "fsync")):
            original = getattr(owner, name)

            def step(*arguments: Any, _original: Any = original, **keywords: Any) -> Any:
                count[0] += 1
                if count[0] == number:
                    raise Killed
                return _original(*arguments, **keywords)

            inner.setattr(owner, name, step)

    for number in range(1, 20):
        out = tmp_path / f"out{number}"
        with monkeypatch.context() as inner:
            die_at(number)
            try:
                convert(source, out, quantization="w8a8")
            except Killed:
                steps += 1
            else:
                break
        for left in set(tmp_path.iterdir()) - {Path(source)}:
            with pytest.raises(InvalidConfig, match=r"no config.json"):
                Engine.from_pretrained(left)
    assert steps >= 5
    assert results_of(out) == results_of(source, quantization="w8a8")


@pytest.mark.parametrize("kind", ["file", "full", "link", "nowhere"])
def test_what_is_there_is_not_written_over(kind: str, tmp_path: Path) -> None:
    """A file, a directory with something in it, a link and a missing parent are refused, and stay as they are."""
    source, out = save(tmp_path / "model"), tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "full":
        out.mkdir()
        (out / "mine").write_text("mine")
    elif kind == "link":
        out.symlink_to(tmp_path / "model")
    else:
        out = tmp_path / "gone" / "out"
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidConfig, match="out: it"):
        convert(source, out, quantization="w8a8")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    """As `mkdir` made it."""
    (tmp_path / "out").mkdir()
    convert(save(tmp_path / "model"), tmp_path / "out", quantization="w8a8")
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(("family", "found"), [("gpt2", "Conv1D"), ("gpt_oss", "Experts")])
def test_other_matrices_are_refused(family: str, found: str, tmp_path: Path) -> None:
    """Models whose matrices are not all in linear layers are refused by the name of the module; nothing is written."""
    source = save(tmp_path / "model", family)
    with pytest.raises(ModelNotSupported, match=found):
        convert(source, tmp_path / "out", quantization="w8a8")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("arguments", "found"), [
    ({"quantization": "none"}, "quantization: got 'none'"),
    ({"quantization": "int3"}, "one of none, w8a8, w8a16, w4a16, w4a8, auto-int8"),
    ({"quantization": "w8a8", "dtype": "float16"}, "dtype 'float16'"),
    ({"model": "gone/away"}, "needed is a directory"),
])
def test_arguments_are_refused(arguments: dict[str, str], found: str, tmp_path: Path) -> None:
    """Each is named with what is allowed."""
    model = arguments.pop("model", None) or save(tmp_path / "model")
    with pytest.raises(InvalidConfig, match=found):
        convert(model, tmp_path / "out", **{"quantization": "w8a8", **arguments})


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    """Weights that are missing or not finite; nothing is left."""
    source, name = save(tmp_path / "model"), "model.layers.1.mlp.up_proj.weight"
    weight = load_file(f"{source}/model.safetensors")[name]
    weight[3, 4] = torch.nan
    for change, found in ((weight, "not finite"), (None, f"{name} is missing"), (weight[1:].clone(), "of shape")):
        change_tensors(Path(source), {name: change})
        with pytest.raises((InvalidConfig, ModelNotSupported), match=found):
            convert(source, tmp_path / "out", quantization="w4a16")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize(("kind", "found"), [("gptq", "w4a16"), ("ct-w8a8", "w8a8"), ("bnb-int8", "w8a16")])
def test_a_quantised_model_is_refused(kind: str, found: str, tmp_path: Path) -> None:
    """It would be rounded twice; the message says what it is, and nothing is left."""
    write_checkpoint(tmp_path / "model", kind)
    with pytest.raises(ModelNotSupported, match=rf"quantised already \({found}\)"):
        convert(str(tmp_path / "model"), tmp_path / "out", quantization="w4a16")
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("quantization", ["w8a8", "auto-int8"])
def test_experts_that_files_do_not_have_are_refused(quantization: str, tmp_path: Path) -> None:
    """A configuration that names more of them than there is memory for their names costs none."""
    source = save(tmp_path / "model", "mixtral")
    change_config(Path(source), num_local_experts=2**40)
    with pytest.raises(ModelNotSupported, match=f"experts.{2**40 - 1}.down_proj.weight is missing"):
        convert(source, tmp_path / "out", quantization=quantization)
    assert os.listdir(tmp_path) == ["model"]


def test_the_command_converts_the_demo_model(tmp_path: Path) -> None:
    """The command writes what the demo model needs to answer, its tokenizer too, and says where and how large it is."""
    out = tmp_path / "out"
    printed = invoke("convert", "demo", "--quantization", "w8a8", "--out", str(out))
    num_bytes = sum(path.stat().st_size for path in out.iterdir())
    assert f"w8a8, {num_bytes:,} bytes" in printed.replace("\n", " ")
    with Engine.from_pretrained(out) as engine, Engine.from_pretrained("demo", quantization="w8a8") as other:
        texts = [one.generate(["What is 17 + 25?"])[0].outputs[0].text for one in (engine, other)]
    assert texts[0] == texts[1]


@x86_glibc_only
def test_a_host_that_rounds_up_changes_no_weight(tmp_path: Path) -> None:
    """Converting takes the default floating-point state."""
    convert("demo", tmp_path / "default", quantization="w4a16")
    with host_floats("up"):
        convert("demo", tmp_path / "up", quantization="w4a16")
    assert (tmp_path / "up/model.safetensors").read_bytes() == (tmp_path / "default/model.safetensors").read_bytes()
