"""Tables of what `teamwork` measures: votes after each turn, verifiers, transitions, the paper's protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cothink.stages.diagnosed import Table, percent

CHECKS = ("confirmed_right", "rejected_right", "confirmed_wrong", "rejected_wrong", "unparsable")
CHECKED = "A verifier confirms an answer when it states the same one; it agrees with gold when it was right to do so."
PAPER = "Accuracy in %, mean and population standard deviation over random subsets that all systems share."
MOVES = "Questions; the votes or first plays of the system, against the first plays of the baseline."
CARRIED = "Carried: plays whose last turn stated no answer, and whose answer before it was graded."


def tables(systems: Mapping[str, Any]) -> list[Table]:
    """The tables of the systems of which something was measured."""
    return [*_turns(systems), *_verifiers(systems), *_transitions(systems), *_paper(systems)]


def _turns(systems: Mapping[str, Any]) -> list[Table]:
    teams = {name: v["turns"] for name, v in systems.items() if v.get("turns")}
    if not any(len(part["levels"]) > 1 for part in teams.values()):
        return []
    rows = [
        [name, f"{one['place'] + 1} {one['role']}", percent(one["no_vote"]),
         percent(one["vote"]) if "vote" in one else "", f"{100 * one['unparsable']:.1f} %",
         str(part["carried"]) if one is part["levels"][-1] else ""]
        for name, part in teams.items()
        for one in part["levels"]
    ]  # fmt: skip
    return [("Votes after each turn", ["system", "turn", "no vote", "vote", "unparsable", "carried"], rows, CARRIED)]


def _verifiers(systems: Mapping[str, Any]) -> list[Table]:
    checks = {name: v["turns"]["verifier"] for name, v in systems.items() if v.get("turns", {}).get("verifier")}
    rows = [
        [name, str(v["checks"]), *(str(v[key]) for key in CHECKS), _share(v["agreement"]), _share(v["right"])]
        for name, v in checks.items()
    ]
    head = ["system", "checks", *(key.replace("_", " ") for key in CHECKS), "agrees with gold", "own answer right"]
    return [("Verifiers", head, rows, CHECKED)] if rows else []


def _transitions(systems: Mapping[str, Any]) -> list[Table]:
    rows = []
    for name, v in systems.items():
        for what, counts in (v.get("transitions") or {}).items():
            if isinstance(counts, Mapping):
                way = f"{what.replace('_', ' ')}, from {v['transitions']['from']}"
                rows.append([name, way, *map(str, counts.values())])
        flips = (v.get("turns") or {}).get("refiner")
        if flips:
            rows.append([name, "refiner, on the answer before it", *map(str, flips.values())])
    head = ["system", "what", "wrong to right", "right to right", "wrong to wrong", "right to wrong"]
    return [("Transitions", head, rows, MOVES)] if rows else []


def _paper(systems: Mapping[str, Any]) -> list[Table]:
    rows = [
        [name, way.replace("_", " "), f"{100 * v['paper'][way]['mean']:.2f} ± {100 * v['paper'][way]['std']:.2f}"]
        for name, v in systems.items()
        if v.get("paper")
        for way in ("no_vote", "vote")
        if way in v["paper"]
    ]
    return [("Protocol of the paper", ["system", "", "mean ± std"], rows, PAPER)] if rows else []


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
