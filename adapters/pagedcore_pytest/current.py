"""Which test runs now. Imports pytest alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

GOLDENS_FOLDER: Final = "__goldens__"


@dataclass
class CurrentTest:
    """The test that runs now, for golden answers and for the calls of a test."""

    item: pytest.Item | None = None
    number: int = 0
    """How many tests have begun."""

    def begin(self, item: pytest.Item) -> None:
        """Note that a test begins."""
        self.item, self.number = item, self.number + 1

    def end(self) -> None:
        """Note that it has ended."""
        self.item = None

    @property
    def golden_path(self) -> Path | None:
        """The file of the running test's golden answers: beside the test, of its file's name."""
        if self.item is None:
            return None
        return self.item.path.parent / GOLDENS_FOLDER / f"{self.item.path.stem}.json"
