"""How often a request and a step change file on their way through the core.

    python benchmarks/call_path.py [--list]

A profiler hook notes the file of every Python function that is called while the second of two identical requests is
accepted, and while a decode step of one row and one of eight is run; two calls in a row from different files are a
change. Only files of
``pagedcore`` count: kernels and the model's own forward are left out, because their way depends on the model. The
figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from pagedcore import Engine, SamplingParams

ROOT = Path(__file__).resolve().parents[1] / "pagedcore"
LEFT_OUT = ("models/",)
PROMPT, PARAMS = "What is 2 + 3?", SamplingParams(max_tokens=8, ignore_eos=True)


def files_called(function: Callable[[], Any]) -> tuple[list[str], Any]:
    """Call a function; return the file of every call it makes into the core, in order, and its result."""
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT)):
            name = str(Path(frame.f_code.co_filename).relative_to(ROOT))
            if not name.startswith(LEFT_OUT):
                files.append(name)

    sys.setprofile(note)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return files, result


def changes(files: list[str]) -> list[str]:
    """Leave out calls that stay in the file of the call before."""
    return [name for i, name in enumerate(files) if i == 0 or files[i - 1] != name]


def measure() -> dict[str, list[str]]:
    """Return the files that an accepted request and decode steps without guesses pass, each stay once."""
    with Engine.from_pretrained("demo", speculation="off") as engine:
        engine.add_request(PROMPT, PARAMS)
        _end_all(engine)
        accepted, _ = files_called(lambda: engine.add_request(PROMPT, PARAMS))
        found = {"accepted request": changes(accepted), "decode step": _decode_step(engine)}
        _end_all(engine)
        for _ in range(8):
            engine.add_request(PROMPT, PARAMS)
        return found | {"decode step of 8 rows": _decode_step(engine)}


def _decode_step(engine: Engine) -> list[str]:
    """Run steps until all requests decode, and one more to be sure; then return the files that the next one passes."""
    while not all(request.sequences[0].num_output_tokens for request in engine.requests):
        engine.step()
    engine.step()
    return changes(files_called(engine.step)[0])


def _end_all(engine: Engine) -> None:
    for request in engine.requests:
        while not request.is_done:
            engine.step()
        request.remove()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print every stay, in order")
    given = parser.parse_args()
    for what, stays in measure().items():
        print(f"{what}: {len(stays) - 1} changes of file, {len(set(stays))} files")
        if given.list:
            print("  " + "\n  ".join(stays))


if __name__ == "__main__":
    main()
