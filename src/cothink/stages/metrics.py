"""Figures of a batch of episodes: accuracy, turns, finish reasons, and the same per role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from cothink.types import FINISH_CODES, Episode, Turn


def of_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Means over episodes, shares of finish reasons and verdicts, and per-role figures (`role/figure`)."""
    if not episodes:
        return {"episodes": 0.0}
    n = len(episodes)
    reasons = Counter(e.finish.reason for e in episodes)
    verdicts = Counter(e.verdict for e in episodes)
    found = {
        "episodes": float(n),
        "accuracy": sum(e.accuracy or 0.0 for e in episodes) / n,
        "rounds": sum(1 + max((t.round for t in e.turns), default=-1) for e in episodes) / n,
        "turns": sum(sum(bool(t.completion.output_ids) for t in e.turns) for e in episodes) / n,
        "tokens": float(sum(len(t.completion.output_ids) for e in episodes for t in e.turns)),
        "unparsable": verdicts["unparsable"] / n,
        "grading_errors": verdicts["error"] / n,
    }
    found |= {f"finish/{reason}": reasons[reason] / n for reason in dict.fromkeys([*FINISH_CODES, *reasons])}
    for role in dict.fromkeys(t.role for e in episodes for t in e.turns):
        found |= {f"{role}/{k}": v for k, v in of_role(t for e in episodes for t in e.turns if t.role == role).items()}
    return found


def of_role(turns: Iterable[Turn]) -> dict[str, float]:
    """Tokens per turn, shares of void, cut and answer-leaking turns, and share of repeated 4-grams."""
    spoken = [t for t in turns if t.completion.output_ids]
    if not spoken:
        return {"turns": 0.0}
    n = len(spoken)
    return {
        "turns": float(n),
        "tokens_per_turn": sum(len(t.completion.output_ids) for t in spoken) / n,
        "void": sum(not t.text.strip() for t in spoken) / n,
        "cut": sum(t.completion.finish_reason == "length" for t in spoken) / n,
        "boxed": sum("\\boxed" in t.text for t in spoken) / n,
        "repeated": sum(repeated(t.completion.output_ids) for t in spoken) / n,
    }


def repeated(ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same turn."""
    grams = [tuple(ids[k : k + n]) for k in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
