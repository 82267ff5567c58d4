"""Curves of a run's metrics as one self-contained SVG file; no library."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path

from cothink.record import RunError
from cothink.resolve import nearest

Point = tuple[float, float | None]
"""Step and value; None makes a gap."""

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 360, 64, 16, 36, 36
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666")
TICKS = 5


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
    before, stage, last = 0, None, 0
    for row in rows:  # the steps of a later stage go on where those of the one before end
        if row["stage"] != stage:
            before, stage = before + last, row["stage"]
        last = row["step"]
        for name in (n for n in wanted if n in row):
            series[name].append((before + row["step"], row[name]))
    return lines(series, ", ".join(patterns))


def lines(series: Mapping[str, Sequence[Point]], title: str) -> str:
    """Curves over the step, on one scale, with a legend; a point without neighbours is a dot."""
    known = [(x, y) for points in series.values() for x, y in points if y is not None]
    low_x, high_x = _span(x for x, _ in known)
    low_y, high_y = _span(y for _, y in known)

    def place(x: float, y: float) -> str:
        across = LEFT + (x - low_x) / (high_x - low_x) * (WIDTH - LEFT - RIGHT)
        up = HEIGHT - BOTTOM - (y - low_y) / (high_y - low_y) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{up:.1f}"

    parts = [_text(LEFT, 20, title, "start")]
    for k in range(TICKS):
        y = low_y + (high_y - low_y) * k / (TICKS - 1)
        x = low_x + (high_x - low_x) * k / (TICKS - 1)
        left, bottom = place(low_x, y), place(x, low_y)
        parts.append(f'<path d="M{left} L{place(high_x, y)}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 6, left.partition(",")[2], f"{y:.3g}", "end"))
        parts.append(_text(bottom.partition(",")[0], HEIGHT - 14, f"{x:.4g}", "middle"))
    for k, (name, points) in enumerate(series.items()):
        colour = COLOURS[k % len(COLOURS)]
        for run in _runs(points):
            path = " L".join(place(x, y) for x, y in run)
            parts.append(f'<path d="M{path}{" h0" * (len(run) == 1)}" stroke="{colour}" stroke-width="2"/>')
        parts.append(_text(WIDTH - RIGHT, TOP + 14 * (k + 1), name, "end", colour))
    style = 'font-family="sans-serif" font-size="11" fill="none" stroke-linecap="round"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" {style}>'
    return f'{head}<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>{"".join(parts)}</svg>\n'


def _text(x: object, y: object, text: str, anchor: str, colour: str = "#222") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Lowest and highest, never equal."""
    found = [*values] or [0.0]
    low, high = min(found), max(found)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _runs(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The stretches between gaps."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]
