"""GRPO on the demo model: the engine draws, torch learns, and the new weights go into the engine between two steps.

What was drawn and what is scored afterwards are the same function of the same weights: their ratio is exactly 1.0 for
every token, with prefix cache, preemption, drafts and company on.
"""

import math
import random
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from pagedcore import Engine, SamplingParams
from pagedcore.demo_model import DEMO_MODEL_DIR

DRAWN = SamplingParams(max_tokens=12, temperature=2.0, n=4, logprobs=0, logprobs_mode="processed")


def learner_logprobs(model: torch.nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """Return the learner's log-probability of each token, by torch's own forward."""
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    every = (logits.float() / DRAWN.temperature).log_softmax(-1)
    return every.gather(1, torch.tensor(completion)[:, None])[:, 0]


def main(num_steps: int = 200) -> None:
    """Learn to answer sums, and show that nothing was drawn off the policy."""
    rng, num_tokens, rewards = random.Random(0), 0, list[float]()
    model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL_DIR, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with Engine.from_pretrained("demo", dtype="float32", speculation="auto", block_size=16, num_kv_blocks=6) as engine:
        for step in range(num_steps):
            sums = [(rng.randint(2, 40), rng.randint(2, 40)) for _ in range(3)]
            outputs = engine.generate([f"What is {a} + {b}?" for a, b in sums], DRAWN)
            loss = torch.zeros(())
            for (a, b), output in zip(sums, outputs, strict=True):
                given = [float(f"= {a + b}." in one.text) for one in output.outputs]
                prompt, mean = list(output.prompt_token_ids), sum(given) / len(given)
                rewards += given
                for reward, one in zip(given, output.outputs, strict=True):
                    (score,) = engine.score(prompt, [list(one.token_ids)], params=replace(DRAWN, n=1))
                    for old, new in zip(score.logprobs, one.logprobs, strict=True):
                        assert math.exp(old - new.logprob) == 1.0
                    num_tokens += len(one.token_ids)
                    moved = learner_logprobs(model, prompt, list(one.token_ids)) - torch.tensor(score.logprobs)
                    loss = loss - (reward - mean) * moved.exp().clamp(0.8, 1.2).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with engine.new_weights(version=str(step + 1)) as weights:
                weights.load(model.state_dict())
        print(f"{num_steps} steps, {num_tokens} tokens, ratio exactly 1.0 for all; weights {engine.weights.label}")
        print(f"{engine.stats().num_preemptions} preemptions, {engine.stats().num_accepted_tokens} drafts kept")
        print(f"right: {sum(rewards[:60])} of the first 60, {sum(rewards[-60:])} of the last")


if __name__ == "__main__":
    main()
