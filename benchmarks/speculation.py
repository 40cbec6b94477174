"""What drafts are worth on token streams that are forced upon a model, so that acceptance is that of these texts.

    python benchmarks/speculation.py --tokenizer TOKENIZER.json                       # counts, without a model
    python benchmarks/speculation.py --tokenizer TOKENIZER.json --model MODEL_DIR [--dtype bfloat16] [--streams 1,8,32]

The streams are those of ``speculation_traces.py``: edits of code, JSON and calls of tools, summaries with quotations,
prose and chat. A model of ``peers/make_model.py`` with random weights computes them: whatever it says of a position,
the stream's next token is what follows. Each request is asked with drafts and without, in turns; what it has as drafts
is its own text only, or with ``--completions`` that of the others too, each answered once before. Prompts are computed
before the first turn. Printed are tokens a second from the first token of all streams on, and the ratio of a pair. The
tokenizer is that of the model whose shape it is (Qwen2.5's ``tokenizer.json``, for example). Run it with nothing else
on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from interleaved import Budget, markdown, median_and_spread, ratios
from speculation_traces import KINDS, Trace, traces
from tokenizers import Tokenizer

from pagedcore import Engine, SamplingParams
from pagedcore.drafting.drafts import SOURCES, Drafts
from pagedcore.drafting.offers import share_out

ROW_COSTS = (0.03, 0.06, 0.12)
"""What one more row takes, as a share of a step with one."""


def counted(
    some: Sequence[Trace], sources: Sequence[str], row_cost: float, most: int = 16
) -> tuple[float, float, float]:
    """Follow streams one after the other, as if a row cost this much.

    Returns the ratio to steps without drafts, tokens a step, and drafts a step.
    """
    costs = [1.0 + row_cost * count for count in range(most + 1)]
    drafts, seconds, num_tokens, num_drafts, num_steps = Drafts(sources), 0.0, 0, 0, 0
    for number, trace in enumerate(some):
        tokens, whole = list(trace.prompt), [*trace.prompt, *trace.completion]
        drafts.begin(number, b"", tokens)
        while (num_left := len(whole) - len(tokens)) > 0:
            chances = [drafts.chances(number, tokens)]
            (count,) = share_out(chances, [min(most, num_left - 1)], most, num_sampled=1, seconds=costs)
            offered, right = drafts.propose(number, tokens, count), 0
            while right < len(offered) and offered[right] == whole[len(tokens) + right]:
                right += 1
            tokens += whole[len(tokens) : len(tokens) + right + 1]
            drafts.observe(number, len(tokens), len(offered), right)
            seconds, num_steps = seconds + 1 + row_cost * len(offered), num_steps + 1
            num_tokens, num_drafts = num_tokens + right + 1, num_drafts + len(offered)
        drafts.forget(number, tokens, keep=True)
    return num_tokens / seconds, num_tokens / num_steps, num_drafts / num_steps


def count(some: Sequence[Trace]) -> None:
    """Print what the streams would gain."""
    table = []
    for kind in KINDS:
        of_kind = [one for one in some if one.kind == kind]
        for sources in (SOURCES[:1], SOURCES):
            found = [counted(of_kind, sources, cost) for cost in ROW_COSTS]
            table.append([kind, " + ".join(sources), *(f"{ratio:.2f} ({tokens:.2f} of {1 + offered:.1f})"
                                                      for ratio, tokens, offered in found)])
    print(markdown(["kind", "from", *(f"a row costs {cost:g}: ratio (tokens of rows)" for cost in ROW_COSTS)], table))


class Forced:
    """A model that computes each batch and then says what the streams say."""

    def __init__(self, model: Any) -> None:
        self._model, self._streams = model, dict[int, Sequence[int]]()

    @property
    def decodes_greedily(self) -> bool:
        """As the model; there is no other way to force a token here."""
        assert self._model.decodes_greedily
        return True

    def force(self, sequence_id: int, tokens: Sequence[int]) -> None:
        """Let a sequence have these tokens, prompt included."""
        self._streams[sequence_id] = tokens

    def forward_greedily(self, batch: Any, barred: Any) -> Any:
        """Compute the batch, and return the tokens behind its positions."""
        said = self._model.forward_greedily(batch, barred)
        rows = np.searchsorted(batch.query_start, batch.logits_rows, side="right") - 1
        for place, (row, at) in enumerate(zip(rows.tolist(), batch.logits_rows.tolist(), strict=True)):
            stream = self._streams[int(batch.seq_ids[row])]
            # Why: behind a wrong draft there may be no such token.
            position = min(int(batch.positions[at]) + 1, len(stream) - 1)
            said[place] = stream[position]
        return said


def run(engine: Engine, forced: Forced, some: Sequence[Trace], *, speculate: bool) -> float:
    """Return the tokens a second with which streams go on side by side, once each has its first token."""
    requests = []
    for one in some:
        params = SamplingParams(max_tokens=len(one.completion), temperature=0.0, ignore_eos=True)
        request = engine.add_request(list(one.prompt), params, speculate=speculate)
        requests.append(request)
        forced.force(request.sequences[0].sequence_id, [*one.prompt, *one.completion])
    sequences = [request.sequences[0] for request in requests]
    while not all(sequence.num_output_tokens for sequence in sequences):
        engine.step()
    num_before, started = sum(one.num_output_tokens for one in sequences), time.perf_counter()
    while engine.has_pending_requests():
        engine.step()
    seconds = time.perf_counter() - started
    for one, sequence in zip(some, sequences, strict=True):
        assert sequence.output_token_ids == list(one.completion)
    for request in requests:
        engine.remove_request(request)
    return (sum(len(one.completion) for one in some) - num_before) / seconds


def measure(given: argparse.Namespace, some: Sequence[Trace]) -> None:
    """Run all kinds with and without drafts in turns, and print a table."""
    numbers = [int(number) for number in given.streams.split(",")]
    longest = max(len(one.prompt) + len(one.completion) for one in some)
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    budget, num_done = Budget(given.minutes), 0
    with Engine.from_pretrained(
        given.model, dtype=given.dtype, quantization=given.quantization, max_num_seqs=max(numbers),
        speculation={"sources": list(SOURCES if given.completions else SOURCES[:1])},
        num_kv_blocks=(len(some) + max(numbers)) * (2 + longest // 16), num_threads=given.threads,
    ) as engine:  # fmt: skip
        runner: Any = engine._runner
        runner._greedy = forced = Forced(runner._greedy)
        chosen_kinds = given.kinds.split(",")
        run(engine, forced, [one for one in some if one.kind in chosen_kinds][: max(numbers)], speculate=False)
        while num_done < given.pairs and budget.has_time_for_another(num_done):
            for number in numbers:
                for kind in chosen_kinds:
                    of_kind = [one for one in some if one.kind == kind]
                    chosen = [of_kind[(num_done + place) % len(of_kind)] for place in range(number)]
                    # Why first: prompts are computed once, and the kernels of this number of rows are recorded.
                    run(engine, forced, [one.cut(8) for one in chosen], speculate=True)
                    pair = {way: run(engine, forced, chosen, speculate=way)
                            for way in ((True, False) if num_done % 2 else (False, True))}
                    found.setdefault((kind, number), []).append((pair[True], pair[False]))
                    print(f"{kind}, {number}: {pair[False]:.1f} and {pair[True]:.1f} tokens/s", flush=True)
            num_done += 1
        stats = engine.stats()
        print(f"{stats.num_drafted_tokens} drafts, {stats.num_accepted_tokens} accepted")
    table = []
    for (kind, number), pairs in found.items():
        with_drafts, without = zip(*pairs, strict=True)
        table.append([kind, str(number), *(f"{statistics.median(one):.1f}" for one in (without, with_drafts)),
                      median_and_spread(ratios(with_drafts, without)), str(len(pairs))])
    print(markdown(["kind", "streams", "tokens/s without", "with drafts", "ratio", "pairs"], table))


def main() -> None:
    """Count, or measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--traces", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=320, help="most tokens of a completion")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--streams", default="1,8,32")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--completions", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--pairs", type=int, default=20, help="most pairs of runs of each kind")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    some = traces(Tokenizer.from_file(given.tokenizer), given.traces, given.tokens)
    if given.model is None:
        count(some)
    else:
        measure(given, some)


if __name__ == "__main__":
    main()
