"""Every configuration of quantisation that the installed transformers writes, over files of plain numbers."""

from __future__ import annotations

import inspect
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import quantization_config

from pagedcore import Engine
from pagedcore.convert.conversion import convert
from pagedcore.errors import PagedcoreError
from pagedcore.models.diagnosis import diagnose
from support.families import tiny_model

CLASSES = {name: kind for name, kind in vars(quantization_config).items() if inspect.isclass(kind)
           and name.endswith("Config") and issubclass(kind, quantization_config.QuantizationConfigMixin)}
#: What classes are made with; some cannot be made without arguments, or without a package that is not installed.
ARGUMENTS: tuple[dict[str, Any], ...] = (
    {}, {"bits": 4}, {"bits": 8}, {"load_in_4bit": True}, {"load_in_8bit": True}, {"quant_type": "int4_weight_only"},
    {"weights": "int4"},
)


def written(kind: Any) -> list[dict[str, Any]]:
    """What a class writes; for one that cannot be made here, the name of its method alone."""
    found: list[dict[str, Any]] = []
    for arguments in ARGUMENTS:
        with suppress(TypeError, ValueError, ImportError):
            config = json.loads(json.dumps(kind(**arguments).to_dict()))
            found += [config] if config not in found else []
    name = kind.__name__.removesuffix("Config").lower()
    return found or [{"quant_method": name}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A directory of plain numbers, and its configuration as it was."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model("llama", num_hidden_layers=1).save_pretrained(directory)
    return directory, json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_nothing_but_our_errors_comes_of_it(name: str, model: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Engine, doctor and convert run or refuse, whatever quantization= says besides."""
    path, plain = model[0] / "config.json", model[1]
    for place, config in enumerate(written(CLASSES[name])):
        path.write_text(json.dumps({**plain, "quantization_config": config}))
        with suppress(PagedcoreError):
            diagnose(path.parent)
        with suppress(PagedcoreError):
            convert(str(path.parent), tmp_path / f"out {place}", quantization="w8a16", dtype="float32")
        for quantization in ("none", "w8a8"):
            with suppress(PagedcoreError), Engine.from_pretrained(
                path.parent, quantization=quantization, num_kv_blocks=8, dtype="float32"
            ):
                pass


def test_the_sweep_reaches_the_formats_that_are_read() -> None:
    """Those of GPTQ, AWQ, bitsandbytes, FP8 and MXFP4 are among what is written, each in full."""
    methods = {config.get("quant_method") for kind in CLASSES.values() for config in written(kind)
               if len(config) > 1}
    assert {"gptq", "awq", "bitsandbytes", "fp8", "mxfp4"} <= methods
