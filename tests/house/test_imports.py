"""Who may import whom (the design's table), read from the source of every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "cothink"
PLAIN = set(sys.stdlib_module_names)
# parts of the local engine, which imports them inside its functions
INSIDE = {"arena", "continuous", "growing", "plain", "precision", "prefixes", "requests", "sampler", "weights"}
PURE = {
    "credit", "counterfactual", "estimators", "samples", "team", "record", "stats", "watch", "signals", "chat",
    "presets", "trees",
}  # fmt: skip

# room -> cothink rooms it may import when the module loads or runs (typing-only imports do not count)
ROOMS = {
    "types": set(),
    "tasks": {"types", "tasks"},
    "conversations": {"types", "tasks", "builtin", "conversations", "actions", "trees", "store"},
    "trees": {"types", "credit", "trees"},
    "store": {"types", "team", "record", "trees"},
    "actions": set(),
    "workflows": {"types", "votes", "actions"},
    "votes": {"types", "verify", "stats"},
    "verify": {"types", "verify"},
    "rewards": {"types", "verify", "votes", "actions", "rewards"},
    "credit": {"types"},
    "counterfactual": {"types", "credit"},
    "estimators": {"types"},
    "samples": {"types"},
    "team": {"types"},
    "chat": {"types"},
    "record": {"types", "seal"},
    "seal": set(),
    "offpolicy": set(),
    "losses": {"offpolicy"},
    "batch": {"types", "losses"},
    "attention": {"batch"},
    "logprobs": {"batch", "attention"},
    "engines": {"types", "chat", "engines", "attention", "batch", "grammar"},
    "grammar": {"types"},
    "oldprobs": {"types", "batch", "logprobs"},
    "ranks": set(),
    "finite": set(),
    "policy": {"types", "batch", "losses", "attention", "logprobs", "grammar", "offpolicy", "oldprobs", "ranks",
               "finite"},
}  # fmt: skip
# outside libraries a room may import at all; rooms not listed here are free
LIBRARIES = {
    **dict.fromkeys(
        ("types", "credit", "estimators", "samples", "team", "record", "workflows", "rewards", "watch", "trees"),
        frozenset(),
    ),
    "tasks": {"pyarrow", "datasets", "reasoning_gym"},
    "losses": {"torch"},
    "batch": {"torch"},
}  # fmt: skip


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path):
    """(module, inside a function) of every import that runs."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for n in ast.walk(block)
    }
    inside = {
        id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef) for n in ast.walk(f)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from ((a.name, id(node) in inside) for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module != "cothink":
            yield node.module, id(node) in inside
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"cothink.{a.name}", id(node) in inside) for a in node.names)


FILES = sorted(SOURCE.rglob("*.py"))


def test_the_walk_finds_the_house():
    assert len(FILES) > 30 and {"types", "team", "policy", "stages", "verify"} <= {room(f) for f in FILES}


def test_rooms_import_only_what_they_may():
    wrong = []
    for path in FILES:
        for module, _ in imports(path):
            top, _, rest = module.partition(".")
            mine, target = room(path), rest.split(".")[0]
            if top == "cothink":
                if mine in ROOMS and target not in ROOMS[mine]:
                    wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
                if target == "stages" and mine not in ("stages", "api", "cli", "demo", "demo_malt"):
                    wrong.append(
                        f"{path.relative_to(SOURCE)} imports {module}: stages are for api, cli and the demos only"
                    )
            elif top not in PLAIN and mine in LIBRARIES and top not in LIBRARIES[mine]:
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_workflows_never_import_one_another():
    for path in (SOURCE / "workflows").glob("*.py"):
        assert not [m for m, _ in imports(path) if m.startswith("cothink.workflows")], path.name


def test_torch_stays_right_of_the_border():
    heavy = {"torch", "transformers", "peft", "accelerate", "trl"}
    free = {"policy", "oldprobs", "loading", "batch", "builtin", "attention", "logprobs"}
    wrong = [
        f"{path.relative_to(SOURCE)}: {module}"
        for path in FILES
        for module, inside in imports(path)
        if module.split(".")[0] in heavy
        and not inside
        and room(path) not in free
        and not (room(path) == "engines" and path.stem in INSIDE)
    ]
    assert not wrong, wrong


def test_pure_rooms_never_name_torch():
    wrong = [f"{p.name}: {m}" for p in FILES if room(p) in PURE for m, _ in imports(p) if m.split(".")[0] == "torch"]
    assert not wrong, wrong
