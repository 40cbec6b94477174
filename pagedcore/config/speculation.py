"""What the setting ``speculation`` may be, and what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pagedcore.config.field_rules import FieldRule, integer

SOURCES: Final = ("text", "completions", "grammar")
"""Where drafts come from: what the sequence itself has said before, what others behind the same cache root have said,
and what a grammar leaves no choice of."""
MOST_DRAFTS: Final = 64
"""The largest ``most``."""
_KEYS: Final = ("sources", "most")
_MOST: Final = integer(1, MOST_DRAFTS)


@dataclass(frozen=True, slots=True)
class SpeculationRules:
    """Where drafts come from, and how many a row has at most."""

    sources: tuple[str, ...] = SOURCES
    most: int = 16
    is_explicit: bool = False
    """Whether they were asked for, so that a model that cannot have them is refused."""


def _accepts(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return isinstance(value, str) and value in ("auto", "off")
    sources = value.get("sources", SOURCES)
    return (
        all(isinstance(name, str) and name in _KEYS for name in value)
        and isinstance(sources, list | tuple) and 0 < len(sources) <= len(SOURCES)
        and all(isinstance(one, str) and one in SOURCES for one in sources)
        and _MOST.accepts(value.get("most", 1))
    )


SPECULATION: Final[FieldRule[Any]] = FieldRule(
    _accepts, 'one of auto, off, or {"sources": some of "text", "completions" and "grammar", "most": 1 to '
    f"{MOST_DRAFTS}}}"
)
"""What the setting may be."""


def rules_of(setting: str | Mapping[str, Any]) -> SpeculationRules | None:
    """Return what a value of the setting means, which the rule has accepted; ``None``: no drafts."""
    if isinstance(setting, str):
        return SpeculationRules() if setting == "auto" else None
    rules = SpeculationRules(is_explicit=True)
    sources = tuple(dict.fromkeys(setting.get("sources", rules.sources)))
    return SpeculationRules(sources, setting.get("most", rules.most), is_explicit=True)
