"""What is installed of the tools that CUDA kernels need, and a clear refusal where something is missing.

Owns every message about missing packages. Imports nothing heavy until it is asked. Two sets are told apart: running
kernels that were built before needs the driver and cuda-bindings; building them needs numba-cuda, NVVM, nvJitLink
and NVRTC, without which numba-cuda does not compile.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import re
from functools import cache
from pathlib import Path
from typing import Final

from pagedcore_kernels.errors import InvalidConfig, MissingDependency

EXTRA: Final = "cuda"
_ADVICE: Final = f"Install pagedcore[{EXTRA}]."
# Why: numba-cuda takes the place of numba.cuda when the interpreter starts; only then is it of use.
_COMPILER_MODULES: Final = (("numba-cuda", "numba.cuda.typing.builtins"), ("cuda-bindings", "cuda.bindings"))
_COMPILER_LIBRARIES: Final = (
    ("nvidia-nvvm", "nvvm"), ("nvidia-nvjitlink", "nvJitLink"), ("nvidia-cuda-nvrtc", "nvrtc"),
)
_VERSIONED: Final = ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm", "nvidia-nvjitlink")
"""What decides about the code of a kernel, and Python, whose bytecode Numba compiles."""
_OF_CUDA_12: Final = {"nvidia-nvvm": "nvidia-cuda-nvcc-cu12", "nvidia-nvjitlink": "nvidia-nvjitlink-cu12"}
"""What brought them before CUDA 13."""


def missing_compiler_parts() -> list[str]:
    """Return the packages without which no kernel can be built here, with a reason where it is another than that they
    are not installed; empty if all are there and can be imported.
    """
    faults = {package: _import_fault(module) for package, module in _COMPILER_MODULES}
    missing = [f"{package}{fault}" for package, fault in faults.items() if fault is not None]
    return missing + ([] if missing else _missing_libraries())


def require_compiler() -> None:
    """Refuse to go on where kernels cannot be built.

    Raises:
        MissingDependency: with the names of what is missing.
    """
    if missing := missing_compiler_parts():
        raise MissingDependency(f"building CUDA kernels: {', '.join(missing)} not found here. {_ADVICE}")


def require_bindings() -> None:
    """Refuse to go on where not even kernels that were built before can be launched.

    Raises:
        MissingDependency: cuda-bindings is not installed.
    """
    if (fault := _import_fault("cuda.bindings")) is not None:
        raise MissingDependency(f"launching CUDA kernels: cuda-bindings not found here{fault}. {_ADVICE}")


@cache
def _compiler_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _VERSIONED:
        found[package] = _version(package) or _version(_OF_CUDA_12.get(package, package)) or "none"
    for package, library in _COMPILER_LIBRARIES:
        if package in found and (file := _system_library(library)):
            # Why: a toolkit of the system comes before packages of another environment, and says no version.
            found[package] = f"{file.name} of {file.stat().st_size} bytes"
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def compiler_versions() -> dict[str, str]:
    """Return the versions that decide what a kernel compiles to; a file for parts that no package brought."""
    return dict(_compiler_versions())


def _system_library(name: str) -> Path | None:
    """The library's file where it does not come from a package."""
    if missing_compiler_parts():
        return None
    from cuda.pathfinder import load_nvidia_dynamic_lib

    found = load_nvidia_dynamic_lib(name)
    if found.abs_path is None or found.found_via == "site-packages":
        return None
    return Path(found.abs_path).resolve()


def explain_link_failure(log: str, ptx: str) -> InvalidConfig:
    """Turn nvJitLink's log into an error; the usual reason is an nvJitLink older than the NVVM that wrote the PTX."""
    written = re.search(r"\.version\s+([\d.]+)", ptx)
    if "Unsupported .version" in log and written:
        versions = compiler_versions()
        return InvalidConfig(
            f"nvidia-nvjitlink: got {versions['nvidia-nvjitlink']}, which does not know PTX {written[1]} of "
            f"nvidia-nvvm {versions['nvidia-nvvm']}. Install versions of one CUDA release: "
            "pip install 'cuda-toolkit[nvvm,nvjitlink]==13.X.*' with the X that your torch was built for."
        )
    reason = next((line.strip() for line in log.splitlines() if "error" in line.lower()), "no reason given")
    return InvalidConfig(f"linking a CUDA kernel: nvJitLink refused it: {reason[:300]}.")


@cache  # Why: a package whose import failed half-way may be importable, and of no use, the second time.
def _import_fault(module: str) -> str | None:
    """Why a module is of no use: ``""`` where it is not installed, ``None`` where it can be imported.

    An import can fail in any way: that of numba-cuda 0.30 raises ``AttributeError`` beside NumPy 2.5.
    """
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        return "" if error.name and module.startswith(error.name) else f" (importing it failed: {error})"
    except Exception as error:
        return f" (importing it failed: {type(error).__name__}: {error})"
    return None


@cache
def _missing_libraries() -> list[str]:
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    missing = []
    for package, library in _COMPILER_LIBRARIES:
        try:
            load_nvidia_dynamic_lib(library)
        except DynamicLibNotFoundError:
            missing.append(package)
    return missing
