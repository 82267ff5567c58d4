"""Curves of a run's metrics as self-contained SVG; no library."""

from __future__ import annotations

import fnmatch
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cothink.record import RunError
from cothink.report.markup import text as escape
from cothink.resolve import nearest

Point = tuple[float, float | None]
"""Step and value; None makes a gap."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 64, 16, 36, 36
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b58900", "#56b4e9", "#666666")
DARK = ("#5ab4ec", "#ff9455", "#3fcf9f", "#e59cc6", "#e6c04a", "#9ad4f5", "#aaaaaa")
"""The same colours on a dark page; both sets can be told apart with the common kinds of colour blindness."""
DASHES = ("", "7 3", "2 3", "8 3 2 3")
TICKS = 5
LEGEND = 16
"""Height of a legend's line."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line: `band` is (step, low, high) of its interval; a `faint` one stands behind another, without a legend."""

    name: str
    points: Sequence[Point]
    band: Sequence[tuple[float, float, float]] = ()
    colour: int = 0
    dash: int = 0
    faint: bool = False


def of_run(folder: Path, patterns: Sequence[str]) -> str:
    """The SVG of every metric of a run that matches one of the patterns (`action/*/level`), over all its steps."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        raise RunError(f"{folder} has no metrics.jsonl; name the folder of a run that has trained")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = dict.fromkeys(key for row in rows for key in row if key not in ("stage", "step", "time"))
    wanted = [name for name in names if any(fnmatch.fnmatchcase(name, p) for p in patterns)]
    if not wanted:
        close = next(filter(None, (nearest(pattern, names) for pattern in patterns)), None)
        hint = f"did you mean {close!r}?" if close else "docs/metrics.md lists them"
        raise RunError(f"no metric of {folder} matches {', '.join(patterns)}; {hint}")
    series: dict[str, list[Point]] = {name: [] for name in wanted}
    for x, row in zip(places(rows), rows):
        for name in (n for n in wanted if n in row):
            series[name].append((x, row[name]))
    return draw([Curve(n, points, colour=k) for k, (n, points) in enumerate(series.items())], ", ".join(patterns))


def places(rows: Iterable[Mapping[str, float]]) -> list[int]:
    """The step of every row of metrics; those of a later stage go on where those of the one before end."""
    found: list[int] = []
    before, stage, last = 0, None, 0
    for row in rows:
        if row["stage"] != stage:
            before, stage = before + last, row["stage"]
        last = int(row["step"])
        found.append(before + last)
    return found


def draw(
    curves: Sequence[Curve],
    title: str,
    *,
    size: tuple[int, int] = (WIDTH, HEIGHT),
    log: bool = False,
    inline: bool = False,
) -> str:
    """Curves over the step, on one scale, with a legend below; a point without neighbours is a dot.

    `log` leaves out values that are not positive. `inline` is for a page that brings the colours itself.
    """
    curves = [_positive(c) for c in curves] if log else list(curves)
    frame = _Frame(curves, size, log)
    parts = [*_grid(frame), *(part for c in curves for part in _band(frame, c))]
    for curve in sorted(curves, key=lambda c: not c.faint):
        parts += _line(frame, curve)
    legend, rows = _legend(frame, [c for c in curves if not c.faint])
    height = size[1] + LEGEND * rows
    parts = [_text(frame.left, 20, title, "start", "ink title"), *parts, *legend]
    style = 'font-family="system-ui, sans-serif" font-size="11" fill="none" stroke-linecap="round"'
    data = f'class="plot" data-frame="{frame}" role="img" aria-label="{escape(title)}"'
    space = "" if inline else 'xmlns="http://www.w3.org/2000/svg" '
    head = f'<svg {space}viewBox="0 0 {size[0]} {height}" {data} {style}>'
    paper = "" if inline else f'{_STYLE}<rect width="{size[0]}" height="{height}" fill="white" class="paper"/>'
    return f"{head}{paper}{''.join(parts)}</svg>\n"


_STYLE = (
    "<style>@media (prefers-color-scheme: dark){.paper{fill:#16191d}.ink{fill:#d8dce1}.grid{stroke:#333a42}"
    + "".join(f".c{k}{{stroke:{c}}}.b{k}{{fill:{c}}}" for k, c in enumerate(DARK))
    + "}</style>"
)


class _Frame:
    """Where a step and a value lie on the drawing."""

    def __init__(self, curves: Sequence[Curve], size: tuple[int, int], log: bool):
        self.log, self.left = log, LEFT if size[0] >= WIDTH else 48
        self.right, self.top, self.bottom = size[0] - RIGHT, TOP, size[1] - BOTTOM
        known = [(x, y) for c in curves for x, y in c.points if y is not None]
        ends = [y for c in curves for _, low, high in c.band for y in (low, high)]
        self.x = _span(x for x, _ in known)
        self.y = _span([*(self.scale(y) for _, y in known), *map(self.scale, ends)])

    def scale(self, y: float) -> float:
        return math.log10(y) if self.log else y

    def across(self, x: float) -> float:
        return self.left + (x - self.x[0]) / (self.x[1] - self.x[0]) * (self.right - self.left)

    def up(self, y: float) -> float:
        return self.bottom - (self.scale(y) - self.y[0]) / (self.y[1] - self.y[0]) * (self.bottom - self.top)

    def at(self, x: float, y: float) -> str:
        return f"{self.across(x):.1f},{self.up(y):.1f}"

    def __str__(self) -> str:
        """What a page needs to read values off the drawing."""
        numbers = (*self.x, *self.y, self.left, self.right, self.top, self.bottom, int(self.log))
        return " ".join(f"{n:.6g}" for n in numbers)


def _positive(curve: Curve) -> Curve:
    points = [(x, y if y is not None and y > 0 else None) for x, y in curve.points]
    band = [(x, low, high) for x, low, high in curve.band if low > 0]
    return Curve(curve.name, points, band, curve.colour, curve.dash, curve.faint)


def _grid(frame: _Frame) -> list[str]:
    parts = []
    for tick in _ticks(*frame.y, TICKS):
        y = 10**tick if frame.log else tick
        height = f"{frame.up(y):.1f}"
        parts.append(f'<path d="M{frame.left},{height} H{frame.right}" stroke="#ddd" class="grid"/>')
        parts.append(_text(frame.left - 6, f"{frame.up(y) + 4:.1f}", _short(y), "end"))
    steps = [x for x in _ticks(*frame.x, TICKS) if x == int(x)] or [round(frame.x[0])]
    return parts + [_text(f"{frame.across(x):.1f}", frame.bottom + 18, f"{x:g}", "middle") for x in steps]


def _short(value: float) -> str:
    """Three digits, or `3.2e-6` where that is too long for the margin."""
    shown = f"{value:.3g}"
    if "e" not in shown:
        return shown
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}e{int(power)}"


def _band(frame: _Frame, curve: Curve) -> list[str]:
    if not curve.band:
        return []
    hue = _hue(curve)
    if len(curve.band) == 1:
        x, low, high = curve.band[0]
        return [f'<path d="M{frame.at(x, low)} L{frame.at(x, high)}" {_stroke(curve)} stroke-width="1"/>']
    there = " L".join(frame.at(x, high) for x, _, high in curve.band)
    back = " L".join(frame.at(x, low) for x, low, _ in reversed(curve.band))
    return [f'<path d="M{there} L{back} Z" fill="{COLOURS[hue]}" class="b{hue}" fill-opacity="0.16"/>']


def _line(frame: _Frame, curve: Curve) -> list[str]:
    dash = f' stroke-dasharray="{DASHES[curve.dash % len(DASHES)]}"' if curve.dash % len(DASHES) else ""
    look = 'stroke-width="1" stroke-opacity="0.35"' if curve.faint else f'stroke-width="2"{dash}'
    named = "" if curve.faint else f' data-name="{escape(curve.name)}"'
    parts = []
    for run in _runs(curve.points):
        path = " L".join(frame.at(x, y) for x, y in run)
        parts.append(f'<path d="M{path}{" h0" * (len(run) == 1)}" {_stroke(curve)} {look}{named}/>')
    return parts


def _legend(frame: _Frame, curves: Sequence[Curve]) -> tuple[list[str], int]:
    """The names, as many in a row as fit, and the number of rows."""
    parts: list[str] = []
    x, row = float(frame.left), 1
    for curve in curves:
        width = 34 + 6.4 * len(curve.name)
        if x > frame.left and x + width > frame.right:
            x, row = float(frame.left), row + 1
        y = frame.bottom + 18 + LEGEND * row
        dash = f' stroke-dasharray="{DASHES[curve.dash % len(DASHES)]}"' if curve.dash % len(DASHES) else ""
        parts.append(f'<path d="M{x:.0f},{y - 4:.0f} h16" {_stroke(curve)} stroke-width="3"{dash}/>')
        parts.append(_text(f"{x + 21:.0f}", f"{y:.0f}", curve.name, "start"))
        x += width
    return parts, row


def _hue(curve: Curve) -> int:
    return curve.colour % len(COLOURS)


def _stroke(curve: Curve) -> str:
    return f'stroke="{COLOURS[_hue(curve)]}" class="c{_hue(curve)}"'


def _text(x: object, y: object, words: str, anchor: str, look: str = "ink") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="#222" class="{look}">{escape(words)}</text>'


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Lowest and highest, never equal."""
    found = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(found), max(found)
    room = abs(low) / 2 or 0.5
    return (low, high) if high > low else (low - room, high + room)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """At most `count` + 1 round numbers within the span."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The stretches between gaps; values that are not finite are gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None or not math.isfinite(y):
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def decimate(points: Sequence[Point], most: int, pick: Callable[[Sequence[Point]], Sequence[Point]]) -> list[Point]:
    """At most about `most` points: where there are more, `pick` says what stays of each of `most` / 2 stretches."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(2 * len(points) / most)
    return [p for k in range(0, len(points), size) for p in pick(points[k : k + size])]
