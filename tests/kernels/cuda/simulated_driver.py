"""Drivers without a GPU: one executes the compiled PTX on the CPU, for tests of the whole backend."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from pagedcore_kernels.cuda.build.compiler import compile_ptx
from pagedcore_kernels.cuda.build.images import source_digest
from pagedcore_kernels.cuda.build.toolchain import compiler_versions
from pagedcore_kernels.cuda.build.variants import Source, make_source
from pagedcore_kernels.cuda.driver import Argument
from pagedcore_ptxsim import launch

CACHE: list[Path] = []
"""The directory where compiled PTX is kept between runs, once a fixture has named it."""


@cache
def compiled(name: str, arch: str) -> tuple[Source, str]:
    """A kernel and its PTX, from the cache if these sources and tools have compiled it before."""
    source, versions, digest = make_source(name), compiler_versions(), source_digest()
    path = CACHE[0] / f"{name}.{arch}.{digest}.{'-'.join(versions.values())}.ptx"
    numba = "-".join(version for tool, version in versions.items() if not tool.startswith("nvidia"))
    # Why a lock: what one worker compiles the others wait for.
    with (CACHE[0] / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _write(path, _compile(source, arch, CACHE[0] / f"{name}.{digest}.{numba}.nvvm"))
    return source, path.read_text()


def _compile(source: Source, arch: str, halfway: Path) -> str:
    """What the compiler makes. Numba's half, nine tenths of the time, is kept: but for the kernel's name it is the same
    for every architecture and NVVM."""
    from numba.cuda.cudadrv import nvvm

    second = nvvm.compile_ir

    def keep(modules: list[str], **options: Any) -> bytes:
        _write(halfway, json.dumps([modules, options]))
        return bytes(second(modules, **options))

    if halfway.exists():
        modules, options = json.loads(halfway.read_text())
        ptx = second(modules, **options | {"arch": arch.replace("sm", "compute")})
        return str(ptx.decode().strip("\0").strip())
    with patch.object(nvvm, "compile_ir", keep):
        return compile_ptx(source, arch)


def _write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


def as_numpy(argument: Argument) -> Any:
    """A tensor as the array over its memory; formats that NumPy lacks as integers of their size."""
    if argument is None:
        return 0
    if not isinstance(argument, torch.Tensor):
        return argument
    if argument.dtype in (torch.bfloat16, torch.float16):
        argument = argument.view(torch.int16)
    elif argument.dtype == torch.float8_e4m3fn:
        argument = argument.view(torch.uint8)
    return argument.numpy() if argument.numel() else np.zeros(1, np.int32)


@dataclass
class SimulatedDriver:
    """Executes every launch with the PTX interpreter, CTAs in random order, and notes what was launched."""

    arch: str = "sm_90"
    num_sms: int = 8
    most_shared_bytes: int = 227 * 1024
    seed: int = 0
    check_races: bool = False
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    launched: list[tuple[str, int]] = field(default_factory=list)

    @property
    def capability(self) -> tuple[int, int]:
        return int(self.arch[3:-1]), int(self.arch[-1])

    def prepare(self, name: str) -> None:
        pass

    def num_ctas(self, name: str) -> int:
        return 2 * self.num_sms

    def begin_step(self) -> None:
        pass

    def launch(self, name: str, num_ctas: int, arguments: Sequence[Argument]) -> None:
        source, ptx = compiled(name, self.arch)
        assert source.shared_bytes <= self.most_shared_bytes
        order = np.random.default_rng(self.seed + len(self.launched)).permutation(num_ctas)
        self.launched.append((name, num_ctas))
        launch(
            ptx, None, num_ctas, source.threads, [as_numpy(a) for a in arguments],
            dynamic_shared_bytes=source.shared_bytes, block_order=order.tolist(), check_races=self.check_races,
        )
