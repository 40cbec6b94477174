"""Compiled kernels as a wheel: pip installs it on a machine with a GPU, which then needs no compiler.

Owns the wheel's form and where an installed one is. It holds kernel images and nothing that runs.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final

PACKAGE: Final = "pagedcore_cuda_kernels"
_METADATA: Final = """Metadata-Version: 2.1
Name: {name}
Version: {version}
Summary: Kernels of pagedcore {version} for NVIDIA GPUs, compiled ahead
Requires-Dist: pagedcore=={version}
Requires-Dist: cuda-bindings>=13.0.3,<14
"""
_WHEEL: Final = "Wheel-Version: 1.0\nGenerator: pagedcore\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def installed_kernels() -> Path | None:
    """Return the directory that an installed wheel has put its kernels in; ``None``: there is none."""
    found = importlib.util.find_spec(PACKAGE)
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def write_wheel(out: Path, version: str, files: Iterable[Path]) -> Path:
    """Write files of kernels as a wheel for one version of pagedcore into a directory; return its path."""
    about = f"{PACKAGE}-{version}.dist-info"
    content = {f"{PACKAGE}/__init__.py": b'"""Kernels of pagedcore for NVIDIA GPUs."""\n'}
    content |= {f"{PACKAGE}/{file.name}": file.read_bytes() for file in files}
    content[f"{about}/METADATA"] = _METADATA.format(name=PACKAGE.replace("_", "-"), version=version).encode()
    content[f"{about}/WHEEL"] = _WHEEL.encode()
    lines = [f"{name},sha256={_digest(each)},{len(each)}" for name, each in content.items()]
    content[f"{about}/RECORD"] = "\n".join([*lines, f"{about}/RECORD,,", ""]).encode()
    path = out / f"{PACKAGE}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, each in content.items():
            # Why: with the date of today the same kernels would be another file.
            wheel.writestr(zipfile.ZipInfo(name), each, zipfile.ZIP_DEFLATED)
    return path


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
