"""Schemes of quantisation on processors with fewer instruction sets than this one, in turns: emulated, so say so.

    python benchmarks/peers/make_model.py MODEL_DIR
    python benchmarks/instruction_sets.py --model MODEL_DIR [--sets avx2 avx-vnni avx-512 native] [--rounds 3]
        [--kinds w4a8 w4a16 w8a8 none] [--threads 2] [--llamacpp LLAMA_BIN --gguf FILE.gguf]

Kernels are compiled, and torch's libraries told, as if instruction sets were missing. Caches, memory and clocks stay
those of this machine, whose instructions may also be faster than those of the processor that is meant: figures compare
schemes with each other, and are none of a laptop. On a laptop, take ``--sets native``; its figures are welcome, with
this command.

Printed is a table for each set: ``w3``, one stream, in ms for a token; ``eight`` streams with prompts of 128 and 64
tokens, and ``prompts`` of 128 with one token, in tokens per second. The last column compares the first kind with the
best other one, round by round (``peers/in_turns.py``). llama.cpp is what its build is: for ``avx2`` build it with
``-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_AVX512=OFF``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import llvmlite.binding

HERE = Path(__file__).resolve().parent
WORKLOADS = "w3,eight,prompts"


@dataclass(frozen=True)
class Processor:
    """What is made believe."""

    name: str
    """LLVM's name."""
    needed: str
    """The instruction set that this machine has to have, by LLVM's name."""
    missing: tuple[str, ...]
    """How the names of those begin that it is to have not."""
    torch: str
    onednn: str


_NO_512 = ("amx", "avx10", "avx512", "evex512")
SETS = {
    "avx2": Processor("haswell", "avx2", (*_NO_512, "avxvnni"), "avx2", "AVX2"),
    "avx-vnni": Processor("alderlake", "avxvnni", _NO_512, "avx2", "AVX2_VNNI"),
    "avx-512": Processor("icelake-server", "avx512vnni", ("amx", "avx10", "avx512bf16", "avx512fp16"), "avx512",
                         "AVX512_CORE_VNNI"),
}
"""Those that are emulated; "native" is this machine as it is."""


def environment(name: str) -> dict[str, str]:
    """Return the variables of a process that is to compute so."""
    if name == "native":
        return {}
    processor, host = SETS[name], llvmlite.binding.get_host_cpu_features()
    if not host.get(processor.needed):
        raise SystemExit(f"{name}: this machine has no {processor.needed} to emulate it with")
    features = [one for one, is_there in sorted(host.items()) if is_there and not one.startswith(processor.missing)]
    return {
        "NUMBA_CPU_NAME": processor.name, "NUMBA_CPU_FEATURES": ",".join(f"+{one}" for one in features),
        "ATEN_CPU_CAPABILITY": processor.torch, "DNNL_MAX_CPU_ISA": processor.onednn,
    }  # fmt: skip


def engines(given: argparse.Namespace, name: str) -> list[str]:
    """Return the commands of what is compared on a set, as ``in_turns.py`` takes them."""
    variables = [f"{variable}={value}" for variable, value in environment(name).items()]
    commands = {}
    for kind in given.kinds:
        commands["bf16" if kind == "none" else kind] = [
            "env", *variables, sys.executable, "run_pagedcore.py", "--model", given.model, "--quantization", kind,
            "--max-seqs", "8", "--threads", str(given.threads),
        ]  # fmt: skip
    if given.llamacpp:
        commands["llama.cpp"] = [
            sys.executable, "run_llamacpp.py", "--model", given.gguf, "--programs", given.llamacpp, "--max-seqs", "8",
            "--threads", str(given.threads),
        ]  # fmt: skip
    return [f"{engine}={shlex.join(command)}" for engine, command in commands.items()]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a directory")
    parser.add_argument("--sets", nargs="+", choices=(*SETS, "native"), default=tuple(SETS))
    parser.add_argument("--kinds", nargs="+", default=("w4a8", "w4a16", "w8a8", "none"), help="first: compared")
    parser.add_argument("--workloads", default=WORKLOADS)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llamacpp", default="", help="folder with llama-server")
    parser.add_argument("--gguf", default="", help="its model")
    given = parser.parse_args()
    given.model, given.gguf = (str(Path(one).resolve()) if one else "" for one in (given.model, given.gguf))
    for name in given.sets:
        commands = [part for engine in engines(given, name) for part in ("--engine", engine)]
        print(f"\n{name}" + ("" if name == "native" else ", emulated"), flush=True)
        subprocess.run(
            [sys.executable, HERE / "peers" / "in_turns.py", *commands, "--workloads", given.workloads, "--rounds",
             str(given.rounds)], check=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
