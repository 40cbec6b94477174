from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models import loading
from pagedcore.models.checkpoints import pretrained
from pagedcore.models.checkpoints.pretrained import load_pretrained, resolve_dtype
from pagedcore.models.families import supported_models
from pagedcore.models.loading import load_tokenizer, model_name, resolve_backend
from pagedcore.plugins.manager import create_plugin_manager
from pagedcore_kernels.reference import ReferenceAttention
from support.embedders import write_embedder
from support.families import VOCAB, tiny_model
from support.quantized_checkpoints import change_tensors

REGISTRY = create_plugin_manager(entry_points=False).registry


def save(directory: Path, **changes: Any) -> Path:
    """A tiny saved model whose configuration has ``changes``."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    return directory


def refused(directory: Path, *, error: type[Exception] = InvalidConfig, **options: Any) -> str:
    """The message with which a directory is refused; it never shows the path."""
    with pytest.raises(error) as caught:
        load_pretrained(directory, **options)
    assert str(directory) not in str(caught.value)
    return str(caught.value)


def use_reference(table: str, name: str) -> Any:
    """Load what comes with pagedcore, but the reference for any attention."""
    return ReferenceAttention if table == "attention" else REGISTRY.load(table, name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_are_loaded_in_the_format_asked_for(tmp_path: Path, dtype: str) -> None:
    """Values are those that were saved, converted once."""
    model = load_pretrained(save(tmp_path), dtype=dtype)
    assert model.dtype == resolve_dtype(dtype)
    expected = tiny_model("llama", tie_word_embeddings=True).model.norm.weight.to(model.dtype)
    assert torch.equal(model.model.norm.weight, expected)


def test_auto_is_what_the_machine_is_fast_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 where the processor has instructions for it, else float32."""
    machine = type("M", (), {"default_dtype": "float32"})
    monkeypatch.setattr(pretrained, "this_machine", lambda: machine)
    assert resolve_dtype("auto") == torch.float32
    machine.default_dtype = "bfloat16"
    assert resolve_dtype("auto") == torch.bfloat16


@pytest.mark.parametrize("name", ["int8", "save", "", "double trouble"])
def test_other_formats_are_refused(name: str) -> None:
    """A name that is no floating format, or no format at all, is refused with the allowed ones."""
    with pytest.raises(InvalidConfig, match="allowed is auto"):
        resolve_dtype(name)


def test_an_architecture_is_refused_before_its_weights_are_looked_for(tmp_path: Path) -> None:
    """A directory with nothing but a configuration is refused for its architecture."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "rwkv"}))
    assert "'rwkv'" in refused(tmp_path, error=ModelNotSupported)


def test_layer_types_that_only_the_configuration_class_fills_in_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Defaults count: a file that does not list its layers is judged by what they come out as."""
    monkeypatch.setattr(supported_models, "_RECURRENT", frozenset())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "granitemoehybrid", "num_hidden_layers": 4}))
    assert "linear_attention" in refused(tmp_path, error=ModelNotSupported)


def test_weights_in_other_formats_are_not_read(tmp_path: Path) -> None:
    """Without safetensors a model is refused: pickled weights can run code."""
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "'pytorch_model.bin', a format whose reading can run code" in refused(tmp_path)


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    """No configuration, one that is no JSON, and cut weights each end in a typed error."""
    assert "no config.json" in refused(tmp_path)
    save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    assert "could not be loaded" in refused(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "could not be read" in refused(tmp_path)


def test_missing_weights_are_not_made_up(tmp_path: Path) -> None:
    """A checkpoint with a gap is refused; transformers alone would fill it with random numbers."""
    weights = save(tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    gone = "model.layers.1.mlp.up_proj.weight"
    kept = {name: tensor.clone() for name, tensor in tensors.items() if name != gone}
    save_file(kept, weights, metadata={"format": "pt"})
    assert f"1 weights are missing from its files, {gone}" in refused(tmp_path)


def test_a_name_that_is_no_directory_is_not_found_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub name that cannot be reached ends in a typed error."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InvalidConfig, match="could not be read"):
        load_pretrained("no-such-owner/no-such-model")


def test_a_directory_becomes_a_backend(tmp_path: Path) -> None:
    """Settings reach the model: format, block size, attention; facts are those of the configuration."""
    settings = EngineConfig(dtype="float32", block_size=4, attention_backend="reference")
    names: list[tuple[str, str]] = []
    backend = resolve_backend(
        save(tmp_path), settings, lambda *asked: (names.append(asked), use_reference(*asked))[1]
    )
    assert names == [("models", "transformers"), ("attention", "reference")]
    assert (backend.vocab_size, backend.max_model_len, backend.block_size) == (VOCAB, 256, 4)
    assert backend.eos_token_ids == frozenset({2})
    assert backend.kv_bytes_per_token == 3 * 2 * 2 * 16 * 4


def test_the_demo_model_is_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ "demo" stands for the directory that comes with the package."""
    monkeypatch.setattr(loading, "DEMO_MODEL_DIR", save(tmp_path))
    backend = resolve_backend("demo", EngineConfig(dtype="float32"), use_reference)
    assert backend.vocab_size == VOCAB


def test_a_loaded_model_is_taken_over_in_its_own_format() -> None:
    """ "auto" leaves a loaded model's format alone; another one converts it."""
    kept = resolve_backend(tiny_model("llama"), EngineConfig(), use_reference)
    converted = resolve_backend(tiny_model("llama"), EngineConfig(dtype="bfloat16"), use_reference)
    assert kept.kv_bytes_per_token == 2 * converted.kv_bytes_per_token


def test_a_loaded_model_with_mapped_weights_leaves_others_alone(tmp_path: Path) -> None:
    """Weights that the caller still holds are as they were after a model was taken over."""
    model = load_pretrained(save(tmp_path), dtype="float32")
    shared = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        shared.mul_(2)
    expected = shared.clone()
    resolve_backend(model, EngineConfig(), use_reference)
    assert torch.equal(shared, expected)


@pytest.mark.parametrize("model", [None, 7, object(), torch.nn.Linear(2, 2)], ids=lambda model: type(model).__name__)
def test_anything_else_is_refused(model: object) -> None:
    """What is neither a name nor a model is refused with what is allowed."""
    with pytest.raises(InvalidConfig, match="allowed is"):
        resolve_backend(model, EngineConfig(), use_reference)


def test_models_have_short_names(tmp_path: Path) -> None:
    """People see the last part of a directory, a hub name as it is, or a type."""
    assert model_name(tmp_path / "..") == ".."
    (tmp_path / "mine").mkdir()
    assert model_name(str(tmp_path / "mine")) == "mine"
    assert model_name("org/name") == "org/name"
    assert model_name(object()) == "object"


def test_a_model_without_a_tokenizer_works_with_token_ids(tmp_path: Path) -> None:
    """A directory without tokenizer files, and a model object, have no tokenizer."""
    assert load_tokenizer(save(tmp_path), EngineConfig()) is None
    assert load_tokenizer(object(), EngineConfig()) is None


def test_importing_does_not_import_transformers() -> None:
    """The modules an engine imports are light until a model is loaded."""
    code = (
        "import sys, pagedcore.models.loading, pagedcore.execution.ragged_batch, pagedcore.execution.machine; "
        "sys.exit('transformers' in sys.modules or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)})
    assert done.returncode == 0


@pytest.mark.slow
def test_loading_needs_little_more_than_the_weights(tmp_path: Path) -> None:
    """Mapped files and packed copies never add up: the peak stays below one and a half times the weights."""
    model = tiny_model("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=12, head_dim=64)
    num_bytes = sum(p.nbytes for p in model.parameters())
    model.save_pretrained(tmp_path)
    code = """
import sys
from pathlib import Path
from transformers.models.llama import modeling_llama
from pagedcore.config.engine_config import EngineConfig
from pagedcore.models.loading import transformers_backend
from pagedcore_kernels.reference import ReferenceAttention
from pagedcore.models import transformers_model
status = lambda: int(next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x).split()[1])
before = status()
transformers_backend(sys.argv[1], EngineConfig(dtype="float32"), lambda table, name: ReferenceAttention)
print((status() - before) * 1024)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert int(done.stdout) < 1.5 * num_bytes


@pytest.mark.parametrize(("name", "words"), [
    ("/no/such/directory", "no directory, and no hub id"), ("./no-such", "check the path"),
    ("../no-such-model", "check the path"), ("a" * 5000, "cannot be looked at .*too long"),
    ("~/models/llama", "expanduser"), ("", "no directory"), ("C:\\\\models", "no directory"),
    ("https://example.org/owner/name", "owner/name"), ("a/b/c", "owner/name"),
])
@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_name_that_can_be_no_model_is_refused_by_itself(
    monkeypatch: pytest.MonkeyPatch, name: str, words: str, what: str
) -> None:
    """Neither the hub nor transformers is asked for it, and the message repeats nothing of it."""
    monkeypatch.setattr(pretrained, "load_pretrained", lambda *_, **__: pytest.fail("it was looked for"))
    load = {"model": lambda: resolve_backend(name, EngineConfig(), use_reference),
            "tokenizer": lambda: load_tokenizer("demo", EngineConfig(tokenizer=name or "/no"))}[what]
    with pytest.raises(InvalidConfig, match=words) as caught:
        load()
    assert str(caught.value).startswith(f"{what}: ")
    assert not name.strip("./~") or name not in str(caught.value)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    """A path to a file of a model names what is needed instead."""
    with pytest.raises(InvalidConfig, match=r"^model: got a file, needed is the directory .*, or a GGUF file\.$"):
        resolve_backend(save(tmp_path) / "config.json", EngineConfig(), use_reference)


@pytest.mark.parametrize(("name", "message", "shown"), [
    ("o/n", "We couldn't connect to 'https://huggingface.co' to load o/n, see https://huggingface.co/docs/x.",
     "We couldn't connect to 'https://huggingface.co' to load the model, see https://huggingface.co/docs/x"),
    ("a", "a path /home/user/a/x and file:///etc/passwd", "the model path its files and file:its files"),
    ("/data/m", "no file /data/m/config.json in /data/m.", "no file the model/config.json in the model"),
    ("/data/my files", "no file x in directory /data/my files.", "no file x in directory the model"),
    ("/data/my files", "'/data/my files/a b.json' and /data/my files.bak/x", "'the model/a b.json' and its files"),
    ("my files", f"no file x in {os.getcwd()}/my files", "no file x in the model"),
    ("./my files", "no file x in ./my files.", "no file x in the model"),
    ("o/n", "cannot open '/home/A B/.cache/of hub' now", "cannot open 'its files' now"),
    ("o/n", 'in "/a b/c (1) d": no', 'in "its files": no'),
    ("o/n", "in /home/A B/.cache/m+1/x.json: no space, or/and ./a b/c", "in its files: no space, or/and its files"),
    ("o/n", "1 / 2 of (/tmp/x), see o/n.", "1 / 2 of (its files), see the model"),
])
def test_a_librarys_message_loses_paths_and_nothing_else(name: str, message: str, shown: str) -> None:
    """Addresses stay readable, paths are left out, and a short name is replaced where it is a word."""
    with pytest.raises(InvalidConfig) as caught, pretrained.as_refusals(name):
        raise OSError(message)
    assert str(caught.value) == f"model: it could not be loaded ({shown})."


@pytest.mark.parametrize("changes", [{}, {"norm.weight": None}, {"spare.weight": torch.ones(1)}])
def test_the_output_layer_that_embeddings_lack_is_no_warning(
    changes: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What transformers reports of it is lost; with anything else that is missing or too many it is seen."""
    write_embedder(tmp_path, family="mistral")
    change_tensors(tmp_path, changes)
    logging.getLogger("transformers").addHandler(caplog.handler)
    # Why: the command line, which other tests call, makes transformers quiet for the rest of a process.
    caplog.set_level(logging.WARNING, logger="transformers")
    try:
        with pytest.raises(InvalidConfig, match="weights are missing") if None in changes.values() else nullcontext():
            load_pretrained(tmp_path, dtype="float32")
    finally:
        logging.getLogger("transformers").removeHandler(caplog.handler)
    # Why not a count: a record comes twice where transformers' logger also hands its records to the root's.
    assert any("LOAD REPORT" in one.getMessage() for one in caplog.records) == bool(changes)
