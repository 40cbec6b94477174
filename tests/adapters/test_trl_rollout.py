"""The rollout function for TRL: what its trainer asks of one, over weights that change from step to step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR
from pagedcore_trl import Rollout

REQUIRED = {"prompt_ids", "completion_ids", "logprobs"}
"""What ``GRPOTrainer`` refuses to go on without; other keys are given to its reward functions, one value per prompt."""
PROMPTS: list[Any] = ["What is 2 + 3?", "What is 2 + 3?", [{"role": "user", "content": "What is 4 + 4?"}]]


class StandIn:
    """What a trainer has that a rollout function may ask for."""

    temperature, max_completion_length = 0.7, 9

    def __init__(self) -> None:
        tensors = load_file(DEMO_MODEL_DIR / "model.safetensors")
        self.model = SimpleNamespace(state_dict=lambda: tensors)
        self.tensors, self.state = tensors, SimpleNamespace(global_step=0)
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)


def test_a_trainer_gets_what_it_asks_for_from_its_present_weights() -> None:
    """Lists of token ids and of one number per token, which are those of a score; a step's weights are loaded once."""
    trainer = StandIn()
    with Engine.from_pretrained("demo", dtype="float32") as engine:
        rollout, seen = Rollout(engine), list[int]()
        for step in (0, 0, 1):
            if step != trainer.state.global_step:
                for one in trainer.tensors.values():
                    one.mul_(1.02)
                trainer.state.global_step = step
            output = rollout(PROMPTS, trainer)
            assert output.keys() >= REQUIRED
            assert {len(values) for values in output.values()} == {len(PROMPTS)}
            for prompt, ids, logprobs in zip(*(output[name] for name in ("prompt_ids", "completion_ids", "logprobs")),
                                             strict=True):
                assert torch.tensor(logprobs).shape == torch.tensor(ids).shape
                assert 0 < len(ids) <= 9
                (score,) = engine.score(prompt, [ids], params=SamplingParams(
                    temperature=0.7, logprobs_mode="processed"))
                assert list(score.logprobs) == logprobs
            seen += output["weights"]
        assert engine.weights.label == "step-1"
    first, second = sorted(set(seen))
    assert seen == [first] * 6 + [second] * 3
