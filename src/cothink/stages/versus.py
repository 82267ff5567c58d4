"""Systems on the same questions: exact McNemar, paired bootstrap, Holm; and a team against votes at equal cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

from cothink import stats
from cothink.resolve import listing
from cothink.stages.answers import Row
from cothink.stages.summary import Questions, figure, macro

Cost = Literal["generated", "all"]
"""What is counted as cost: sampled tokens, or prompt tokens as well (each prompt in full)."""


def compare(systems: Mapping[str, Questions]) -> list[dict[str, Any]]:
    """Every pair of systems: single answers, and votes where some system has several plays of every question.

    A system of one play votes by its answer, which in a debate is a vote already. Holm's correction runs over the
    pairs of one kind. Single answers: the difference is between the means over the plays, McNemar's test counts the
    first plays.
    """
    plays = {q.k for q in systems.values()}
    found = _family(systems, "single answer", Questions.mean, Questions.first)
    if max(plays, default=0) > 1:

        def voted(questions: Questions) -> Mapping[str, float]:
            return {key: _vote_of(plays, questions.k) for key, plays in questions.plays.items()}

        what = f"vote of {max(plays)}" if len(plays) == 1 else "vote of all plays"
        found += _family(systems, what, voted, voted)
    return found


def _vote_of(plays: Sequence[Row], k: int) -> float:
    """The vote over the first k plays: 0 or 1."""
    first = plays[:k]
    return stats.majority_at_k([row["vote"] for row in first], [row["accuracy"] == 1.0 for row in first], len(first))


Outcomes = Callable[[Questions], Mapping[str, float]]


def _family(systems: Mapping[str, Questions], what: str, mean: Outcomes, binary: Outcomes) -> list[dict[str, Any]]:
    pairs = [{"what": what, **pair(a, systems[a], b, systems[b], mean, binary)} for a, b in combinations(systems, 2)]
    for entry, p in zip(pairs, stats.holm([entry["mcnemar_p"] for entry in pairs]), strict=True):
        entry["holm_p"] = p
    return pairs


def pair(a: str, one: Questions, b: str, two: Questions, mean: Outcomes, binary: Outcomes) -> dict[str, Any]:
    """a minus b on the questions that both answered: difference, discordant counts and the exact p."""
    return {"a": a, "b": b, **_paired(one, mean(one), binary(one), mean(two), binary(two))}


def _paired(
    questions: Questions,
    mean_a: Mapping[str, float],
    binary_a: Mapping[str, float],
    mean_b: Mapping[str, float],
    binary_b: Mapping[str, float],
) -> dict[str, Any]:
    shared = [key for key in mean_a if key in mean_b]
    if not shared:
        raise ValueError("the systems have no question in common; evaluate them on the same sets")
    keep, left = set(shared), len(mean_a) + len(mean_b) - 2 * len(shared)
    both = {key: mean_a[key] - mean_b[key] for key in shared}
    groups = [[both[key] for key in keys if key in keep] for keys in questions.sets.values()]
    only_a = sum(binary_a[key] > binary_b[key] for key in shared)
    only_b = sum(binary_b[key] > binary_a[key] for key in shared)
    old = sum(mean_b[key] for key in shared)
    return {
        "questions": len(shared),
        **({"not_shared": left} if left else {}),
        "difference": [*stats.paired_bootstrap([*both.values()])],
        **({"macro_difference": [*stats.bootstrap_macro([g for g in groups if g])]} if len(groups) > 1 else {}),
        "relative_gain": stats.relative_gain(sum(mean_a[key] for key in shared), old) if old else None,
        "only_a": only_a,
        "only_b": only_b,
        "mcnemar_p": stats.mcnemar(only_a, only_b),
    }


def tokens(rows: Sequence[Row], cost: Cost) -> int:
    """What some plays cost."""
    turns = [turn for row in rows for turn in row["turns"]]
    return sum(turn["tokens"] + (turn["prompt_tokens"] if cost == "all" else 0) for turn in turns)


def votes_worth(team: Questions, single: Questions, cost: Cost) -> int:
    """How many answers of the single model cost what one play of the team costs, on average: rounded, at least 1."""
    one_play = _per_play(team, cost)
    answer = _per_play(single, cost)
    return max(1, round(one_play / answer)) if answer else 1


def _per_play(questions: Questions, cost: Cost) -> float:
    """Mean over questions of the mean cost of one play."""
    each = [tokens(plays, cost) / len(plays) for plays in questions.plays.values()]
    return sum(each) / len(each) if each else 0.0


def equal_cost(
    name: str, team: Questions, single_name: str, single: Questions, cost: Cost, votes: int
) -> dict[str, Any]:
    """The team's single play against the vote of the single model's first `votes` answers to the same questions."""
    short = [key for key, plays in single.plays.items() if len(plays) < votes]
    if short:
        what = f"{single_name} has fewer than {votes} plays of {len(short)} questions ({listing(short[:3])}, ...)"
        raise ValueError(f"{what}; run the evaluation again to play them")
    outcomes = {key: _vote_of(plays, votes) for key, plays in single.plays.items()}
    spent = {key: tokens(plays[:votes], cost) for key, plays in single.plays.items()}
    mean, n = team.mean(), len(single.plays)
    found = _paired(team, mean, team.first(), outcomes, outcomes)
    groups = [[outcomes[key] for key in keys] for keys in single.sets.values()]
    return {
        "team": name,
        "single": single_name,
        "votes": votes,
        "cost": cost,
        "team_tokens_per_question": _per_play(team, cost),
        "single_tokens_per_question": sum(spent.values()) / n if n else 0.0,
        "team_accuracy": figure([*mean.values()]),
        "single_accuracy": figure([*outcomes.values()]),
        "single_macro": macro(groups),
        **found,
    }
