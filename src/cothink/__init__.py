"""cothink: train, measure and serve teams of language-model agents that reason together."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cothink.api import LoadedTeam, RunResult, Solution, compare, evaluate, load_team, run
    from cothink.recipe import Recipe

__version__ = "0.1.0"
__all__ = ["LoadedTeam", "Recipe", "RunResult", "Solution", "compare", "evaluate", "load_team", "run"]


def __getattr__(name: str):
    if name == "Recipe":
        from cothink.recipe import Recipe

        return Recipe
    if name in __all__:
        from cothink import api

        return getattr(api, name)
    raise AttributeError(f"module 'cothink' has no attribute {name!r}")
