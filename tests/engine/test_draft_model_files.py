"""A second model that guesses: answers are the same bytes with it, whatever it says, and it is in nobody's way."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.test_speculation import PROMPTS, drawn_requests, forced_of, told
from pagedcore import Engine, EngineConfig, MemoryBudget, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore.drafting.drafts import Drafts
from pagedcore.errors import InvalidConfig, MemoryBudgetExceeded
from pagedcore.execution.draft_model import DraftModel
from pagedcore.scheduler.speculation import Speculation
from support.doubles import ToyBackend
from support.drafts import assert_forgotten, let_guess
from support.engine_builders import assert_all_free, make_engine, run
from support.torture import first_seed, scaled

ALONE: dict[str, Any] = {"speculation": {"sources": ["grammar"]}}
NO_SOURCE = Drafts(())


def small_model(path: Path, **changes: Any) -> Path:
    """Write a random model of the demo's tokens, with one layer."""
    shutil.copytree(DEMO_MODEL_DIR, path, ignore=shutil.ignore_patterns("*.py", "*.safetensors", "__pycache__"))
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = 1
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:1]
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.3)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that knows nothing."""
    return small_model(tmp_path_factory.mktemp("draft") / "small")


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    """An engine that guesses nothing."""
    with Engine.from_pretrained("demo", dtype="float32") as engine:
        yield engine


def always_asked(engine: Engine) -> DraftModel:
    """Let an engine ask its model wherever there is room, as if a forward took no time."""
    speculation = engine.scheduler.speculation
    assert isinstance(speculation, Speculation)
    model = speculation._model
    assert isinstance(model, DraftModel)
    model._clock = lambda: 0.0
    let_guess(engine, NO_SOURCE, engine.input_processor.vocab_size, forced=forced_of(engine), model=model)
    return model


@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=1.3, seed=6, top_k=20, top_p=0.9, repetition_penalty=1.2,
                   min_tokens=20, n=2),
], ids=["greedy", "drawn", "adjusted"])
def test_the_model_itself_is_always_right(plain: Engine, params: SamplingParams) -> None:
    """Both draw with the same seed and position, so a model that guesses for itself has every draft accepted."""
    wanted = plain.generate(PROMPTS, params)
    with Engine.from_pretrained("demo", dtype="float32", speculative_model="demo", **ALONE) as engine:
        model = always_asked(engine)
        got = engine.generate(PROMPTS, params)
        stats = engine.stats()
        assert [told(one) for one in got] == [told(one) for one in wanted]
        assert stats.num_accepted_tokens == stats.num_drafted_tokens > 60
        assert stats.speculation == "on"
        assert_forgotten(model)


def test_a_model_that_knows_nothing_changes_no_answer(plain: Engine, small: Path) -> None:
    """Everything that a request may ask for, in small pools of both models, with aborts."""
    rng = random.Random(f"draft model {first_seed()}")
    with Engine.from_pretrained(
        "demo", dtype="float32", speculative_model=str(small), max_num_batched_tokens=24, check_invariants=True,
        num_kv_blocks=11, block_size=8, max_num_seqs=8, host_kv_memory="256KiB", preemption="swap", **ALONE,
    ) as engine:
        model, live = always_asked(engine), []
        asked = drawn_requests(rng, engine, scaled(5))
        for one in asked:
            while not engine.can_accept(3):
                engine.step()
            live.append(engine.add_request(*one))
            for _ in range(rng.choice([0, 0, 3])):
                engine.step()
            if rng.random() < 0.1:
                engine.abort_request(live[-1].request_id)
        run(engine)
        assert engine.stats().num_drafted_tokens > engine.stats().num_accepted_tokens
        for one, request in zip(asked, live, strict=True):
            got = engine.output_of(request)
            if all(each.finish_reason != "abort" for each in got.outputs):
                assert told(got) == told(plain.generate([one[0]], one[1])[0]), one
        assert_all_free(engine)
        assert_forgotten(model)


def test_models_with_other_tokens_are_refused(small: Path, tmp_path: Path) -> None:
    """One token that differs is enough; without tokenizers, another number of tokens is."""
    other = shutil.copytree(small, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    names = list(vocab)[40:42]
    vocab[names[0]], vocab[names[1]] = vocab[names[1]], vocab[names[0]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidConfig, match=r"^speculative_model: its token \d+ is another one than the model's"):
        Engine.from_pretrained("demo", speculative_model=str(other), **ALONE)
    bare = small_model(tmp_path / "bare", vocab_size=AutoConfig.from_pretrained(small).vocab_size + 8)
    # Why taken: known tokens are the same, and the rest is padding.
    Engine.from_pretrained("demo", speculative_model=str(bare), **ALONE).close()
    for one in bare.glob("tokenizer*"):
        one.unlink()
    with pytest.raises(InvalidConfig, match=r"^speculative_model: got one with \d+ tokens, allowed are those"):
        Engine.from_pretrained("demo", speculative_model=str(bare), **ALONE)


def test_what_cannot_guess_is_refused_by_name(tmp_path: Path) -> None:
    """Directories that are none, or hostile, and settings that do not fit, before the engine holds anything."""
    (tmp_path / "config.json").write_text('{"model_type": "llama", "auto_map": {"AutoConfig": "evil.Config"}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    for name in (str(tmp_path), str(tmp_path / "none"), "~/x"):
        with pytest.raises(InvalidConfig, match=r"^speculative_model: "):
            make_engine(speculation="auto", speculative_model=name)
    with pytest.raises(InvalidConfig, match=r'^speculative_model: got a name, allowed is None with speculation="off"'):
        EngineConfig(speculative_model="demo", speculation="off")

    class Forward(ToyBackend):
        takes_positions_back = False

    with pytest.raises(InvalidConfig, match=r"^speculative_model: got a name, .*cannot take computed positions back"):
        make_engine(Forward(), speculation="auto", speculative_model="demo")
    with pytest.raises(InvalidConfig, match=r"^speculative_model: got one with \d+ tokens, allowed .*32\."):
        make_engine(speculation="auto", speculative_model="demo")


def test_weights_and_pool_come_from_the_budget(small: Path) -> None:
    """Of a budget they are drawn with the engine's own pool, and go back with it; what it has not is refused."""
    budget = MemoryBudget("64MiB")
    given: dict[str, Any] = {"dtype": "float32", "num_kv_blocks": 16, "kv_cache_memory": budget}
    with Engine.from_pretrained("demo", **given) as engine:
        alone, kv_bytes = budget.total_bytes - budget.left_bytes, engine.stats().kv_bytes
    with Engine.from_pretrained("demo", speculative_model=str(small), **given, **ALONE) as engine:
        drawn = budget.total_bytes - budget.left_bytes
        weights = sum(one.stat().st_size for one in small.glob("*.safetensors"))
        assert drawn - alone > 0.9 * weights
        assert engine.stats().kv_bytes == kv_bytes
    assert budget.left_bytes == budget.total_bytes
    tight = MemoryBudget(alone + 1000)
    with pytest.raises(MemoryBudgetExceeded):
        Engine.from_pretrained("demo", speculative_model=str(small), **{**given, "kv_cache_memory": tight}, **ALONE)
    assert tight.left_bytes == tight.total_bytes
