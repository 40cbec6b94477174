"""What the architecture tests look at: every shipped source file, parsed, and what each one imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_PARENTS = (ROOT, ROOT / "kernels", ROOT / "adapters")
PACKAGES = ("pagedcore", "pagedcore_kernels", "pagedcore_asyncgen", "pagedcore_bentoml", "pagedcore_http",
            "pagedcore_langchain", "pagedcore_openai", "pagedcore_otel", "pagedcore_pytest", "pagedcore_ray",
            "pagedcore_trl")
"""What the wheel of ``pagedcore`` has."""
SEPARATE_PACKAGES = ("pagedcore_ptxsim",)
"""Packages of this repository with a wheel of their own; the rules of style hold for them too."""


@dataclass(frozen=True)
class Source:
    """One file of a package."""

    module: str
    path: Path

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def part(self) -> str:
        """The module or folder of ``pagedcore`` it belongs to, or the other package's name."""
        names = self.module.split(".")
        return self.package if self.package != "pagedcore" or len(names) == 1 else names[1]

    @cached_property
    def num_code_lines(self) -> int:
        """Lines that are neither blank, nor a comment, nor of a docstring, nor of an import."""
        left = {number for number, line in enumerate(self.text.splitlines(), 1)
                if line.strip() and not line.lstrip().startswith("#")}
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(value=ast.Constant(value=str())) | ast.Import() | ast.ImportFrom():
                    left -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return len(left)

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def imports(self) -> Iterator[tuple[str, str]]:
        """Every (module, name) imported anywhere, in functions and under ``TYPE_CHECKING`` too; "" is the module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from ((self._absolute(node), alias.name) for alias in node.names)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.path.name == "__init__.py" else self.module.split(".")[:-1]
        base = package[: len(package) - node.level + 1]
        return ".".join([*base, node.module] if node.module else base)


def all_sources() -> list[Source]:
    """Every Python file of every package."""
    found = []
    for parent in PACKAGE_PARENTS:
        for package in (*PACKAGES, *SEPARATE_PACKAGES):
            for path in sorted((parent / package).rglob("*.py")):
                names = path.relative_to(parent).with_suffix("").parts
                found.append(Source(".".join(names[:-1] if names[-1] == "__init__" else names), path))
    return found


SOURCES = all_sources()
