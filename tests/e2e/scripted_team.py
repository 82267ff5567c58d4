"""The demo's pair of roles, spoken by a script."""

from __future__ import annotations

from functools import partial

from cothink.api import LoadedTeam
from cothink.engines.scripted import engine
from cothink.recipe import Recipe
from cothink.session import Session
from cothink.wiring import resolve


def team(script, **seat):
    """The team, and its engine, which knows what was asked; `seat` changes both roles."""
    seats = {n: {"policy": n, "system": n, "max_tokens": 64, **seat} for n in ("meta", "reasoning")}
    recipe = Recipe.load(
        {
            "name": "pair",
            "team": {"workflow": {"name": "rema", "max_turns": 3}, "roles": seats},
            "policies": {n: {"model": "builtin:tiny"} for n in seats},
            "tasks": {"test": {"name": "wordsums", "split": "test"}},
            "stages": [{"kind": "evaluate"}],
        }
    )
    speaker = engine(script)
    made = Session(
        recipe, recipe.roles(), partial(resolve("workflow", "rema"), max_turns=3), {}, dict.fromkeys(seats, speaker)
    )
    return LoadedTeam(made), speaker
