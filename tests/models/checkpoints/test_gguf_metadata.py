"""Whole GGUF models whose metadata mean something else than a converter writes: loaded as they say, or refused."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore.config.engine_config import EngineConfig
from pagedcore.convert import conversion
from pagedcore.errors import ModelNotSupported, PagedcoreError
from pagedcore.models.blueprint import read_blueprint
from pagedcore.models.checkpoints.quantized import load_stored, stored_format
from pagedcore.models.loading import load_tokenizer
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from pagedcore_kernels.reference import ReferenceAttention
from support.gguf_files import write_gguf, write_model
from support.torture import first_seed, scaled

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
TEMPLATE = "{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}"
PIECES = ["<unk>", "<s>", "</s>", "<turn>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a"]
#: What files of both kinds of tokenizers say.
TOKENIZERS: dict[str, dict[str, Any]] = {
    "pieces": {"model": "llama", "tokens": PIECES, "scores": [-float(number) for number in range(len(PIECES))],
               "token_type": [2, 3, 3, 3, *[6] * 256, *[1] * 5], "bos_token_id": 1, "eos_token_id": 2},
    "bytes": {"model": "gpt2", "pre": "qwen2", "tokens": [*map(chr, range(33, 127)), "ab", "<end>", "<turn>"],
              "merges": ["a b"], "token_type": [*[1] * 95, 3, 3], "eos_token_id": 95, "eot_token_id": 96},
}
#: Families with the kind of tokenizer that their files have here.
FAMILIES = {"llama": "pieces", "qwen2": "bytes", "qwen3": "bytes", "gemma3_text": "pieces", "qwen3_moe": "bytes",
            "phi3": "pieces", "granite": "bytes", "glm4": "bytes", "gpt_oss": "bytes"}
#: What an entry becomes.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 255, 2**31, 2**63 - 1, 2**64 - 1, 0.5, -0.0, 1e-45, 1e300, float("nan"),
    float("inf"), "", "x", "llama", "gpt2", "no_vocab", "qwen2", "gpt-2", "linear", "yarn", "\0", "a" * 999,
    "{% for", "{{ 'a' * 2000000000 }}", [], [1], ["a"], [1.5], [True], ["a"] * 9999, [0] * 9999, [float("nan")] * 3,
    ["a b", "b c"], ["a b c"], ["", ""], [-1] * 5,
)
#: Entries that the files do not have and that are read.
MORE = ("add_bos_token", "add_eos_token", "add_space_prefix", "unknown_token_id", "padding_token_id", "eom_token_id")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, Any], Mapping[str, Any]]]:
    """Metadata and tensors of small models."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.gguf_files.write_gguf", lambda path, *written: found.append(written))
        for family, own in FAMILIES.items():
            metadata = {f"tokenizer.ggml.{name}": value for name, value in TOKENIZERS[own].items()}
            write_model(tmp_path_factory.mktemp("gguf"), family, num_hidden_layers=1, vocab_size=300,
                        metadata={**metadata, "tokenizer.chat_template": TEMPLATE})
    return found


def changed(rng: random.Random, metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata with other values, of other types too, in some entries, or in elements of them."""
    metadata = dict(metadata)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(sorted({*metadata, *(f"tokenizer.ggml.{name}" for name in MORE), "general.alignment"}))
        value = metadata.get(name)
        if isinstance(value, list) and value and rng.random() < 0.6:
            metadata[name] = changed_list(rng, value)
        else:
            metadata[name] = rng.choice(VALUES)
    return metadata


def changed_list(rng: random.Random, values: list[Any]) -> list[Any]:
    place, other = rng.randrange(len(values)), rng.randrange(len(values))
    match rng.randrange(5):
        case 0:
            return [*values[:place], values[other], *values[place + 1 :]]
        case 1:
            return [*values[:place], *values[place + rng.choice((1, 9)) :]]
        case 2:
            return rng.sample(values, len(values))
        case 3:
            return [*values, *values[: rng.choice((1, 9))]]
        case _:
            return [*values[:place], type(values[0])(rng.choice((0, -1, 10**6))), *values[place + 1 :]]


def use(path: Path) -> None:
    """Everything that is done with a model's file before a prompt is computed."""
    stored = stored_format(str(path))
    assert stored is not None
    read_blueprint(path, ReferenceAttention, EngineConfig())
    load_stored(str(path), stored, torch.float32, trust_remote_code=False)
    conversion._open(str(path), torch.float32)
    tokenizer: Any = load_tokenizer(path, EngineConfig())
    for text in ("", "ab a\n Größe 日本語 <turn></s>\0") if tokenizer is not None else ():
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        tokenizer.new_detokenizer().push(ids)
        tokenizer.encode_chat([{"role": "user", "content": text}])
        assert tokenizer.knows_tools in (True, False)


def test_files_as_they_are_written_are_used(
    written: list[tuple[dict[str, Any], Mapping[str, Any]]], tmp_path: Path
) -> None:
    """What is changed below is sound to begin with."""
    for metadata, tensors in written:
        write_gguf(tmp_path / "model.gguf", metadata, tensors)
        if metadata["general.architecture"] != "gpt-oss":
            use(tmp_path / "model.gguf")
            continue
        with pytest.raises(ModelNotSupported, match="quantised when they are loaded, not converted"):
            use(tmp_path / "model.gguf")


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + scaled(60)))
def test_metadata_of_other_types_and_values_are_a_typed_error(
    seed: int, written: list[tuple[dict[str, Any], Mapping[str, Any]]], tmp_path: Path
) -> None:
    """A file is used, or refused by a typed error, whatever its metadata say; none of them makes work without end."""
    rng = random.Random(seed)
    metadata, tensors = rng.choice(written)
    write_gguf(tmp_path / "model.gguf", changed(rng, metadata), tensors)
    message = ""
    try:
        use(tmp_path / "model.gguf")
    except PagedcoreError as error:
        message = str(error)
    assert str(tmp_path) not in message
