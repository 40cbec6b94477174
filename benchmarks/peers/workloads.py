"""What every peer is asked to do: greedy, end-of-text ignored, fixed output lengths.

It imports nothing but the standard library, because it runs in every peer's own environment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

#: Prompts draw from this range, which is valid for the model and for the tokenizer.
_FIRST_TOKEN, _LAST_TOKEN = 300, 4000
#: What the name of a workload with one long prompt begins with; the number of its tokens follows.
LONG = "long"


@dataclass
class Workload:
    """Prompts and how many tokens each is to be answered with."""

    name: str
    prompts: list[list[int]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    prime: Workload | None = None
    """Run before the clock starts."""

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        """Tokens to be generated."""
        return sum(self.outputs)


def workload(name: str) -> Workload:
    """Return a workload by name.

    ``heavy``: 384 requests with prompts of 1 to 32 tokens and lengths spread as in ``pagedcore bench``'s
    ``heavy-tailed``: most generate a few tokens, some 256. ``w1``: 64 ragged requests. ``w2``: 32 requests with a
    shared prefix of 512 tokens that no cache has seen; ``w2p``: the same after one request with that prefix. ``w3``:
    one stream; ``brief``: a short one. ``burst``: 16 short requests at once. ``many``: 32 requests of 64
    tokens that share none, answered with 32. ``eight``: as many of w3's shape at once;
    ``prompts``: the same, answered with one token. ``long8192``: one stream with a prompt of 8,192 tokens, or of any
    other number. ``warm``: four small ones. ``w3@1`` is of the same shape with other tokens.
    """
    base, _, variation = name.partition("@")
    rng = random.Random(f"tokens-{base}-{variation}")
    if base == "w1":
        prompt_lengths, output_lengths = random.Random(0), random.Random(1)
        lengths = [prompt_lengths.randint(16, 256) for _ in range(64)]
        outputs = [output_lengths.randint(16, 256) for _ in range(64)]
        return Workload(name, [_tokens(rng, n) for n in lengths], outputs)
    if base == "heavy":
        lengths = random.Random("heavy-tailed")
        prompts = [_tokens(rng, lengths.randint(1, 32)) for _ in range(384)]
        return Workload(name, prompts, [min(256, int(4 * lengths.paretovariate(0.9)) + 1) for _ in prompts])
    if base in ("w2", "w2p"):
        prefix = _tokens(rng, 512)
        prime = Workload("prime", [prefix + _tokens(rng, 16)], [2]) if base == "w2p" else None
        return Workload(name, [prefix + _tokens(rng, 16) for _ in range(32)], [32] * 32, prime)
    if base == "w3":
        return Workload(name, [_tokens(rng, 128)], [64])
    if base.startswith(LONG):
        return Workload(name, [_tokens(rng, int(base.removeprefix(LONG)))], [32])
    if base in ("eight", "prompts"):
        return Workload(name, [_tokens(rng, 128) for _ in range(8)], [64 if base == "eight" else 1] * 8)
    if base == "many":
        return Workload(name, [_tokens(rng, 64) for _ in range(32)], [32] * 32)
    if base == "burst":
        return Workload(name, [_tokens(rng, 32) for _ in range(16)], [8] * 16)
    if base == "brief":
        return Workload(name, [_tokens(rng, 32)], [24])
    if base == "warm":
        return Workload(name, [_tokens(rng, n) for n in (20, 90, 40, 130)], [12, 8, 16, 10])
    raise SystemExit(f"no workload {name!r}")


def _tokens(rng: random.Random, number: int) -> list[int]:
    return [rng.randrange(_FIRST_TOKEN, _LAST_TOKEN) for _ in range(number)]
