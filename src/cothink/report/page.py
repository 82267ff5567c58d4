"""The static report: one HTML file that needs no network, no script and nothing beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cothink import __version__
from cothink.report import sections
from cothink.report.conversation import episode, line
from cothink.report.curves import Drawing, drawings
from cothink.report.episodes import telling
from cothink.report.folders import Folder
from cothink.report.markup import first_line, fold, text

STATIC = Path(__file__).parent / "static"
# Should some text slip through the escaping one day, a browser still runs no script and loads nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(runs: Sequence[Folder], evaluations: Mapping[str, Sequence[sections.Table]], episodes: int = 8) -> str:
    """The report of some runs as HTML: `evaluations` are tables by heading, `episodes` counts those of each run."""
    names = ", ".join(run.name for run in runs) or ", ".join(evaluations)
    drawn = drawings({run.name: run.metrics() for run in runs if run.metrics()})
    parts = {"run": ("What was run", _runs(runs)), "curves": ("Curves", figures(drawn))}
    for k, (heading, found) in enumerate(evaluations.items()):
        parts[f"evaluation{k}"] = (heading, sections.tables(found))
    if runs:
        parts["watch"] = ("The watch", _each(runs, sections.watched))
        parts["numbers"] = ("Numbers", _each(runs, sections.numbers))
        parts["episodes"] = ("Episodes", _each(runs, lambda run: samples(run, episodes)) if episodes else "")
    parts = {key: part for key, part in parts.items() if part[1]}
    links = "".join(f'<a href="#{key}">{text(title)}</a>' for key, (title, _) in parts.items())
    body = "".join(f'<section id="{key}"><h2>{text(name)}</h2>{html}</section>' for key, (name, html) in parts.items())
    title, style = first_line(names, 80), (STATIC / "style.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{text(title)}</title><style>{style}</style></head><body class="report">'
        f'<header class="top"><h1>{text(title)}</h1><nav>{links}</nav></header><main>{body}</main>'
        f"<footer>cothink {__version__}, {time.strftime('%Y-%m-%d %H:%M')}</footer></body></html>\n"
    )


def _runs(runs: Sequence[Folder]) -> str:
    if len(runs) < 2:
        return "".join(map(sections.about, runs))
    each = "".join(fold(run.name, sections.about(run)) for run in runs)
    differ = f"<h3>Where the recipes differ</h3>{sections.differences(runs)}"
    return sections.tables([sections.overview(runs)]) + differ + each


def _each(runs: Sequence[Folder], part: Callable[[Folder], str]) -> str:
    if len(runs) == 1:
        return part(runs[0])
    return "".join(f"<h3>{text(run.name)}</h3>{found}" for run in runs if (found := part(run)))


def figures(drawn: Sequence[Drawing]) -> str:
    """Panels side by side."""
    if not drawn:
        return ""
    note = "Thin: values as they were; bold: their moving average, rate 0.1; shaded or bars: 95 % intervals."
    panels = "".join(f"<figure>{one.svg()}</figure>" for one in drawn)
    return f'<p class="note">{note}</p><div class="panels">{panels}</div>'


def samples(run: Folder, most: int) -> str:
    """Telling episodes of the run's last training step, its last trees and its last evaluation."""
    stages = run.episodes()
    trained = [name for name in stages if name.endswith("-rl")]
    trees = [name for name in stages if name.endswith("-collect")]
    other = [name for name in stages if name not in (*trained, *trees) and "-without-" not in name]
    chosen = [names[-1] for names in (trained, trees, other) if names]
    parts = []
    for name in chosen:
        file = stages[name][-1]
        rows = telling(file, -(-most // len(chosen)))
        where = f"{name}, step {int(file.stem)}" if name in trained and file.stem.isdigit() else name
        parts += [f"<h4>{text(where)}</h4>", *(_opened(row, k) for k, row in enumerate(rows))]
    return "".join(parts)


def _opened(row: dict[str, Any], k: int) -> str:
    return f'<details class="sample"{" open" if k == 0 else ""}><summary>{line(row)}</summary>{episode(row)}</details>'


def write_svgs(runs: Sequence[Folder], folder: Path) -> list[Path]:
    """The report's curves as files; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for one in drawings({run.name: run.metrics() for run in runs if run.metrics()}):
        written.append(folder / one.file)
        written[-1].write_text(one.svg(inline=False), encoding="utf-8")
    return written
