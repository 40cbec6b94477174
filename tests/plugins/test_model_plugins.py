"""Model backends and linear layers of a third party, registered by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine, EngineConfig, SamplingParams
from pagedcore.errors import InvalidConfig
from pagedcore.models.fingerprint import kv_format
from pagedcore.plugins.hookspecs import hookimpl
from pagedcore.plugins.registry import Registry
from support.doubles import ToyBackend, toy_answer
from support.families import tiny_model
from virtual_gpu.backends import shipped_kernels
from virtual_gpu.torch_cuda import virtual_gpus

ASKED: list[tuple[Any, EngineConfig]] = []
SMALL: dict[str, Any] = {"num_kv_blocks": 16, "block_size": 16, "max_num_seqs": 4, "max_num_batched_tokens": 32}


def toy_backend(model: Any, config: EngineConfig, load: Any) -> ToyBackend:
    """A model factory: anything is the toy."""
    ASKED.append((model, config))
    return ToyBackend()


def no_backend(model: Any, config: EngineConfig, load: Any) -> object:
    """A model factory that makes no backend."""
    return load("attention", "reference")


class CountedProduct:
    """A product in plain torch that counts its weights, and halves them if ``is_wrong``."""

    num_made = 0
    is_wrong = False

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        CountedProduct.num_made += 1
        self.weight = weight.clone() * (0.5 if CountedProduct.is_wrong else 1)
        self._bias = None if bias is None else bias.clone()

    @staticmethod
    def supports(dtype: torch.dtype, num_inputs: int) -> bool:
        """Take what is small."""
        return num_inputs < 96

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply."""
        return torch.nn.functional.linear(rows, self.weight, self._bias)

    @property
    def memory(self) -> tuple[int, int]:
        """Nothing to be moved."""
        return 0, 0


class ThirdParty:
    """Registers them under names, and one of each kind that is no such thing."""

    @hookimpl
    def pagedcore_register(self, registry: Registry) -> None:
        registry.models.add("toy", f"{__name__}:toy_backend")
        registry.models.add("nothing", f"{__name__}:no_backend")
        registry.linears.add("counted", f"{__name__}:CountedProduct")
        registry.linears.add("nothing", f"{__name__}:no_backend")


@pytest.fixture(autouse=True)
def _nothing_counted() -> Iterator[None]:
    yield
    ASKED.clear()
    CountedProduct.num_made, CountedProduct.is_wrong = 0, False


def engine(model: Any, **settings: Any) -> Engine:
    return Engine.from_pretrained(model, plugins=[ThirdParty()], **{**SMALL, **settings})


@pytest.mark.parametrize(
    "model", ["my-format:some-model", Path("weights.bin"), object()], ids=["name", "path", "object"]
)
def test_a_model_backend_is_chosen_by_name(model: Any) -> None:
    """The factory gets what the user calls a model, whatever it is, and the settings; nothing else looks at it."""
    with engine(model, model_backend="toy", seed=5) as built:
        outputs = built.generate([[3, 4]], SamplingParams(max_tokens=6))
    assert list(outputs[0].outputs[0].token_ids) == toy_answer([3, 4], 6)
    assert [(asked, config.seed) for asked, config in ASKED] == [(model, 5)]


@pytest.mark.parametrize(("settings", "message"), [
    ({"model_backend": "none"}, r"models: 'none' is not registered; known are transformers, toy, nothing"),
    ({"model_backend": "nothing"}, r"model_backend: 'nothing' made .* needed is .* ModelBackend"),
    ({"model_backend": ""}, "model_backend: got '', allowed is a name"),
    ({"linear_backend": "none"}, r"linears: 'none' is not registered; known are onednn, packed, counted, nothing"),
    ({"linear_backend": "nothing"}, "linear_backend: 'nothing' does not have the members of LinearFactory"),
    ({"linear_backend": "counted", "device": "cuda"}, "linear_backend: got 'counted', allowed on cuda is 'auto'"),
], ids=["unknown-model", "no-model", "empty", "unknown-linear", "no-linear", "on-a-gpu"])
def test_wrong_names_are_refused(settings: dict[str, Any], message: str) -> None:
    """A name that is not there, and a thing that is no backend, end in an error that says what is allowed."""
    with virtual_gpus() as gpus, shipped_kernels(gpus), pytest.raises(InvalidConfig, match=message):
        Engine.from_pretrained("demo", plugins=[ThirdParty()], **settings)


@pytest.mark.parametrize(("family", "num_made"), [("llama", 13), ("gpt2", 13), ("stablelm", 22)])
def test_linear_layers_are_made_by_name(family: str, num_made: int) -> None:
    """All layers are the factory's, fused ones too, and the completions are those of the built-in layers."""
    sizes = {"n_inner": 64} if family == "gpt2" else {"intermediate_size": 64}
    with engine(tiny_model(family, **sizes), dtype="float32") as built:
        expected = built.generate([[3, 4, 5]], SamplingParams(max_tokens=8))
    assert CountedProduct.num_made == 0
    with engine(tiny_model(family, **sizes), linear_backend="counted", dtype="float32") as built:
        outputs = built.generate([[3, 4, 5]], SamplingParams(max_tokens=8))
    assert CountedProduct.num_made == num_made
    assert outputs[0].outputs[0].token_ids == expected[0].outputs[0].token_ids


def test_linear_layers_that_are_not_supported_stay() -> None:
    """Only layers of fewer than 96 inputs are handed to the factory; the down projections are wider."""
    with engine(tiny_model("llama", intermediate_size=96), linear_backend="counted") as built:
        model = built.components.runner.backend._decoder._model  # type: ignore[attr-defined]
    assert {type(layer.mlp.down_proj) for layer in model.model.layers} == {torch.nn.Linear}
    assert CountedProduct.num_made == 3 * 6 + 1


def test_wrong_products_do_not_pass_the_self_test() -> None:
    """A factory whose layers compute something else is found out before the first request."""
    CountedProduct.is_wrong = True
    with pytest.raises(InvalidConfig, match="self-test failed"):
        engine(tiny_model("llama"), linear_backend="counted")


def test_blocks_of_other_linear_layers_are_of_another_format() -> None:
    """Their K and V have other bits, so that exported ones are computed again."""
    formats = set()
    for name in ("auto", "counted"):
        with engine(tiny_model("llama"), linear_backend=name) as built:
            formats.add(kv_format(built.components.runner.backend, 16))
    assert len(formats) == 2
