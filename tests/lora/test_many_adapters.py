"""32 requests with 16 adapters, and two without, of all kinds at once: what each is told is what it is told alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from pagedcore import Engine, SamplingParams
from support.lora_directories import random_matrices, write_adapter

ATTENTION = {"q_proj": (192, 192), "k_proj": (192, 64), "v_proj": (192, 64), "o_proj": (192, 192)}
MLP = {"gate_proj": (192, 512), "up_proj": (192, 512), "down_proj": (512, 192)}
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 90, "block_size": 8}
#: Too few tokens a step for the prompts, and too few blocks for the ends of all.
COMPANY = SETTINGS | {
    "max_num_seqs": 32, "max_num_batched_tokens": 48, "speculation": "auto", "check_invariants": True,
}


class Asked(NamedTuple):
    """A request."""

    adapter: str | None
    prompt: list[int]
    params: SamplingParams

    def told(self, engine: Engine) -> Any:
        """Ask for it in company of nobody."""
        (output,) = engine.generate([self.prompt], self.params, lora=self.adapter)
        return bits(output)


def bits(output: Any) -> Any:
    """Tokens of each completion, and every bit of their log-probabilities."""
    return [(one.token_ids, [(each.logprob.hex(), each.top) for each in one.logprobs]) for one in output.outputs]


def asked() -> list[Asked]:
    """Two of each adapter, and two of none: greedy, sampled, several completions, and the best of several."""
    shared = torch.randint(3, 2048, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    some: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 1}
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"n": 2, "temperature": 1.0}, {"best_of": 3, "temperature": 0.8}]
    found = list[Asked]()
    for number in range(34):
        prompt = [*shared[: 8 + number % 3 * 6], *[20 + number, 21, 22] * 2]
        params = SamplingParams(**some, **kinds[(number + number // 16) % 4], seed=number)
        found.append(Asked(f"a{number % 16}" if number < 32 else None, prompt, params))
    return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """16 adapters of ranks 1 to 16: of all linear layers, or of some, with and without all parts of a fused product."""
    kinds = [[*ATTENTION, *MLP], ["q_proj", "v_proj"], ["gate_proj", "up_proj", "down_proj"], ["k_proj", "o_proj"]]
    folder = tmp_path_factory.mktemp("adapters")
    found = {}
    for number in range(16):
        rank, of_layers = 1 + number, kinds[number % 4]
        sizes = {f"model.layers.{layer}.{where}.{name}": size for layer in range(4)
                 for where, sizes in (("self_attn", ATTENTION), ("mlp", MLP)) for name, size in sizes.items()
                 if name in of_layers}  # fmt: skip
        found[f"a{number}"] = str(write_adapter(folder / str(number), random_matrices(sizes, rank, number), rank))
    return found


@pytest.fixture(scope="module")
def alone(places: dict[str, str]) -> list[Any]:
    """What each request is told by an engine that has no other one, nor shares or guesses anything."""
    plain: dict[str, Any] = {**SETTINGS, "enable_prefix_caching": False, "speculation": "off"}
    with Engine.from_pretrained("demo", **plain, adapters=places, max_adapters=16) as engine:
        found = [one.told(engine) for one in asked() if one.adapter is not None]
    with Engine.from_pretrained("demo", **plain) as bare:
        return [*found, *(one.told(bare) for one in asked() if one.adapter is None)]


@pytest.mark.parametrize(("max_adapters", "settings"), [
    (16, {"preemption": "recompute"}), (8, {"preemption": "swap", "host_kv_memory": "8MiB", "num_kv_blocks": 45}),
], ids=["recomputed", "swapped"])
def test_each_is_told_what_it_is_told_alone(
    places: dict[str, str], alone: list[Any], max_adapters: int, settings: dict[str, Any]
) -> None:
    """In chunks, behind shared beginnings, with drafts, forked, preempted in either way, and waiting for slots."""
    with Engine.from_pretrained("demo", **COMPANY | settings, adapters=places, max_adapters=max_adapters) as engine:
        requests = [engine.add_request(one.prompt, one.params, lora=one.adapter) for one in asked()]
        most_at_once = 0
        while engine.has_pending_requests():
            engine.step()
            most_at_once = max(most_at_once, engine.stats().num_running)
        stats = engine.stats()
        assert [bits(one.output()) for one in requests] == alone
    assert most_at_once == 32 or max_adapters < 16
    assert stats.num_preemptions_by_kind[settings["preemption"]] == stats.num_preemptions > 0
    assert stats.num_cached_tokens > 0
    assert stats.num_drafted_tokens > 0
    assert (stats.num_adapter_loads > 0) == (max_adapters < 16)
    assert len({str(one) for one in alone}) == len(alone)
