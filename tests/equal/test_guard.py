"""Going back is exact: weights, optimiser, estimator and schedule are those of the good state, the rate is half."""

from __future__ import annotations

import torch

from cothink.policy import Knobs
from cothink.recipe import Recipe
from cothink.record import Run
from cothink.session import assemble, bound_loss
from cothink.signals import Finding
from cothink.stages.guard import Guard
from cothink.stages.rl import _checkpoint
from cothink.stages.rows import Progress
from cothink.types import Sample

CAUSE = Finding("void", "solver", "warn", "solver/void", "rise", 0.1, 0.05, True)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 250, (4, 10), generator=generator).tolist()
    turns = (-1,) * 4 + (0,) * 6
    return [
        Sample("p", "solver", f"e{k}/solver", tuple(row), turns, (0.0,) * 10, (0.0,) * 4 + (float(k % 2) - 0.5,) * 6)
        for k, row in enumerate(ids)
    ]


def image(policy):
    """Weights and optimiser moments."""
    moments = policy._optimizer.state_dict()["state"] if policy._optimizer else {}
    tensors = {n: t.clone() for n, t in policy.model.state_dict().items()}
    return tensors | {f"{k}/{n}": v.clone() for k, m in moments.items() for n, v in m.items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_going_back_restores_the_good_state(tiny_folder, tmp_path, monkeypatch):
    """rema §7 row 40, credit 7: a state holds weights, optimisers, averages and the schedule, not the random stream."""
    recipe = Recipe.load(
        {
            "name": "g",
            "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "system": ""}}},
            "policies": {"p": {"model": str(tiny_folder), "learning_rate": 0.01, "scheduler": "linear"}},
            "tasks": {"train": {"name": "wordsums", "count": 5}},
            "stages": [
                {"kind": "rl", "steps": 50, "tasks_per_step": 1, "episodes_per_task": 4, "watch": "act",
                 "estimator": "rae"}
            ],
        }
    )  # fmt: skip
    session, stage = assemble(recipe), recipe.stages[0]
    session.run = Run(tmp_path / "run", recipe.to_yaml(), 0)
    policy, here = session.policies["p"], Progress()
    knobs = Knobs(loss=bound_loss(stage), aggregate="token_mean")
    monkeypatch.setattr("cothink.policy.ENGINE_GAP", float("inf"))  # the samples are made up: no engine said them

    def learn(count):
        for _ in range(count):
            policy.update(batch(here.step), knobs, seed=here.step)
            here.step, here.place = here.step + 1, here.place + 1
            here.cursor, here.tokens = here.cursor + 1, here.tokens + 9
            here.memory["solver"] = here.step / 10
            here.watch.series.setdefault("reward", []).append(0.5)
            here.watch.steps += 1

    guard = Guard(session, stage, 0, here, ["p"], lambda name=None: _checkpoint(session, 0, here, name))
    guard.begin()
    start = image(policy)
    learn(3)
    guard._keep()
    kept, rate, memory = image(policy), policy._optimizer.param_groups[0]["lr"], dict(here.memory)
    learn(2)
    assert not same(image(policy), kept)
    version = policy.version
    guard._back(CAUSE)
    assert same(image(policy), kept) and here.memory == memory
    assert (here.place, here.step, here.cursor, here.tokens) == (3, 5, 5, 45)  # no row and no random number again
    assert here.watch.series["reward"] == [0.5] * 3 and here.watch.steps == 3
    assert policy._optimizer.param_groups[0]["lr"] == rate / 2 and policy.version > version
    policy.update(batch(99), knobs, seed=0)
    assert policy._optimizer.param_groups[0]["lr"] == 0.01 * (1 - 4 / 50) / 2  # the schedule goes on from there

    # twice from one state: a quarter, not a half again; the start has no optimiser to go back to
    guard._back(CAUSE)
    assert policy._optimizer.param_groups[0]["lr"] == rate / 4
    here.watch.good = here.watch.good[:1]
    guard._back(CAUSE)
    assert same(image(policy), start) and policy._optimizer.param_groups[0]["lr"] == 0.01 / 8
