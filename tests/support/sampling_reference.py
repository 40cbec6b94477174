"""What sampling means, written as plainly as possible: sorts, float64, one row at a time. The oracle of the tests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

#: Probability by which float32 sums may differ from exact ones; every comparison that uses it says so.
ROUNDING = 1e-5
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Draw:
    """The parameters of one draw."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0


def weights_of(logits, temperature):
    """Probabilities but for a factor."""
    x = logits.astype(np.float64)
    return np.exp((x - x.max()) / temperature)


def kept_tokens(logits, draw):
    """Ids that may be drawn, ascending: sort by logit and id, cut to k, cut to p, cut to min_p."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    order = order[np.isfinite(logits[order])]
    if 0 < draw.top_k < len(logits):
        order = order[: draw.top_k]
    weights = weights_of(logits, draw.temperature)
    if draw.top_p < 1:
        sums = np.cumsum(weights[order])
        order = order[: np.searchsorted(sums, draw.top_p * sums[-1]) + 1]
    return np.sort(order[weights[order] >= draw.min_p])


def mix(word):
    """Finaliser of SplitMix64."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def uniform(seed, position):
    """The random number of a request's position."""
    salted = seed * 0x9E3779B97F4A7C15 + mix(position + 0x632BE59BD9B4E019 & _MASK)
    return (mix(salted & _MASK) >> 11) / 2**53


def choose(logits, draw):
    """The token of one draw."""
    if draw.temperature == 0:
        return int(np.argmax(logits))
    kept = kept_tokens(logits, draw)
    sums = np.cumsum(weights_of(logits, draw.temperature)[kept])
    place = np.searchsorted(sums, uniform(draw.seed, draw.position) * sums[-1], side="right")
    return int(kept[min(place, len(kept) - 1)])


def explains(logits, draw, token):
    """Whether ``token`` is the choice for some rounding: sums of probability and thresholds off by ``ROUNDING``."""
    weights = weights_of(logits, draw.temperature)
    number = uniform(draw.seed, draw.position)
    for shift in (-ROUNDING, 0.0, ROUNDING):
        top_p = min(max(draw.top_p + shift, 1e-300), 1.0) if draw.top_p < 1 else 1.0
        for factor in (1 - ROUNDING, 1.0, 1 + ROUNDING):
            variant = Draw(draw.temperature, draw.top_k, top_p, draw.min_p * factor)
            kept = kept_tokens(logits, variant)
            sums = np.concatenate(([0.0], np.cumsum(weights[kept]))) / weights[kept].sum()
            for place in np.flatnonzero(kept == token):
                if sums[place] - ROUNDING <= number <= sums[place + 1] + ROUNDING:
                    return True
    return False
