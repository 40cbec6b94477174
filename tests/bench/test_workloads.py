"""The benchmark's workloads are the same tokens everywhere and for ever."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from pagedcore.bench.workloads import Workload, load_prompts, make_workload
from pagedcore.errors import InvalidConfig

RECORDED = {
    "heavy-tailed": ("21ae14e423085517dd1d86160c9d0a73b23b8d8d4fcaa683b2117ae195d75a1a", 6152, 9326),
    "uniform": ("2c47f3c239d3b7bc1c7351345dc39b75341f14f8a2bdc3e477ca0d006b962d4a", 4096, 8192),
    "w1": ("b6e1a7bb0d69133f8022ff3f023b47f2bac4a4e173e3c3a4481b9d08f51f5799", 9569, 8698),
    "w2": ("e934c45d50ef3e42fb8ca1304d55b889b5156c05a9b6509d48eff8c986824507", 16896, 1024),
    "w3": ("4fc1d3d48481ac8baffb100361ec2f58f080a0ea279214a7e69267d1e1503d76", 128, 64),
    "ragged": ("5b385080350e9dd41e0dc2d0681b91d42a1387a3f05da6e5191475c67c29f7a8", 8413, 8676),
}


@pytest.mark.parametrize("name", RECORDED)
def test_token_ids_are_the_recorded_ones(name: str) -> None:
    """Prompts and lengths of a workload are, token by token, those that other engines were measured with."""
    workload = make_workload(name, 1024)
    data = json.dumps([[list(prompt) for prompt in workload.prompts], list(workload.num_outputs)])
    digest = hashlib.sha256(data.encode()).hexdigest()
    assert (digest, workload.num_prompt_tokens, workload.num_output_tokens) == RECORDED[name]


def test_w2_shares_a_prefix() -> None:
    """All prompts of w2 begin with the same 512 tokens and differ after them."""
    prompts = make_workload("w2", 1024).prompts
    assert len({prompt[:512] for prompt in prompts}) == 1
    assert len({prompt[512:] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("max_model_len", [4, 64, 300, 100_000])
def test_ragged_fits_any_context(max_model_len: int) -> None:
    """The ragged workload is shortened until every request fits, and stays ragged."""
    workload = make_workload("ragged", max_model_len)
    lengths = [len(prompt) + more for prompt, more in zip(workload.prompts, workload.num_outputs, strict=True)]
    assert max(lengths) <= max_model_len
    assert len(set(lengths)) > 1
    assert len(lengths) == 64


def test_padding_waste_counts_rectangles() -> None:
    """Two requests of 1+4 and 3+2 tokens padded together take 2 x (3+4) places, of which 10 are used."""
    two = Workload("two", ((1,), (1, 2, 3)), (4, 2))
    assert two.padding_waste(num_slots=2) == pytest.approx(1 - 10 / 14)
    assert two.padding_waste(num_slots=1) == 0


def test_a_short_context_is_refused_with_the_need() -> None:
    """A workload of fixed size says how much context it needs."""
    with pytest.raises(InvalidConfig, match=r"'w2' needs a context of 560 tokens, this model has 559"):
        make_workload("w2", 559)


def test_an_unknown_workload_is_refused() -> None:
    """The error lists what there is."""
    with pytest.raises(InvalidConfig, match="heavy-tailed, uniform, ragged, w1, w2, w3"):
        make_workload("w9", 1024)


def test_prompts_are_read_from_a_file(tmp_path: Path) -> None:
    """A JSON list of token id lists becomes a workload with one length for all."""
    path = tmp_path / "prompts.json"
    path.write_text("[[1, 2, 3], [4]]")
    workload = load_prompts(path, 7, 1024)
    assert (workload.prompts, workload.num_outputs) == (((1, 2, 3), (4,)), (7, 7))


@pytest.mark.parametrize("text", ["", "{}", "[]", "[[]]", '["text"]', "[[1.5]]", "[[true]]"])
def test_a_malformed_prompts_file_is_refused(tmp_path: Path, text: str) -> None:
    """Anything but non-empty lists of integers is refused, and no path is repeated in the message."""
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(InvalidConfig, match="prompts:") as caught:
        load_prompts(path, 7, 1024)
    assert str(tmp_path) not in str(caught.value)
