"""What can be evaluated (a run folder, a recipe, a model, a server), and several of them on the same questions."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cothink import export, models, seating, suites, wiring
from cothink.builtin.prompts import PROMPTS
from cothink.recipe import Recipe
from cothink.record import RunError, last_checkpoint, write_atomic
from cothink.report.markup import visible
from cothink.resolve import nearest
from cothink.session import Session, assemble
from cothink.stages import influence, reports, versus
from cothink.stages.answers import Answers, Row
from cothink.stages.diagnose import silenced
from cothink.stages.evaluate import Sets, measure_sets, sentence, sound
from cothink.stages.summary import Questions
from cothink.stages.versus import Cost
from cothink.tasks import overlap, report
from cothink.types import Task

Target = str | Path | Mapping[str, Any]
SHOWN = 5
"""Golds that were left out of a set, and are named one by one."""
MAX_TOKENS = 1024
"""Tokens of one answer of a plain model, where nothing else is said."""
_LABELLED = re.compile(r"([A-Za-z0-9_.+ -]+)=(.+)", re.DOTALL)


@dataclass(frozen=True)
class System:
    """One team to evaluate: its recipe, and the checkpoint it speaks with (None: the weights the recipe names).

    `plain` is the name of a model that came without a recipe and answers alone.
    """

    name: str
    recipe: Recipe
    weights: Path | None = None
    plain: str | None = None

    def identity(self) -> dict[str, Any]:
        """What decides its answers: recipes or weights that differ have other identities."""
        tree = self.recipe.model_dump()
        team = json.dumps({k: tree[k] for k in ("team", "policies", "engine")}, sort_keys=True)
        files = [] if self.weights is None else sorted(p for p in self.weights.rglob("*.safetensors"))
        sizes = [f"{p.relative_to(p.parents[1])} {p.stat().st_size}" for p in files]
        return {
            "recipe": hashlib.blake2b(team.encode(), digest_size=8).hexdigest(),
            "weights": None if self.weights is None else [self.weights.name, *sizes],
        }


def system(target: Target, *, max_tokens: int | None = None, overrides: Sequence[str] = ()) -> System:
    """The system of a target: a run folder, a recipe (file or mapping), `openai:MODEL@URL`, or a model's name.

    `LABEL=TARGET` names it; `overrides` change recipes of run folders and files, `max_tokens` plain models only.
    """
    if isinstance(target, Mapping):
        recipe = Recipe.load(target, overrides)
        return System(recipe.name, recipe)
    text = str(target)
    labelled = _LABELLED.fullmatch(text)
    label, text = (labelled[1].strip(), labelled[2]) if labelled and not Path(text).exists() else (None, text)
    path = Path(text).expanduser()
    if (path / export.TEAM).exists():
        return System(label or path.resolve().name, *export.placed(path, list(overrides)))
    if (path / "recipe.yaml").exists():
        return System(label or path.resolve().name, Recipe.load(path / "recipe.yaml", overrides), last_checkpoint(path))
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        recipe = Recipe.load(path, overrides)
        return System(label or recipe.name, recipe)
    if path.is_dir() and not (path / "config.json").exists():
        raise RunError(f"{path} is neither a run folder (no recipe.yaml) nor a model (no config.json). "
                       "Name a folder that `cothink run` wrote, or one written by save_pretrained")  # fmt: skip
    _refuse_typos(text, path)
    return System(label or _short(text), plain_model(text, max_tokens or MAX_TOKENS), plain=text)


def plain_model(model: str, max_tokens: int = MAX_TOKENS, *, judge: bool = False) -> Recipe:
    """The recipe of one model that answers alone (workflow `solo`), or judges pairs of answers alone."""
    role = "judge" if judge else "solver"
    workflow = {"name": "judge", "form": "vrp"} if judge else {"name": "solo"}
    seat: dict[str, Any] = {"policy": role, "trainable": False, "max_tokens": max_tokens}
    if model == "builtin:tiny" and not judge:
        seat["system"] = PROMPTS["solo"]  # the only words it was trained on
    # models.where tells folders from hub ids by their first character.
    name = str(Path(model).resolve()) if Path(model).is_dir() else model
    return Recipe.load(
        {
            "name": re.sub(r"[/\\]", "-", _short(model)),
            "team": {"workflow": workflow, "roles": {role: seat}},
            "policies": {role: {"model": name}},
            "tasks": {"test": {"name": "wordsums", "split": "test"}},
            "stages": [{"kind": "evaluate"}],
        }
    )


def _short(model: str) -> str:
    name = model.removeprefix("openai:").partition("@")[0] if models.is_outside(model) else model
    return name.rstrip("/").rpartition("/")[2].replace(":", "-")


def _refuse_typos(text: str, path: Path) -> None:
    """A name that is no model: neither known, nor a folder, nor `org/name` beside no local folder `org`."""
    known = [m.name for m in models.available() if not m.name.startswith((".", "HUB", "openai"))]
    if text in known or path.is_dir() or models.OPENAI.fullmatch(text):
        return
    if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not path.parent.is_dir():
        return  # a hub id
    beside = [str(path.parent / p.name) for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = nearest(text, [*known, *beside])
    hint = f"; did you mean {close!r}?" if close else "."
    raise RunError(f"there is no {text!r}{hint} Name a run folder, a recipe file, {', '.join(known)}, a hub id "
                   "org/name, a model's folder, or openai:MODEL@URL")  # fmt: skip


def questions(
    systems: Sequence[System], on: str, suite: suites.Name | None, limit: int | None
) -> tuple[dict[str, Sequence[Task]], list[str]]:
    """The sets to ask, each cut to `limit`, and what was left out of them.

    Without a suite, the set `on` of the first system that has a recipe; every system gets the same questions.
    """
    sets: dict[str, Sequence[Task]] = {}
    notes: list[str] = []
    for name, found in _asked(systems, on, suite).items():
        tasks = suites.tasks(name, found)
        kept, left_out = sound(tasks)
        sets[name] = kept[:limit]
        more = [f"left out {len(left_out) - SHOWN} more"] if len(left_out) > SHOWN else []
        notes += [f"{name}: {line}" for line in (*report(tasks).splitlines(), *left_out[:SHOWN], *more)]
    return sets, notes


def _asked(systems: Sequence[System], on: str, suite: suites.Name | None) -> dict[str, suites.Set]:
    if suite is not None:
        return suites.sets(suite)
    owner = next((one for one in systems if one.plain is None), None)
    if owner is None:
        known = ", ".join((*suites.SETS, *suites.GROUPS))
        raise RunError(f"a model brings no questions: name a suite, one of {known}")
    if on not in owner.recipe.tasks:
        raise RunError(f"the recipe has no task set {on!r}; it has {', '.join(owner.recipe.tasks)}")
    block = owner.recipe.tasks[on]
    return {on: suites.Set(block.name, block.options)}


def fitted(systems: Sequence[System], sets: Sets) -> list[System]:
    """The systems, those of plain models with the workflow that fits the questions; raises RunError where none does."""
    pairs = {name: any("answer_a" in task.meta for task in tasks) for name, tasks in sets.items()}
    if not any(pairs.values()):
        return list(systems)
    if not all(pairs.values()):
        names = ", ".join(name for name, asked in pairs.items() if asked)
        raise RunError(f"{names} asks which of two answers is better, the other sets do not: evaluate it on its own")
    for one in systems:
        workflow = one.recipe.team.workflow.name
        if one.plain is None and workflow != "judge" and ":" not in workflow:
            what = f"{one.name} plays the workflow {workflow}, which shows nobody the two answers to judge"
            raise RunError(f"{what}; name a system whose recipe has workflow: {{name: judge}}")
    return [one if one.plain is None else replace(one, recipe=_judge(one)) for one in systems]


def _judge(one: System) -> Recipe:
    assert one.plain is not None
    return plain_model(one.plain, one.recipe.team.roles["solver"].max_tokens, judge=True)


@dataclass
class Plan:
    """How systems are evaluated: `k` plays a question; `out` is where answers and results are kept (None: nowhere).

    `seed` None takes each recipe's own. `cost` is what an equal-cost comparison counts. `diagnose` plays every question
    again without each role that others read.
    """

    sets: Sets
    k: int = 1
    temperature: float | None = None
    seed: int | None = None
    out: Path | None = None
    console: Any = None
    cost: Cost = "generated"
    diagnose: bool = False
    notes: list[str] = field(default_factory=list)

    def settings(self) -> dict[str, Any]:
        """What the answers in a folder depend on, beside the systems and questions."""
        return {"seed": self.seed, "temperature": self.temperature}

    def say(self, text: str) -> None:
        """Prints one line, when there is somebody to read it."""
        if self.console is not None:
            self.console.print(visible(text), markup=False, highlight=False, soft_wrap=True)


async def evaluate(systems: Sequence[System], plan: Plan, single: System | None = None) -> dict[str, Any]:
    """Every system on the same questions, all pairs compared, and each team against `single` at equal cost.

    With a folder, finished questions are kept as they come, and results.json, .md and .csv are written at the end.
    """
    names = [s.name for s in (*systems, *([single] if single else []))]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise RunError(f"two systems are called {twice!r}; name them apart: FIRST=TARGET SECOND=TARGET")
    _same_prompts(systems)
    if plan.out is not None:
        _claim(plan, [*systems, *([single] if single else [])])
    for note in plan.notes:
        plan.say(note)
    found: dict[str, Questions] = {}
    values: dict[str, Any] = {}
    for one in systems:
        rows = await _play(one, plan, lambda rows: plan.k)
        found[one.name], values[one.name] = Questions(rows[0]), rows[1]
    priced = await _at_equal_cost(single, plan, found, values) if single else []
    results = {
        "sets": {name: len(tasks) for name, tasks in plan.sets.items()},
        "k": plan.k,
        **plan.settings(),
        "systems": values,
        "comparisons": versus.compare(found),
        "equal_cost": priced,
        "notes": [*plan.notes, *_twice(plan.sets)],
    }
    if plan.out is not None:
        write_atomic(plan.out / "results.json", json.dumps(results, indent=2))
        write_atomic(plan.out / "results.md", reports.markdown(results))
        write_atomic(plan.out / "results.csv", reports.table(results))
    return results


def _same_prompts(systems: Sequence[System]) -> None:
    """Refuses systems that give a role of one workflow different prompts: their figures would compare prompts too."""
    seen: dict[tuple[str, str], tuple[str, str]] = {}
    for one in systems:
        block = one.recipe.team.workflow
        if wiring.declared(block, "layouts", "LAYOUTS") is None:
            continue
        for role, found in seating.template_hashes(block, one.recipe.roles()).items():
            name, known = seen.setdefault((block.name, role), (one.name, found))
            if known != found:
                what = f"{name} and {one.name} give the role {role!r} different prompts (hashes {known} and {found})"
                raise RunError(f"{what}: what differs would not be the weights alone. Evaluate them with one prompt")


async def _play(one: System, plan: Plan, plays: Callable[[list[Row]], int]) -> tuple[list[Row], dict[str, Any]]:
    """The plays of one system: k of each question, then as many as `plays` says of those; its figures are of the k."""
    answers = Answers(None if plan.out is None else plan.out / f"{one.name}.jsonl")
    seed = ("evaluate", one.recipe.seed if plan.seed is None else plan.seed)
    session: Session | None = None

    def ready(*needed: Answers, k: int) -> Session:
        nonlocal session
        if session is None and not all(found.complete(plan.sets, k) for found in needed):
            session = assemble(one.recipe, one.weights, with_tasks=False)
        # Where every answer is there, the models stay where they are.
        found = session or Session(one.recipe, one.recipe.roles(), None, {}, {})
        found.console = plan.console
        return found

    async def go(k: int) -> tuple[dict[str, Any], list[Row]]:
        return await measure_sets(
            ready(answers, k=k), plan.sets, episodes_per_task=k, temperature=plan.temperature, seed=seed,
            title=f"{one.name} x {k}", answers=answers,
        )  # fmt: skip

    values, rows = await go(plan.k)
    seconds = values.pop("seconds")  # the results of the same answers are the same, however long they took
    plan.say(f"{one.name}: {sentence(values)}, {seconds:.0f} s")
    if plan.diagnose:
        quiet = {role: Answers(None if plan.out is None else plan.out / f"{one.name}-without-{role}.jsonl")
                 for role in silenced(rows)}  # fmt: skip
        values["diagnosis"] = await influence.team(
            ready(*quiet.values(), k=plan.k), plan.sets, rows, k=plan.k, temperature=plan.temperature, seed=seed,
            title=one.name, kept=quiet.__getitem__,
        )  # fmt: skip
    k = plays(rows)
    if k > plan.k:
        rows = (await go(k))[1]
    session = None
    gc.collect()  # the next system's weights may need the room
    return rows, values


async def _at_equal_cost(
    single: System, plan: Plan, found: dict[str, Questions], values: dict[str, Any]
) -> list[dict[str, Any]]:
    teams = dict(found)
    votes: dict[str, int] = {}

    def needed(rows: list[Row]) -> int:
        votes.update({n: versus.votes_worth(team, Questions(rows), plan.cost) for n, team in teams.items()})
        return max(votes.values())

    rows, values[single.name] = await _play(single, replace(plan, diagnose=False), needed)
    every = Questions(rows)
    found[single.name] = Questions(row for row in rows if row["play"] < plan.k)
    return [
        versus.equal_cost(name, team, single.name, every, plan.cost, votes[name]) for name, team in teams.items()
    ]  # fmt: skip


def _claim(plan: Plan, systems: Sequence[System]) -> None:
    """Refuses a folder whose answers came from other settings or other systems of the same name."""
    assert plan.out is not None
    plan.out.mkdir(parents=True, exist_ok=True)
    path = plan.out / "settings.json"
    known = json.loads(path.read_text()) if path.exists() else {"settings": plan.settings(), "systems": {}}
    for key, value in plan.settings().items():
        if known["settings"][key] != value:
            what = f"{plan.out} holds answers at {key} {known['settings'][key]}, not {value}"
            raise RunError(f"{what}. Name another folder with --out, or ask for the same {key}")
    for one in systems:
        before = known["systems"].setdefault(one.name, one.identity())
        if before != one.identity():
            what = f"{plan.out} holds answers of another system called {one.name!r}"
            raise RunError(f"{what}. Name another folder with --out, or give this one a name: NAME=TARGET")
    write_atomic(path, json.dumps(known, indent=2))


def _twice(sets: Sets) -> list[str]:
    """Notes on questions that stand in two sets, which averages over sets count twice."""
    names, notes = list(sets), []
    for k, one in enumerate(names):
        for two in names[k + 1 :]:
            if shared := overlap(sets[one], sets[two]):
                notes.append(f"{len(shared)} questions stand both in {one} and in {two}, and count twice")
    return notes
