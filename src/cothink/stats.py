"""Intervals, paired tests and votes for evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

Answer = TypeVar("Answer")

Z95 = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson(events: float, total: float, z: float = Z95) -> tuple[float, float]:
    """Wilson score interval of a proportion; (0, 1) when nothing was observed."""
    if not 0 <= events <= total:
        raise ValueError(f"wilson: {events} events of {total} is not a proportion")
    if total == 0:
        return 0.0, 1.0
    share, zz = events / total, z * z / total
    middle = (share + zz / 2) / (1 + zz)
    half = z * math.sqrt(share * (1 - share) / total + zz / (4 * total)) / (1 + zz)
    # At the ends the exact bound is the end itself; rounding must not leave 1e-18 there.
    return 0.0 if events == 0 else max(0.0, middle - half), 1.0 if events == total else min(1.0, middle + half)


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p of the discordant counts: tasks that only a, and that only b, got right."""
    from scipy.stats import binomtest

    return float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0


def fisher_exact(a_events: int, a_total: int, b_events: int, b_total: int) -> float:
    """Two-sided p of Fisher's exact test on two proportions."""
    from scipy.stats import fisher_exact as test

    return float(test([[a_events, a_total - a_events], [b_events, b_total - b_events]]).pvalue)  # pyright: ignore


def holm(pvalues: Sequence[float]) -> list[float]:
    """Holm-adjusted p values of one family, in the given order."""
    adjusted, worst = [0.0] * len(pvalues), 0.0
    for rank, i in enumerate(sorted(range(len(pvalues)), key=lambda i: pvalues[i])):
        worst = max(worst, min(1.0, (len(pvalues) - rank) * pvalues[i]))
        adjusted[i] = worst
    return adjusted


def bootstrap_mean(
    values: Sequence[float], seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean and its percentile bootstrap interval: (mean, low, high).

    With one value a question (the mean of its plays) this is the cluster bootstrap: questions are drawn, not plays.
    """
    return bootstrap_macro([values], seed, resamples, level)


def bootstrap_macro(
    groups: Sequence[Sequence[float]], seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean of the groups' means and its interval, values drawn anew within each group: (mean, low, high)."""
    import numpy as np

    if not groups or not all(map(len, groups)):
        raise ValueError("bootstrap: no values in a group; evaluate at least one task of each set")
    rng, centre, means = np.random.default_rng(seed), 0.0, np.zeros(resamples)
    for values in groups:
        data = np.asarray(values, dtype=float)
        centre += float(data.mean()) / len(groups)
        # In slices, so that a large test set does not need resamples * len(values) numbers at once.
        size = max(1, 2_000_000 // len(data))
        for start in range(0, resamples, size):
            drawn = rng.integers(0, len(data), (min(size, resamples - start), len(data)))
            means[start : start + size] += data[drawn].mean(axis=1) / len(groups)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return centre, float(low), float(high)


def paired_bootstrap(
    diffs: Sequence[float], seed: int = 0, resamples: int = 10_000, level: float = 0.95
) -> tuple[float, float, float]:
    """Mean difference of two systems and its interval, from one difference per task: (difference, low, high)."""
    return bootstrap_mean(diffs, seed, resamples, level)


def mean_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """Student's 95 % interval of a mean; None for fewer than two values, or for equal ones, which say nothing of it."""
    from scipy.stats import t

    n = len(values)
    if n < 2 or len(set(values)) == 1:
        return None
    mean = math.fsum(values) / n
    half = float(t.ppf(0.975, n - 1)) * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean - half, mean + half


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased chance that k of the drawn answers hold a right one (arXiv 2107.03374)."""
    if not 0 <= right <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass_at_k: need 0 <= right <= samples and 1 <= k <= samples, got {samples=} {right=} {k=}")
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[Answer | None], same: Callable[[Answer, Answer], bool] | None = None) -> Answer | None:
    """The answer most samples agree on, the earliest one on a tie; None entries (no answer) do not vote."""
    classes: list[tuple[Answer, int]] = []
    for answer in answers:
        if answer is None:
            continue
        for i, (first, count) in enumerate(classes):
            if same(first, answer) if same else first == answer:
                classes[i] = (first, count + 1)
                break
        else:
            classes.append((answer, 1))
    return max(classes, key=lambda c: c[1])[0] if classes else None


def majority_at_k(votes: Sequence[Hashable | None], right: Sequence[bool], k: int) -> float:
    """Share of the disjoint runs of k plays, in order, whose vote is right; plays left over are not used.

    `votes` names each play's answer (None: it states none), `right` says whether the play is. The vote is `majority`,
    and its answer counts as right if the earliest play that states it is.
    """
    if len(votes) != len(right) or not 1 <= k <= len(votes):
        raise ValueError(f"majority_at_k: {k=} of {len(votes)} votes and {len(right)} grades; need 1 <= k <= votes")
    runs = range(0, len(votes) - k + 1, k)
    won = 0
    for start in runs:
        winner = majority(votes[start : start + k])
        won += winner is not None and right[votes.index(winner, start)]
    return won / len(runs)


def relative_gain(new: float, old: float) -> float:
    """(new - old) / old."""
    return (new - old) / old
