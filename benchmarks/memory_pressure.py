"""Four times as much KV as there is room for: what each way of making room costs, on six workloads and their mix.

    python benchmarks/memory_pressure.py [--minutes 7] [--rounds 9] [--out TABLE.md] [--json FILE]

"auto" chooses by its cost model; the others are habits, see ``tests/support/pressure_workloads.py``. In a round every
way answers the same requests with the same model and the same pool, in one process and in turn; all have to give the
same tokens, or the script stops. Every round has requests of its own, so that it is not luck who packs well, and times
are compared within rounds. What was done (steps, tokens computed, bytes moved) hardly depends on the machine's noise;
"priced" is what that would take at the prices the engine measured, the noise left out. The model has random weights:
its answers mean nothing, its work is real.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from interleaved import Budget, markdown, median_and_spread, ratios, turns
from transformers import Qwen2Config, Qwen2ForCausalLM

from pagedcore import Engine, SamplingParams
from pagedcore.kv_cache.host_cache import Direction

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.pressure_workloads import (
    BLOCK_SIZE,
    MODES_WITH_HOST,
    OVERSUBSCRIPTION,
    Workload,
    workloads,
)

MODES = ("auto", "swap", "recompute", "wait")
MIB = 2**20


@dataclass(frozen=True)
class Run:
    """One workload answered in one mode."""

    seconds: float
    num_steps: int
    num_tokens: int
    """Positions computed, those computed again included."""
    out_bytes: int
    in_bytes: int
    num_stalled_rows: int
    num_preemptions: dict[str, int]


@dataclass(frozen=True)
class Prices:
    """Seconds that an engine has measured."""

    step_s: float
    token_s: float
    out_byte_s: float
    in_byte_s: float

    def of(self, run: Run) -> float:
        """Price what was done."""
        moving_s = run.out_bytes * self.out_byte_s + run.in_bytes * self.in_byte_s
        return run.num_steps * self.step_s + run.num_tokens * self.token_s + moving_s


def save_model(directory: str) -> None:
    """Write a model of 29 million parameters with the shape of small chat models."""
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=512, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, intermediate_size=1536,
        vocab_size=4096, max_position_embeddings=2048, tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)


def run(model: str, workload: Workload, mode: str) -> tuple[Run, list[tuple[int, ...]], Prices]:
    """Answer a workload; return what was done, the tokens, and the engine's prices."""
    with Engine.from_pretrained(
        model, num_kv_blocks=workload.num_blocks, block_size=BLOCK_SIZE, preemption=mode, max_num_waiting=256,
        host_kv_memory="512MiB" if mode in MODES_WITH_HOST else None,
    ) as engine:
        requests = [
            engine.add_request(prompt, SamplingParams(max_tokens=answer, min_tokens=answer, ignore_eos=True))
            for prompt, answer in workload.requests
        ]
        before = time.perf_counter()
        while engine.has_pending_requests():
            engine.step()
        seconds = time.perf_counter() - before
        stats, costs = engine.stats(), engine.scheduler.costs
        times = costs.steps.times
        done = Run(
            seconds, stats.num_steps, stats.num_computed_tokens, stats.swapped_out_bytes, stats.swapped_in_bytes,
            stats.num_stalled_rows, stats.num_preemptions_by_kind,
        )
        block_bytes = stats.kv_bytes // stats.num_blocks
        byte_s = [costs.moves[way].per_unit_s / block_bytes for way in (Direction.OUT, Direction.IN)]
        tokens = [request.output().outputs[0].token_ids for request in requests]
        return done, tokens, Prices(times.fixed_s, times.prefill_token_s, *byte_s)


Results = dict[str, dict[str, list[Run]]]


def measure(num_rounds: int, minutes: float) -> tuple[Results, Prices]:
    """Run all workloads in all modes, round by round; return the runs by workload and mode, and the median prices."""
    results: Results = {workload.name: {mode: [] for mode in MODES} for workload in workloads()}
    prices: list[Prices] = []
    with TemporaryDirectory() as directory:
        save_model(directory)
        run(directory, Workload("warm up", workloads()[0].requests[:4]), "auto")
        budget = Budget(minutes)
        for number, modes in enumerate(turns(MODES, num_rounds)):
            if not budget.has_time_for_another(number):
                break
            for workload in workloads(number):
                answers = list[list[tuple[int, ...]]]()
                for mode in modes:
                    done, tokens, measured = run(directory, workload, mode)
                    results[workload.name][mode].append(done)
                    answers.append(tokens)
                    if mode in MODES_WITH_HOST:
                        prices.append(measured)
                if any(tokens != answers[0] for tokens in answers):
                    raise SystemExit(f"{workload.name}: the ways give different tokens")
    names = ("step_s", "token_s", "out_byte_s", "in_byte_s")
    return results, Prices(*(statistics.median(getattr(one, name) for one in prices) for name in names))


def compare(results: Results) -> str:
    """Write how long "auto" took beside each of the others, and beside the best of them."""
    rows = []
    for name, runs in results.items():
        seconds = {mode: [one.seconds for one in runs[mode]] for mode in MODES}
        best = min(MODES[1:], key=lambda mode: statistics.median(seconds[mode]))
        cells = [median_and_spread(ratios(seconds["auto"], seconds[mode])) for mode in MODES[1:]]
        to_best = statistics.median(ratios(seconds["auto"], seconds[best]))
        rows.append([name, f"{statistics.median(seconds['auto']):.2f}", *cells, f"{to_best:.3f} ({best})"])
    return markdown(["workload", "auto, s", *(f"auto / {mode}" for mode in MODES[1:]), "auto / best"], rows)


def count(results: Results, prices: Prices) -> str:
    """Write what was done in all rounds together, its price, and that price relative to the cheapest mode's."""
    rows = []
    for name, runs in results.items():
        priced = {mode: sum(map(prices.of, runs[mode])) for mode in MODES}
        for mode, some in runs.items():
            kinds = {kind: sum(one.num_preemptions[kind] for one in some) for kind in some[0].num_preemptions}
            preempted = " ".join(f"{kind} {times}" for kind, times in kinds.items() if times)
            moved = sum(one.out_bytes + one.in_bytes for one in some) / MIB
            rows.append([
                name, mode, str(sum(one.num_steps for one in some)), str(sum(one.num_tokens for one in some)),
                f"{moved:.0f}", str(sum(one.num_stalled_rows for one in some)), preempted or "none",
                f"{priced[mode]:.2f}", f"{priced[mode] / min(priced.values()):.3f}",
            ])
    header = ["workload", "way", "steps", "tokens computed", "MiB moved", "rows stood still", "preempted"]
    return markdown([*header, "priced, s", "/ cheapest"], rows)


def main() -> None:
    """Measure, print, and keep the figures if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=7.0)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results, prices = measure(arguments.rounds, arguments.minutes)
    num_rounds = len(results["mix"]["auto"])
    about = (
        f"{num_rounds} rounds, pool for 1/{OVERSUBSCRIPTION} of the demand; prices: "
        f"{prices.step_s * 1e3:.2f} ms a step, {prices.token_s * 1e3:.3f} ms a token, "
        f"{prices.out_byte_s * 1e3 * MIB:.3f} and {prices.in_byte_s * 1e3 * MIB:.3f} ms a MiB out and in. "
        "Ratios: median (smallest - largest)."
    )
    text = "\n\n".join([about, compare(results), count(results, prices)])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if arguments.json is not None:
        runs = {
            name: {mode: [asdict(one) for one in some] for mode, some in of.items()} for name, of in results.items()
        }
        arguments.json.write_text(json.dumps({"prices": asdict(prices), "runs": runs}, indent=1))


if __name__ == "__main__":
    main()
