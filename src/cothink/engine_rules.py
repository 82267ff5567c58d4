"""What a recipe's engine can hold and be told, found before any model loads."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cothink import models
from cothink.resolve import Problem, RecipeError, bind, effective, options_of, resolve, unknown

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
    """The problems of `engine: vllm`, of `ray` around another, and of servers; `local` holds whatever policies are."""
    yield from _outside(recipe)
    name, given = recipe.engine.name, recipe.engine.options
    if name == "ray":
        name, given = yield from _workers(given)
    if name == "vllm":
        yield from _one_model(recipe)
        yield from _options(given)
        yield from _served(recipe, given)


def _outside(recipe: Recipe) -> Iterator[Problem]:
    """What policies say of the servers they speak through."""
    from cothink.engines import openai

    for name, policy in recipe.policies.items():
        where = f"policies.{name}.server"
        if not policy.server:
            continue
        if not models.is_outside(policy.model):
            yield Problem(where, f"{policy.model} is no server's model", f"nothing here (remove {where})", code="E01")
            continue
        try:
            openai.fit(**bind(openai.engine, policy.server, where).keywords)  # type: ignore[attr-defined]
        except RecipeError as error:
            yield from error.problems
        except ValueError as error:
            what, _, fix = str(error).partition(": write ")
            yield Problem(where, what, fix, code="E01")


def _workers(given: Mapping[str, Any]) -> Generator[Problem, None, tuple[str, Mapping[str, Any]]]:
    """A pool's own settings; returns the inner engine with its options."""
    pool = resolve("engine", "ray")
    own, seen = options_of(pool), effective(pool, bind(pool, given, "engine").keywords)  # type: ignore[attr-defined]
    inner, rest = seen["inner"], {k: v for k, v in given.items() if k not in own}
    for name, least in (("workers", 1), ("cpus", 0), ("gpus", 0)):
        if seen[name] < least:
            yield Problem(f"engine.{name}", f"{seen[name]} is less than {least}", f"{name}: {least or 1}", code="E23")
    if "server" in rest:
        what = "workers of a pool have their own vLLM each; a server is one engine for all"
        yield Problem("engine.server", what, "engine: {name: vllm, server: ...}, or remove it", code="E23")
        return inner, {}
    function = resolve("engine", inner)
    for name in (n for n in rest if n not in options_of(function)):
        yield unknown(f"engine.{name}", f"option of engines ray and {inner}", name, [*own, *options_of(function)])
    try:
        bind(function, {k: v for k, v in rest.items() if k in options_of(function)}, "engine")
    except RecipeError as error:
        yield from error.problems
    return inner, rest


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


def _options(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Settings that mean nothing: a server has its own."""
    server = given.get("server")
    idle = OF_A_SERVER if server is None else OF_THIS_PROCESS
    for name in (n for n in idle if n in given):
        what = "is of requests to a server" if server is None else "is the server's to know: an option of vllm serve"
        fix = "server: http://host:port beside it, or remove it" if server is None else f"nothing here (remove {name})"
        yield Problem(f"engine.{name}", what, fix, code="E23")
    if server is not None and not str(server).startswith(("http://", "https://")):
        yield Problem("engine.server", f"{server!r} is no address", "http://host:port", code="E23")


def _served(recipe: Recipe, given: Mapping[str, Any]) -> Iterator[Problem]:
    """A server takes new adapters while it runs, not new full weights."""
    for name in sorted(_learning(recipe)) if given.get("server") is not None else ():
        if recipe.policies[name].lora_r is None:
            what = "a vLLM server takes new adapters, not new full weights"
            yield Problem(f"policies.{name}", what, "lora_r: 16, or an engine without server", code="E23")


def _learning(recipe: Recipe) -> set[str]:
    return {role.policy for role in recipe.team.roles.values() if role.trainable}
