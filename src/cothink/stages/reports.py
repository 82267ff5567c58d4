"""Evaluation results for people (Markdown) and spreadsheets (CSV); the whole is in the JSON they are made from."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from cothink.stages import teamtables
from cothink.stages.answers import FAILED
from cothink.stages.diagnosed import Table, diagnosed, percent
from cothink.stages.summary import not_graded

RULES = (
    "Accuracy is pass@1, the mean over the plays of a question. Intervals are 95 %: Wilson where every question counts "
    "0 or 1, else the bootstrap over questions. The micro average weighs questions equally, the macro average sets. "
    "Vote: equal answers are one answer, plays that state none do not vote, a tie goes to the answer given first; "
    "maj@k averages the disjoint runs of k plays."
)

COMPARED = (
    "Paired on the same questions: the difference of accuracies with its bootstrap interval, how many questions only "
    "one of the two answered rightly (single answers: in first plays), McNemar's exact p, and Holm's over the pairs."
)
SWAPPED = "Pairs judged in both orders: consistent is the same answer twice; a judge without bias says first in half."
PRICED = "Votes: how many answers of the single model cost what one play of the team does, on average (rounded, not 0)."


def tables(results: Mapping[str, Any]) -> list[Table]:
    """All tables of a results mapping; comparisons may be absent."""
    systems = results["systems"]
    shown = _columns(systems)
    found: list[Table] = [
        (f"Evaluation: {', '.join(results['sets'])}", ["system", *shown, "unparsable", "errors", "failed"],
         [[name, *(percent(pick(v)) for pick in shown.values()), *_rates(v)] for name, v in systems.items()], RULES),
        ("Cost", ["system", "tokens per play", "prompt tokens", "calls", "rounds", "finish reasons", "by role"],
         [[name, *_costs(v)] for name, v in systems.items()], ""),
    ]  # fmt: skip
    for title, key in (("sets", "sets"), ("levels", "by_level")):
        found += _by(f"By {title}", systems, key)
    found += teamtables.tables(systems)
    swapped = {name: v["swap"] for name, v in systems.items() if v.get("swap")}
    if swapped:
        head = ["system", "pairs", "consistent", "right in both", "no verdict in one", "for the first shown"]
        found.append(
            ("Both orders", head, [[name, *map(_share_or_count, v.values())] for name, v in swapped.items()], SWAPPED)
        )
    for name, values in systems.items():
        if values.get("diagnosis"):
            found += diagnosed(f": {name}" if len(systems) > 1 else "", values["diagnosis"])
    if results.get("comparisons"):
        head = ["", "pair", "difference", "only first", "only second", "p", "p (Holm)", "gain"]
        found.append(("Compared", head, [*map(_compared, results["comparisons"])], COMPARED))
    if results.get("equal_cost"):
        head = ["team", "accuracy", "tokens", "single model", "votes", "accuracy", "tokens", "team - votes", "p"]
        found.append(("At equal cost", head, [*map(_priced, results["equal_cost"])], PRICED))
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """The tables of a results mapping and its notes, as Markdown."""
    return page(tables(results), results.get("notes", ()))


def page(shown: Iterable[Table], notes: Iterable[str] = ()) -> str:
    """Tables as Markdown, the first one's title as its heading."""
    parts = []
    for k, (title, head, rows, note) in enumerate(shown):
        parts += [f"{'##' if k else '#'} {title}", _table(head, rows), *([note] if note else [])]
    parts += [f"- {note}" for note in notes]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _signed(value: Sequence[float]) -> str:
    return f"{100 * value[0]:+.1f} [{100 * value[1]:+.1f}, {100 * value[2]:+.1f}]"


def _of(part: Mapping[str, Any]) -> str:
    return percent([part["accuracy"], part["low"], part["high"]])


def _columns(systems: Mapping[str, Any]) -> dict[str, Callable[[Mapping[str, Any]], Sequence[float]]]:
    """The figures that every system has: name -> where they are."""
    shown: dict[str, Callable[[Mapping[str, Any]], Sequence[float]]] = {
        "accuracy": lambda v: [v["accuracy"], v["low"], v["high"]]
    }
    if any(len(v["sets"]) > 1 for v in systems.values()):
        shown["macro"] = lambda v: v["macro"]
    plays = {str(v["k"]) for v in systems.values()}
    if plays == {"1"}:
        return shown
    if all("first" in v for v in systems.values()):
        shown["no vote"] = lambda v: v["first"]
    k = min(plays)
    if plays == {k}:
        return shown | {f"pass@{k}": lambda v: v["pass_at"][k], f"maj@{k}": lambda v: v["maj_at"][k]}
    return shown | {"vote of all plays": lambda v: v["maj_at"][str(v["k"])]}


def _rates(values: Mapping[str, Any]) -> list[str]:
    return [f"{100 * share:.1f} %" for share in not_graded(values).values()]


def _share_or_count(value: float | int | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{100 * value:.1f} %"


def _costs(values: Mapping[str, Any]) -> list[str]:
    n = max(values["episodes"], 1)
    reasons = ", ".join(f"{name} {100 * share:.0f} %" for name, share in values["finish"].items())
    roles = "; ".join(
        f"{name} {part['tokens'] / n:.0f} (cut {100 * part['cut']:.0f} %, void {100 * part['void']:.0f} %)"
        for name, part in values["roles"].items()
    )
    each = [values[key] / n for key in ("tokens", "prompt_tokens", "calls")]
    return [f"{each[0]:.1f}", f"{each[1]:.1f}", f"{each[2]:.1f}", f"{values['rounds']:.1f}", reasons, roles]


def _by(title: str, systems: Mapping[str, Any], key: str) -> list[Table]:
    names = list(dict.fromkeys(name for v in systems.values() for name in v[key]))
    if len(names) < 2:
        return []
    counts = {name: max(v[key][name]["n"] for v in systems.values() if name in v[key]) for name in names}
    rows = [[f"{name} ({counts[name]})", *(_of(v[key][name]) if name in v[key] else "" for v in systems.values())]
            for name in names]  # fmt: skip
    return [(title, ["", *systems], rows, "")]


def _compared(entry: Mapping[str, Any]) -> list[str]:
    gain = entry["relative_gain"]
    return [entry["what"], f"{entry['a']} - {entry['b']}", _signed(entry["difference"]), str(entry["only_a"]),
            str(entry["only_b"]), f"{entry['mcnemar_p']:.3g}", f"{entry['holm_p']:.3g}",
            "" if gain is None else f"{100 * gain:+.1f} %"]  # fmt: skip


def _priced(entry: Mapping[str, Any]) -> list[str]:
    return [entry["team"], percent(entry["team_accuracy"]), f"{entry['team_tokens_per_question']:.1f}", entry["single"],
            str(entry["votes"]), percent(entry["single_accuracy"]), f"{entry['single_tokens_per_question']:.1f}",
            _signed(entry["difference"]), f"{entry['mcnemar_p']:.3g}"]  # fmt: skip


def table(results: Mapping[str, Any]) -> str:
    """CSV, a figure a line: system, set, level, metric, value, low, high, n; shares and costs have no interval."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["system", "set", "level", "metric", "value", "low", "high", "n"])
    for name, values in results["systems"].items():
        for set_name, level, metric, *figures in _figures(values):
            writer.writerow([name, set_name, level, metric, *figures])
    return out.getvalue()


def _figures(v: Mapping[str, Any]) -> Iterator[list[Any]]:
    yield ["all", "", "accuracy", v["accuracy"], v["low"], v["high"], v["n"]]
    yield ["all", "", "macro", *v["macro"], v["n"]]
    for kind in ("pass", "maj"):
        for k, found in v[f"{kind}_at"].items():
            yield ["all", "", f"{kind}@{k}", *found, v["n"]]
    for name, part in v["sets"].items():
        yield [name, "", "accuracy", part["accuracy"], part["low"], part["high"], part["n"]]
    for level, part in v["by_level"].items():
        yield ["all", level, "accuracy", part["accuracy"], part["low"], part["high"], part["n"]]
    for word in ("right", "wrong", "unparsable", "error", FAILED):
        yield ["all", "", f"share {word}", v["verdicts"].get(word, 0.0), "", "", v["episodes"]]
    for reason, share in v["finish"].items():
        yield ["all", "", f"finish {reason}", share, "", "", v["episodes"]]
    for cost in ("tokens", "prompt_tokens", "calls"):
        yield ["all", "", f"{cost} per play", v[cost] / max(v["episodes"], 1), "", "", v["episodes"]]
    yield ["all", "", "rounds", v["rounds"], "", "", v["episodes"]]
    for word, share in v.get("swap", {}).items():
        if word != "pairs" and share is not None:
            yield ["all", "", f"swap {word}", share, "", "", v["swap"]["pairs"]]
