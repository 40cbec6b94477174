"""What compiled kernels take of a GPU, as a table that people and tests read.

Owns the table's form alone: ``pagedcore kernels build`` writes one beside the kernels, docs/cuda-kernels.md has the one
of everything that is shipped, and the compile gate holds every kernel against it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from pagedcore_kernels.cuda.build.images import KernelImage

RESOURCES_FILE: Final = "RESOURCES.md"
_COLUMNS: Final = ("kernel", "threads", "shared memory", "spilled bytes")


@dataclass(frozen=True)
class KernelResources:
    """One kernel for one architecture: threads and dynamic shared memory of a CTA, registers and spills of a thread."""

    threads: int
    shared_bytes: int
    spilled_bytes: int
    registers: int


def resource_table(images: Iterable[KernelImage]) -> str:
    """A Markdown table, a line per kernel and a column of registers per architecture, in order of the names."""
    rows: dict[str, dict[str, KernelImage]] = {}
    for image in images:
        rows.setdefault(image.name, {})[image.arch] = image
    archs = sorted({arch for row in rows.values() for arch in row}, key=lambda arch: int(arch[3:]))
    head = [*_COLUMNS, *(f"registers {arch}" for arch in archs)]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for name in sorted(rows):
        row = rows[name]
        any_image = next(iter(row.values()))
        spilled = max(image.local_bytes for image in row.values())
        registers = [str(row[arch].registers) if arch in row else "-" for arch in archs]
        numbers = [str(any_image.threads), str(any_image.shared_bytes), str(spilled), *registers]
        lines.append("| " + " | ".join([f"`{name}`", *numbers]) + " |")
    return "\n".join(lines) + "\n"


def read_resource_table(text: str) -> dict[tuple[str, str], KernelResources]:
    """Read the first such table of a Markdown text, by name and architecture."""
    lines = iter(text.splitlines())
    head = next((line for line in lines if line.startswith("| " + " | ".join(_COLUMNS))), "")
    archs = re.findall(r"registers (sm_\d+)", head)
    next(lines, None)
    found = {}
    for line in lines:
        if not line.startswith("| `"):
            break
        name, threads, shared, spilled, *registers = (cell.strip().strip("`") for cell in line.strip("|").split("|"))
        for arch, number in zip(archs, registers, strict=True):
            if number != "-":
                found[name, arch] = KernelResources(int(threads), int(shared), int(spilled), int(number))
    return found
