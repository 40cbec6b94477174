from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from pagedcore.errors import ModelNotSupported
from pagedcore.models import transformers_model
from pagedcore.models.attention import layers, recurrences
from pagedcore.models.attention.interface import PagedStep
from pagedcore.models.attention.layers import AttentionCall, RecordingStep, layers_of
from pagedcore.models.decoders.plain import ModuleDecoder
from pagedcore.models.families import supported_models
from pagedcore.models.state_pool import StatePool
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.reference import ReferenceAttention
from support.families import tiny_model

NO_INTERFACE = ["falcon", "bloom", "mpt"]
SILENTLY_WRONG = ["inkling_text", "qwen4_exp", "rwkv", "xlstm", "zamba", "zaya"]


def take_over(model: Any) -> TransformersModel:
    return TransformersModel(model, ReferenceAttention, block_size=4, decoder_factory=ModuleDecoder)


def never(*_: object) -> None:
    """A check that finds nothing."""


@pytest.mark.parametrize("name", NO_INTERFACE)
def test_models_with_their_own_attention_are_refused_by_name(name: str) -> None:
    """A configuration is enough to refuse what ignores the attention interface."""
    with pytest.raises(ModelNotSupported, match=f"'{name}'.*attention interface"):
        supported_models.check_config({"model_type": name})


@pytest.mark.parametrize("name", SILENTLY_WRONG)
def test_models_with_state_are_refused_by_name(name: str) -> None:
    """What would run and give wrong answers is refused before anything is loaded."""
    with pytest.raises(ModelNotSupported, match=f"'{name}'.*state from token to token"):
        supported_models.check_config({"model_type": name})


@pytest.mark.parametrize(("config", "reason"), [
    ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ({"model_type": "llava", "vision_config": {}, "text_config": {}}, "vision_config"),
    ({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}}, "quantized"),
    ({"model_type": "qwen3_next", "layer_types": ["conv"]}, "type conv are not known"),
    ({"model_type": "new", "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ({"model_type": "llama", "layer_types": ["full_attention", "conv"]}, "type conv are not known"),
    ({"model_type": "deepseek_v32"}, "selection of positions"),
    ({"model_type": "blt"}, "patches"),
    ({"model_type": "bart", "is_encoder_decoder": True}, "it is an encoder-decoder"),
    ({"model_type": "bart", "is_encoder_decoder": False}, "decoder of an encoder-decoder.*length of its cache"),
    ({"model_type": "roberta", "is_decoder": True}, "from the id of its padding token on"),
    ({"model_type": "llama", "position_embedding_type": "relative_key"}, "relative_key"),
], ids=lambda value: value if isinstance(value, str) else value["model_type"])
def test_configurations_are_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    """Every reason that a configuration shows is in the message, with the architecture's name."""
    with pytest.raises(ModelNotSupported, match=reason) as caught:
        supported_models.check_config(config)
    assert repr(config["model_type"]) in str(caught.value)


@pytest.mark.parametrize("name", ["bart", "mbart", "pegasus", "roberta", "xmod"])
def test_what_is_refused_by_its_positions_would_fail_the_self_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names stand for what these models do: with the list gone, the last guard finds it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    sizes = {"vocab_size": 99, "hidden_size": 32, "d_model": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "intermediate_size": 32, "max_position_embeddings": 64, "decoder_layers": 2, "decoder_attention_heads": 2,
             "decoder_ffn_dim": 32, "encoder_layers": 1, "encoder_ffn_dim": 32, "languages": ["en_XX"],
             "default_language": "en_XX"}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes, is_decoder=True)).eval()
    with pytest.raises(ModelNotSupported, match="counts positions"):
        take_over(model)
    monkeypatch.setattr(supported_models, "_REFUSED", {})
    with pytest.raises(ModelNotSupported, match="self-test failed"):
        take_over(model)


def test_a_model_without_positions_runs() -> None:
    """"nope" is what Granite 4 says of it; the self-test compares the model with itself."""
    attention = {"layer_types": ["attention"] * 3, "num_local_experts": 0, "shared_intermediate_size": 96}
    model = tiny_model("granitemoehybrid", **attention, position_embedding_type="nope")
    assert model.model.rotary_emb is None
    take_over(model)


def test_an_unnamed_model_that_ignores_the_interface_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its name in the list, BLOOM is caught because its configuration does not take the key."""
    from transformers import AutoModelForCausalLM, BloomConfig

    monkeypatch.setattr(supported_models, "_REFUSED", {})
    monkeypatch.setattr(transformers_model.model_facts, "max_model_len", lambda config: 64)
    config = BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=2)
    with pytest.raises(ModelNotSupported, match=r"'bloom'.*attention interface"):
        take_over(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(("family", "open_guards", "caught_by"), [
    ("qwen3_next", [], "linear_attention are not known"),
    ("qwen3_next", ["_check_layer_types"], "Conv1d"),
    ("qwen3_next", ["_check_layer_types", "check_modules"], "attention calls were made"),
    ("qwen3_next", ["_check_layer_types", "check_modules", "check_num_attention_layers"], "self-test failed"),
    ("minimax", [], "linear_attention are not known"),
    ("minimax", ["_check_layer_types"], "attention calls were made"),
    ("minimax", ["_check_layer_types", "check_num_attention_layers"], "self-test failed"),
])
def test_guards_stand_behind_each_other(
    monkeypatch: pytest.MonkeyPatch, family: str, open_guards: list[str], caught_by: str
) -> None:
    """However many guards are taken away, the next one still stops a model whose layers keep state in a way that is
    not known."""
    monkeypatch.setattr(recurrences, "_REPLACED", {})
    monkeypatch.setattr(supported_models, "_RECURRENT", frozenset())
    for name in open_guards:
        monkeypatch.setattr(supported_models, name, never)
    with pytest.raises(ModelNotSupported, match=caught_by):
        take_over(tiny_model(family))


def _without(argument: str) -> Callable[..., torch.Tensor]:
    """An attention step in which one argument of the backend is lost."""
    attend = ReferenceAttention.attend

    def broken(self: ReferenceAttention, layer: int, query: torch.Tensor, **arguments: Any) -> torch.Tensor:
        neutral = {"scale": 1.0, "sinks": None}.get(argument, 0)
        return attend(self, layer, query, **{**arguments, argument: neutral})

    return broken


@pytest.mark.parametrize(("family", "argument"), [
    ("mistral", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("granite", "scale"), ("llama4_text", "chunk"),
])
def test_the_self_test_finds_a_lost_argument(monkeypatch: pytest.MonkeyPatch, family: str, argument: str) -> None:
    """Twelve tokens are enough to see that a window, cap, sink, scale or chunk does not reach the backend."""
    monkeypatch.setattr(ReferenceAttention, "attend", _without(argument))
    with pytest.raises(ModelNotSupported, match="self-test failed"):
        take_over(tiny_model(family))


@pytest.mark.parametrize("family", ["qwen3_5_text", "mamba2"])
def test_the_self_test_finds_a_lost_state(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A row that begins from nothing, where it should from the state before it, is not what the model computes."""
    planned = StatePool.planned

    def forgetful(self: StatePool, batch: Any) -> Any:
        return planned(self, dataclasses.replace(batch, state_reads=np.full_like(batch.state_reads, -1)))

    monkeypatch.setattr(StatePool, "planned", forgetful)
    with pytest.raises(ModelNotSupported, match="self-test failed"):
        take_over(tiny_model(family))


def test_the_self_test_finds_a_window_that_only_the_mask_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """PhiMoE never passes its window on; were it not derived from the configuration, the model would be refused."""
    monkeypatch.setattr(layers, "_masks_with_windows", lambda module: False)
    with pytest.raises(ModelNotSupported, match="self-test failed"):
        take_over(tiny_model("phimoe"))


def test_the_self_test_finds_unwritten_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that loses a write in the second chunk is refused, and the message says where."""
    write = ReferenceAttention.write_kv
    calls = []

    def lose_later_writes(self: ReferenceAttention, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        calls.append(layer)
        write(self, layer, key, value if calls.count(layer) == 1 else value * 0)

    monkeypatch.setattr(ReferenceAttention, "write_kv", lose_later_writes)
    with pytest.raises(ModelNotSupported, match=r"from token 7 on, in the second chunk"):
        take_over(tiny_model("llama"))


def test_the_self_test_holds_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tolerance of a coarse format passes a right model and still finds a wrong scale."""
    take_over(tiny_model("granite", dtype=torch.bfloat16))
    monkeypatch.setattr(ReferenceAttention, "attend", _without("scale"))
    with pytest.raises(ModelNotSupported, match="self-test failed"):
        take_over(tiny_model("granite", dtype=torch.bfloat16))


def test_damaged_weights_are_named_as_such() -> None:
    """A model whose own numbers are not finite is refused for that and not for its architecture, and so is one whose
    numbers are so large that a norm makes zeros of them: the message names the module and the number."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(ModelNotSupported, match=r"model\.norm gives numbers of up to nan, needed are finite ones"):
        take_over(model)
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight *= 1e25
        expected = model(torch.tensor([[1, 2, 3]])).logits
    assert not expected.any()
    with pytest.raises(ModelNotSupported, match=r"layers\.0\.mlp\.down_proj gives numbers of up to [0-9.]+e\+2"):
        take_over(model)


class _Module:
    layer_idx = 0
    is_causal = True


def _record(module: Any, *, mask: torch.Tensor | None = None, **arguments: Any) -> list[AttentionCall]:
    step = RecordingStep()
    key = torch.zeros(1, 2, 3, 8)
    step.attend(module, torch.zeros(1, 4, 3, 8), key, key, mask, arguments)
    return step.calls


@pytest.mark.parametrize(("calls", "reason"), [
    (_record(_Module(), mask=torch.zeros(1)), "mask of its own"),
    (_record(_Module(), is_causal=False), "later tokens"),
    (_record(_Module(), position_bias=torch.zeros(1)), "'position_bias'"),
    (_record(_Module(), indices=torch.zeros(1)), "'indices'"),
    (_record(_Module(), sliding_window=5), "window of 5 tokens, its configuration means 0"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_calls_that_cannot_be_paged_are_refused(calls: list[AttentionCall], reason: str) -> None:
    """What an attention call asks for beyond causal attention is refused, with what it is."""
    with pytest.raises(ModelNotSupported, match=reason):
        layers_of(calls, object())


def test_a_layer_that_attends_twice_keeps_both() -> None:
    """Each call has keys and values of its own, also where the keys are the same ones, and is known by its number."""
    first, second = _record(_Module())[0], _record(_Module())[0]
    assert [one.index for one in layers_of([first], object()).values()] == [0]
    twice = layers_of([first, dataclasses.replace(second, key=first.key)], object())
    assert isinstance(twice, layers.LayersByCall)
    assert [(number, one.index, one.owns_kv) for number, one in twice.items()] == [(0, 0, True), (1, 1, True)]


def test_a_layer_without_a_number_is_refused() -> None:
    """K and V of a layer that cannot be distinguished from the others have no place."""
    with pytest.raises(ModelNotSupported, match="number"):
        _record(object())


def test_a_bert_that_looks_ahead_is_refused() -> None:
    """An encoder with a language model's head on it is no causal language model."""
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=64,
    )
    with pytest.raises(ModelNotSupported, match="later tokens"):
        take_over(BertLMHeadModel(config))


def test_shared_keys_are_stored_once() -> None:
    """Layers of Gemma 3n that reuse K and V of others read those and have no memory of their own."""
    model = take_over(tiny_model("gemma3n_text"))
    assert [layer.owns_kv for layer in model.layers.values()] == [True] * 4 + [False] * 2
    assert len(model.layout(4).layers) == 4
    assert [layer.index for layer in model.layers.values()][4:] == [2, 3]


def test_positions_reach_a_model_that_counts_them_itself() -> None:
    """Llama 4 scales queries by their place in the batch; that is switched off and done by position instead."""
    model = take_over(tiny_model("llama4_text"))
    tuned = [layer.query_tuning is not None for layer in model.layers.values()]
    assert tuned == [False, False, False, True]


def test_a_step_converts_to_the_format_of_the_pool() -> None:
    """Attention that runs in another number format than the pool is converted, and its result converted back."""
    model = take_over(tiny_model("llama", dtype=torch.bfloat16))
    layer = model.layers[0]

    class Recorder:
        def plan(self, batch: object) -> None: ...
        def write_kv(self, index: int, key: torch.Tensor, value: torch.Tensor) -> None:
            assert key.dtype == value.dtype == torch.bfloat16
        def attend(self, index: int, query: torch.Tensor, **_: object) -> torch.Tensor:
            assert query.dtype == torch.bfloat16
            return query

    class Batch:
        positions = slot_mapping = torch.zeros(3, dtype=torch.int64).numpy()
        adapter_slots = window_slots = None

    step = PagedStep(Recorder(), {0: layer}, Batch(), torch.bfloat16)
    heads = torch.zeros(1, 2, 3, 8)
    assert step.attend(_Module(), heads, heads, heads, None, {}).dtype == torch.float32
