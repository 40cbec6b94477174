"""The JSON files of a model with values of other types, or absurd ones: read as they now are, or a typed error."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from pagedcore.config.engine_config import EngineConfig
from pagedcore.errors import PagedcoreError
from pagedcore.models.blueprint import read_blueprint
from pagedcore.models.checkpoints.pretrained import load_pretrained
from pagedcore.models.loading import load_tokenizer, transformers_backend
from pagedcore_kernels.reference import ReferenceAttention
from support.families import tiny_model
from support.text_builders import byte_level
from support.torture import first_seed, scaled

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x",
    "llama", "\0", "a" * 999, "{{ 1 }}", [], [1], ["a"], [None], [[1]], [{}], {}, {"a": 1}, {"content": 7},
    {"content": "x"}, {"__type": "AddedToken", "content": []},
)
#: Fields that files may have, by file; those that they do have are changed as well.
FIELDS = {
    "config.json": "architectures attribute_map auto_map configuration_files dtype eos_token_id id2label "
    "is_encoder_decoder layer_types output_attentions per_layer_config quantization_config rope_parameters "
    "rope_scaling sliding_window sub_configs text_config to_dict torch_dtype",
    "generation_config.json": "cache_config compile_config custom_generate eos_token_id stop_strings to_dict "
    "watermarking_config",
    "tokenizer_config.json": "added_tokens_decoder additional_special_tokens auto_map bos_token chat_template "
    "eos_token extra_special_tokens model_input_names model_max_length name_or_path padding_side split_special_tokens "
    "tokenizer_class unk_token",
    "tokenizer.json": "added_tokens decoder model normalizer padding post_processor pre_tokenizer truncation",
    "special_tokens_map.json": "additional_special_tokens bos_token eos_token unk_token",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with all its files."""
    directory = tmp_path_factory.mktemp("sound")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.7}')
    (directory / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    return directory


def use(directory: Path) -> None:
    """Everything that is done with a model's files before a prompt is computed."""
    read_blueprint(directory, ReferenceAttention, EngineConfig())
    load_pretrained(directory, dtype="float32", is_quick=False)
    settings = EngineConfig(dtype="float32", attention_backend="reference")
    backend = transformers_backend(str(directory), settings, lambda table, name: ReferenceAttention)
    assert backend.max_model_len > 0
    tokenizer: Any = load_tokenizer(str(directory), settings)
    for text in ("", "hello  Größe 日本語 🙂 <|im_end|>\0"):
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        tokenizer.new_detokenizer().push(ids)
        tokenizer.encode_chat([{"role": "user", "content": text}])
        assert tokenizer.knows_tools in (True, False)
    assert tokenizer.to_json()


def change(rng: random.Random, path: Path, fields: list[str]) -> None:
    """Put another value in the place of some part of a file, or add a field."""
    whole = {"file": json.loads(path.read_text())}
    for _ in range(rng.choice((1, 1, 2))):
        part: Any = whole
        name: Any = "file"
        while isinstance(part[name], dict | list) and part[name] and (part is whole or rng.random() < 0.7):
            part = part[name]
            name = rng.choice([*part, *fields]) if isinstance(part, dict) else rng.randrange(len(part))
            if name not in part and isinstance(part, dict):
                break
        part[name] = rng.choice(VALUES)
    path.write_text(json.dumps(whole["file"]))


def test_files_as_they_are_written_are_used(sound: Path) -> None:
    """What is changed below is sound to begin with."""
    use(sound)


@pytest.mark.parametrize("seed", range(first_seed(), first_seed() + scaled(25)))
def test_other_types_and_values_are_a_typed_error(seed: int, sound: Path, tmp_path: Path) -> None:
    """Files are used, or refused by a typed error without a path, whatever they say."""
    rng, directory = random.Random(seed), tmp_path / "model"
    shutil.copytree(sound, directory)
    name = rng.choice(sorted(FIELDS))
    change(rng, directory / name, FIELDS[name].split())
    message = ""
    try:
        use(directory)
    except PagedcoreError as error:
        message = str(error)
    assert str(tmp_path) not in message


@pytest.mark.parametrize(("name", "content", "message"), [
    ("config.json", '"text"', "config.json is no object"), ("config.json", "[]", "config.json is no object"),
    ("config.json", '{"model_type": "llama", "layer_types": 7}', "layer_types are no list"),
    ("tokenizer.json", '{"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "unk_token": "a", '
     '"vocab": {"a": 4294967295}}}', "a token has the id 4294967295, allowed are ids below 4194304"),
], ids=lambda one: str(one)[:30])
def test_a_file_of_another_form_is_refused_with_the_reason(
    name: str, content: str, message: str, sound: Path, tmp_path: Path
) -> None:
    """What libraries take without an error is looked at; to the largest id of a token, for example, they count."""
    shutil.copytree(sound, tmp_path / "model")
    (tmp_path / "model" / name).write_text(content)
    with pytest.raises(PagedcoreError, match=message):
        use(tmp_path / "model")
