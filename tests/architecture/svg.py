"""A few shapes as SVG text: enough for the pictures of the documentation, with one look in light and in dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

#: Fill, border and text of each kind of box, in light and in dark.
COLOURS = {
    "door": (("#ede9fe", "#8b5cf6", "#3b2a78"), ("#2e2557", "#8b7bd8", "#e4defc")),
    "engine": (("#dbeafe", "#3b82f6", "#1e3a6e"), ("#1c3157", "#5b93e6", "#dbe8fd")),
    "request": (("#d9f3ee", "#149d8c", "#0f4a43"), ("#123f3a", "#3db5a5", "#d3f3ed")),
    "memory": (("#fdefc8", "#d39b15", "#5c430a"), ("#463610", "#cfa53c", "#fbeec9")),
    "compute": (("#fde2dc", "#e0644a", "#6b2617"), ("#4c2219", "#df7d68", "#fcdfd8")),
    "ground": (("#e9ecf1", "#8a94a6", "#374051"), ("#2b323d", "#8a94a6", "#e3e7ee")),
}
#: Classes without a box: panel, arrow, arrow against the order, quiet text, loud text.
_LIGHT = ("#fcfcfd", "#6b7687", "#d11a2a", "#5a6473", "#1f2733")
_DARK = ("#14181f", "#8b96a8", "#ff6b76", "#a3adbb", "#eef1f5")
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def _rules(theme: int, indent: str) -> list[str]:
    panel, arrow, wrong, quiet, loud = (_LIGHT, _DARK)[theme]
    rules = [
        f".panel {{ fill: {panel}; }}",
        f".arrow {{ stroke: {arrow}; }} .head {{ fill: {arrow}; stroke: none; }}",
        f".wrong {{ stroke: {wrong}; }} .wronghead {{ fill: {wrong}; stroke: none; }}",
        f".quiet {{ fill: {quiet}; }} .loud {{ fill: {loud}; }}",
    ]
    for kind, themes in COLOURS.items():
        fill, border, text = themes[theme]
        rules.append(f".{kind} {{ fill: {fill}; stroke: {border}; }} .{kind}-text {{ fill: {text}; }}")
        rules.append(f".{kind}-solid {{ fill: {border}; }}")
    return [indent + rule for rule in rules]


class Picture:
    """Collects shapes; ``text`` is the whole file. Coordinates are rounded, so that the text is the same everywhere."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = (width, height)
        self._title = title
        self._shapes: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._shapes.append(f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
                            'rx="9" stroke-width="1.4"/>')

    def gap(self, x: float, y: float, width: float, height: float) -> None:
        """A dashed outline, for a place that is empty or may be."""
        self._shapes.append(f'<rect class="arrow" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" '
                            'rx="6" fill="none" stroke-width="1" stroke-dasharray="4 4"/>')

    def bar(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self._shapes.append(f'<rect class="{kind}-solid" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" '
                            f'height="{_n(height)}" rx="3"/>')

    def words(self, x: float, y: float, words: str, kind: str, *, size: float = 13, bold: bool = False,
              mono: bool = False, anchor: str = "middle") -> None:
        weight = ' font-weight="700"' if bold else ""
        self._shapes.append(f'<text class="{kind}{" mono" * mono}" x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}"'
                            f'{weight} text-anchor="{anchor}">{escape(words)}</text>')

    def dot(self, x: float, y: float, number: int, kind: str) -> None:
        """A number in a filled circle."""
        self._shapes.append(f'<circle class="{kind}-solid" cx="{_n(x)}" cy="{_n(y)}" r="11"/>')
        self._shapes.append(f'<text x="{_n(x)}" y="{_n(y + 4.2)}" font-size="12" font-weight="700" '
                            f'text-anchor="middle" fill="#ffffff">{number}</text>')

    def arrow(self, points: Sequence[Point], *, wrong: bool = False, dashed: bool = False) -> None:
        """A line around rounded corners with a head at its last point."""
        line, head = ("wrong", "wronghead") if wrong else ("arrow", "head")
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        (x0, y0), (x, y) = points[-2], points[-1]
        dx, dy = _sign(x - x0), _sign(y - y0)
        end = (x - 7 * dx, y - 7 * dy)
        self._shapes.append(f'<path class="{line}" fill="none" stroke-width="1.6"{dash} '
                            f'd="{_rounded([*points[:-1], end])}"/>')
        left, right = (x - 9 * dx - 4.5 * dy, y - 9 * dy - 4.5 * dx), (x - 9 * dx + 4.5 * dy, y - 9 * dy + 4.5 * dx)
        corners = " ".join(f"{_n(a)},{_n(b)}" for a, b in ((x, y), left, right))
        self._shapes.append(f'<polygon class="{head}" points="{corners}"/>')

    @property
    def text(self) -> str:
        width, height = self._size
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'height="{height}" role="img" font-family="{_FONT}">',
            f"<title>{escape(self._title)}</title>",
            "<style>",
            *_rules(0, "  "),
            "  .mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; }",
            "  @media (prefers-color-scheme: dark) {",
            *_rules(1, "    "),
            "  }",
            "</style>",
            f'<rect class="panel" width="{width}" height="{height}" rx="12"/>',
            *self._shapes,
            "</svg>",
        ]) + "\n"


def _n(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def _rounded(points: Sequence[Point], radius: float = 9) -> str:
    """A path along horizontal and vertical lines, its corners cut by quarter circles."""
    path = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (x0, y0), (x, y), (x1, y1) in zip(points, points[1:], points[2:], strict=False):
        near = min(radius, (abs(x - x0) + abs(y - y0)) / 2, (abs(x1 - x) + abs(y1 - y)) / 2)
        path.append(f"L{_n(x - near * _sign(x - x0))} {_n(y - near * _sign(y - y0))}")
        path.append(f"Q{_n(x)} {_n(y)} {_n(x + near * _sign(x1 - x))} {_n(y + near * _sign(y1 - y))}")
    path.append(f"L{_n(points[-1][0])} {_n(points[-1][1])}")
    return "".join(path)
