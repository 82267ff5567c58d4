"""Intervals, tests and votes against published or hand-worked values (spec/malt.md O12, O13; spec/rema.md 5)."""

from fractions import Fraction

import pytest

from cothink import stats


def test_published_values():
    assert stats.relative_gain(57.25, 49.50) == pytest.approx(0.1566, abs=5e-5)
    table = {(15, 5): 0.0414, (10, 2): 0.0386, (0, 6): 0.03125, (5, 5): 1.0, (0, 0): 1.0}
    assert {k: stats.mcnemar(*k) for k in table} == pytest.approx(table, abs=5e-5)
    for events, total, low, high in [(6, 30, 0.095, 0.373), (23, 40, 0.422, 0.715), (372, 500, 0.704, 0.780)]:
        assert stats.wilson(events, total) == pytest.approx((low, high), abs=6e-4)
    assert stats.wilson(0, 0) == (0.0, 1.0) and stats.wilson(5, 5)[1] == 1.0
    with pytest.raises(ValueError, match="not a proportion"):
        stats.wilson(6, 5)


def test_eight_seeds_decide_what_five_cannot():
    assert stats.fisher_exact(0, 5, 4, 5) == pytest.approx(0.048, abs=5e-4)
    assert stats.fisher_exact(0, 5, 3, 5) == pytest.approx(0.17, abs=5e-3)
    assert stats.fisher_exact(0, 8, 5, 8) == pytest.approx(0.026, abs=5e-4)


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.9, 0.6]) == [1.0, 1.0] and stats.holm([]) == []


def test_bootstrap_is_seeded_and_covers_the_mean():
    values = [float(i % 4 == 0) for i in range(400)]
    mean, low, high = stats.bootstrap_mean(values, seed=3)
    assert mean == 0.25 and (mean, low, high) == stats.bootstrap_mean(values, seed=3)
    # 1.96 standard errors of a proportion are .0424 here
    assert (low, high) == pytest.approx((0.25 - 0.0424, 0.25 + 0.0424), abs=0.004)
    assert stats.paired_bootstrap([0.5] * 10) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        stats.bootstrap_mean([])


def test_pass_at_k_by_counting():
    assert stats.pass_at_k(4, 1, 1) == 0.25 and stats.pass_at_k(4, 1, 4) == 1.0
    assert stats.pass_at_k(5, 2, 2) == pytest.approx(1 - 3 / 10)
    assert stats.pass_at_k(5, 0, 5) == 0.0
    with pytest.raises(ValueError, match="pass_at_k"):
        stats.pass_at_k(4, 1, 5)


def test_votes():
    table = {"ABC": "A", "ABB": "B", "-BC": "B", "--C": "C", "---": None, "": None}
    for votes, want in table.items():
        assert stats.majority([None if v == "-" else v for v in votes]) == want

    assert stats.majority(["3", "1/2", "0.5"], same=lambda a, b: Fraction(a) == Fraction(b)) == "1/2"


def test_students_interval_by_hand():
    """1..5: mean 3, s / sqrt(5) = 0.70711, and 4 degrees of freedom have the quantile 2.77645."""
    assert stats.mean_interval([1, 2, 3, 4, 5]) == pytest.approx((3 - 1.96324, 3 + 1.96324), abs=1e-5)
    assert stats.mean_interval([1.0]) is None and stats.mean_interval([2.0, 2.0, 2.0]) is None
