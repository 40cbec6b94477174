"""A rollout function for TRL's ``GRPOTrainer``: an engine draws, and has the trainer's weights of each step.

    engine = Engine.from_pretrained(directory, dtype="float32")
    trainer = GRPOTrainer(model=directory, reward_funcs=reward, train_dataset=dataset, rollout_func=Rollout(engine))

The log-probabilities are of the distribution that tokens were drawn from, and those that ``Engine.score`` computes, bit
for bit. Nothing of TRL is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pagedcore import Engine, SamplingParams

__all__ = ["Rollout"]


class Rollout:
    """Called by a trainer with the prompts of a step, and with itself."""

    def __init__(self, engine: Engine, params: SamplingParams | None = None) -> None:
        """Take an engine of the model that is trained, which nobody else steps.

        Args:
            engine: its weights become those of the trainer's model, tensor by tensor.
            params: of the completions; ``None``: the trainer's temperature and longest completion.
        """
        self.engine, self._params = engine, params
        self._step: int | None = None

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Complete each prompt once; a trainer has a prompt in its list as often as it wants completions.

        Args:
            prompts: texts, or lists of chat messages.
            trainer: its ``state.global_step`` says when there are new weights.

        Returns:
            Per prompt: "prompt_ids", "completion_ids", "logprobs" of the completion's tokens, and "weights", the number
            of the version that drew them.

        Raises:
            InvalidWeights: the trainer's model is another one, or a part of one, as adapters are.
            InvalidRequest: a prompt or a parameter is refused.
            RequestFailed: a completion could not be computed.
        """
        step = trainer.state.global_step
        if step != self._step:
            model = trainer.accelerator.unwrap_model(trainer.model)
            with self.engine.new_weights(version=f"step-{step}") as weights:
                weights.load(model.state_dict())
            self._step = step
        params = self._params or SamplingParams(
            max_tokens=trainer.max_completion_length, temperature=trainer.temperature)
        params = replace(params, n=1, logprobs=0, logprobs_mode="processed")
        outputs = self.engine.generate(prompts, params, show_progress=False)
        for output in outputs:
            output.raise_for_error()
        completions = [output.outputs[0] for output in outputs]
        return {
            "prompt_ids": [list(output.prompt_token_ids) for output in outputs],
            "completion_ids": [list(one.token_ids) for one in completions],
            "logprobs": [[token.logprob for token in one.logprobs or ()] for one in completions],
            "weights": [self.engine.weights.number] * len(outputs),
        }
