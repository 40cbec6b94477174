"""Which files are read for weights: safetensors of the directory, whoever reads them, and never a pickle."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pagedcore.convert.conversion import convert
from pagedcore.errors import InvalidConfig, ModelNotSupported
from pagedcore.models.checkpoints.pretrained import load_config, load_pretrained
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import tiny_model
from support.gguf_files import write_model
from support.quantized_checkpoints import change_config, write_checkpoint

INDEX = "model.safetensors.index.json"
needs_products = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")


def load(source: Path | str, *, is_quick: bool = True) -> Any:
    """What an engine loads of a directory, a file or a name."""
    if (stored := stored_format(str(source))) is not None:
        return load_stored(str(source), stored, torch.float32, trust_remote_code=False, is_quick=is_quick)
    return load_pretrained(source, dtype="float32", is_quick=is_quick)


def plain(directory: Path) -> Path:
    """A model in one file."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory)
    return directory


def sharded(directory: Path) -> Path:
    """A model in several files."""
    tiny_model("llama", tie_word_embeddings=True).save_pretrained(directory, max_shard_size="40KB")
    assert len(list(directory.glob("*.safetensors"))) > 1
    return directory


def one_of_another_name(directory: Path) -> Path:
    """A quantised model in a file that is named like nothing else."""
    write_checkpoint(directory, "gptq")
    (directory / "model.safetensors").rename(directory / "gptq_model-4bit-128g.safetensors")
    return directory


def quantised(kind: str) -> Callable[[Path], Path]:
    """A model in a format of another library."""
    def write(directory: Path) -> Path:
        write_checkpoint(directory, kind)
        return directory

    return write


def gguf(directory: Path) -> Path:
    """A model in a GGUF file."""
    directory.mkdir(exist_ok=True)
    write_model(directory / "model.gguf", "llama")
    return directory / "model.gguf"


KINDS: list[Callable[[Path], Path]] = [plain, sharded, one_of_another_name, gguf,
         *map(quantised, ("ct-w8a8", "ct-w4a16-zeros", "gptq-order", "awq", "bnb-int8", "bnb-nf4-nested"))]


@pytest.fixture
def no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever reads pickles fails."""
    def fail(*args: Any, **options: Any) -> Any:
        pytest.fail("a pickle was read")

    for owner, name in ((torch, "load"), (torch.serialization, "load"), (pickle, "load"), (pickle, "loads")):
        monkeypatch.setattr(owner, name, fail)
    # Why a class: others inherit from it.
    monkeypatch.setattr(pickle, "Unpickler", type("Unpickler", (pickle.Unpickler,), {"__init__": fail}))


@needs_products
@pytest.mark.usefixtures("no_pickles")
@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "transformers"])
@pytest.mark.parametrize("write", KINDS, ids=lambda write: write.__name__)
def test_no_kind_of_checkpoint_is_unpickled(write: Callable[[Path], Path], is_quick: bool, tmp_path: Path) -> None:
    """Each kind loads, here and by transformers, while nothing can read a pickle."""
    assert load(write(tmp_path / "model"), is_quick=is_quick).config.num_hidden_layers


#: By name of a shard in the index: what the file is called that is there, if there is one.
NAMES: list[tuple[Any, str]] = [
    ("w.bin", "w.bin"), ("w.SAFETENSORS", "w.SAFETENSORS"), ("w", "w"), ("w.safetensors.bin", "w.safetensors.bin"),
    ("../w.safetensors", "../w.safetensors"), ("/etc/passwd", ""), ("sub/w.safetensors", "sub/w.safetensors"),
    ("./w.safetensors", "w.safetensors"), ("sub\\w.safetensors", "sub\\w.safetensors"), ("", ""), (".", ""), ("..", ""),
    (".safetensors", ".safetensors"), ("w\0.safetensors", ""), ("w.safetensors\n", "w.safetensors"),
    ("*.safetensors", "w.safetensors"), ("[w].safetensors", "w.safetensors"), ("w.safetensors/", "w.safetensors"),
    ("gone.safetensors", ""), ("a" * 300 + ".safetensors", ""), (7, ""), (None, ""), (["w.safetensors"], ""), ({}, ""),
]


def write_index(directory: Path, index: Any) -> None:
    (directory / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))


def refused(load: Callable[[], Any], directory: Path) -> str:
    """The message with which a directory is refused; it names no path of this machine."""
    with pytest.raises(ModelNotSupported) as caught:
        load()
    assert str(directory) not in str(caught.value)
    return str(caught.value)


@pytest.mark.usefixtures("no_pickles")
@pytest.mark.parametrize(("name", "file"), NAMES, ids=repr)
def test_an_index_names_safetensors_of_its_directory_only(name: Any, file: str, tmp_path: Path) -> None:
    """Anything else is refused before a file is opened, by every loader and by ``convert``."""
    directory = plain(tmp_path / "model")
    (directory / "sub").mkdir()
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    if file:
        (directory / file).write_bytes(weights.read_bytes())
    weights.unlink()
    write_index(directory, {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)})
    for is_quick in (True, False):
        assert "index names" in refused(partial(load, directory, is_quick=is_quick), tmp_path)
    assert "index names" in refused(
        lambda: convert(str(directory), tmp_path / "out", quantization="w8a8", dtype="float32"), tmp_path)
    change_config(directory, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32})
    assert "index names" in refused(lambda: load(directory), tmp_path)


@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "transformers"])
@pytest.mark.parametrize("index", [
    "", "{", "[]", "{}", "7", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": null}', "[" * 10**6,
    '{"weight_map": ' + '{"a":' * 10**5, b"\xff\xfe".decode("utf-16"),
], ids=lambda index: str(index)[:20])
def test_an_index_without_names_is_refused(index: str, is_quick: bool, tmp_path: Path) -> None:
    """No JSON, JSON of another form, and JSON that is too deep."""
    (plain(tmp_path) / "model.safetensors").unlink()
    write_index(tmp_path, index)
    assert "no weight_map of names" in refused(partial(load, tmp_path, is_quick=is_quick), tmp_path)


def test_an_index_is_not_read_whatever_its_size(tmp_path: Path) -> None:
    """It is refused by its size, which the message says with the limit."""
    (plain(tmp_path) / "model.safetensors").unlink()
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(2**26 + 1)
    assert f"has {2**26 + 1} bytes, allowed are {2**26}" in refused(lambda: load(tmp_path), tmp_path)


def test_an_index_that_is_not_used_is_not_read(tmp_path: Path) -> None:
    """The one file of the usual name comes first, as with transformers; other indexes belong to other formats."""
    write_index(plain(tmp_path), {"weight_map": {"a": "w.bin"}})
    (tmp_path / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "w.bin"}}')
    for is_quick in (True, False):
        assert load(tmp_path, is_quick=is_quick).config.num_hidden_layers


@pytest.mark.usefixtures("no_pickles")
@pytest.mark.parametrize("is_quick", [True, False], ids=["quick", "transformers"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.PT", "consolidated.00.pth", "model.ckpt"])
def test_pickles_are_refused_with_the_reason(name: str, is_quick: bool, tmp_path: Path) -> None:
    """Weights in another format alone: what they are called, why they are not read, and what to do."""
    (plain(tmp_path) / "model.safetensors").rename(tmp_path / name)
    message = refused(partial(load, tmp_path, is_quick=is_quick), tmp_path)
    assert f"{name!r}, a format whose reading can run code" in message
    assert "save_pretrained" in message


ADAPTER = '{"peft_type": "LORA", "base_model_name_or_path": "../other"}'


@pytest.mark.usefixtures("no_pickles")
@pytest.mark.parametrize("is_quick", [True, False])
def test_a_model_beside_an_adapter_runs_without_it(
    is_quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers would apply it where peft is installed, from a pickle too: it is never given the directory."""
    def applied(*_: object, **__: object) -> None:
        raise AssertionError("the adapter was looked for")

    expected = load(plain(tmp_path), is_quick=is_quick).state_dict()
    (tmp_path / "adapter_config.json").write_text(ADAPTER)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"damaged")
    monkeypatch.setattr("transformers.integrations.peft.is_peft_available", lambda *_: True)
    monkeypatch.setattr("transformers.integrations.peft.find_adapter_config_file", applied)
    caplog.set_level("INFO", "pagedcore")
    found = load(tmp_path, is_quick=is_quick).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert ["adapter" in one.message for one in caplog.records] == [True]


@pytest.mark.parametrize("names", [["config.json"], [], ["config.json", "model.safetensors"]], ids=str)
def test_an_adapter_alone_is_refused_with_that_word(names: list[str], tmp_path: Path) -> None:
    """Without a model's weights, without its configuration, or without both."""
    plain(tmp_path)
    (tmp_path / "adapter_config.json").write_text(ADAPTER)
    (tmp_path / "adapter_model.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    for name in {"config.json", "model.safetensors"} - {*names} or {"config.json"}:
        (tmp_path / name).unlink()
    for is_quick in (True, False):
        assert " adapter (adapter_" in refused(partial(load, tmp_path, is_quick=is_quick), tmp_path)


@pytest.mark.parametrize("field", [
    {"_attn_implementation": "org/kernel"}, {"attn_implementation": "org/kernel"},
    {"_attn_implementation_internal": "org/kernel"}, {"attn_implementation": {"": "org/kernel", "x": "org/kernel"}},
    {"_attn_implementation": "flash_attention_2"}, {"_attn_implementation": "nonsense"},
    {"_experts_implementation": "org/kernel"}, {"experts_implementation": "sonicmoe"},
    {"transformers_weights": "other.safetensors"}, {"transformers_weights": "../other.safetensors"},
    {"transformers_weights": "adapter_model.bin"}, {"transformers_weights": "model.fp16.safetensors.index.json"},
], ids=str)
def test_a_configuration_does_not_choose_code_or_files(field: dict[str, Any], tmp_path: Path) -> None:
    """What it says of implementations, which may be repositories to fetch, and of other weights is dropped."""
    change_config(plain(tmp_path), **field)
    (tmp_path / "model.fp16.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {"a": "w.bin"}}')
    config = load_config(tmp_path)
    assert config._attn_implementation is None
    assert config._experts_implementation is None
    for is_quick in (True, False):
        assert load(tmp_path, is_quick=is_quick).config._attn_implementation == "sdpa"


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The snapshot of "owner/name" in a cache of the hub, which itself cannot be reached."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (snapshot := repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    return snapshot


def link_as_the_hub_does(snapshot: Path, directory: Path) -> None:
    """Put files into a cache: the content under a name of its own, and a link to it."""
    (blobs := snapshot.parents[1] / "blobs").mkdir()
    for number, path in enumerate(sorted(directory.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs") / f"{number:064x}")


@needs_products
@pytest.mark.usefixtures("no_pickles")
@pytest.mark.parametrize("write", [plain, sharded, quantised("gptq-order")], ids=["plain", "sharded", "gptq"])
def test_a_name_on_the_hub_is_its_snapshot(
    write: Callable[[Path], Path], snapshot: Path, tmp_path: Path
) -> None:
    """The cache is made of links to files without endings: names are what counts."""
    link_as_the_hub_does(snapshot, write(tmp_path / "model"))
    for is_quick in (True, False):
        assert load("owner/name", is_quick=is_quick).config.num_hidden_layers


@pytest.mark.usefixtures("no_pickles")
def test_a_snapshot_is_looked_at_like_a_directory(snapshot: Path, tmp_path: Path) -> None:
    """An index that names a pickle, and a pickle alone, are refused before transformers sees the name."""
    link_as_the_hub_does(snapshot, plain(tmp_path / "model"))
    (snapshot / "model.safetensors").rename(snapshot / "w.bin")
    assert "'w.bin', a format" in refused(lambda: load("owner/name"), tmp_path)
    write_index(snapshot, {"metadata": {}, "weight_map": {"a": "w.bin"}})
    assert "index names 'w.bin'" in refused(lambda: load("owner/name"), tmp_path)


def test_files_that_cannot_be_read_are_a_typed_error(tmp_path: Path) -> None:
    """An index that is a directory is none; weights that are one are no file."""
    (plain(tmp_path) / "model.safetensors").unlink()
    (tmp_path / INDEX).mkdir()
    (tmp_path / "model.safetensors").mkdir()
    for is_quick in (True, False):
        with pytest.raises(InvalidConfig, match="1 safetensors files and no"):
            load(tmp_path, is_quick=is_quick)
