"""Models with short convolutions under everything that moves, shares, forks or takes back what a sequence has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore.engine.engine import Engine
from pagedcore.errors import InvalidConfig
from pagedcore.sampling_params import SamplingParams
from support.families import VOCAB, tiny_model
from support.lora_directories import linear_sizes, merged, random_matrices, write_adapter

SHARED = [int(one) for one in torch.randint(3, VOCAB, (37,), generator=torch.Generator().manual_seed(8))]
PROMPTS = [[*SHARED[:length], 5 + length] for length in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 37)]
SMALL: dict[str, Any] = {"block_size": 8, "max_num_seqs": 6, "max_num_batched_tokens": 12}


def params(place: int) -> SamplingParams:
    """Sampled and greedy, one and several completions, with log-probabilities."""
    return SamplingParams(max_tokens=20, temperature=float(place % 2), seed=place, n=1 + place % 3, logprobs=2,
                          ignore_eos=True)  # fmt: skip


def answers(engine: Engine, order: list[int]) -> dict[int, Any]:
    outputs = engine.generate([PROMPTS[place] for place in order], [params(place) for place in order])
    return {place: [(list(one.token_ids), one.logprobs) for one in output.outputs]
            for place, output in zip(order, outputs, strict=True)}  # fmt: skip


@pytest.fixture(scope="module", params=[("lfm2", torch.float32), ("lfm3", torch.bfloat16)], ids=str)
def case(request: pytest.FixtureRequest) -> tuple[Any, dict[int, Any]]:
    """A model's arguments, and what it answers to each prompt alone, without a prefix cache and in one chunk."""
    family, dtype = request.param
    settings: dict[str, Any] = {"block_size": 8, "num_kv_blocks": 64, "enable_prefix_caching": False}
    with Engine.from_pretrained(tiny_model(family, dtype=dtype), **settings) as engine:
        return request.param, {place: answers(engine, [place])[place] for place in range(len(PROMPTS))}


@pytest.mark.parametrize("more", [
    {"num_kv_blocks": 200}, {"num_kv_blocks": 24, "preemption": "recompute", "speculation": "off"},
    {"num_kv_blocks": 24, "preemption": "swap", "host_kv_memory": "4MiB", "speculation": "off"},
    {"num_kv_blocks": 60, "speculation": "auto"},
], ids=["cached", "recomputed", "swapped", "drafted"])
def test_answers_are_those_alone(case: tuple[Any, dict[int, Any]], more: dict[str, Any]) -> None:
    """With prompts that share prefixes to every offset of a block, chunked, forked, preempted, swapped and with drafts,
    each answer and each log-probability is the same."""
    (family, dtype), alone = case
    with Engine.from_pretrained(tiny_model(family, dtype=dtype), **SMALL, **more) as engine:
        first = answers(engine, list(range(len(PROMPTS))))
        again = answers(engine, list(range(len(PROMPTS)))[::-1])
        stats = engine.stats()
    assert first == alone
    assert again == alone
    assert stats.is_schedule_invariant
    assert stats.num_preemptions > 0 or more["num_kv_blocks"] > 24


def test_a_session_goes_on_where_it_was(case: tuple[Any, dict[int, Any]], tmp_path: Path) -> None:
    """A conversation that is parked, and one that is exported to another engine, have the answer of one prompt."""
    (family, dtype), _ = case
    tokens = SamplingParams(max_tokens=9, ignore_eos=True)
    with Engine.from_pretrained(tiny_model(family, dtype=dtype), **SMALL, num_kv_blocks=40,
                                host_kv_memory="4MiB") as engine:  # fmt: skip
        session = engine.session()
        first = list(session.ask(PROMPTS[8], tokens).outputs[0].token_ids)
        session.park("host")
        session.export(tmp_path / "session")
        second = list(session.ask(PROMPTS[3], tokens).outputs[0].token_ids)
        whole = engine.generate([PROMPTS[8] + first + PROMPTS[3]], tokens)[0]
    with Engine.from_pretrained(tiny_model(family, dtype=dtype), **SMALL, num_kv_blocks=40) as other:
        moved = other.import_session(tmp_path / "session")
        assert list(moved.ask(PROMPTS[3], tokens).outputs[0].token_ids) == second
    assert second == list(whole.outputs[0].token_ids)


@torch.inference_mode()
def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Return the likeliest tokens behind a prompt, all of which is computed again for each."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt):]


def test_a_sequence_has_convolutions_of_its_own_adapter(tmp_path: Path) -> None:
    """Behind one prefix, cached or not, requests with two adapters and with none have the answers of transformers' own
    model with that adapter merged."""
    prompts, tokens = PROMPTS[1::2], SamplingParams(max_tokens=6, ignore_eos=True)
    settings: dict[str, Any] = {"num_kv_blocks": 200, **SMALL}
    sizes = linear_sizes(tiny_model("lfm2"))
    matrices = {name: random_matrices(sizes if name else {}, 4, seed) for seed, name in enumerate([None, "a", "b"])}
    models = {name: merged(tiny_model("lfm2"), own, {"lora_alpha": 8}) for name, own in matrices.items()}
    expected = {name: [greedy(model, prompt, 6) for prompt in prompts] for name, model in models.items()}
    assert len({str(one) for one in expected.values()}) == 3
    places = {name: write_adapter(tmp_path / name, own, 4) for name, own in matrices.items() if name}
    with Engine.from_pretrained(tiny_model("lfm2"), **settings, adapters=places) as engine:
        for _ in range(2):
            asked = [(place, name) for place in range(len(prompts)) for name in matrices]
            requests = [engine.add_request(prompts[place], tokens, lora=name) for place, name in asked]
            while engine.has_pending_requests():
                engine.step()
            found = [list(one.output().outputs[0].token_ids) for one in requests]
            assert found == [expected[name][place] for place, name in asked]
        assert engine.stats().num_cached_tokens > 0


def test_int8_kv_is_refused_by_name() -> None:
    """Inputs of convolutions stay in the model's format; nothing is allocated for a pool that cannot hold them."""
    with pytest.raises(InvalidConfig, match=r"convolutions.*kv_cache_dtype at 'auto'"):
        Engine.from_pretrained(tiny_model("lfm2"), kv_cache_dtype="int8")
