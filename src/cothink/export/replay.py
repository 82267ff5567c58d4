"""The prompts of stored episodes: the workflow is played again, and the roles say what the record says."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from cothink.chat import Codec, InternCodec
from cothink.recipe import Recipe
from cothink.resolve import bind, resolve
from cothink.team import Team, Workflow, stable_seed
from cothink.types import Completion, Message, PlayError, Role, Sampling, Task

Prompts = dict[str, tuple[Message, ...]]


class _End(PlayError):
    """The record ends here: a limit of tokens stopped the episode, which a replay does not know."""


class _Tape:
    """An engine that answers each call with the turns that the record holds at its place."""

    def __init__(self, turns: Sequence[Mapping[str, Any]]):
        self.heard: Prompts = {}
        self._codec = InternCodec()
        self._at: dict[int, tuple[list[Mapping[str, Any]], int]] = {}
        names: dict[str, str] = {}
        groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for turn in turns:  # the names and seeds that a Team of seed 0 gives, before it numbers the turns
            parents = tuple(names[p] for p in turn["parents"])
            group = groups.setdefault((parents, turn["role"]), [])
            names[turn["id"]] = f"{stable_seed(*parents, turn['role'], len(group)):016x}"
            self._at[stable_seed(0, *parents, turn["role"], len(group))] = group, len(group)
            group.append(turn)

    def codec(self, policy: str) -> Codec:
        """One id a message."""
        return self._codec

    def load(self, policy: str, weights: Any, version: int) -> None:
        """A record has no weights."""

    async def generate(
        self,
        policy: str,
        messages: Sequence[Message],
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        n: int,
        seed: int,
    ) -> list[Completion]:
        """See `Engine`."""
        group, first = self._at.get(seed, ([], 0))
        said = group[first : first + n]
        if len(said) < n:
            raise _End
        for turn in said:
            self.heard[turn["id"]] = tuple(messages)
        ids = [(self._codec.intern("assistant", turn["text"]),) for turn in said]
        return [
            Completion(t["text"], prompt_ids, i, (0.0,), t["finish_reason"]) for t, i in zip(said, ids, strict=True)
        ]


def prompts(recipe: Recipe, episodes: Sequence[Mapping[str, Any]]) -> list[Prompts]:
    """By turn id, the chat that each turn of each episode answered; turns that cannot be found again are not there."""
    block = recipe.team.workflow
    workflow = bind(resolve("workflow", block.name), block.options, "team.workflow")
    return asyncio.run(_all(workflow, recipe.roles(), episodes))


async def _all(workflow: Workflow, roles: Mapping[str, Role], episodes: Sequence[Mapping[str, Any]]) -> list[Prompts]:
    return await asyncio.gather(*(_one(workflow, roles, episode) for episode in episodes))


async def _one(workflow: Workflow, roles: Mapping[str, Role], episode: Mapping[str, Any]) -> Prompts:
    tape = _Tape(episode["turns"])
    team = Team(roles, dict.fromkeys((r.policy for r in roles.values()), tape))
    with contextlib.suppress(PlayError):
        await workflow(Task(episode["task"], episode["question"], episode["gold"]), team)
    return tape.heard
