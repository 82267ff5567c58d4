"""The parts of a report that are tables: what was run, how runs differ, what the watch said, numbers, evaluations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from cothink.report.curves import extremes
from cothink.report.folders import Folder
from cothink.report.markup import first_line, fold, shortened, table, text

RECIPE = 100_000
"""Characters of a recipe that are shown."""


Table = tuple[str, Sequence[str], Sequence[Sequence[object]], str]
"""Title, head, rows and a note below."""


def tables(found: Sequence[Table]) -> str:
    """Tables below one another."""
    return "".join(
        f"<h3>{text(title)}</h3>{table(head, rows)}" + (f'<p class="note">{text(note)}</p>' if note else "")
        for title, head, rows, note in found
    )


def about(run: Folder) -> str:
    """What was run: team, policies, stages, where it stands, and the recipe and versions to open."""
    recipe, manifest = run.recipe, run.manifest
    team = _mapping(recipe.get("team"))
    facts = {
        "status": ", ".join(filter(None, (run.status, run.progress))),
        "workflow": _flat(team.get("workflow")),
        "seed": recipe.get("seed"),
        "started": manifest.get("started"),
        "training took": _span(run),
        "commit": _commit(manifest.get("commit")),
        "command": " ".join(map(str, manifest.get("command") or ())),
    }
    shown = "".join(
        f"<div{' class=whole' if k == 'command' else ''}><dt>{k}</dt><dd>{text(shortened(str(v), 600)[0])}</dd></div>"
        for k, v in facts.items()
        if v not in (None, "")
    )
    roles = [
        (name, r.get("policy"), "learns" if r.get("trainable", True) else "frozen", r.get("temperature"),
         r.get("max_tokens"), first_line(str(r.get("system") or "the workflow's own")))
        for name, r in _entries(team.get("roles"))
    ]  # fmt: skip
    policies = [
        (name, p.get("model"), p.get("learning_rate"), p.get("lora_r") or "full weights")
        for name, p in _entries(recipe.get("policies"))
    ]
    stages = [(k, s.get("kind"), _stage(s)) for k, s in enumerate(run.stages)]
    versions = [*_mapping(manifest.get("versions")).items(), ("platform", manifest.get("platform"))]
    return (
        f'<dl class="facts">{shown}</dl>'
        + table(("role", "policy", "", "temperature", "max tokens", "system prompt"), roles)
        + table(("policy", "model", "learning rate", "LoRA rank"), policies)
        + table(("stage", "kind", "what"), stages)
        + fold("the recipe", f'<pre class="say">{text(shortened(run.recipe_text, RECIPE)[0])}</pre>')
        + fold("versions", table(("library", "version"), versions))
    )


def _commit(name: Any) -> str:
    """A commit's beginning; a `+` behind it says that files had changed since."""
    found = str(name or "")
    return found[:12] + "+" * (len(found) > 12 and found.endswith("+"))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _entries(value: Any) -> list[tuple[str, Mapping[str, Any]]]:
    return [(str(name), part) for name, part in _mapping(value).items() if isinstance(part, dict)]


def _flat(value: Any) -> str:
    if not isinstance(value, dict):
        return str(value or "")
    return ", ".join([str(value.get("name", ""))] + [f"{k} {v}" for k, v in value.items() if k != "name"])


def _stage(stage: Mapping[str, Any]) -> str:
    words = {"on": "on", "label": "as", "suite": "suite", "steps": "steps", "tasks_per_step": "rows a step",
             "episodes_per_task": "plays of a row", "token_budget": "token budget", "preset": "preset",
             "epochs": "epochs", "learning_rate": "learning rate"}  # fmt: skip
    plain = [f"{word} {stage[key]}" for key, word in words.items() if stage.get(key) is not None]
    plain += [f"{key} {_flat(stage[key])}" for key in ("schedule", "estimator", "data") if stage.get(key)]
    rewards = stage.get("rewards")
    plain += [f"rewards {', '.join(map(_name, rewards))}"] if isinstance(rewards, list) else []
    return "; ".join(plain)


def _name(block: Any) -> str:
    return str(_mapping(block).get("name", block))


def _span(run: Folder) -> str:
    """Seconds of collecting and learning, as far as the metrics tell."""
    seconds = sum(row.get(k) or 0 for row in run.metrics() for k in ("seconds_collect", "seconds_learn"))
    return f"{seconds:,.0f} s" if seconds else ""


def differences(runs: Sequence[Folder]) -> str:
    """The settings in which the recipes of several runs differ; a part that only some have is one line."""
    rows = [(path, *map(_brief, values)) for path, values in _differ("", [run.recipe for run in runs])]
    if not rows:
        return '<p class="note">All recipes are the same.</p>'
    found = table(("setting", *(run.name for run in runs)), rows)
    return found if len(rows) <= 20 else fold(f"{len(rows)} settings", found)


MISSING = object()
NOTHING = (None, False, [], {})
"""Values that say no more than a missing setting does: recipes of earlier versions lack later ones."""


def _differ(path: str, values: Sequence[Any]) -> Iterator[tuple[str, Sequence[Any]]]:
    """Dotted settings, as `cothink run` takes them, and each run's value."""
    if all(v == values[0] for v in values) or all(v is MISSING or v in NOTHING for v in values):
        return
    if all(isinstance(v, list) and any(isinstance(x, dict) for x in v) for v in values):
        values = [{str(k): x for k, x in enumerate(v)} for v in values]
    kinds = [(v.get("kind"), v.get("name") if path else None) for v in values if isinstance(v, dict)]
    if len(kinds) < len(values) or len(set(kinds)) > 1:  # parts of different kinds have nothing to compare inside
        yield path, values
        return
    for key in dict.fromkeys(key for v in values for key in v):
        inner = f"{path}.{key}" if path else str(key)
        yield from _differ(inner, [v.get(key, MISSING) for v in values])


def _brief(value: Any) -> str:
    if value is MISSING:
        return "-"
    return first_line(value if isinstance(value, str) else json.dumps(value, default=str), 90)


def watched(run: Folder) -> str:
    """What the watch said, a line for each signal, and why it stopped the run."""
    parts = []
    if run.stopped:
        stop = run.stopped
        parts.append(f'<p class="alarm">Stopped at step {text(stop.get("step"))}: {text(stop.get("what"))}</p>')
    groups: dict[tuple[str, str], list[tuple[int, str]]] = {}
    for step, level, words in run.warnings():
        signal, _, rest = words.partition(" ")
        key, told = (words, "") if level == "action" or not rest else (signal.removesuffix(":"), rest)
        groups.setdefault((level, key), []).append((step, told))
    rows = [
        (level, signal, said[0][0], said[-1][0], len(said), first_line(said[-1][1], 160))
        for (level, signal), said in groups.items()
    ]
    if rows:
        parts.append(table(("level", "signal", "first step", "last step", "steps", "last said"), rows))
    if run.unreadable:
        parts.append(f'<p class="note">{run.unreadable} lines of metrics could not be read.</p>')
    return "".join(parts) or '<p class="note">The watch said nothing.</p>'


def numbers(run: Folder) -> str:
    """Every metric: first, last, lowest, highest."""
    found = extremes(run.metrics())
    return (
        fold(f"all {len(found)} metrics", table(("metric", "first", "last", "lowest", "highest"), found))
        if found
        else ""
    )


def overview(runs: Sequence[Folder]) -> Table:
    """What each run has cost and where it stands, for a comparison."""
    rows = []
    for run in runs:
        metrics = run.metrics()
        last = metrics[-1] if metrics else {}
        totals = [row["tokens_total"] for row in metrics if "tokens_total" in row]
        rows.append((run.name, run.status, run.progress, f"{_total(totals):,}" if totals else "",
                     last.get("reward"), last.get("accuracy"), _span(run)))  # fmt: skip
    return "Runs", ("run", "status", "trained", "tokens sampled", "last reward", "last accuracy", "time"), rows, ""


def _total(totals: Sequence[float]) -> int:
    """`tokens_total` counts within a stage: the sum of each stage's last."""
    ends = [a for a, b in pairwise(totals) if b < a]
    return int(sum(ends) + totals[-1])
