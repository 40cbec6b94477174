"""Three sequences of 10, 20 and 30 tokens in one batch: as one finishes, the batch shrinks and its blocks are free.

Nothing is padded and no request waits for another: step 11 computes two tokens, step 21 one.
"""

from itertools import groupby

from pagedcore import Engine, SamplingParams


def main() -> None:
    """Run the three sequences and print, for each batch size, the steps it lasted and the blocks it held."""
    # Without guesses each step computes one token of each sequence.
    with Engine.from_pretrained("demo", num_kv_blocks=16, speculation="off") as engine:
        requests = [
            engine.add_request(prompt, SamplingParams(max_tokens=num_tokens, ignore_eos=True))
            for prompt, num_tokens in [("What is 2 + 3?", 10), ("What is 5 + 4?", 20), ("What is 8 + 1?", 30)]
        ]
        history: list[tuple[int, int]] = []
        while engine.has_pending_requests():
            batch_size = len(engine.step())
            for request in requests:
                if request.is_done:
                    request.remove()
            history.append((batch_size, engine.stats().num_blocks_used))

        first = 1
        for batch_size, steps in groupby(history, key=lambda entry: entry[0]):
            blocks = [num_blocks for _, num_blocks in steps]
            print(f"steps {first:>2} to {first + len(blocks) - 1:>2}: batch of {batch_size}, "
                  f"{min(blocks)} to {max(blocks)} of {engine.stats().num_blocks} blocks in use afterwards")
            first += len(blocks)
        stats = engine.stats()
        print(f"{stats.num_generated_tokens} tokens in {stats.num_steps} steps, {stats.num_rows} rows computed")


if __name__ == "__main__":
    main()
