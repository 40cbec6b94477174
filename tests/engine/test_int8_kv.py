"""Engines with KV in int8: what their completions are worth, what they take, and who cannot have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model.questions import demo_questions, is_correct
from pagedcore.engine.builder import build_components
from pagedcore.errors import InvalidConfig
from pagedcore.models.fingerprint import kv_format
from pagedcore.models.transformers_model import TransformersModel
from pagedcore_kernels.cpu.attention.backend import NumbaCpuAttention
from pagedcore_kernels.layout import ScaledKVLayout
from pagedcore_kernels.reference import ReferenceAttention
from support.doubles import ToyBackend
from support.families import VOCAB, tiny_model
from support.generate_oracle import make_prompts
from virtual_gpu.backends import VirtualBackends
from virtual_gpu.torch_cuda import virtual_gpus

INT8: dict[str, Any] = {"kv_cache_dtype": "int8"}


def test_demo_answers_are_right_with_int8_kv() -> None:
    """Of questions of every task at most one more is answered wrongly than with KV in the model's own numbers."""
    questions, num_right = demo_questions(48, seed=1), []
    for settings in ({}, INT8):
        with Engine.from_pretrained("demo", max_num_seqs=48, **settings) as engine:
            prompts = [question.prompt for question in questions]
            outputs = engine.generate(prompts, SamplingParams(max_tokens=64), show_progress=False)
        texts = [output.outputs[0].text for output in outputs]
        num_right.append(sum(is_correct(question, text) for question, text in zip(questions, texts, strict=True)))
    assert num_right[1] >= num_right[0] - 1


@pytest.mark.parametrize(("family", "dtype"), [
    ("llama", torch.float32), ("qwen3", torch.bfloat16), ("gemma2", torch.float32), ("gemma3_text", torch.bfloat16),
    ("gpt_oss", torch.float32), ("gemma3n_text", torch.bfloat16), ("qwen2_moe", torch.float32),
    ("llama", torch.bfloat16), ("lfm2", torch.bfloat16),
], ids=str)
def test_logits_are_close_to_those_of_exact_kv(family: str, dtype: torch.dtype) -> None:
    """Families with grouped heads, windows, sinks, capped scores, shared layers, experts: log-probabilities of prompts
    are near those of KV in the model's numbers, and differ from them: int8 was used.
    """
    params, found = SamplingParams(max_tokens=1, prompt_logprobs=0), []
    for settings in ({}, INT8):
        with Engine.from_pretrained(tiny_model(family, dtype=dtype), num_kv_blocks=32, **settings) as engine:
            assert engine.stats().is_schedule_invariant
            outputs = engine.generate(make_prompts(), params, show_progress=False)
        found.append(torch.tensor([one.logprob for output in outputs for one in output.prompt_logprobs or () if one]))
    assert not torch.equal(*found)
    spread = (found[0] - found[0].mean()).norm()
    assert (found[1] - found[0]).norm() < 0.12 * spread


def test_a_pool_in_int8_has_nearly_twice_the_blocks_of_bfloat16() -> None:
    """The same memory holds 128 / 68 the blocks with heads of 64, and 256 / 68 those of float32: scales are counted."""
    num_blocks = {}
    for dtype, kv_cache_dtype in (("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "int8"), ("float32", "int8")):
        model = tiny_model("llama", hidden_size=256, num_hidden_layers=2)
        settings = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "kv_cache_memory": 2**22,
                    "attention_backend": "reference", "block_size": 16}
        with Engine.from_pretrained(model, **settings) as engine:
            stats, backend = engine.stats(), engine._runner.backend
            num_blocks[dtype, kv_cache_dtype] = stats.num_blocks
            assert stats.kv_bytes == stats.num_blocks * backend.kv_bytes_per_token * stats.block_size <= 2**22
    assert num_blocks["bfloat16", "int8"] == num_blocks["float32", "int8"]
    assert num_blocks["bfloat16", "int8"] == num_blocks["bfloat16", "auto"] * 128 // 68
    assert num_blocks["float32", "int8"] == num_blocks["float32", "auto"] * 256 // 68


@pytest.mark.parametrize("branches", [{"beam_width": 3}, {"n": 3, "seed": 5, "temperature": 1.0}], ids=str)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_branches_that_share_and_copy_blocks_are_those_of_a_roomy_engine(
    branches: dict[str, Any], preemption: str
) -> None:
    """Beams and samples fork inside a block, which is copied with its scales; in a pool for too few of them, checked
    after every step, they are swapped or computed again, and stay what they were.
    """
    params = SamplingParams(max_tokens=14, ignore_eos=True, logprobs=2, **branches)
    answers, prompts = [], [list(range(start, start + 21)) for start in (3, 40, 80)]
    for settings in ({"num_kv_blocks": 200, "enable_prefix_caching": False, "max_num_seqs": 3},
                     {"num_kv_blocks": 16, "host_kv_memory": "1MiB", "preemption": preemption, "check_invariants": True,
                      "max_num_seqs": 9}):
        with Engine.from_pretrained(tiny_model("llama"), block_size=8, **INT8, **settings) as engine:
            outputs = engine.generate(prompts, params, show_progress=False)
            answers.append([[(one.token_ids, one.logprobs) for one in output.outputs] for output in outputs])
            num_preemptions = engine.stats().num_preemptions
    assert num_preemptions > 0
    assert answers[0] == answers[1]


def test_the_reference_keeps_int8_kv_too() -> None:
    """Attention in plain torch, the fallback everywhere, answers with int8 KV as the kernels do, in float16 too."""
    prompts, answers = make_prompts()[:3], []
    for name in ("numba-cpu", "reference"):
        model = tiny_model("llama")
        with Engine.from_pretrained(model, attention_backend=name, num_kv_blocks=32, block_size=8, **INT8) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_tokens=4, ignore_eos=True), show_progress=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
            assert isinstance(engine._runner.backend.layout(8), ScaledKVLayout)  # type: ignore[attr-defined]
    assert answers[0] == answers[1]
    half = TransformersModel(tiny_model("llama", dtype=torch.float16), ReferenceAttention, **INT8)
    assert half.layout(16).model_dtype == torch.float16


def test_kv_formats_of_int8_and_of_the_model_differ() -> None:
    """What a session's files are compared by says in which numbers their KV is; it is the same for the same, and with
    int8 for what other kernels have computed."""
    formats = [
        kv_format(TransformersModel(tiny_model("llama"), attention, kv_cache_dtype=name, attention_name=name_of), 16)
        for attention, name_of, name in (
            (NumbaCpuAttention, "numba-cpu", "auto"), (NumbaCpuAttention, "numba-cpu", "int8"),
            (ReferenceAttention, "reference", "int8"), (ReferenceAttention, "reference", "e4m3"),
            (ReferenceAttention, "reference", "auto"))
    ]
    assert formats[1] == formats[2]
    assert len(set(formats)) == 4


def test_int8_kv_is_refused_where_nothing_stores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backends of one's own, attention without int8: a typed refusal that names the setting and what
    to use, before a model is loaded.
    """
    with pytest.raises(InvalidConfig, match=r"kv_cache_dtype: got .* backend of your own, which decides itself"):
        build_components(ToyBackend(), num_kv_blocks=4, **INT8)
    monkeypatch.setattr("pagedcore.models.checkpoints.pretrained.load_pretrained",
                        lambda *_, **__: pytest.fail("was loaded"))
    monkeypatch.delattr("pagedcore_kernels.reference.ReferenceAttention.kv_cache_dtypes")
    for settings in ({"attention_backend": "reference"}, {"device": "cuda", "attention_backend": "queued"}):
        with virtual_gpus(), pytest.raises(
            InvalidConfig, match=r"kv_cache_dtype: got 'int8', .*'auto'.*'numba-cpu' stores int8 on a CPU"
        ):
            build_components("demo", plugins=[VirtualBackends()], **INT8, **settings)


def test_prompts_of_numbers_that_are_none_end_their_own_requests_only() -> None:
    """A token whose embedding is NaN has a scale of NaN: its request fails, those beside it keep their tokens."""
    model, prompts = tiny_model("llama"), make_prompts()[:3]
    poison = VOCAB - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[poison] = float("nan")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    clean = [[token for token in prompt if token != poison] for prompt in prompts]
    with Engine.from_pretrained(model, num_kv_blocks=64, **INT8) as engine:
        alone = [engine.generate([prompt], params, show_progress=False)[0].outputs[0].token_ids for prompt in clean]
        *outputs, bad = engine.generate([*clean, [5, 6, poison, 7]], params, show_progress=False)
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert bad.outputs[0].finish_reason == "error"
