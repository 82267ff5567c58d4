"""Which curves a reader is shown: panels over the metrics of one or several runs, thinned to a size that loads."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cothink.plots import Curve, Point, decimate, draw, places
from cothink.watch import smooth

Row = Mapping[str, Any]

SIZE = (380, 230)
"""Width and height of one panel: two or three stand side by side, and a telephone shows it at its size."""
SMOOTHED = 30
"""Curves of fewer points are drawn as they are."""
BYTES = 1_000_000
"""What all panels of a page may weigh together; the more curves there are, the fewer points each keeps."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A drawing of metrics; `{}` in a pattern stands for one name without a slash."""

    title: str
    patterns: tuple[str, ...]
    log: bool = False


PANELS = (
    Panel("reward", ("reward",)),
    Panel("accuracy: plays in training, and tests", ("accuracy", "test/accuracy")),
    Panel("reward by role", ("{}/reward",)),
    Panel("reward by function", ("reward/{}",)),
    Panel("spread of rewards among plays of a row", ("reward_std",)),
    Panel("tokens per turn", ("{}/tokens_per_turn",)),
    Panel("rounds and turns per episode", ("rounds", "turns")),
    Panel("entropy of what was sampled", ("{}/sampled_entropy",)),
    Panel("exact entropy at trained tokens", ("{}/entropy",)),
    Panel("KL of a step's updates", ("{}/kl_update",)),
    Panel("KL to the reference weights", ("{}/kl_ref_k3", "{}/kl_ref_k1")),
    Panel("mismatch of engine and trainer", ("{}/engine_gap", "{}/engine_gap_max"), log=True),
    Panel("gradient norm", ("{}/gradient_norm",)),
    Panel("share of clipped ratios", ("{}/clip_fraction",)),
    Panel("unfinished, cut and void", ("unfinished", "{}/cut", "{}/void")),
    Panel("repeated 4-grams", ("{}/repeated",)),
    Panel("rows kept, groups without spread", ("share_kept", "degenerate_share")),
    Panel("net push of advantages", ("{}/net_push",)),
    Panel("loss", ("{}/loss",)),
    Panel("held-out or watched loss", ("{}/nll",)),
    Panel("token accuracy", ("{}/token_accuracy",)),
    Panel("preference margin", ("{}/margin",)),
    Panel("share of pairs told apart", ("{}/pair_accuracy",)),
    Panel("log-probs over the reference's", ("{}/chosen_change", "{}/rejected_change")),
    Panel("learning rate", ("{}/learning_rate",)),
    Panel("seconds", ("seconds_collect", "seconds_learn")),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Drawing:
    """A panel with its curves, ready to be drawn for a page or for a file."""

    panel: Panel
    curves: list[Curve]

    def svg(self, *, inline: bool = True) -> str:
        """The drawing as SVG."""
        return draw(self.curves, self.panel.title, size=SIZE, log=self.panel.log, inline=inline)

    @property
    def file(self) -> str:
        """A file's name for it."""
        return re.sub(r"[^a-z0-9]+", "-", self.panel.title.lower()).strip("-") + ".svg"


def drawings(runs: Mapping[str, Sequence[Row]], panels: Sequence[Panel] = PANELS) -> list[Drawing]:
    """The panels that have something to show; several runs are drawn over one another, a colour for each."""
    steps = {name: places(rows) for name, rows in runs.items()}
    keys = list(dict.fromkeys(key for rows in runs.values() for row in rows for key in row))
    wanted = [(panel, [k for k in keys if _matches(k, panel.patterns)]) for panel in panels]
    count = sum((len(found) + sum(_ends_of(k)[0] in keys for k in found)) * len(runs) for _, found in wanted)
    most = max(40, min(300, BYTES // (26 * max(count, 1))))
    longest = max(map(len, runs.values()), default=0)
    found = []
    for panel, names in wanted:
        curves: list[Curve] = []
        for k, (run, rows) in enumerate(runs.items()):
            for j, key in enumerate(names):
                hue, dash = (k, j) if len(runs) > 1 else (j, 0)
                name = _name(key, run if len(runs) > 1 else "", len(names) > 1 or len(runs) == 1)
                smoothed = longest / max(len(rows), 1)  # of runs side by side all are smoothed, or none
                curves += _curves(name, key, rows, steps[run], panel, hue, dash, most, smoothed)
        if any(y for curve in curves for _, y in curve.points):
            found.append(Drawing(panel, curves))
    return found


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(re.fullmatch(re.escape(p).replace(r"\{\}", r"(?!turn\d)[^/]+"), key) for p in patterns)


def _name(key: str, run: str, told: bool) -> str:
    return " ".join(part for part in (run, key if told else "") if part)


def _curves(
    name: str,
    key: str,
    rows: Sequence[Row],
    steps: Sequence[int],
    panel: Panel,
    hue: int,
    dash: int,
    most: int,
    counts: float,
) -> list[Curve]:
    """One metric of one run: thinned, and behind its moving average where it has many points (each `counts`)."""
    points: list[Point] = [(x, _figure(row[key])) for x, row in zip(steps, rows) if key in row]
    if not points:
        return []
    values = [y for _, y in points if y is not None]
    band = _band(rows, steps, key, most)
    if len(values) * counts < SMOOTHED or len(values) < len(points) or panel.log:
        return [Curve(name, decimate(points, most, _ends), band, hue, dash)]
    average: list[Point] = list(zip([x for x, _ in points], smooth(values)))
    return [
        Curve(name, decimate(points, most, _ends), band, hue, dash, faint=True),
        Curve(name, decimate(average, most, _ends), (), hue, dash),
    ]


def _ends_of(key: str) -> tuple[str, str]:
    """The metrics that hold the interval of one."""
    return ("test/low", "test/high") if key == "test/accuracy" else (f"{key}_low", f"{key}_high")


def _band(rows: Sequence[Row], steps: Sequence[int], key: str, most: int) -> list[tuple[float, float, float]]:
    """The interval at each step; thinned to the mean interval of each stretch, for its extremes would be none's."""
    low, high = _ends_of(key)
    found = [
        (float(x), a, b)
        for x, row in zip(steps, rows)
        if (a := _figure(row.get(low))) is not None and (b := _figure(row.get(high))) is not None
    ]
    size = -(-len(found) // max(1, most // 2))
    groups = [found[k : k + size] for k in range(0, len(found), size)] if size > 1 else [[one] for one in found]
    return [tuple(sum(end) / len(group) for end in zip(*group)) for group in groups]  # type: ignore[misc]


def _figure(value: Any) -> float | None:
    """A gap where there is no number: one that is not finite would drag the whole average with it."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _ends(points: Sequence[Point]) -> list[Point]:
    """The lowest and the highest point of a stretch, in order: a spike stays visible."""
    known = [p for p in points if p[1] is not None]
    if not known:
        return [points[0]]
    return sorted({min(known, key=_height), max(known, key=_height)})


def _height(point: Point) -> float:
    return point[1] if point[1] is not None else 0.0


def extremes(rows: Sequence[Row]) -> list[tuple[str, float, float, float, float]]:
    """Every metric with its first, last, lowest and highest value."""
    series: dict[str, list[float]] = {}
    for row in rows:
        for key, value in row.items():
            if key not in ("stage", "step", "time") and isinstance(value, int | float):
                series.setdefault(key, []).append(float(value))
    return [(key, v[0], v[-1], min(v), max(v)) for key, v in series.items()]
