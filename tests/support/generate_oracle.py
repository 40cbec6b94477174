"""What ``model.generate`` of transformers makes of three prompts: the oracle of greedy tokens."""

from __future__ import annotations

from typing import Any

import torch

from support.families import VOCAB

NUM_TOKENS = 12
PROMPT_LENGTHS = (3, 19, 9)


def make_prompts() -> list[list[int]]:
    """Three random prompts of different lengths."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def generate_alone(model: Any, prompt: list[int]) -> list[int]:
    """The tokens transformers generates for one prompt, end token included."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()
