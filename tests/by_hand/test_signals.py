"""The watch on synthetic logs: each signal speaks on the log that is made to show it, and a healthy log is silent."""

from __future__ import annotations

import math
import random

import pytest

from cothink.signals import NAMES, SIGNALS, Memory, Watch, healthy, measured

HEALTHY = {
    "reward": 0.5, "accuracy": 0.5, "reward_std": 0.4, "share_kept": 0.8, "main/gradient_norm": 1.0, "rounds": 3.0,
    "one_round": 0.1, "required_rounds": 2.0, "unfinished": 0.1, "mask_capped": 0.0, "early_finish": 0.0,
    "meta/void": 0.0, "meta/tokens_per_turn": 40.0, "meta/sampled_entropy": 1.0, "main/kl_update": 1e-4,
    "main/kl_ref_k3": 0.01, "main/clip_fraction": 0.05, "meta/repeated": 0.05, "meta/net_push": 0.01,
    "test/accuracy": 0.5, "test/high": 0.6, "solo/gain": 0.1, "meta/influence": 2.0, "main/mismatch": 1e-4,
    "main/ess_fraction": 0.95,
}  # fmt: skip


def hear(log, **options):
    """(signal, level) -> first step, of a list of figures."""
    watch, memory, found = Watch(["meta"], ["main"], **options), Memory(), {}
    for step, figures in enumerate(log, 1):
        for f in watch.see(step, figures, memory):
            found.setdefault((f.signal, f.level), step)
    return found


def turning(at=30, steps=80, **changed):
    """A healthy log in which some figures take other values from step `at` on."""
    return [HEALTHY | (changed if step >= at else {}) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("signal", "changed", "warn", "stop"),
    [
        # e_t = .1 + .4 x .9^n: 1 - e/max passes .15 at the 2nd step, .25 at the 4th, and 20 times in a row at the 23rd
        ("reward_drop", {"reward": 0.1}, 31, 52),
        ("test_drop", {"test/accuracy": 0.3, "test/high": 0.4}, 30, 31),
        ("flat_groups", {"reward_std": 0.03, "reward": 0.1}, 30, 39),
        ("no_success", {"test/accuracy": 0.005, "test/high": 0.02}, None, 34),
        ("few_groups", {"share_kept": 0.0}, 30, 34),
        ("gradient", {"main/gradient_norm": 11.0}, 30, 32),
        ("fewer_rounds", {"rounds": 1.7, "reward": 0.1}, 30, None),
        ("one_round", {"one_round": 0.85}, None, 30),
        ("one_round", {"rounds": 1.2}, None, 30),
        ("unfinished", {"unfinished": 0.65}, None, 30),
        ("mask_full", {"mask_capped": 1.0}, 49, None),
        ("early_finish", {"early_finish": 0.3}, 30, None),
        # with n bad ones the mean of ten steps is .1 - .012 n: below .02 at the 7th, below 0 from the 9th on
        ("lazy", {"solo/gain": -0.02}, 36, 37 + 21),
        # with n bad ones the mean of five is 2 - .32 n, or 2 - .38 n, over 2
        ("unheard", {"meta/influence": 0.4}, 34, None),
        ("unheard", {"meta/influence": 0.1}, 33, 34),
        ("void", {"meta/void": 0.1}, 30, None),
        ("void", {"meta/void": 0.3}, None, 30),
        ("shorter", {"meta/tokens_per_turn": 7.0, "reward": 0.1}, None, 30),
        ("entropy_low", {"meta/sampled_entropy": 0.2, "reward": 0.1}, 30, None),
        ("entropy_high", {"meta/sampled_entropy": 2.5, "reward": 0.1}, 30, None),
        ("update_kl", {"main/kl_update": 0.2}, None, 30),
        ("reference_kl", {"main/kl_ref_k3": 0.5, "reward": 0.1}, 30, None),
        ("mismatch", {"main/mismatch": 0.002}, 30, None),
        ("mismatch", {"main/mismatch": 0.02}, None, 30),
        ("ess", {"main/ess_fraction": 0.4}, 30, None),
        ("ess", {"main/ess_fraction": 0.05}, None, 30),
        ("clipped", {"main/clip_fraction": 0.3}, 30, None),
        ("repeated", {"meta/repeated": 0.3}, None, 30),
        # the mean of ten steps passes .1 at the 3rd step of .4 and .3 at the 8th
        ("net_push", {"meta/net_push": 0.4}, 32, 37),
    ],
)
def test_each_signal_speaks_on_its_own_log(signal, changed, warn, stop):
    """credit 7: the limits of the table, on a figure that turns bad at step 30."""
    found = hear(turning(**changed))
    assert {k: v for k, v in found.items() if k[0] == signal} == {
        (signal, level): step for level, step in (("warn", warn), ("stop", stop)) if step is not None
    }


def test_every_signal_has_a_log():
    marks = test_each_signal_speaks_on_its_own_log.pytestmark
    assert {case[0] for case in marks[0].args[1]} == set(NAMES) and len(SIGNALS) == len(NAMES) + 1


def test_a_healthy_noisy_log_is_silent():
    rng = random.Random(0)
    for spread in (0.02, 0.1, 0.2):  # from large batches to 4 x 4 plays
        log = [HEALTHY | {"reward": min(1.0, max(0.0, rng.gauss(0.5, spread)))} for _ in range(300)]
        assert hear(log) == {}, spread


def test_a_collapse_like_the_papers_is_noticed_early():
    """rema §7 row 40, §5 fig. 5: reward .42 -> .67 over 300 steps, then .54 within 15 steps and on down."""
    rng = random.Random(1)
    level = (
        [0.42 + 0.25 * k / 300 for k in range(300)] + [0.67 - 0.13 * k / 15 for k in range(16)] + [0.5, 0.45, 0.4] * 20
    )
    found = hear([HEALTHY | {"reward": x + rng.gauss(0, 0.02)} for x in level])
    assert set(found) == {("reward_drop", "warn"), ("reward_drop", "stop")}
    assert 310 < found["reward_drop", "warn"] < 325 and found["reward_drop", "stop"] < 350


def test_nothing_speaks_while_warming_up_but_what_cannot_be_applied():
    assert hear(turning(at=1, steps=20, reward=0.0, **{"meta/void": 1.0})) == {}
    bad = turning(at=5, steps=6, **{"main/gradient_norm": math.nan, "main/skipped_updates": 1.0})
    assert hear(bad) == {("gradient", "stop"): 5}


def test_fatal_only_together_or_where_it_applies():
    assert ("entropy_high", "stop") not in hear(turning(**{"meta/sampled_entropy": 5.0}))
    assert ("entropy_high", "stop") in hear(turning(**{"meta/sampled_entropy": 5.0, "reward": 0.1}))
    assert hear(turning(reward_std=0.01, accuracy=0.97)) == {}  # solved groups are flat
    assert hear(turning(one_round=1.0, required_rounds=1.0)) == {}
    assert hear(turning(**{"test/accuracy": 0.4, "test/high": 0.52})) == {}  # within the interval of chance
    assert hear(turning(**{"main/clip_fraction": 0.9}), clips=False) == {}  # usual for turn-level ratios


@pytest.mark.parametrize(
    "changed",
    [
        {"meta/sampled_entropy": 0.01}, {"meta/sampled_entropy": 5.0}, {"meta/tokens_per_turn": 5.0},
        {"reward_std": 0.01}, {"rounds": 1.0}, {"main/kl_ref_k3": 2.0},
    ],
)  # fmt: skip
def test_what_learning_does_too_is_only_said_while_the_reward_holds(changed):
    """Measured on word problems: accuracy rose from .24 to .5 while the entropy fell to an eighth."""
    watch, memory = Watch(["meta"], ["main"], {"one_round": None}), Memory()
    said = [f for step, row in enumerate(turning(**changed), 1) for f in watch.see(step, row, memory)]
    assert said and all(f.level == "warn" and not f.back for f in said)
    assert healthy(80, memory, 20)  # such a state is still worth going back to


def test_a_gradient_that_comes_back_to_its_usual_size_is_no_spike():
    norms = [1.0] * 12 + [1e-4] * 60 + [0.5] * 3
    assert not [v for v in measured("median", norms) if v is not None and v > 5]
    assert measured("median", [*norms, 30.0])[-1] == pytest.approx(30)


def test_a_reward_that_can_be_negative_is_watched_through_the_grade():
    log = [{**f, "reward": f["reward"] - 0.6} for f in turning(accuracy=0.1)]
    assert hear(log)["reward_drop", "warn"] == 31


def test_limits_by_signal_and_by_role():
    log = turning(**{"meta/void": 0.1})
    assert hear(log, limits={"void": None}) == {}
    assert hear(log, limits={"void": (0.2, 0.3)}) == {}
    assert hear(log, limits={"void/meta": (0.05, 0.08)}) == {("void", "stop"): 30}
    assert hear(log, limits={"void/other": None}) == {("void", "warn"): 30}


def test_a_good_state_is_one_that_stays_near_its_best():
    memory, watch = Memory(), Watch(["meta"], ["main"])
    for step, figures in enumerate(turning(reward=0.44), 1):
        watch.see(step, figures, memory)
    assert not healthy(80, memory, 20)  # 12 % below the best
    memory.series["reward"] = [0.5] * 40
    memory.warned = None
    assert healthy(80, memory, 20) and not healthy(80, memory, 80)  # nobody was listening yet
    memory.warned = 75
    assert not healthy(80, memory, 20) and healthy(85, memory, 20)


def test_a_state_in_which_an_ignored_signal_speaks_is_no_good_one():
    memory, watch = Memory(quiet={"void": 99}), Watch(["meta"], ["main"])
    said = [watch.see(step, figures, memory) for step, figures in enumerate(turning(**{"meta/void": 0.1}), 1)]
    assert not any(said) and not healthy(80, memory, 20)


def test_measures_by_hand():
    series = [1.0] * 10 + [2.0, 0.5]
    assert measured("rise", series)[-2:] == [1.0, -0.5]
    assert measured("start", series)[-2:] == [2.0, 0.5]
    assert measured("start", [2.0, *[1.0] * 10], below=True)[-1] == 0.5  # broken by its first update
    assert measured("start", [2.0, *[1.0] * 10])[-1] == pytest.approx(1 / 1.1)
    assert measured("best", [0.2, 0.4, 0.3]) == [1.0, 1.0, pytest.approx(0.75)]
    assert measured("mean", series)[-1] == pytest.approx(1.05)
    assert measured("few", [2.0, 1.0, 1.0, 1.0, 0.0, 0.5]) == [*[None] * 5, pytest.approx(3.5 / 5)]
    # broken at step 13: the line falls by a tenth of itself a step, and the 4th is more than the swings explain
    assert measured("drop", [0.6, 0.8] * 6 + [0.0] * 4) == [*[None] * 5, pytest.approx(1 - 0.9**4)]
    assert measured("rise", [1.0] * 10) == [None] * 10  # a start value needs ten steps
