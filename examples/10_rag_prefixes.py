"""Questions about a few documents, each behind its whole document: which KV pool such prompts need.

A prompt begins with its document, so all questions about one document share what was computed of it, while it is still
in the pool. ``num_blocks_recomputed`` counts what was computed again because it was not, and the log says so once.
"""

from collections.abc import Sequence

from pagedcore import Engine, SamplingParams

NUM_DOCUMENTS = 12
NUM_ROUNDS = 4


def document(number: int) -> str:
    """Return a page of facts."""
    return " ".join(f"Page {number}, line {line}: {number} + {line} = {number + line}." for line in range(24)) + "\n"


def ask_all(name: str, prompts: Sequence[str], **memory: object) -> None:
    """Ask in rounds over all documents, as the users of one service do, and show what was found."""
    with Engine.from_pretrained("demo", max_num_seqs=4, **memory) as engine:
        for prompt in prompts:
            engine.generate([prompt], SamplingParams(max_tokens=8))
        stats = engine.stats()
    print(f"{name:22} {stats.num_blocks:4} blocks, {stats.num_host_blocks:4} on the host: "
          f"{stats.prefix_hit_rate:4.0%} of the tokens found, {stats.num_blocks_recomputed:4} blocks computed again")


def main() -> None:
    """Ask the same questions with a pool that is too small, one with a host tier, and one that is large enough."""
    pages = [document(number) for number in range(NUM_DOCUMENTS)]
    prompts = [f"{page}What is {turn} + {turn}?" for turn in range(NUM_ROUNDS) for page in pages]
    with Engine.from_pretrained("demo", num_kv_blocks=64) as engine:
        num_blocks = sum(len(engine.prepare(page).token_ids) // engine.stats().block_size + 1 for page in pages)
    print(f"The documents take {num_blocks} blocks.")
    ask_all("a third of them", prompts, num_kv_blocks=num_blocks // 3)
    # Left to itself ("auto"), an engine computes again what its machine computes faster than it copies.
    ask_all("and a host tier", prompts, num_kv_blocks=num_blocks // 3, host_kv_memory="64MiB", preemption="swap")
    ask_all("all of them", prompts, num_kv_blocks=num_blocks + 64)


if __name__ == "__main__":
    main()
