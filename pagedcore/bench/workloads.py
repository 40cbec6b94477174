"""What is measured: workloads, prompts as token ids with the number of tokens to generate, and random weights.

``w1``, ``w2``, ``w3`` draw from ``random.Random`` with fixed seeds, so that other engines can be given the very same
tokens on every machine; their digests are recorded in the tests. ``throughput.py`` runs them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pagedcore.errors import InvalidConfig

NAMES: Final = ("heavy-tailed", "uniform", "ragged", "w1", "w2", "w3")
_PEER_IDS: Final = (300, 4000)
"""Half-open range of the token ids of w1 to w3."""
_RAGGED_IDS: Final = (32, 256)
"""Half-open range of the token ids of "ragged": inside any model's vocabulary."""
_LONGEST: Final = 256
_TAIL: Final = 0.9
"""Exponent of the Pareto distribution of heavy-tailed lengths: below 1 a few requests have most of the tokens."""
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "tiny": {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 768, "vocab_size": 4096, "max_position_embeddings": 4096,
    },
    "qwen05b": {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "intermediate_size": 4864, "vocab_size": 151936, "max_position_embeddings": 32768,
    },
}
"""Of models with random weights, whose speed is that of real ones; "qwen05b" is that of Qwen2.5-0.5B."""



@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that arrive together: greedy, each of a fixed length, end-of-sequence tokens ignored."""

    name: str
    prompts: tuple[tuple[int, ...], ...]
    num_outputs: tuple[int, ...]
    """Tokens to generate, per prompt."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens to generate in all."""
        return sum(self.num_outputs)

    def padding_waste(self, num_slots: int) -> float:
        """Share of positions that are padding if batches of ``num_slots`` requests are padded to rectangles."""
        padded = 0
        for start in range(0, len(self.prompts), num_slots):
            batch = slice(start, start + num_slots)
            longest = max(map(len, self.prompts[batch])) + max(self.num_outputs[batch])
            padded += len(self.prompts[batch]) * longest
        return 1 - (self.num_prompt_tokens + self.num_output_tokens) / padded


def make_workload(name: str, max_model_len: int) -> Workload:
    """Make the workload called ``name``.

    ``heavy-tailed``: 384 requests, most of which generate a few tokens and some 256. ``uniform``: 128 requests of one
    length. ``ragged``: 64 requests of lengths that are all as likely. These three are shortened to fit
    ``max_model_len``. ``w1``: 64 ragged requests of 16 to
    256 tokens in and out. ``w2``: 32 requests that share 512 tokens. ``w3``: one request of 128 tokens, 64 out.

    Raises:
        InvalidConfig: there is no such workload, or the model's context is too short for it.
    """
    require_name(name)
    rng = random.Random("ragged" if name == "ragged" else f"tokens-{name}-")
    longest = max(2, min(_LONGEST, max_model_len // 2))
    if name == "heavy-tailed":
        prompts = tuple(_ids(rng, rng.randint(1, max(1, longest // 8)), _RAGGED_IDS) for _ in range(384))
        outputs = tuple(min(longest, int(longest / 64 * rng.paretovariate(_TAIL)) + 1) for _ in prompts)
    elif name == "uniform":
        prompts = tuple(_ids(rng, max(1, longest // 8), _RAGGED_IDS) for _ in range(128))
        outputs = (max(1, longest // 4),) * 128
    elif name == "ragged":
        shortest = max(1, longest // 16)
        prompts = tuple(_ids(rng, rng.randint(shortest, longest), _RAGGED_IDS) for _ in range(64))
        outputs = tuple(rng.randint(shortest, longest) for _ in prompts)
    elif name == "w1":
        prompt_lengths, output_lengths = random.Random(0), random.Random(1)
        prompts = tuple(_ids(rng, prompt_lengths.randint(16, _LONGEST)) for _ in range(64))
        outputs = tuple(output_lengths.randint(16, _LONGEST) for _ in prompts)
    elif name == "w2":
        prefix = _ids(rng, 512)
        prompts, outputs = tuple(prefix + _ids(rng, 16) for _ in range(32)), (32,) * 32
    else:
        prompts, outputs = (_ids(rng, 128),), (64,)
    return _fitting(Workload(name, prompts, outputs), max_model_len)


def require_name(name: str) -> None:
    """Raise ``InvalidConfig`` unless there is a workload called ``name``."""
    if name not in NAMES:
        raise InvalidConfig(f"workload: got {name!r}, allowed is one of {', '.join(NAMES)}.")


def load_prompts(path: Path, num_outputs: int, max_model_len: int) -> Workload:
    """Read a JSON file with a list of prompts, each a list of token ids, and ask ``num_outputs`` tokens for each.

    Raises:
        InvalidConfig: the file holds something else, or a prompt does not fit the model's context.
    """
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"prompts: the file cannot be read as JSON: {type(error).__name__}.") from None
    are_token_ids = isinstance(prompts, list) and prompts and all(
        isinstance(prompt, list) and set(map(type, prompt)) == {int} for prompt in prompts)
    if not are_token_ids:
        raise InvalidConfig("prompts: the file needs a list of prompts, each a list of token ids.")
    return _fitting(Workload("file", tuple(map(tuple, prompts)), (num_outputs,) * len(prompts)), max_model_len)


def _fitting(workload: Workload, max_model_len: int) -> Workload:
    needed = max(len(prompt) + more for prompt, more in zip(workload.prompts, workload.num_outputs, strict=True))
    if needed > max_model_len:
        raise InvalidConfig(
            f"workload: {workload.name!r} needs a context of {needed} tokens, this model has {max_model_len}; "
            "take another model or the workload ragged."
        )
    return workload


def _ids(rng: random.Random, count: int, bounds: tuple[int, int] = _PEER_IDS) -> tuple[int, ...]:
    return tuple(rng.randrange(*bounds) for _ in range(count))


def random_model(shape: str, dtype: str) -> Any:
    """Build a Qwen2 model of ``shape`` with random weights, the same ones every time.

    Raises:
        InvalidConfig: there is no such shape.
    """
    if shape not in SHAPES:
        raise InvalidConfig(f"random weights: got {shape!r}, allowed is one of {', '.join(SHAPES)}.")
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen2Config(tie_word_embeddings=True, **SHAPES[shape]), dtype=getattr(torch, dtype)
    ).eval()
