"""The rl loop's own decisions, on a scripted engine and a policy that only writes down what it is given."""

from __future__ import annotations

import asyncio

import pytest

from cothink.engines.scripted import engine as scripted
from cothink.recipe import Recipe
from cothink.rewards import RewardError
from cothink.session import Session
from cothink.stages.rl import rl
from cothink.types import Completion, Task
from cothink.workflows.solo import run


class Notebook:
    """A policy that keeps the samples of every update."""

    def __init__(self):
        self.seen, self.version = [], 0

    probabilities = None  # marks it as a policy without torch knobs

    def update(self, samples, knobs, seed):
        self.seen.append(list(samples))
        self.version += 1
        return {"updates": 1.0}

    def save(self, *places):
        """A notebook has no weights."""


def session(script, count=6, **stage):
    tree = {
        "name": "t",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": ""}}},
        "policies": {"p": {"model": "x"}},
        "tasks": {"train": {"name": "wordsums", "count": 5}},
        "stages": [{"kind": "rl", "steps": 1, "tasks_per_step": 3, "episodes_per_task": 4, **stage}],
    }
    recipe = Recipe.load(tree)
    book = Notebook()
    tasks = [Task(f"t{k}", f"q{k}", str(k)) for k in range(count)]

    async def workflow(task, team):
        return await run(task, team, stop_on_truncation=True)

    return Session(recipe, recipe.roles(), workflow, {"p": book}, {"p": scripted(script)}, {"train": tasks}), book


def train(s):
    return asyncio.run(rl(s, s.recipe.stages[0], 0))


def by_play(table):
    """Answers `q3` play after play from `table["q3"]` (default: wrong); counts what was asked."""
    asked: dict[str, int] = {}

    def script(call):
        q = call.messages[-1].content
        k = asked.get(q, 0)
        asked[q] = k + 1
        replies = table.get(q, ["\\boxed{-1}"])
        return replies[k % len(replies)]

    script.asked = asked
    return script


def good(k):
    return f"\\boxed{{{k}}}"


MIXED = {f"q{k}": [good(k), "\\boxed{-1}"] for k in range(6)}


def test_only_groups_that_teach_are_kept_and_more_are_played_for_them():
    """rema §7 row 30."""
    table = {**MIXED, "q0": [good(0)], "q1": ["no"], "q2": [good(2)]}  # t3, t4, t5 are mixed
    script = by_play(table)
    s, book = session(script)
    found = train(s)
    assert {x.task for x in book.seen[0]} == {"t3", "t4", "t5"}
    assert len(book.seen[0]) == 12  # whole groups
    assert found["rows_kept"] == 3 and found["rows_played"] == len(script.asked) <= 6
    assert set(script.asked.values()) == {4}  # no row is played twice in a step


def test_oversampling_is_bounded_and_an_empty_batch_changes_nothing():
    """rema §7 row 30; credit §9 row 12."""
    script = by_play({})
    s, book = session(script, count=40, oversample_max=2)
    found = train(s)
    assert (found["rows_played"], found["rows_kept"]) == (6, 0)
    assert book.seen == [[]]


def test_without_a_filter_every_row_trains_and_flat_groups_have_no_advantage():
    s, book = session(by_play({**MIXED, "q0": [good(0)]}), count=3, filter="none")
    train(s)
    advantages = {t: sorted({a for x in book.seen[0] if x.task == t for a in x.advantages if a}) for t in ("t0", "t1")}
    assert advantages == {"t0": [], "t1": pytest.approx([-2 / 3, 2 / 3])}  # 2 of 4 right, leave-one-out


def test_success_filter_is_closed_at_both_ends():
    table = {"q0": [good(0), "n", "n", "n"], "q1": [good(1), good(1), good(1), "n"], "q2": [good(2)]}
    s, book = session(by_play(table), count=3, filter={"name": "success", "low": 0.25, "high": 0.75})
    train(s)
    assert {x.task for x in book.seen[0]} == {"t0", "t1"}


def cut(text):
    return Completion(text, finish_reason="length")


@pytest.mark.parametrize(
    ("rule", "trained", "values"),
    [("zero", 4, [0.0, 0.0, 0.0, 1.0]), ("keep", 4, [0.0, 0.0, 1.0, 1.0]), ("mask", 3, [0.0, 0.0, 1.0])],
)
def test_unfinished_episodes(rule, trained, values):
    """rema §7 row 8."""
    table = {"q0": [good(0), "no", cut(good(0)), "no"]}
    s, book = session(by_play(table), count=1, tasks_per_step=1, unfinished=rule, filter="none")
    found = train(s)
    assert len(book.seen[0]) == trained
    total, n = sum(values), len(values)
    want = sorted(v - (total - v) / (n - 1) for v in values)
    got = sorted(next(a for a, t in zip(x.advantages, x.turns) if t >= 0) for x in book.seen[0])
    assert got == pytest.approx(want)
    assert found["finish/truncated"] == 0.25 and found["accuracy"] == 0.5  # accuracy always uses the unmasked grade


def test_epochs_visit_every_row_once_and_orders_differ():
    script = by_play(MIXED)
    s, book = session(script, steps=4, filter="none")
    train(s)
    steps = [sorted({x.task for x in rows}) for rows in book.seen]
    assert sorted(steps[0] + steps[1]) == sorted(steps[2] + steps[3]) == [f"t{k}" for k in range(6)]
    assert steps[0] != steps[2]  # each epoch has its own order


def test_token_budget_ends_the_stage():
    s, book = session(by_play(MIXED), steps=50, token_budget=30, filter="none")
    found = train(s)
    assert len(book.seen) == 3 and found["tokens_total"] == 36  # 12 plays of one token a step


def test_void_filter_drops_episodes_with_an_empty_turn():
    s, book = session(by_play({"q0": [good(0), "", "no", "no"]}), count=1, tasks_per_step=1, void_filter=True)
    train(s)
    assert len(book.seen[0]) == 3


def test_a_reward_that_never_applies_is_an_error():
    s, _ = session(by_play(MIXED), rewards=[{"name": "answer.plan", "role": "solver"}])
    with pytest.raises(
        RewardError, match=r"no reward applied to any turn of 12 episodes: answer\.plan \(role solver\)"
    ):
        train(s)


def test_an_empty_task_set_is_named():
    s, _ = session(by_play({}), count=0)
    with pytest.raises(ValueError, match=r"tasks\.train is empty"):
        train(s)
