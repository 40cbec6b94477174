"""Six workloads over a pool for a quarter of what they want, and their mix: what ``memory_pressure.py`` measures.

They differ in what it costs to take blocks away. ``tests/scheduler/test_preemption_costs.py`` runs them at fixed
prices.

"auto" is compared with habits: always to swap, always to recompute, always to wait. Who always swaps has host memory
and copies everything there, what finished requests leave included; the others never move anything, so they have none.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

BLOCK_SIZE = 16
OVERSUBSCRIPTION = 4
MODES_WITH_HOST = ("auto", "swap")
Requests = list[tuple[list[int], int]]


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests as (prompt, answer length), all there from the start; one workload equals no other."""

    name: str
    requests: Requests

    @property
    def num_blocks(self) -> int:
        """The pool: a quarter of what up to 32 of the requests want at once, and room for the longest alone."""
        sizes = sorted((-(-(len(prompt) + answer) // BLOCK_SIZE) for prompt, answer in self.requests), reverse=True)
        return max(sizes[0], sum(sizes[:32]) // OVERSUBSCRIPTION)


def workloads(seed: int = 0) -> list[Workload]:
    """Make six workloads that differ in what is cheap, and their mix.

    Who comes when decides how well they pack, by one or two percent either way; several seeds tell luck from choice.
    """
    rng = random.Random(seed)

    def prompt(low: int, high: int) -> list[int]:
        return [rng.randrange(4000) for _ in range(rng.randint(low, high))]

    def many(count: int, make: Callable[[], tuple[list[int], int]]) -> Requests:
        return [make() for _ in range(count)]

    system = prompt(192, 192)
    kinds = {
        "short prompts, long answers": many(32, lambda: (prompt(8, 24), rng.randint(96, 160))),
        "long prompts, short answers": many(32, lambda: (prompt(160, 320), rng.randint(8, 40))),
        "long prompts, long answers": many(20, lambda: (prompt(160, 320), rng.randint(96, 160))),
        "one system prompt": many(32, lambda: (system + prompt(8, 32), rng.randint(32, 96))),
        "few giants among dwarfs": many(4, lambda: (prompt(480, 640), 160)) + many(28, lambda: (prompt(8, 24), 32)),
        "all the same length": many(32, lambda: (prompt(64, 64), 96)),
    }
    mix = [request for requests in kinds.values() for request in requests[:8]]
    rng.shuffle(mix)
    return [Workload(name, requests) for name, requests in kinds.items()] + [Workload("mix", mix)]
