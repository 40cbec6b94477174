"""How often a request and a step change file on their way through the core.

    python benchmarks/call_path.py [--list]

A profiler hook notes the file of every Python function that is called while the second of two identical requests is
accepted, and while one decode step is run; two calls in a row from different files are a change. Only files of
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
PROMPT, PARAMS = "What is 2 + 3?", SamplingParams(max_tokens=8)


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
    """Return the files that an accepted request and a decode step pass, each stay once."""
    with Engine.from_pretrained("demo") as engine:
        first = engine.add_request(PROMPT, PARAMS)
        while not first.is_done:
            engine.step()
        first.remove()
        accepted, request = files_called(lambda: engine.add_request(PROMPT, PARAMS))
        while not request.sequences[0].num_output_tokens:
            engine.step()
        engine.step()
        decoded, _ = files_called(engine.step)
    return {"accepted request": changes(accepted), "decode step": changes(decoded)}


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
