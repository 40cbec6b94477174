"""Packed weights in a file: the same bits as packing them, one copy for all processes, and when they are not used."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.convert.packing import pack
from pagedcore.errors import InvalidConfig, InvalidRequest, ModelNotSupported
from pagedcore.models.checkpoints import packed_model
from pagedcore.models.checkpoints.packed_file import PackedFile
from pagedcore.models.linears import packed_linear
from pagedcore.models.self_test import SelfTest
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.embedders import write_embedder
from support.families import tiny_model
from support.gguf_files import MIXED, write_model
from support.quantized_checkpoints import change_config, write_checkpoint
from support.runner import invoke, try_invoke
from support.scores import PROMPTS, engine_of

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, return_logits=True)


def packed(source: Path, out: Path | None = None, dtype: str = "auto") -> Path:
    return pack(str(source), out, create_plugin_manager().registry.load, dtype=dtype)


def results_of(source: Path, dtype: str = "auto") -> list[Any]:
    """Which model it is, and greedy tokens of the prompts with their logits."""
    with engine_of(source, dtype=dtype) as engine:
        outputs = engine.generate(PROMPTS, GREEDY, show_progress=False)
        found = engine._runner.backend.fingerprint  # type: ignore[attr-defined]
    return [found, *((one.outputs[0].token_ids, np.asarray(one.outputs[0].logits).tolist()) for one in outputs)]


def from_float(family: str, **changes: Any) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        model = tiny_model(family, **changes)
        with torch.no_grad():
            for one in model.parameters():
                if one.ndim == 1:
                    one.add_(torch.randn_like(one) * 0.1)
        model.save_pretrained(directory / "model")
        return directory / "model"
    return write


def converted(quantization: str, family: str, **changes: Any) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        convert(str(from_float(family, **changes)(directory)), directory / "out", quantization=quantization)
        return directory / "out"
    return write


def checkpoint(kind: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        write_checkpoint(directory / "model", kind)
        return directory / "model"
    return write


def gguf(family: str, *kinds: str) -> Callable[[Path], Path]:
    def write(directory: Path) -> Path:
        write_model(directory / "model.gguf", family, kinds or MIXED)
        return directory / "model.gguf"
    return write


MODELS = {
    # Queries, keys and values are one product, with a bias; the embedding reads the output layer's rows.
    "buffers of a model in it": from_float("gemma3n_text"),
    "float, fused": from_float("qwen2", tie_word_embeddings=True), "transposed matrices": from_float("gpt2"),
    "experts and a router": from_float("gpt_oss"), "a layer in float32": from_float("hunyuan_v1_moe"),
    "int8 rows for tokens": converted("w8a8", "qwen2", tie_word_embeddings=True),
    "a table of tokens": converted("w4a16", "llama", tie_word_embeddings=True),
    "schemes side by side": converted("auto-int8", "qwen3_moe"), "int8 rows by groups": converted("w4a8", "llama"),
    "ordered inputs": checkpoint("gptq-order"), "a codebook": checkpoint("bnb-nf4"),
    "blocks": gguf("gemma3_text", "iq4_nl", "q3_k"),
    "tables of blocks": gguf("gemma4_text", "q4_0", "q8_0"), "parts unlike": gguf("qwen3_moe", "q4_0", "f16"),
}


@pytest.mark.parametrize("kind", [
    # Why slow: of all models only this one has heads so large, whose kernels take ten seconds to compile.
    pytest.param(kind, marks=pytest.mark.slow) if kind == "tables of blocks" else kind for kind in MODELS
])
def test_the_same_bits(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Tokens, logits and the model's identity are those of the weights that were packed, which lie beside."""
    wanted = results_of(source := MODELS[kind](tmp_path))
    path = packed(source)
    with caplog.at_level(logging.INFO, "pagedcore"):
        assert results_of(source) == wanted
        with engine_of(source, dtype="auto"):
            assert str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")
    assert "not used" not in caplog.text


def test_packed_weights_alone_are_a_model(tmp_path: Path) -> None:
    """A directory without other weights computes the same, says its own number format, and goes on if it is moved."""
    wanted = results_of(source := MODELS["a table of tokens"](tmp_path), "bfloat16")
    packed(source, tmp_path / "alone", "bfloat16")
    (tmp_path / "alone").rename(tmp_path / "moved")
    assert not list((tmp_path / "moved").glob("*.safetensors"))
    assert results_of(tmp_path / "moved") == wanted


def test_packed_weights_without_an_output_layer_embed_only(tmp_path: Path) -> None:
    """As the files that they were made of, pooled as these say; they do not have the embedding in its place."""
    write_embedder(tmp_path / "model", pooling="pooling_mode_mean_tokens", normalizes=False, prompts={"q": "over"})
    with engine_of(tmp_path / "model", dtype="float32") as engine:
        (wanted,) = engine.embed("the quick", show_progress=False)
    packed(tmp_path / "model", tmp_path / "alone", "float32")
    with engine_of(tmp_path / "alone", dtype="float32") as engine:
        (found,) = engine.embed("the quick", show_progress=False)
        engine.embed("the quick", prompt_name="q", show_progress=False)
        with pytest.raises(InvalidRequest, match="without an output layer"):
            engine.generate(["a"], GREEDY, show_progress=False)
    assert found.vector.tobytes() == wanted.vector.tobytes()


def test_what_is_left_of_the_model_stays_mapped(tmp_path: Path) -> None:
    """Parameters that are no product's, an embedding of its own among them, are read where the file is."""
    path = packed(source := from_float("llama")(tmp_path))
    with engine_of(source, dtype="auto") as engine:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        places = next(line.split()[0] for line in maps if line.endswith(str(path)))
        begin, end = (int(place, 16) for place in places.split("-"))
        left = engine._runner.backend._weights._parameters  # type: ignore[attr-defined]
        assert any(one.ndim == 2 for one in left)
        assert all(begin <= one.data_ptr() < end for one in left)


def other_version(patch: pytest.MonkeyPatch, source: Path) -> None:
    patch.setattr(packed_model, "LAYOUT_VERSIONS", {**packed_model.LAYOUT_VERSIONS, "float": 0})


def other_processor(patch: pytest.MonkeyPatch, source: Path) -> None:
    patch.setattr(packed_model, "has_instructions", lambda name: name == "avx2")


def other_config(patch: pytest.MonkeyPatch, source: Path) -> None:
    change_config(source, rms_norm_eps=1e-4)


def other_weights(patch: pytest.MonkeyPatch, source: Path) -> None:
    if any(source.glob("*.safetensors")):
        from_float("llama", seed=1)(source.parent)


def changed_in_place(patch: pytest.MonkeyPatch, source: Path) -> None:
    """Change one number between the samples that are taken of a file."""
    (path,) = source.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    # Why: the clock of a file system is coarse.
    later = (source / "model.packed").stat().st_mtime_ns + 10**9
    os.utime(path, ns=(later, later))
    patch.setattr(packed_model, "_digest_of_weights", lambda paths: header_of(source)["weights"])


def header_of(source: Path) -> dict[str, Any]:
    return PackedFile(source / "model.packed").header


CHANGES: dict[str, tuple[Callable[[pytest.MonkeyPatch, Path], None], str]] = {
    "version": (other_version, "of another version"), "processor": (other_processor, "for a processor with .*avx"),
    "config": (other_config, "its configuration is not"), "weights": (other_weights, "made of other weights"),
    "one weight": (changed_in_place, "the weights beside were written after them"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_beside_are_packed_where_the_packed_ones_do_not_fit(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says why, and answers are those of the weights that are there."""
    packed(source := from_float("llama")(tmp_path))
    apply, reason = CHANGES[change]
    apply(monkeypatch, source)
    with caplog.at_level(logging.INFO, "pagedcore"):
        found = results_of(source)
    assert len([line for line in caplog.messages if "packed weights beside the model are not used" in line]) == 1
    assert re.search(reason, caplog.text)
    (source / "model.packed").unlink()
    assert found == results_of(source)


@pytest.mark.parametrize("change", ["version", "processor", "config"])
def test_packed_weights_alone_that_do_not_fit_are_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing else to compute with, and the message says why."""
    packed(from_float("llama")(tmp_path), tmp_path / "alone")
    apply, reason = CHANGES[change]
    apply(monkeypatch, tmp_path / "alone")
    with pytest.raises(ModelNotSupported, match=f"packed weights and no others, and .*{reason}"):
        engine_of(tmp_path / "alone", dtype="auto")


@pytest.mark.parametrize(("settings", "reason"), [
    ({"dtype": "float32"}, "for rows of bfloat16"), ({"quantization": "w4a16"}, "of the scheme none"),
    ({"linear_backend": "onednn"}, "not for linear_backend"),
])
def test_other_settings_are_refused_or_computed_with_the_weights_beside(
    settings: dict[str, Any], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A number format, a scheme or products that a caller chose are not those that were packed."""
    source = from_float("llama")(tmp_path)
    packed(source, tmp_path / "alone", "bfloat16")
    packed(source, None, "bfloat16")
    settings = {"dtype": "auto", **settings}
    with caplog.at_level(logging.INFO, "pagedcore"):
        engine_of(source, **settings).close()
    assert reason in caplog.text
    with pytest.raises(ModelNotSupported, match=reason):
        engine_of(tmp_path / "alone", **settings)


def test_a_damaged_file_is_refused_whatever_lies_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage is no other version: whoever owns the disk has to know. Nothing is computed with it."""
    path = packed(source := from_float("llama")(tmp_path))
    content = bytearray(path.read_bytes())
    content[-5000] ^= 4
    path.write_bytes(content)
    computed = list[object]()
    monkeypatch.setattr(SelfTest, "__init__", lambda *arguments: computed.append(arguments))
    with pytest.raises(InvalidConfig, match="damaged"):
        engine_of(source, dtype="auto")
    assert not computed


def test_damage_is_said_in_the_place_of_what_it_leads_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong with the tensors of a damaged file, the damage is the reason."""
    path = packed(source := from_float("llama")(tmp_path))
    content = bytearray(path.read_bytes())
    content[-5000] ^= 4
    path.write_bytes(content)

    def refuse(*arguments: object, **options: object) -> None:
        raise ModelNotSupported("model: an order that is none of its inputs.")

    monkeypatch.setattr("pagedcore.models.checkpoints.packed_model.load_packed", refuse)
    with pytest.raises(InvalidConfig, match="damaged"):
        engine_of(source, dtype="auto")


def change_header(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], Any]) -> None:
    """Have headers read with a change, as those of somebody who forges a file."""
    read = PackedFile.__init__

    def changed(self: PackedFile, path: Path) -> None:
        read(self, path)
        change(self.header)

    patch.setattr(PackedFile, "__init__", changed)


def first(header: dict[str, Any]) -> dict[str, Any]:
    return next(iter(header["products"].values()))  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [
    lambda header: header.update(products=None), lambda header: header.update(products={"model.norm": {}}),
    lambda header: header["products"].pop("lm_head"), lambda header: header["products"].update(lm_head=[]),
    lambda header: header["products"].update({"lm_head+lm_head": {}}),
    lambda header: first(header).update(outputs=10**9), lambda header: first(header).update(rows="float64"),
    lambda header: first(header).update(layout=[]), lambda header: first(header).update(is_reordered=True),
    lambda header: header["products"].update(lm_head={"parts": 3}),
    lambda header: header["products"].update(lm_head={"parts": [{"parts": []}] * 2}),
    lambda header: header.update(identity=[1]), lambda header: header.update(embedding={"kind": "blocks"}),
    lambda header: header.update(embedding={"kind": "rows", "of": "model.layers.0.mlp.down_proj"}),
    lambda header: header.update(embedding={"kind": "int8"}), lambda header: header.update(embedding=3),
], ids=lambda change: str(change.__code__.co_firstlineno) + str(change.__code__.co_consts[1:])[:60])
def test_a_forged_header_is_a_refusal(
    change: Callable[[dict[str, Any]], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers, shapes and embeddings that the model does not have raise what a user can read, and nothing else."""
    packed(from_float("llama")(tmp_path), tmp_path / "alone")
    change_header(monkeypatch, change)
    with pytest.raises((ModelNotSupported, InvalidConfig), match="packed weight"):
        engine_of(tmp_path / "alone", dtype="auto")


@pytest.mark.parametrize("packed", ["beside", "only"])
def test_the_commands_write_them(packed: str, tmp_path: Path) -> None:
    """``convert --packed`` and ``pack`` leave a model that computes what the portable one does, and nothing else."""
    source, names = from_float("llama")(tmp_path), {"model.packed", "config.json", "generation_config.json"}
    words = "convert", str(source), "--quantization", "w8a16", "--out"
    invoke(*words, str(tmp_path / "portable"))
    invoke(*words, str(tmp_path / "out"), "--packed", packed)
    assert {path.name for path in (tmp_path / "out").iterdir()} - names == {"model.safetensors"} - {
        "model.safetensors" if packed == "only" else ""}
    assert results_of(tmp_path / "out") == results_of(tmp_path / "portable")
    invoke("pack", str(tmp_path / "portable"), "--out", str(tmp_path / "more"))
    assert results_of(tmp_path / "more") == results_of(tmp_path / "portable")
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out", "portable", "more"}
    with pytest.raises(InvalidConfig, match="no empty directory"):
        invoke(*words, str(tmp_path / "out"), "--packed", packed)


def test_the_doctor_says_what_becomes_of_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are used, and why not; with --verify, that they are what was written."""
    packed(source := from_float("llama")(tmp_path), tmp_path / "alone")
    assert "packed weights, which are mapped" in invoke("doctor", str(tmp_path / "alone"), "--verify")
    packed(source, None, "float32")
    assert "packed weights are not used: they are for rows of float32" in invoke("doctor", str(source))
    other_processor(monkeypatch, source)
    assert "no. model: it has packed weights and no others" in invoke("doctor", str(tmp_path / "alone"))
    path = tmp_path / "alone" / "model.packed"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    for words, reason in ((("alone",), "SHA-256 is another"), (("nowhere",), "this is no directory"), ((), "no model")):
        with pytest.raises(InvalidConfig, match=reason):
            try_invoke("doctor", *[str(tmp_path / word) for word in words], "--verify")


def test_a_product_that_depends_on_the_number_of_rows_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Starts do not try products of mapped weights again, so that whoever writes them has to."""
    source, run = from_float("llama")(tmp_path), PackedMatmul._run

    def odd(self: Any, rows: torch.Tensor, out: int, *others: Any) -> None:
        run(self, rows if len(rows) < 500 or rows.shape[1] != 96 else rows * 1.01, out, *others)

    with monkeypatch.context() as patch:
        patch.setattr(PackedMatmul, "_run", odd)
        with pytest.raises(ModelNotSupported, match="depend on the number of rows"):
            packed(source)
    assert not (source / "model.packed").exists()
    packed(source)
    monkeypatch.setattr(packed_linear, "_is_invariant", lambda layer: pytest.fail("tried again"))
    engine_of(source, dtype="auto").close()


@pytest.mark.parametrize(("source", "out", "reason"), [
    ("nowhere", None, "needed is a directory"), ("model", "model", "no empty directory"),
])
def test_arguments(source: str, out: str | None, reason: str, tmp_path: Path) -> None:
    """What cannot be packed, or written, is refused before anything is."""
    from_float("llama")(tmp_path)
    with pytest.raises(InvalidConfig, match=reason):
        packed(tmp_path / source, None if out is None else tmp_path / out)
    assert {path.name for path in tmp_path.iterdir()} == {"model"}


MEMORY = """
import json, sys
from pathlib import Path
from pagedcore import Engine, SamplingParams
engine = Engine.from_pretrained(sys.argv[1], num_kv_blocks=16, num_threads=1)
engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), show_progress=False)
print("ready", flush=True)
sys.stdin.readline()
found, ours = {}, False
for line in Path("/proc/self/smaps").read_text().splitlines():
    name, _, rest = line.partition(":")
    if name in ("Rss", "Pss", "Anonymous"):
        if ours:
            found[name] = found.get(name, 0) + int(rest.split()[0])
    elif "-" in name.split()[0]:
        ours = line.endswith("model.packed")
status = Path("/proc/self/status").read_text()
found["RssAnon"] = int(status.partition("RssAnon:")[2].split()[0])
print(json.dumps(found), flush=True)
sys.stdin.readline()
"""


def test_two_processes_have_one_copy(tmp_path: Path) -> None:
    """Their shares of the mapped file add up to the file, nothing of it is private, and no matrix is held beside."""
    # Why heads of 16: other tests compile their kernels too.
    sizes = {"hidden_size": 1024, "intermediate_size": 6144, "vocab_size": 8192, "num_hidden_layers": 1, "head_dim": 16}
    source = from_float("llama", **sizes)(tmp_path)
    size = packed(source, tmp_path / "alone").stat().st_size // 1024
    # Why first: a compiler leaves as much memory as the file takes, and maybe not all of the processes need one.
    for directory in (tmp_path / "alone", source):
        with Engine.from_pretrained(directory, num_kv_blocks=16, num_threads=1) as engine:
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), show_progress=False)
    processes = [subprocess.Popen([sys.executable, "-c", MEMORY, str(directory)], stdin=-1, stdout=-1, text=True)
                 for directory in (tmp_path / "alone", tmp_path / "alone", source)]  # fmt: skip
    try:
        assert all(_line(process) == "ready" for process in processes)
        found = [json.loads(_ask(process)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    mapped, other = found[:2], found[2]
    assert size > 60_000
    assert sum(one["Pss"] for one in mapped) <= 1.02 * size
    assert [one["Anonymous"] for one in mapped] == [0, 0]
    assert all(one["RssAnon"] < other["RssAnon"] - 0.95 * size for one in mapped)


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _ask(process: subprocess.Popen[str]) -> str:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return _line(process)
