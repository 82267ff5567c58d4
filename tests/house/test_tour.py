"""docs/tour.md shows what the code does: its task, texts, advantages and weights are computed again."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from cothink import credit, estimators, losses
from cothink.batch import pad, weights_for
from cothink.recipe import Recipe
from cothink.rewards import score
from cothink.samples import samples
from cothink.session import assemble, bound_rewards
from cothink.stages.playing import play_tasks

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
ROWS = re.findall(r"^\| (\d) \| `(.*?)` \| (\d+) \| `(.*?)` \| (\d+) \| (\w+) \|$", TOUR, re.M)


def test_the_tour_is_true():
    recipe = Recipe.load(ROOT / "recipes" / "rema-demo.yaml")
    session = assemble(recipe)
    (task,) = [t for t in session.tasks["train"] if t.id == "wordsums/train/0/10"]
    assert task.question in TOUR and f"answer='{task.answer}'" in TOUR and str(task.meta["steps"]) in TOUR
    played = asyncio.run(play_tasks(session, [task], 4, ("tour", 4)))
    episodes = asyncio.run(score(played.episodes, bound_rewards(recipe.stages[1])))
    seen = [
        (e.id[-1], meta.text, str(len(meta.completion.output_ids)),
         reasoning.text, str(len(reasoning.completion.output_ids)), e.verdict)
        for e in episodes
        for meta, reasoning in [e.turns]
    ]  # fmt: skip
    assert len(ROWS) == 4 and seen == ROWS
    assert len(episodes[3].turns[0].completion.prompt_ids) == 43
    assert " ".join(map(str, episodes[3].turns[0].completion.output_ids)) in TOUR

    scored = credit.scored(episodes)
    assert [t.value for t in scored] == [0, 0, 0, 0, 0, 0, 1, 1]
    advantages = estimators.rloo(scored)
    assert advantages == pytest.approx([-1 / 3] * 6 + [1, 1])

    rows, _ = samples(episodes, {(t.episode, t.turn): a for t, a in zip(scored, advantages)}, session.roles)
    mine = [s for s in rows if s.policy == "meta"]
    assert (len(mine[3].ids), mine[3].trained) == (53, 10)
    weights = weights_for(mine, "const_turn", turns_ref=1.0, planned_units=4)
    assert weights[3][-1] == pytest.approx(0.025) and weights[0][-1] == pytest.approx(0.05)
    batch = pad(mine, weights)
    assert tuple(batch.ids.shape) == (4, 53)
    logprobs, _ = session.policies["meta"].logprobs(batch)
    loss, _ = losses.policy(logprobs, batch)
    assert float(loss.detach()) == pytest.approx(0.0, abs=1e-5)
    loss.backward()
    assert sum(float(p.grad.abs().sum()) for p in session.policies["meta"].parameters()) > 0
