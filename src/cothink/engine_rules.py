"""What a recipe's engine can hold and be told, found before any model loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cothink import models
from cothink.resolve import Problem

if TYPE_CHECKING:
    from cothink.recipe import Recipe

OF_A_SERVER = ("timeout", "retries")
OF_THIS_PROCESS = (
    "max_rows",
    "max_model_len",
    "cache_gib",
    "gpu_memory_utilization",
    "tensor_parallel_size",
    "enforce_eager",
)


def findings(recipe: Recipe) -> Iterator[Problem]:
    """The problems of `engine: vllm`; other engines hold whatever the policies are."""
    if recipe.engine.name == "vllm":
        yield from _one_model(recipe)
        yield from _options(recipe)
        yield from _served(recipe)


def _one_model(recipe: Recipe) -> Iterator[Problem]:
    """One model in one process: all policies are its adapters, or the only one is its full weights."""
    inside = {name: p for name, p in recipe.policies.items() if not models.is_outside(p.model)}
    kinds = sorted({f"{p.model} in {p.dtype}" for p in inside.values()})
    if len(kinds) > 1:
        fix = "the same model and dtype for all policies, or engine: local"
        yield Problem("policies", f"engine vllm holds one model, not {' and '.join(kinds)}", fix, code="E23")
    learning = _learning(recipe)
    whole = [name for name, p in inside.items() if p.lora_r is None]
    many = len(whole) > 1 or any(name in learning for name in whole)
    for name in whole if len(inside) > 1 and many else ():
        what = "engine vllm holds one set of full weights, and none that learn beside adapters"
        fix = "lora_r: 16; or one policy for all roles; or engine: local"
        yield Problem(f"policies.{name}", what, fix, code="E23")


def _options(recipe: Recipe) -> Iterator[Problem]:
    """Settings that mean nothing: a server has its own."""
    given, server = recipe.engine.options, recipe.engine.options.get("server")
    idle = OF_A_SERVER if server is None else OF_THIS_PROCESS
    for name in (n for n in idle if n in given):
        what = "is of requests to a server" if server is None else "is the server's to know: an option of vllm serve"
        fix = "server: http://host:port beside it, or remove it" if server is None else f"nothing here (remove {name})"
        yield Problem(f"engine.{name}", what, fix, code="E23")
    if server is not None and not str(server).startswith(("http://", "https://")):
        yield Problem("engine.server", f"{server!r} is no address", "http://host:port", code="E23")


def _served(recipe: Recipe) -> Iterator[Problem]:
    """A server takes new adapters while it runs, not new full weights."""
    for name in sorted(_learning(recipe)) if recipe.engine.options.get("server") is not None else ():
        if recipe.policies[name].lora_r is None:
            what = "a vLLM server takes new adapters, not new full weights"
            yield Problem(f"policies.{name}", what, "lora_r: 16, or an engine without server", code="E23")


def _learning(recipe: Recipe) -> set[str]:
    return {role.policy for role in recipe.team.roles.values() if role.trainable}
