"""Alternation by phases, steps and epochs, and the curriculum: who learns from which rows, on a scripted engine."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from cothink.engines.scripted import engine as scripted
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.resolve import bind, resolve
from cothink.session import Session
from cothink.stages.rl import rl
from cothink.types import Task

SOLVED = {"q1": 1, "q2": 2, "q8": 8, "q9": 9}  # of ten: the vector of the spec, .1 drop, .2 keep, .8 keep, .9 drop


class Notebook:
    """A policy that writes down whose samples it is given."""

    probabilities = None  # marks it as a policy without torch knobs

    def __init__(self, name, log):
        self.name, self.log, self.version = name, log, 0

    def update(self, samples, knobs, seed):
        self.log.append((self.name, sorted({s.task for s in samples}), len(samples)))
        self.version += 1
        return {"updates": 1.0}

    def save(self, folder):
        (folder / f"{self.name}.txt").write_text(str(self.version))


class Players:
    """Plans and answers; the k-th sampled try of a row succeeds while k is below its number in `solved`."""

    def __init__(self, solved=SOLVED):
        self.solved, self.tries, self.fail_at, self.main = solved, Counter(), None, None

    def __call__(self, call):
        if self.fail_at is not None and len(self.engine.calls) == self.fail_at:
            self.main.cancel()  # what Ctrl-C does
        text = call.messages[-1].content
        question = next(q for q in self.solved if q in text)
        if call.policy == "meta":
            return "plan" if call.sampling.temperature == 0 else f"plan {self._try(question)}"
        sampled = "plan " in text  # the plan's own number decides where reasoning is greedy
        k = int(text.rsplit(" ", 1)[1]) if sampled and call.sampling.temperature == 0 else self._try(question)
        return f"\\boxed{{{question[1:]}}}" if k % 10 < self.solved[question] else "\\boxed{0}"

    def _try(self, question):
        self.tries[question] += 1
        return self.tries[question] - 1


PHASES = {"name": "phases", "first": "reasoning"}
FILTER = {"name": "success", "low": 0.2, "high": 0.8}


def session(players, folder=None, rows=None, concurrency=256, **stage):
    tree = {
        "name": "t",
        "team": {
            "workflow": {"name": "rema", "max_turns": 1},
            "concurrency": concurrency,
            "roles": {name: {"policy": name, "system": name} for name in ("meta", "reasoning")},
        },
        "policies": {name: {"model": "x"} for name in ("meta", "reasoning")},
        "tasks": {"train": {"name": "wordsums", "count": 5}},
        "stages": [{"kind": "rl", "steps": 99, "tasks_per_step": 3, "episodes_per_task": 4, **stage}],
    }
    recipe = Recipe.load(tree)
    log: list = []
    engine = players.engine = scripted(players)
    policies = {name: Notebook(name, log) for name in ("meta", "reasoning")}
    workflow = bind(resolve("workflow", "rema"), {"max_turns": 1}, "team.workflow")
    tasks = rows or [Task(q, q, q[1:]) for q in players.solved]
    made = Session(recipe, recipe.roles(), workflow, policies, dict.fromkeys(policies, engine), {"train": tasks})
    if folder is not None:
        made.run = Run(folder, recipe.to_yaml(), 0)
    return made, log


def train(s, players=None):
    async def main():
        if players is not None:
            players.main = asyncio.current_task()
        return await rl(s, s.recipe.stages[0], 0)

    return asyncio.run(main())


def asked(calls, policy, heat):
    return [c for c in calls if c.policy == policy and c.sampling.temperature == heat]


def test_the_filter_of_a_phase_and_what_it_keeps():
    """rema §7 row 18: 1 greedy plan x 10 solutions, 10 plans x 1 greedy solution each, [.2, .8] closed, every phase."""
    players = Players()
    s, log = session(players, schedule=PHASES, filter=FILTER)
    found = train(s)
    calls = players.engine.calls
    # reasoning phase: one greedy plan per row (asked once, shared by ten plays), ten sampled solutions of it
    plans, solutions = asked(calls[:44], "meta", 0.0), asked(calls[:44], "reasoning", 1.0)
    assert (len(plans), len(solutions)) == (4, 40)
    assert Counter(c.prompt_ids for c in solutions) == {c.prompt_ids: 10 for c in solutions}
    # then 4 sampled plans per kept row, one solution each; meta learns nothing from them
    step = calls[44 : 44 + 16]
    assert len(asked(step, "meta", 1.0)) == 8 == len(asked(step, "reasoning", 1.0))
    # meta phase: ten sampled plans per row, one greedy solution for each
    again = calls[60:140]
    plans, solutions = asked(again, "meta", 1.0), asked(again, "reasoning", 0.0)
    assert (len(plans), len(solutions)) == (40, 40) == (len(again) // 2, len({c.prompt_ids for c in solutions}))
    assert log == [("reasoning", ["q2", "q8"], 8), ("meta", ["q2", "q8"], 8)]
    assert len(calls) == 156
    counts = {k.removeprefix("phase/"): v for k, v in found.items() if k.startswith("phase/")}
    assert counts == {
        "number": 2, "iteration": 1, "epoch": 1, "rows": 4, "kept": 2, "dropped_low": 1, "dropped_high": 1, "failed": 0,
        "tokens": 80,
    }  # fmt: skip
    # every sampled token counts: 4 + 40 and 80 in the filters, 2 x 16 in the steps
    assert found["tokens_total"] == 44 + 80 + 32


def test_iterations_and_epochs():
    """rema §7 row 19: reasoning first; epochs hold every kept row once, and each phase filters anew."""
    players = Players({"q3": 3, "q4": 4, "q5": 5, "q6": 6, "q9": 10})
    plan = PHASES | {"iterations": 2, "epochs": 2}
    s, log = session(players, schedule=plan, filter=FILTER)
    train(s)
    assert [name for name, _, _ in log] == (["reasoning"] * 4 + ["meta"] * 4) * 2
    sizes = [len(rows) for _, rows, _ in log]
    assert sizes == [3, 1] * 8  # 4 rows an epoch, 3 a step: a step never holds a row twice
    for k in range(0, 16, 2):
        assert sorted(log[k][1] + log[k + 1][1]) == ["q3", "q4", "q5", "q6"]
    assert len({tuple(rows) for _, rows, n in log if n == 12}) > 1  # each epoch has its own order


def test_a_phase_that_keeps_nothing_is_passed_over_and_all_of_them_are_an_error():
    players = Players({"q1": 10, "q2": 0})
    s, log = session(players, schedule=PHASES, filter=FILTER)
    with pytest.raises(ValueError, match=r"no row of tasks.train was solved at a rate from 0.2 to 0.8 in any of 2 ph"):
        train(s)
    assert log == []


def test_a_budget_that_the_filter_spends_ends_the_stage_before_its_first_step(tmp_path):
    players = Players()
    s, log = session(players, tmp_path, schedule=PHASES, filter=FILTER, token_budget=44)
    assert train(s) == {} and log == [] and len(players.engine.calls) == 44
    s.run.close()
    again, log = session(players, tmp_path, schedule=PHASES, filter=FILTER, token_budget=44)
    assert train(again) == {} and log == [] and not players.engine.calls  # the new session's engine was not asked


def test_a_filter_survives_a_resume(tmp_path):
    """rema §7 rows 19 and 42: a finished filter is never played again, and half of one is played on."""
    whole = Players({f"q{k}": 5 for k in range(10, 30)})
    settings = {"concurrency": 10, "schedule": PHASES, "filter": FILTER, "tasks_per_step": 8}  # four rows a wave
    s, straight = session(whole, **settings)
    train(s)
    parts = Players(whole.solved)
    written: list = []
    asked = 0
    for stop in (70, 300, 330, None):  # twice within filters, once within a step
        s, log = session(parts, tmp_path, **settings)
        parts.fail_at = None if stop is None else stop - asked
        try:
            train(s, parts)
        except asyncio.CancelledError:
            assert stop is not None
        s.run.close()
        asked += len(parts.engine.calls)
        written += log
    assert written == straight
    lost = asked - len(whole.engine.calls)
    assert 0 < lost < 3 * 80  # at most the wave, or the step, that was interrupted


def test_alternation_by_epochs():
    """rema §7 row 19: blocks of whole epochs, the first one as long as the others."""
    players = Players({f"q{k}": 5 for k in range(10, 16)})
    plan = {"name": "alternate", "by": "epochs", "every": 2, "first": "meta"}
    s, log = session(players, schedule=plan, filter="none", steps=10)
    train(s)
    assert [name for name, _, _ in log] == ["meta"] * 4 + ["reasoning"] * 4 + ["meta"] * 2


def test_alternation_by_steps():
    players = Players({f"q{k}": 5 for k in range(10, 16)})
    plan = {"name": "alternate", "every": 3, "first": "reasoning"}
    s, log = session(players, schedule=plan, filter="none", steps=7)
    train(s)
    assert [name for name, _, _ in log] == ["reasoning"] * 3 + ["meta"] * 3 + ["reasoning"]


def levels(*needs, **meta):
    return [Task(f"q{k}", f"q{k}", str(k), {"level": need, **meta}) for k, need in enumerate(needs, 10)]


def test_a_curriculum_adds_harder_rows_in_even_steps():
    """credit 3.13: rows that need at most k - 4 at first, the full k after 40 % of the stage."""
    rows = levels(1, 1, 2, 3, 4, 5, 6, 6)
    players = Players({t.id: 5 for t in rows})
    s, log = session(players, rows=rows, filter="none", steps=20, tasks_per_step=2, curriculum={})
    found = train(s)
    need = {t.id: t.meta["level"] for t in rows}
    hardest = [max(need[q] for q in rows) for name, rows, _ in log if name == "meta"]
    for step, most in enumerate(hardest):
        assert most <= min(6, 2 + step // 2), (step, hardest)
    assert max(hardest[:2]) <= 2 and max(hardest[8:]) == 6 and found["curriculum/most"] == 6


@pytest.mark.parametrize(
    ("rows", "curriculum", "error"),
    [
        (levels(1, 2), {"key": "rounds"}, r"row q10 of tasks.train has no number there; its meta holds level"),
        (levels(1, 6), {"start": 6}, r"the rows of tasks.train need 1 to 6 \(level\); write a number from 1 to below"),
        (levels(3, 6), {"start": 2}, "write a number from 3 to below 6"),
    ],
)
def test_a_curriculum_that_cannot_be(rows, curriculum, error):
    s, _ = session(Players({t.id: 5 for t in rows}), rows=rows, curriculum=curriculum)
    with pytest.raises(ValueError, match=error):
        train(s)
