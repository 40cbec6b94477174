"""How long an engine takes to its first token: the demo model with its imports, and a model whose imports are done.

    python benchmarks/start.py [--model MODEL_DIR [--quantization SCHEME]] [--runs 20] [--base CHECKOUT]

Each start is a process of its own. ``demo`` counts all that follows ``import torch``: pagedcore's imports,
``Engine.from_pretrained("demo")`` and an answer of four tokens. With ``--model`` the second count begins at
``Engine.from_pretrained(MODEL_DIR)`` and ends with the first token, after the demo model has answered and the model's
tokenizer has been read once. With ``--base``, another checkout starts in turn, and the ratios are those of each pair.

One start of each kind comes before and is not counted: it compiles kernels, writes Python's bytecode, as installing a
package does, and reads the weights into the page cache. Run it with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from pathlib import Path

from interleaved import interval, markdown, median_and_spread, ratios, turns
from tqdm import tqdm

HERE = Path(__file__).resolve().parents[1]
DEMO = """
import time, torch
begin = time.perf_counter()
from pagedcore import Engine, SamplingParams
Engine.from_pretrained("demo").generate(["What is 2 + 3?"], SamplingParams(max_tokens=4))
print(time.perf_counter() - begin)
"""
MODEL = """
import sys, time
from pagedcore import Engine, SamplingParams
from pagedcore.tokenizer.tokenizer import HFTokenizer
one = SamplingParams(max_tokens=1, ignore_eos=True)
with Engine.from_pretrained("demo") as engine:
    engine.generate(["What is 2 + 3?"], one)
HFTokenizer.from_directory(sys.argv[1])
begin = time.perf_counter()
Engine.from_pretrained(sys.argv[1], quantization=sys.argv[2]).generate(["What is 2 + 3?"], one)
print(time.perf_counter() - begin)
"""


def start(checkout: Path, script: str, arguments: list[str]) -> float:
    """Return the seconds that a script in a new process prints."""
    paths = os.pathsep.join(str(checkout / name) for name in (".", "kernels", "adapters"))
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory, such as peers/make_model.py writes")
    parser.add_argument("--quantization", default="none", help="of the model, while it is loaded")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--base", type=Path, help="another checkout")
    given = parser.parse_args()
    checkouts = {"here": HERE} | ({"base": given.base.resolve()} if given.base else {})
    kinds = {"demo, beyond import torch": (DEMO, list[str]())}
    if given.model:
        kinds["model, imports done"] = MODEL, [str(Path(given.model).resolve()), given.quantization]
    table = list[list[str]]()
    for kind, (script, arguments) in kinds.items():
        seconds: dict[str, list[float]] = {name: [] for name in checkouts}
        for checkout in checkouts.values():
            start(checkout, script, arguments)
        for order in tqdm(turns(list(checkouts), given.runs), total=given.runs, desc=kind, disable=None):
            for name in order:
                seconds[name].append(start(checkouts[name], script, arguments))
        line = [kind, *(median_and_spread(values) for values in seconds.values())]
        if given.base:
            pairs = ratios(seconds["here"], seconds["base"])
            low, high = interval(pairs)
            line.append(f"{statistics.median(pairs):.3f} ({low:.3f} to {high:.3f})")
        table.append([*line, str(given.runs)])
    print(markdown(["start", *(f"{name}, s" for name in checkouts), *(["ratio"] if given.base else []), "runs"], table))


if __name__ == "__main__":
    main()
