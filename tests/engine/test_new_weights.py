"""Weights that are loaded into a running engine: it computes what an engine made of them computes, and nothing else."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedcore import Engine, MemoryBudget, SamplingParams
from pagedcore.errors import EngineInUse, InvalidWeights, MemoryBudgetExceeded, ModelMismatch, WeightsIncomplete
from pagedcore.models.decoders import fused
from pagedcore.outputs import WeightsVersion
from pagedcore.request_options import NO_OPTIONS
from pagedcore.requests.embedding import TextEncoder
from pagedcore.requests.observers import EngineObserver
from support.changed_demo import Tensors, changed_weights, write_demo

PROMPT = list(range(40, 80))
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1.0, seed=5, logprobs=2, ignore_eos=True)
WAYS: list[Any] = ["staged", "in_place"]


@pytest.fixture(scope="module")
def weights() -> Tensors:
    """The new ones."""
    return changed_weights()


@pytest.fixture(scope="module")
def directory(weights: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The new ones in files."""
    return write_demo(tmp_path_factory.mktemp("new"), weights)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Iterator[Engine]:
    """An engine that was made of the new weights."""
    with Engine.from_pretrained(directory, max_num_batched_tokens=16, max_num_seqs=8) as engine:
        yield engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    """An engine with the old ones."""
    with Engine.from_pretrained("demo", max_num_batched_tokens=16, max_num_seqs=8, preemption="recompute") as one:
        yield one


def load(engine: Engine, weights: Any, version: str = "", **how: Any) -> None:
    """Give an engine other weights."""
    with engine.new_weights(version, **how) as new:
        new.load(weights)


def answer(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> tuple[Any, ...]:
    """Return the tokens of a completion and their log-probabilities."""
    output = engine.generate([prompt], params)[0].outputs[0]
    return output.token_ids, output.logprobs


@pytest.mark.parametrize("source", ["tensors", "directory"])
@pytest.mark.parametrize("way", WAYS)
def test_an_engine_computes_what_one_made_of_the_new_weights_does(
    way: Any, source: str, engine: Engine, oracle: Engine, weights: Tensors, directory: Path
) -> None:
    """Bit for bit, and from no block of the old ones; both before and after the caller writes to its tensors."""
    before, identity = answer(engine, DRAWN), engine.identity
    given = {name: one.clone() for name, one in weights.items()}
    with engine.new_weights("7", way=way) as new:
        new.load(given if source == "tensors" else directory)
    for one in given.values():
        one.zero_()
    output = engine.generate([PROMPT], DRAWN)[0]
    assert (output.outputs[0].token_ids, output.outputs[0].logprobs) == answer(oracle, DRAWN) != before
    assert output.num_cached_tokens == 0
    assert set(output.outputs[0].weights) == {engine.weights}
    assert engine.weights.label == "7"
    assert engine.identity not in (identity, oracle.identity)
    assert engine.weights.number > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_kept_request_goes_on_as_if_its_tokens_had_been_given(
    way: Any, engine: Engine, oracle: Engine, weights: Tensors
) -> None:
    """Every later token is that of the new weights behind the same text, and says so."""
    request = engine.add_request(PROMPT, GREEDY)
    while len(request.sequences[0].output_token_ids) < 5:
        engine.step()
    begun = list(request.sequences[0].output_token_ids)
    load(engine, weights, "b", running="keep", way=way)
    deltas = []
    while not request.is_done:
        deltas += engine.step()
    output, num_begun = request.output().outputs[0], len(begun)
    rest = answer(oracle, SamplingParams(max_tokens=12 - num_begun, temperature=0, logprobs=0, ignore_eos=True),
                  PROMPT + begun)
    assert output.token_ids[:num_begun] == tuple(begun)
    assert (output.token_ids[num_begun:], (output.logprobs or ())[num_begun:]) == rest
    assert output.weights == (WeightsVersion(0),) * num_begun + (engine.weights,) * (12 - num_begun)
    assert {one for delta in deltas for one in delta.weights} == {engine.weights}


def test_what_was_scored_or_chosen_among_in_part_is_computed_anew(
    engine: Engine, oracle: Engine, weights: Tensors
) -> None:
    """Log-probabilities of a prompt, a mean of states, and candidates never come from two versions."""
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    best = SamplingParams(max_tokens=6, temperature=1.0, seed=1, n=1, best_of=3)
    requests = [engine.add_request(PROMPT, scored), engine.add_request(PROMPT[:7], best)]
    encoder = TextEncoder.of(engine.input_processor, "mean")
    text = engine.accept(encoder.process(PROMPT, NO_OPTIONS))
    for _ in range(2):
        engine.step()
    assert requests[0].sequences[0].is_scored
    assert requests[0].sequences[0].prompt_logprobs
    load(engine, weights, running="keep")
    while engine.has_pending_requests():
        engine.step()
    (vector,) = oracle.embed([PROMPT], pooling="mean")
    assert (text.output().vector == vector.vector).all()
    (expected,), (chosen,) = oracle.generate([PROMPT], scored), oracle.generate([PROMPT[:7]], best)
    assert requests[0].output().prompt_logprobs == expected.prompt_logprobs
    assert requests[1].output().outputs[0].token_ids == chosen.outputs[0].token_ids


@pytest.mark.parametrize(("running", "reason"), [("wait", "length"), ("abort", "abort")])
def test_requests_end_first_with_the_old_weights(
    running: Any, reason: str, engine: Engine, weights: Tensors
) -> None:
    """As they would have, or as aborted ones."""
    expected = answer(engine, GREEDY)[0]
    request = engine.add_request(PROMPT, GREEDY)
    while not request.sequences[0].output_token_ids:
        engine.step()
    load(engine, weights, running=running)
    output = request.output().outputs[0]
    assert output.finish_reason == reason
    assert set(output.weights) <= {WeightsVersion(0)}
    assert output.token_ids == expected[: len(output.token_ids)]


def spoilt(weights: Tensors, how: str) -> Any:
    """Return weights that are refused."""
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = dict(weights)
    if how == "missing":
        del wrong[name]
    elif how == "further":
        wrong["lm_tail.weight"] = wrong[name]
    elif how == "untied":
        wrong["lm_head.weight"] = wrong["model.embed_tokens.weight"] + 1
    elif how == "shape":
        wrong[name] = wrong[name].T
    elif how == "format":
        wrong[name] = wrong[name].to(torch.int8)
    elif how == "nan":
        wrong[name] = wrong[name].clone()
        wrong[name][3, 4] = float("nan")
    return wrong if how != "no mapping" else 7


@pytest.mark.parametrize("how", ["missing", "further", "untied", "shape", "format", "nan", "no mapping"])
def test_weights_of_another_model_change_nothing(how: str, engine: Engine, weights: Tensors) -> None:
    """Neither staged nor in place; requests go on."""
    before, identity = answer(engine, DRAWN), engine.identity
    for way in WAYS:
        with pytest.raises(InvalidWeights, match="weights"):
            load(engine, spoilt(weights, how), way=way)
    assert answer(engine, DRAWN) == before
    assert (engine.identity, engine.weights) == (identity, WeightsVersion(0))


@pytest.mark.parametrize("quantization", ["none", "w8a8"])
def test_no_number_that_is_none_gets_in(quantization: Any, tmp_path: Path, weights: Tensors) -> None:
    """Wherever it is, by its tensor's name: of tensors and of files, staged and in place, before the first write."""
    with Engine.from_pretrained("demo", quantization=quantization, num_kv_blocks=32) as engine:
        before = answer(engine, DRAWN)
        for name in ("model.embed_tokens.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.weight",
                     "model.layers.3.mlp.down_proj.weight", "model.layers.2.input_layernorm.weight"):
            wrong = {**weights, name: weights[name].clone()}
            wrong[name].view(-1)[-1] = -torch.inf
            for source in (wrong, write_demo(tmp_path, wrong)):
                for way in WAYS:
                    with pytest.raises(InvalidWeights, match=f"weights, {name}: got numbers that are not finite"):
                        load(engine, source, way=way)
            assert answer(engine, DRAWN) == before


def test_tied_weights_may_have_both_names(engine: Engine, oracle: Engine, weights: Tensors) -> None:
    """As a ``state_dict`` of transformers has them."""
    with engine.new_weights() as new:
        new.load({**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    assert answer(engine, DRAWN) == answer(oracle, DRAWN)


def test_a_tensor_that_is_written_to_meanwhile_refuses_the_load(
    engine: Engine, weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of one version and half of another would be neither."""
    given, layer = {name: one.clone() for name, one in weights.items()}, fused.FusedLayer.__init__

    def write_and_make(*arguments: Any) -> None:
        given["model.norm.weight"].add_(1)
        layer(*arguments)

    before = answer(engine, DRAWN)
    monkeypatch.setattr(fused.FusedLayer, "__init__", write_and_make)
    with pytest.raises(InvalidWeights, match="written to"):
        load(engine, given)
    assert answer(engine, DRAWN) == before


def break_late(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    """Let what makes the output layer do something first, when all other products are made."""
    make = fused.OutputLayer

    def first(*arguments: Any) -> Any:
        what()
        return make(*arguments)

    monkeypatch.setattr(fused, "OutputLayer", first)


def test_a_load_in_place_that_breaks_off_leaves_no_mixture(
    engine: Engine, oracle: Engine, weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is computed until a whole version is there."""
    def fail() -> None:
        raise MemoryError

    request = engine.add_request(PROMPT, GREEDY)
    engine.step()
    with monkeypatch.context() as patch:
        break_late(patch, fail)
        with pytest.raises(MemoryError):
            load(engine, weights, running="keep", way="in_place")
    assert isinstance(request.error, WeightsIncomplete)
    assert request.sequences[0].finish_reason == "error"
    for refused in (lambda: engine.add_request(PROMPT), lambda: request.extend([5]), lambda: engine.session().ask([5])):
        with pytest.raises(WeightsIncomplete, match="weights incomplete"):
            refused()
    assert engine.step() is not None
    load(engine, weights, way="in_place")
    assert answer(engine, DRAWN) == answer(oracle, DRAWN)


@pytest.mark.parametrize("way", WAYS)
def test_ctrl_c_in_the_middle_leaves_one_version_whole(
    way: Any, engine: Engine, oracle: Engine, weights: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged it is the old one; behind the first write it waits until the new one is there."""
    before = answer(engine, DRAWN)
    with monkeypatch.context() as patch:
        break_late(patch, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            load(engine, weights, way=way)
    assert answer(engine, DRAWN) == (before if way == "staged" else answer(oracle, DRAWN))
    load(engine, weights)
    assert answer(engine, DRAWN) == answer(oracle, DRAWN)


def test_a_second_copy_is_drawn_from_a_budget_that_counts_weights(weights: Tensors) -> None:
    """Byte by byte, from the load to the end of its context, once; without room for it the old weights stay, and in
    place it needs none.
    """
    budget = MemoryBudget("32MiB", counts_weights=True)
    with Engine.from_pretrained("demo", kv_cache_memory=budget.share("8MiB")) as engine:
        left = budget.left_bytes
        num_bytes = budget.total_bytes - left - engine.stats().kv_bytes
        with engine.new_weights("1") as new:
            for _ in range(2):
                with pytest.raises(InvalidWeights):
                    new.load(spoilt(weights, "nan"))
                assert budget.left_bytes == left
            new.load(weights)
            assert budget.left_bytes == left - num_bytes
        assert (budget.left_bytes, engine.weights.label) == (left, "1")
        before, taken = answer(engine, DRAWN), budget.draw(left - num_bytes + 1)
        with pytest.raises(MemoryBudgetExceeded, match='way="in_place"'):
            load(engine, weights, "2")
        assert (budget.left_bytes, engine.weights.label) == (num_bytes - 1, "1")
        assert answer(engine, DRAWN) == before
        load(engine, weights, "2", way="in_place")
        assert (budget.left_bytes, engine.weights.label) == (num_bytes - 1, "2")
        taken.close()
        new = engine.new_weights().__enter__()
        new.load(weights)
        new.close()
        assert (budget.left_bytes, engine.weights.label) == (left, "2")
    assert budget.left_bytes == budget.total_bytes


def test_one_load_at_a_time_and_one_in_a_context(engine: Engine, weights: Tensors) -> None:
    """Two that swap at once, an empty one and a second one are refused."""
    with engine.new_weights() as new:
        with pytest.raises(EngineInUse), engine.new_weights():
            pass
        new.load(weights)
        with pytest.raises(InvalidWeights, match="second load"):
            new.load(weights)
    with pytest.raises(InvalidWeights, match="a call of load"), engine.new_weights():
        pass
    with pytest.raises(ValueError, match="version"):
        engine.new_weights("a b")


def test_two_threads_that_swap_at_once_leave_one_version_whole(
    engine: Engine, oracle: Engine, weights: Tensors
) -> None:
    """Of both one loads, or one after the other; who comes meanwhile is told, and answers are of the last version."""
    taken = list[str]()

    class Noting(EngineObserver):
        def weights_taken(self) -> None:
            taken.append(engine.weights.label)

    engine.add_observer(Noting())
    for way in WAYS:
        taken.clear()
        start, told = threading.Barrier(2), list[str]()

        def swap(version: str, way: Any = way, start: Any = start, told: Any = told) -> None:
            start.wait()
            try:
                load(engine, weights, version, way=way)
                told.append(version)
            except EngineInUse:
                told.append("in use")

        threads = [threading.Thread(target=swap, args=(version,)) for version in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(told) == 2
        assert sorted(one for one in told if one != "in use") == sorted(taken)
        assert engine.weights.label == taken[-1]
        assert answer(engine, DRAWN) == answer(oracle, DRAWN)


def test_a_fork_does_not_wait_for_a_load_of_its_parent(engine: Engine, weights: Tensors, oracle: Engine) -> None:
    """The child has no thread that would end it, and loads for itself; its parent's goes on."""
    with engine.new_weights("parent") as new:
        new.load(weights)
        if (child := os.fork()) == 0:
            try:
                load(engine, weights, "child")
                os._exit(0 if engine.weights.label == "child" else 1)
            except BaseException:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.weights.label == "parent"
    assert answer(engine, DRAWN) == answer(oracle, DRAWN)


def test_sessions_name_their_weights(
    engine: Engine, oracle: Engine, weights: Tensors, directory: Path, tmp_path: Path
) -> None:
    """KV in memory, on disk and in files is that of one version; a file of another one is refused, or recomputed."""
    parked, open_one = engine.session(GREEDY), engine.session(GREEDY)
    begun = [one.ask(PROMPT).outputs[0].token_ids for one in (parked, open_one)]
    parked.park("disk")
    parked.export(tmp_path / "six")
    load(engine, weights, "7")
    expected = answer(oracle, GREEDY, [*PROMPT, *begun[0], 9])[0]
    assert parked.parked is not None
    assert parked.parked.tier == "tokens"
    for one in (parked, open_one.fork(), open_one):
        assert one.ask([9]).outputs[0].token_ids == expected
    with pytest.raises(ModelMismatch):
        engine.import_session(tmp_path / "six")
    assert engine.import_session(tmp_path / "six", other_weights="recompute").ask([9]).outputs[0].token_ids == expected
    parked.export(tmp_path / "seven")
    assert engine.import_session(tmp_path / "seven").token_ids == parked.token_ids
    with pytest.raises(ModelMismatch, match="7#"):
        oracle.import_session(tmp_path / "seven")
