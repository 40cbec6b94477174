"""All mutants and what finds them: ``make mutants``, or with words of a bug's description only those.

    PYTHONPATH=.:tests python -m mutants [--search FOLDER ...] [WORD ...]

``--search`` runs whole folders of tests until one fails, to name a killer for a new mutant.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from tqdm import tqdm

from mutants.catalogue import MUTANTS
from mutants.killing import ROOT, run_tests


def main() -> int:
    """Print a line per mutant; return how many were not killed."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--search", nargs="+", metavar="FOLDER", help="below tests/, instead of the named tests")
    parser.add_argument("words", nargs="*", help="words of the descriptions; all mutants without any")
    args = parser.parse_args()
    chosen = [one for one in MUTANTS if not args.words or any(word in one.bug for word in args.words)]
    num_alive = 0
    for mutant in tqdm(chosen, unit="mutant", disable=None):
        outcome = run_tests(mutant, args.search or [mutant.killer], limit_s=3600)
        num_alive += outcome.verdict != "killed"
        found = outcome.killer or outcome.reason
        tqdm.write(f"{outcome.verdict:9}{mutant.bug}\n{'':9}{mutant.path}\n{'':9}{found}")
    print(f"{len(chosen)} mutants above the scheduler, {len(chosen) - num_alive} killed")
    if args.words or args.search:
        return num_alive
    below = [sys.executable, "-m", "pytest", "-v", "-m", "", "scheduler_lives/test_mutants.py"]
    return num_alive + subprocess.run(below, cwd=ROOT / "tests", check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
