"""Directories of models that somebody has damaged: refused by a typed error, or read as what they now say."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagedcore import Engine, SamplingParams
from pagedcore.convert.conversion import convert
from pagedcore.errors import PagedcoreError
from pagedcore_kernels.cpu.matmul.packed_int8 import form_of_int8_product
from support.families import tiny_model
from support.quantized_checkpoints import write_checkpoint
from support.torture import first_seed, scaled

pytestmark = pytest.mark.skipif(form_of_int8_product(16) is None, reason="no such vectors")
PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
VALUES: tuple[Any, ...] = (None, True, 0, -1, 1, 3, 7, 2**31, 10**30, 0.5, -0.0, 1e300, "", "x", [], [1], {}, {"a": 1})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A model as it was saved, and quantised ones."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model("llama").save_pretrained(folder / "none")
    for scheme in ("w8a8", "w4a16"):
        convert(str(folder / "none"), folder / scheme, quantization=scheme, dtype="float32")
    write_checkpoint(folder / "nf4", "bnb-nf4-nested")
    return sorted(folder.iterdir())


def damage_header(rng: random.Random, path: Path) -> None:
    """Change what the file says of its tensors, with a length of the header that fits."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = rng.choice([one for one in header if one != "__metadata__"])
    match rng.randrange(6):
        case 0:
            header[name]["shape"] = [rng.choice([0, 1, 2, 64, 2**40, -1]) for _ in range(rng.randrange(4))]
        case 1:
            header[name]["dtype"] = rng.choice(["I8", "I32", "F32", "F64", "BF16", "U8", "BOOL", "X"])
        case 2:
            header[name]["data_offsets"] = [rng.randrange(-5, len(data) + 99), rng.randrange(-5, len(data) + 99)]
        case 3:
            del header[name]
        case 4:
            header[rng.choice([name + "x", "model", "", "a" * 300])] = header[name]
        case 5:
            header[name] = rng.choice(VALUES)
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data)


def damage_bytes(rng: random.Random, path: Path) -> None:
    """Flip bytes anywhere, or cut the file off."""
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 8, 64])):
        content[rng.randrange(len(content))] = rng.randrange(256)
    path.write_bytes(content[: rng.choice([len(content), rng.randrange(len(content))])])


def damage_config(rng: random.Random, path: Path) -> None:
    """Change, remove or add fields, inside of the description of the quantisation too."""
    config = json.loads(path.read_text())
    for _ in range(rng.choice([1, 1, 2])):
        place: Any = config
        while True:
            name = rng.choice(sorted(place))
            if isinstance(place[name], dict) and place[name] and rng.random() < 0.8:
                place = place[name]
                continue
            break
        if rng.random() < 0.2:
            del place[name]
        else:
            place[name] = rng.choice(VALUES)
        if not config:
            break
    path.write_text(json.dumps(config))


@pytest.mark.torture
def test_a_damaged_directory_is_refused_by_a_typed_error_or_read(
    sound: list[Path], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Whatever changed in one of its files, loading raises an error of pagedcore, or the model answers, or its request
    ends with an error; no other exception, and no message names a path."""
    num_refused = num_read = 0
    for seed in range(first_seed(), first_seed() + (number := scaled(30))):
        rng = random.Random(seed)
        directory = tmp_path / str(seed)
        shutil.copytree(sound[seed % len(sound)], directory)
        if rng.random() < 0.5:
            damage_config(rng, directory / "config.json")
        else:
            rng.choice([damage_header, damage_bytes])(rng, directory / "model.safetensors")
        try:
            with Engine.from_pretrained(str(directory), dtype="float32", num_kv_blocks=16, num_threads=1) as engine:
                (output,) = engine.generate([[1, 2, 3]], PARAMS, show_progress=False)
                output.raise_for_error()
                assert len(output.outputs[0].token_ids) == 2
            num_read += 1
        except PagedcoreError as error:
            if str(tmp_path) in str(error):
                raise ValueError(f"seed {seed}: a path is in the message") from error
            num_refused += 1
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
        shutil.rmtree(directory)
    record_property("seeds", number)
    assert min(num_refused, num_read) > number // 8, (num_refused, num_read)
