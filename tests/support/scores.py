"""Log-probabilities of every token of three prompts, by an engine and by transformers' own forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagedcore import Engine, SamplingParams
from pagedcore.models.decoders.fused import FusedDecoder
from support.families import VOCAB

PROMPTS = [[(7 * i + n) % VOCAB for i in range(n)] for n in (5, 19, 33)]
SCORES = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=1)


def engine_of(model: Any, **settings: Any) -> Engine:
    """Return a small engine on one thread, in float32."""
    settings = {"num_kv_blocks": 64, "max_num_seqs": 4, "num_threads": 1, "dtype": "float32", **settings}
    return Engine.from_pretrained(model, **settings)


def scores_of(model: Any, *, must_fuse: bool = False, **settings: Any) -> np.ndarray[Any, Any]:
    """Log-probabilities of every token of the prompts; ``must_fuse``: by the fused decoder and no other."""
    with engine_of(model, **settings) as engine:
        assert engine.stats().is_schedule_invariant
        if must_fuse:
            assert isinstance(engine._runner.backend._decoder, FusedDecoder)  # type: ignore[attr-defined]
        outputs = engine.generate(PROMPTS, SCORES, show_progress=False)
    return np.array([one.logprob for output in outputs for one in (output.prompt_logprobs or ())[1:]])


@torch.inference_mode()
def scores_of_transformers(model: Any) -> np.ndarray[Any, Any]:
    """The same by transformers' own forward."""
    parts = []
    for prompt in PROMPTS:
        logprobs = model(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        parts += [logprobs[place - 1, token].item() for place, token in enumerate(prompt) if place]
    return np.array(parts)
