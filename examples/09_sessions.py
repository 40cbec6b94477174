"""Conversations that wait and travel: turns, a fork, parking on disk, and a file that another process can go on from.

Wherever a session was in between, its next answer is the same, bit for bit; what was kept only saves time.
"""

import tempfile
from pathlib import Path

from pagedcore import Engine, RequestOutput, SamplingParams


def show(what: str, output: RequestOutput) -> None:
    """Print an answer and how much of the conversation was not computed again."""
    num_prompt_tokens = len(output.prompt_token_ids)
    print(f"{what:11} {output.outputs[0].text.strip():16} {output.num_cached_tokens} of {num_prompt_tokens} cached")


def main() -> None:
    """Ask, fork, park, export and import."""
    path = Path(tempfile.mkdtemp()) / "chat.json"
    params = SamplingParams(max_tokens=32)

    with Engine.from_pretrained("demo", host_kv_memory="16MiB") as engine:
        with engine.session(params) as session:
            show("first turn", session.ask("What is 2 + 3?"))
            with session.fork() as fork:
                show("fork", fork.ask("\nWhat is 9 - 5?"))
            state = session.park("disk", ttl_s=3600)
            print(f"{'parked':11} on {state.tier}, {state.num_tokens_kept} positions kept")
            show("second turn", session.ask("\nWhat is 12 + 30?"))
            session.export(path)
        print(f"blocks still in use: {engine.stats().num_blocks_used}")

    # This may be another process, on another day.
    with Engine.from_pretrained("demo") as engine, engine.import_session(path) as session:
        show("imported", session.ask("\nWhat is 6 + 6?"))


if __name__ == "__main__":
    main()
