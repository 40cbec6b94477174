"""How narrow could quotes be? The quotes of ``quotes.py`` beside those of an oracle, for the very same requests.

    python benchmarks/quote_oracle.py [--seeds 41 42 43 44 45] [--requests 6000] [--every 30] [--draws 100]

The oracle is told what no engine can know: the distribution that lengths are drawn from, the cost of each kind of
step, and the record of the noise of step times. For every 30th quote it draws what may come 100 times: a length for
each request that runs or waits, given how long it is already, and a place in the record: either any place ("noise
drawn"), or one of the 400 before which steps were most like the latest ones ("noise alike"; none within 400 steps of
the true place), or the true one ("noise foreseen": every future step time). Its interval leaves out 2.5 % of the draws
on each side. One shift and one factor for all its intervals of a row are then chosen, in hindsight, such that 95 %
hold: the width at 95 %. The error of that width is the jackknife's over seeds, each of which is a run of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from bisect import bisect_right
from collections.abc import Sequence as ListOf
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from interleaved import markdown

from pagedcore import Engine, SamplingParams
from pagedcore.analysis.quotes.quote_book import SHARE, QuoteBook
from pagedcore.analysis.quotes.quoting import begin_quotes
from pagedcore.outputs import Quote
from pagedcore.scheduler.step_time import StepTimeModel
from pagedcore.sequence import Sequence

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.paced_loads import (
    NOISE,
    TIMES,
    Asked,
    Served,
    capacity,
    known,
    learnt,
    load_of,
    paced_engine,
    serve,
    share_held,
)

KINDS: Final = ("drawn", "alike", "foreseen")
MOMENTS: Final = (("start", 0), ("end", 2))
Floats = npt.NDArray[np.float64]
_NUM_ALIKE: Final = 400
_APART: Final = 400
_WINDOWS: Final = (10, 30, 100)
_NUM_LENGTHS: Final = 20_000


class Drawn(QuoteBook):
    """Forecasts with the true costs, and, if lengths are learnt, with lengths drawn from their true distribution."""

    def __init__(self, engine: Engine, seed: int, *, is_known: bool) -> None:
        super().__init__(engine.scheduler)
        self.model, self._is_known, self._rng = StepTimeModel(TIMES), is_known, random.Random(seed)
        self._lengths = sorted(one.num_output for one in load_of(1.0, _NUM_LENGTHS, 77))

    def tokens_left(self, sequence: Sequence) -> int:
        """Draw how many tokens will come."""
        if self._is_known:
            return max(1, sequence.max_tokens - sequence.num_output_tokens)
        longer = bisect_right(self._lengths, sequence.num_output_tokens)
        if longer == len(self._lengths):
            return 1
        return self._lengths[self._rng.randrange(longer, len(self._lengths))] - sequence.num_output_tokens


class Oracle:
    """Draws what becomes of requests that an engine quotes."""

    def __init__(self, engine: Engine, seed: int, num_draws: int, *, is_known: bool) -> None:
        self._engine, self._num_draws, self._is_known = engine, num_draws, is_known
        self._book, self._drawn = begin_quotes(engine), Drawn(engine, seed, is_known=is_known)
        noise = np.array(json.loads(NOISE.read_text())["cpu"])
        self._num, self._rng = len(noise), np.random.default_rng(seed)
        self._first = random.Random(seed).randrange(self._num)
        self._sums = np.concatenate([[0.0], np.cumsum(np.tile(noise, 3))])
        places = np.arange(self._num) + self._num
        self._before = np.log([(self._sums[places] - self._sums[places - one]) / one for one in _WINDOWS])

    def draws(self, asked: Asked, params: SamplingParams) -> Floats:
        """Return moments in seconds: float64 [kinds, draws, 3]."""
        [sequence] = self._engine.requests.sequences_of_quote(self._engine.prepare(asked.prompt(), params))
        self._drawn.usual_s = usual_s = self._book.usual_s
        num = 1 if self._is_known else self._num_draws
        moments = np.repeat([self._drawn.forecast([sequence]) for _ in range(num)], self._num_draws // num, axis=0)
        num_steps = np.maximum(1, np.round(moments / usual_s)).astype(int)
        now = (self._first + self._book.model.num_observed) % self._num
        return np.array([
            moments * (self._sums[place + num_steps] - self._sums[place]) / num_steps for place in self._places(now)
        ])

    def _places(self, now: int) -> tuple[Any, ...]:
        apart = np.abs(np.arange(self._num) - now)
        far = np.abs(self._before - self._before[:, [now]]).sum(axis=0)
        alike = np.argsort(np.where(np.minimum(apart, self._num - apart) < _APART, np.inf, far))[:_NUM_ALIKE]
        drawn = self._rng.integers(0, self._num, (self._num_draws, 1))
        return drawn, self._rng.choice(alike, (self._num_draws, 1)), now


def quoted(
    load: float, num: int, seed: int, every: int, num_draws: int, *, is_known: bool
) -> tuple[Floats, Floats, list[Served]]:
    """Quote all requests of a load, and some by the oracle too; the first quarter is left out, as in ``quotes.py``.

    Returns:
        draws: of the requests that the oracle quoted and the engine accepted; float64 [quotes, kinds, draws, 3].
        actual: their moments in seconds; float64 [quotes, 3].
        served: what came of all requests that were accepted, with the quotes of the engine.
    """
    rate, params_of = load * capacity(), known if is_known else learnt
    engine, clock = paced_engine(seed)
    asked, oracle = load_of(rate, num, seed), Oracle(engine, seed, num_draws, is_known=is_known)
    draws, coming, ask = dict[int, Floats](), iter(range(num)), engine.quote

    def quote(prompt: Any, params: SamplingParams) -> Quote:
        index = next(coming)
        if index >= num // 4 and index % every == 0:
            draws[index] = oracle.draws(asked[index], params)
        return ask(prompt, params)

    engine.quote = quote  # type: ignore[assignment,method-assign]
    served = serve(engine, clock, asked, params_of, quotes=True)
    taken = [index for index in draws if served[index].request is not None]
    actual = np.array([served[index].moments() for index in taken])
    accepted = [one for one in served[num // 4:] if one.request is not None]
    return np.array([draws[index] for index in taken]), actual, accepted


def width_at_share(draws: Floats, actual: Floats, unit_s: float) -> float:
    """Return the median width over value of intervals of draws, shifted and stretched alike so that 95 % hold.

    Args:
        draws: seconds [quotes, draws].
        actual: seconds [quotes].
        unit_s: one step, added to all, so that what is near has an error of no more than its share.
    """
    low, middle, high = np.log(np.quantile(draws + unit_s, [0.025, 0.5, 0.975], axis=1))
    off = np.log(actual + unit_s) - middle
    off -= np.median(off)
    below, above = np.maximum(middle - low, 1e-6), np.maximum(high - middle, 1e-6)
    factor = np.quantile(np.where(off > 0, off / above, -off / below), SHARE)
    value = np.exp(middle)
    widths = value * (np.exp(factor * above) - np.exp(-factor * below)) / np.maximum(value - unit_s, 1e-9)
    return float(np.median(widths))


def jackknife(parts: ListOf[tuple[Floats, Floats]], unit_s: float) -> str:
    """Return the width at 95 % of all parts together, and its standard error."""
    def width(some: ListOf[tuple[Floats, Floats]]) -> float:
        draws, actual = (np.concatenate([one[place] for one in some]) for place in (0, 1))
        return width_at_share(draws, actual, unit_s)

    if (num := len(parts)) < 2:
        return f"{width(parts):.2f}"
    without = [width([*parts[:index], *parts[index + 1:]]) for index in range(num)]
    return f"{width(parts):.2f} ± {float(np.std(without)) * (num - 1) ** 0.5:.2f}"


def oracle_table(load: float, num: int, seeds: ListOf[int], every: int, num_draws: int) -> list[list[str]]:
    """Quote loads, one for each seed; compare the engine's quotes (means over seeds) with the oracle's."""
    rows, unit_s = list[list[str]](), TIMES.seconds(0, 16, 16 * 100)
    for name, is_known in (("known", True), ("learnt", False)):
        runs = [quoted(load, num, seed, every, num_draws, is_known=is_known) for seed in seeds]
        for moment, place in MOMENTS:
            shares = np.mean([share_held(served, moment, place) for _, _, served in runs], axis=0)
            oracles = [
                jackknife([(draws[:, kind, :, place], actual[:, place]) for draws, actual, _ in runs], unit_s)
                for kind in range(len(KINDS))
            ]
            rows.append([f"lengths {name}", moment, f"{shares[0]:.1%}", f"{shares[1]:.3f}", *oracles])
    return rows


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[41, 42, 43, 44, 45])
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--every", type=int, default=30)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--load", type=float, default=1.5)
    options = parser.parse_args()
    rows = oracle_table(options.load, options.requests, options.seeds, options.every, options.draws)
    header = ["quotes of", "moment", "hold", "median width / value"]
    print(markdown([*header, *[f"oracle's at 95 %, noise {one}" for one in KINDS]], rows))


if __name__ == "__main__":
    main()
