"""The benchmark that compares quotes with those of an oracle."""

from __future__ import annotations

import pytest

from support.scripts import script


@pytest.mark.slow
def test_an_oracle_that_knows_more_quotes_narrower() -> None:
    """One that foresees every step time and knows all lengths is almost exact; without the lengths it is not."""
    rows = script("quote_oracle").oracle_table(1.5, 400, [1], 10, 20)
    assert [row[0] for row in rows] == ["lengths known"] * 2 + ["lengths learnt"] * 2
    foreseen = [float(row[-1]) for row in rows]
    assert max(foreseen[:2]) < 0.15
    assert min(foreseen[2:]) > 0.1
