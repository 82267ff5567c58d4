"""The tables of a diagnosis: after each turn, who fixed and who spoilt, what checkers say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Table = tuple[str, Sequence[str], Sequence[Sequence[str]], str]
"""Title, head, rows and a note below, for whoever draws them."""

TURNS = "Accuracy: share right if the play ended with that turn; one that states no answer leaves the one before it."
CHANGED = (
    "Turns that state an answer, by what they made of the one before. Net: fixed less spoilt, in points of the role's "
    "turns. Without it: the role's messages are empty and the team plays on; influence: accuracy less "
    "that, on the same questions. Copied: runs of five words that stand in the question, or else in an earlier turn."
)
CHECKED = (
    "What roles say of the answers they read, and never give. Agreement with the gold: right ones accepted and wrong "
    "ones rejected, of those they judged."
)


def percent(value: Sequence[float]) -> str:
    """`53.0 [43.3, 62.5]`."""
    return f"{100 * value[0]:.1f} [{100 * value[1]:.1f}, {100 * value[2]:.1f}]"


def diagnosed(of: str, diagnosis: Mapping[str, Any]) -> list[Table]:
    """The tables of `diagnose` for one system; `of` goes behind their titles."""
    several = any(turn["round"] > 1 for turn in diagnosis["turns"])
    turns = [
        [
            f"{t['role']} {t['round']}" if several else t["role"],
            str(t["turns"]),
            _share(t["states"]),
            percent(t["accuracy"]),
        ]
        for t in diagnosis["turns"]
    ]
    head = ["role", "tokens", "first right", "first wrong", "kept right", "fixed", "spoilt", "stayed wrong", "net",
            "without it", "influence", "copied: question", "turns"]  # fmt: skip
    roles = diagnosis["roles"]
    found: list[Table] = [
        (f"After each turn{of}", ["turn", "turns", "states an answer", "accuracy"], turns, TURNS),
        (f"Who fixed and who spoilt{of}", head, [[name, *_role(r)] for name, r in roles.items()], CHANGED),
    ]
    checks = [[name, *_check(r["checks"])] for name, r in roles.items() if r["checks"]]
    if checks:
        head = ["role", "accepts right", "accepts wrong", "rejects right", "rejects wrong", "silent on right",
                "silent on wrong", "agreement"]  # fmt: skip
        found.append((f"What checkers say{of}", head, checks, CHECKED))
    return found


def _role(role: Mapping[str, Any]) -> list[str]:
    quiet = role.get("silent")
    gain = quiet and [quiet["influence"][key] for key in ("mean", "low", "high")]
    copied = [_share(role[key]) if key in role else "" for key in ("copied_question", "copied_turns")]
    return [_share(role["tokens"]), *map(str, role["changes"].values()), _points(role["net"]),
            percent(quiet["accuracy"]) if quiet else "", _points(gain), *copied]  # fmt: skip


def _check(checks: Mapping[str, Any]) -> list[str]:
    counts = [str(v) for key, v in checks.items() if key != "agreement"]
    return [*counts, "" if checks["agreement"] is None else _share(checks["agreement"])]


def _share(value: float) -> str:
    return f"{100 * value:.0f} %"


def _points(value: Sequence[float] | None) -> str:
    return f"{100 * value[0]:+.1f} [{100 * value[1]:+.1f}, {100 * value[2]:+.1f}]" if value else ""
