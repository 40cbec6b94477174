"""Models read without transformers: the same bits and the same fingerprint as with it, or left to it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.errors import InvalidConfig, ModelNotSupported, PagedcoreError
from pagedcore.models.checkpoints import quick_start
from pagedcore.models.checkpoints.pretrained import load_pretrained
from pagedcore.models.checkpoints.quick_start import NotQuick, read_model, why_not_quick
from pagedcore.models.decoders.fused import FusedDecoder
from pagedcore.models.decoders.plain import ModuleDecoder
from pagedcore.models.families.llama_modules import ForCausalLM
from pagedcore.models.families.table import FAMILIES
from pagedcore.models.fingerprint import model_fingerprint
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.cpu.matmul.packed import PackedMatmul
from support.families import VOCAB, tiny_model

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}
#: Architecture, changes of its configuration.
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "eos_token_id": [2, 5]}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, rope of llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "use_sliding_window": False}),
    "qwen3": ("qwen3", {"use_sliding_window": False}),
    "qwen3, linear rope": ("qwen3", {
        "use_sliding_window": False, "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "mistral, windows": ("mistral", {}),
    "phi3": ("phi3", {}),
    "phi3, half of a head turned": ("phi3", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "granite": ("granite", {"attention_bias": True}),
    "smollm3": ("smollm3", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {}),
    "gemma2": ("gemma2", {}),
    "gemma3": ("gemma3_text", {"final_logit_softcapping": 20.0}),
    "mixtral": ("mixtral", {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe, every other layer, one left out": ("qwen3_moe", {
        "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}),
    "olmoe": ("olmoe", {}),
}
IDS = torch.arange(40)[None] * 7 % VOCAB


def save(directory: Path, family: str = "llama", **changes: Any) -> Path:
    """Save a tiny model whose norms have random weights."""
    model = tiny_model(family, **changes)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += torch.randn(parameter.shape) * 0.3
    model.save_pretrained(directory)
    return directory


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; ``None`` removes one."""
    fields = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in fields.items() if value != "removed"}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a directory."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_model_is_the_one_of_transformers(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Logits are equal bit for bit, and so are fingerprint, longest context and end tokens."""
    family, changes = QUICK[name]
    save(tmp_path, family, **changes)
    quick, general = read_model(tmp_path, dtype), load_pretrained(tmp_path, dtype=str(dtype).removeprefix("torch."))
    assert type(general) is not ForCausalLM
    if hasattr(general.config, "num_experts_per_tok"):
        # Why: transformers' other ways to compute experts add their outputs up in another order.
        general.set_experts_implementation("eager")
    with torch.inference_mode():
        assert torch.equal(quick(IDS).logits, general(IDS).logits)
    assert model_fingerprint(quick) == model_fingerprint(general)
    assert {weight.dtype for weight in quick.parameters()} == {quick.dtype} == {dtype}
    one, other = (TransformersModel(model, NumbaCpuAttention) for model in (quick, general))
    assert (one.eos_token_ids, one.max_model_len) == (other.eos_token_ids, other.max_model_len)
    assert one.layers == other.layers
    assert type(one._decoder) is type(other._decoder) is FusedDecoder


def test_an_architecture_is_one_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is added to the table is read and computed by the fused kernels; nothing else knows it."""
    edit(save(tmp_path) / "config.json", model_type="of_tomorrow", architectures=["OfTomorrowForCausalLM"])
    with pytest.raises(NotQuick, match="it is none of llama,"):
        read_model(tmp_path, torch.float32)
    monkeypatch.setitem(cast("Any", FAMILIES), "of_tomorrow", replace(FAMILIES["llama"], classes="OfTomorrow"))
    model = TransformersModel(read_model(tmp_path, torch.float32), NumbaCpuAttention)
    assert type(model._decoder) is FusedDecoder


@pytest.mark.parametrize("family", ["qwen3", "phi3", "smollm3", "olmo3", "gemma2", "mixtral"])
def test_other_decoders_run_a_quick_model_too(tmp_path: Path, family: str) -> None:
    """Without fused kernels its own modules compute, and the self-test finds them equal to themselves unpaged."""
    changes = {"use_sliding_window": False} if family == "qwen3" else {}
    model = read_model(save(tmp_path, family, **changes), torch.float32)
    backend = TransformersModel(model, NumbaCpuAttention, decoder_factory=ModuleDecoder)
    assert backend.is_schedule_invariant


def test_old_names_of_rotary_parameters_are_known(tmp_path: Path) -> None:
    """A configuration from before version 5 of transformers, as most of the hub's, gives the same model."""
    save(tmp_path, rope_parameters=LLAMA3)
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    edit(tmp_path / "config.json", rope_parameters="removed", rope_theta=1e4, rope_scaling=scaling, head_dim="removed",
         torch_dtype="float32", dtype="removed")
    quick, general = read_model(tmp_path, torch.float32), load_pretrained(tmp_path, dtype="float32")
    assert torch.equal(quick(IDS).logits, general(IDS).logits)
    assert model_fingerprint(quick) == model_fingerprint(general)


def test_weights_may_lie_in_several_files(tmp_path: Path) -> None:
    """An index of shards is followed, tensor by tensor."""
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(read_model(tmp_path, torch.float32)(IDS).logits, model(IDS).logits)
    # Why a duplicate: which of two tensors counts would be a guess.
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    save_file({**load_file(first), **load_file(second)}, first, metadata={"format": "pt"})
    assert "twice" in why_not_quick(tmp_path)
    first.unlink()
    assert "no file of its directory" in why_not_quick(tmp_path)
    with pytest.raises(InvalidConfig):
        load_pretrained(tmp_path, is_quick=True)


def test_an_index_does_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    """Names of files with a directory in them are not opened."""
    save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = dict.fromkeys(load_file(tmp_path / "elsewhere.safetensors"), "../elsewhere.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert "elsewhere" in why_not_quick(tmp_path / "model")


@pytest.mark.parametrize("changes", [
    {"model_type": "gemma"}, {"model_type": ["llama"]}, {"architectures": ["LlamaForSequenceClassification"]},
    {"architectures": "removed"}, {"quantization_config": {}},
    {"num_hidden_layers": 10**9}, {"num_hidden_layers": -1}, {"num_hidden_layers": "3"}, {"num_hidden_layers": True},
    {"num_hidden_layers": 2}, {"hidden_size": 10**12}, {"hidden_size": 32}, {"hidden_size": "removed"},
    {"vocab_size": 1},
    {"num_key_value_heads": 3}, {"num_key_value_heads": "removed"}, {"head_dim": 8}, {"head_dim": 0.5},
    {"head_dim": -16}, {"hidden_act": "gelu"}, {"rms_norm_eps": float("nan")}, {"rms_norm_eps": "1e-6"},
    {"attention_bias": "false"}, {"attention_bias": True}, {"pretraining_tp": 2}, {"eos_token_id": "removed"},
    {"eos_token_id": 2.5}, {"sliding_window": 8}, {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, {"rope_parameters": [1]},
    {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}}, {"rope_scaling": {"rope_type": "linear"}},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    {"tie_word_embeddings": True}, {"tie_word_embeddings": "yes"}, {"something_new": 1},
], ids=str)
def test_a_configuration_with_anything_unknown_is_left_to_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A field that is missing, unknown, absurd or at odds with the weights makes a model that is not read here."""
    edit(save(tmp_path) / "config.json", **changes)
    assert why_not_quick(tmp_path)
    with pytest.raises(NotQuick):
        read_model(tmp_path, torch.float32)


@pytest.mark.parametrize(("family", "changes"), [
    ("gemma2", {"hidden_activation": "gelu"}), ("gemma2", {"hidden_act": "silu"}),
    ("gemma2", {"use_bidirectional_attention": True}), ("gemma2", {"layer_types": ["full_attention"] * 2}),
    ("gemma2", {"layer_types": ["linear_attention"] * 3}), ("gemma2", {"layer_types": 3}),
    ("gemma2", {"sliding_window": None}), ("gemma2", {"final_logit_softcapping": 0}),
    ("gemma2", {"tie_word_embeddings": "removed"}), ("gemma2", {"query_pre_attn_scalar": -1}),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    ("gemma3_text", {"rope_parameters": {"full_attention": 1, "sliding_attention": 2}}),
    ("smollm3", {"no_rope_layers": [1, 0]}), ("smollm3", {"no_rope_layers": "removed"}),
    ("smollm3", {"use_sliding_window": False}), ("granite", {"residual_multiplier": "removed"}),
    ("granite", {"logits_scaling": 0}), ("olmo2", {"clip_qkv": 8.0}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.5}}),
    ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.01}}),
    ("mixtral", {"num_experts_per_tok": 5}), ("mixtral", {"num_local_experts": 3}),
    ("mixtral", {"num_local_experts": 2**30}), ("mixtral", {"num_local_experts": "removed"}),
    ("olmoe", {"num_local_experts": 4}), ("qwen3_moe", {"moe_intermediate_size": 96}),
    ("qwen3_moe", {"decoder_sparse_step": 0}), ("qwen3_moe", {"mlp_only_layers": [0]}),
    ("qwen3_moe", {"mlp_only_layers": [0.0]}), ("olmoe", {"clip_qkv": 8.0}),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8}}),
], ids=str)
def test_fields_of_one_architecture_are_checked(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    """What only one architecture has, and what its layers say one by one, must be as it is known too."""
    assert why_not_quick(save(tmp_path, family)) == ""
    edit(tmp_path / "config.json", **changes)
    assert why_not_quick(tmp_path)
    with pytest.raises(NotQuick):
        read_model(tmp_path, torch.float32)


@pytest.mark.parametrize("change", [
    lambda tensors: tensors.pop("model.norm.weight"),
    lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}),
    lambda tensors: tensors.update({"model.norm.weight": torch.ones(32)}),
    lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.float64)}),
    lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
    lambda tensors: tensors.update({"model.norm.weight": torch.ones(64, 1)}),
], ids=["missing", "more", "shorter", "float64", "int8", "wider"])
def test_other_tensors_than_those_expected_are_left_to_transformers(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None]
) -> None:
    """A tensor too many or too few, or of another shape or format, is not guessed about."""
    edit_weights(save(tmp_path), change)
    assert why_not_quick(tmp_path)


@pytest.mark.parametrize("spoil", [
    lambda directory: (directory / "config.json").write_text("{"),
    lambda directory: (directory / "config.json").write_text("[" * 10**5),
    lambda directory: (directory / "config.json").write_bytes(b"\xff"),
    lambda directory: (directory / "config.json").unlink(),
    lambda directory: (directory / "model.safetensors").unlink(),
    lambda directory: (directory / "model.safetensors").write_bytes(b"\xff" * 5000),
    lambda directory: (directory / "model.safetensors").write_bytes(
        (directory / "model.safetensors").read_bytes()[:-100]),
    lambda directory: (directory / "model.safetensors.index.json").write_text('{"weight_map": 7}'),
], ids=["cut", "deep", "bytes", "no configuration", "no weights", "noise", "cut weights", "index"])
def test_damaged_files_end_in_the_errors_of_the_general_path(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    """The quick path says nothing itself; a typed error follows, the same with it and without, and names no path."""
    spoil(save(tmp_path))
    if (tmp_path / "model.safetensors.index.json").exists():
        (tmp_path / "model.safetensors").unlink()
    messages = []
    for is_quick in (True, False):
        with pytest.raises(PagedcoreError) as caught:
            load_pretrained(tmp_path, dtype="float32", is_quick=is_quick)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert str(tmp_path) not in messages[0]


def test_weights_of_the_wanted_format_are_mapped(tmp_path: Path) -> None:
    """No copy is made of them before they are packed."""
    model = read_model(save(tmp_path), torch.float32)
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
              if line.endswith("model.safetensors")]
    address = model.model.layers[1].mlp.up_proj.weight.data_ptr()
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


def test_an_engine_answers_the_same_by_both_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and log-probabilities of the demo model are equal, and a session of one path continues in the other."""
    params, answers, path = SamplingParams(max_tokens=12, logprobs=2), [], tmp_path / "session.json"
    questions = ["What is 2 + 3?", "What comes after Sunday?", "Sort 7, 5, 6."]
    for is_quick in (True, False):
        if not is_quick:
            monkeypatch.setattr(quick_start, "FAMILIES", {})
        with Engine.from_pretrained("demo", num_kv_blocks=64) as engine:
            outputs = [output.outputs[0] for output in engine.generate(questions, params)]
            answers.append([(output.token_ids, output.logprobs) for output in outputs])
            if is_quick:
                session = engine.session()
                session.ask("What is 2 + 3?")
                session.export(path)
            else:
                assert engine.import_session(path).ask("And 3 + 4?").outputs[0].text
    assert answers[0] == answers[1]


def test_the_demo_answers_without_transformers() -> None:
    """Neither transformers nor what its models bring, torch's compiler and distributed tensors, is imported."""
    code = """
import sys
from pagedcore import Engine, SamplingParams
with Engine.from_pretrained("demo", num_kv_blocks=64) as engine:
    print(engine.generate(["What is 2 + 3?"], SamplingParams(max_tokens=16))[0].outputs[0].text)
heavy = ("transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "huggingface_hub", "sympy")
print(sorted(set(heavy) & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert done.stdout.split("\n")[-2] == "[]"
    assert "5" in done.stdout


def test_the_demo_is_quick() -> None:
    """What comes with pagedcore is read without transformers."""
    assert why_not_quick(DEMO_MODEL_DIR) == ""


def start(directory: Path, **settings: Any) -> Engine:
    return Engine.from_pretrained(directory, num_kv_blocks=16, max_num_seqs=2, **settings)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "zeros": torch.zeros_like, "another order": lambda out: out.roll(1, 1),
    "one output": lambda out: torch.cat([out[:, :7], 2 * out[:, 7:8], out[:, 8:]], 1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_products_of_a_quick_model_are_refused(
    tmp_path: Path, wrong: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product is compared with its weight, since the self-test of such a model computes with the products."""
    right = PackedMatmul.__call__
    monkeypatch.setattr(PackedMatmul, "__call__", lambda product, rows: WRONG[wrong](right(product, rows)))
    with pytest.raises(ModelNotSupported, match=r"self-test failed\. A product of \d+ inputs"):
        start(save(tmp_path), dtype=dtype)


def test_a_quick_model_that_pages_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits over paged attention are compared with those of its own modules, packed products and all."""
    attend_to = NumbaCpuAttention.attend_to

    def too_little(self: NumbaCpuAttention, output: torch.Tensor, *given: Any, **options: Any) -> None:
        attend_to(self, output, *given, **options)
        output *= 0.7

    monkeypatch.setattr(NumbaCpuAttention, "attend_to", too_little)
    with pytest.raises(ModelNotSupported, match=r"self-test failed\. Logits of"):
        start(save(tmp_path))


def test_a_start_multiplies_nothing_with_weights_in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are read for packing alone: torch is given no row to multiply with them."""
    num_rows: list[int] = []
    linear = torch.nn.functional.linear

    def counted(rows: torch.Tensor, *weights: Any) -> torch.Tensor:
        num_rows.append(rows.numel())
        return linear(rows, *weights)

    monkeypatch.setattr(torch.nn.functional, "linear", counted)
    with start(save(tmp_path)) as engine:
        assert engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1))[0].outputs[0].token_ids
    assert num_rows
    assert not any(num_rows)
