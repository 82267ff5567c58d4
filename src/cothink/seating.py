"""Who plays in a stage: the recipe's team, with what the stage changes about it."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cothink.resolve import effective, resolve
from cothink.types import Role, Sampling

if TYPE_CHECKING:
    from cothink.parts import Block, Collect, Evaluate, RoleSeat
    from cothink.recipe import Recipe


def workflow(recipe: Recipe, stage: Collect) -> Block:
    """The workflow of a stage, with the options that it sees."""
    block = recipe.team.workflow
    if stage.branching is None:
        return block
    return block.model_copy(update={"options": {**block.options, "branching": list(stage.branching)}})


def evaluated(recipe: Recipe, stage: Evaluate) -> Block:
    """The workflow of an evaluation, as it is played for its answer alone."""
    from cothink import wiring

    own, block = recipe.team.workflow, stage.workflow
    if block is None:
        block = own
    elif block.name == own.name:
        block = own.model_copy(update={"options": {**own.options, **block.options}})
    return block.model_copy(update={"options": {**block.options, **wiring.alone(block)}})


def seats(recipe: Recipe, stage: Evaluate) -> dict[str, Role]:
    """The roles of an evaluation: the stage's own, else those of the recipe's team that its workflow asks for.

    A seat that is taken over keeps its policy, sampling and system prompt. Roles that nobody fills are left out.
    """
    from cothink import wiring

    block, own = evaluated(recipe, stage), recipe.roles()
    prompts = wiring.declared(block, "roles", "ROLES")
    given = stage.roles or {}
    found = {}
    for name in (*own, *given) if prompts is None else prompts:
        seat = given.get(name, name)
        written = recipe.team.roles.get(name) if seat == name else None
        if not isinstance(seat, str):
            found[name] = seated(name, seat, (prompts or {}).get(name, ""))
        elif written is not None:
            found[name] = seated(name, written, (prompts or {}).get(name, ""))
        elif seat in own:
            found[name] = replace(own[seat], name=name)
    return found


def seated(name: str, seat: RoleSeat, prompt: str) -> Role:
    """The role of a seat; `prompt` is the workflow's own, for a seat without one."""
    sampling = Sampling(seat.temperature, seat.top_p, seat.top_k, seat.max_tokens, seat.stop)
    return Role(name, seat.policy, prompt if seat.system is None else seat.system, seat.trainable, sampling)


def heated(roles: Mapping[str, Role], temperature: float | None) -> dict[str, Role]:
    """The roles at a stage's own temperature, where it has one."""
    if temperature is None:
        return dict(roles)
    return {n: replace(r, sampling=replace(r.sampling, temperature=temperature)) for n, r in roles.items()}


def template_hashes(block: Block, roles: Mapping[str, Role]) -> dict[str, str]:
    """Role name -> digest of what its prompts are made of: its system prompt, and how the workflow lays out the rest.

    Workflows say their layouts by `layouts(**options)`; of one that does not, the source stands in.
    """
    from cothink import wiring

    laid = wiring.declared(block, "layouts", "LAYOUTS")
    run = resolve("workflow", block.name)
    if laid is None:
        laid = dict.fromkeys(roles, inspect.getsource(run))
    return {name: digest(role.system, laid.get(name, "")) for name, role in roles.items()}


def digest(*parts: Any) -> str:
    """A short hash of printable parts, equal on every machine."""
    return hashlib.blake2b("\x1f".join(map(str, parts)).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def options(block: Block) -> dict[str, Any]:
    """All options of a workflow block with the values it will see."""
    return effective(resolve("workflow", block.name), block.options)
