"""The Python front door: `run` a recipe, `evaluate` and `load_team` a trained team; the command line calls this too."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from cothink.parts import DPO, RL, SFT, Collect
from cothink.ranks import Ranks, RanksError, joined
from cothink.recipe import Recipe
from cothink.record import Run, RunError, write_atomic
from cothink.types import Turn

if TYPE_CHECKING:
    from cothink.answering import Answer, Ears, Wish

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a run lies and what its evaluations found, by label."""

    folder: Path
    results: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Solution:
    """A team's answer to one question: the final text, the answer read out of it (None: none found), and all turns.

    A solution can be awaited too, which gives the solution itself.
    """

    text: str
    answer: str | None
    turns: tuple[Turn, ...]
    finish: str

    def __str__(self) -> str:
        return self.answer if self.answer is not None else self.text

    def __await__(self) -> Generator[None, None, Solution]:
        return self
        yield  # makes this a generator: awaiting ends at once


def run(
    recipe: str | Path | Mapping[str, Any] | Recipe,
    overrides: Sequence[str] = (),
    *,
    out: str | Path | None = None,
    console: Any = None,
    **values: Any,
) -> RunResult:
    """Runs a recipe, or resumes it where its run folder stands.

    `overrides` are dotted (`stages.1.steps=5`); keyword `values` override top-level keys (`seed=7`). `out` is the run
    folder (default: the recipe's `output/name`). Raises RecipeError before any model loads.
    """
    if isinstance(recipe, Recipe):
        if overrides or values:
            raise TypeError("run: overrides need a path or mapping; this recipe is resolved already")
        loaded = recipe
    else:
        loaded = Recipe.load(recipe, [*overrides, *(f"{k}={_plain(v)}" for k, v in values.items())])
    folder = Path(out) if out is not None else Path(loaded.output) / loaded.name

    async def shared() -> RunResult:
        with joined() as ranks:
            return await _run(loaded, folder, console if ranks.leads else None, ranks)

    return run_sync(shared())


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


async def _run(recipe: Recipe, folder: Path, console: Any, ranks: Ranks) -> RunResult:
    from cothink.session import assemble
    from cothink.stages.collect import collect
    from cothink.stages.dpo import dpo, pairs_of
    from cothink.stages.evaluate import evaluate as evaluate_stage
    from cothink.stages.lessons import to_come
    from cothink.stages.rl import rl
    from cothink.stages.sft import examples_of, sft
    from cothink.stages.trackers import Trackers

    record = _folder(recipe, folder, ranks)
    try:
        if record.state.get("stage", 0) >= len(recipe.stages):
            return RunResult(folder, record.results)
        _together(recipe, record, ranks)
        for index, stage in enumerate(recipe.stages):
            over = index < record.state.get("stage", 0)
            if over or not isinstance(stage, SFT | DPO) or to_come(recipe, stage, index):
                continue
            read: Any = examples_of if isinstance(stage, SFT) else pairs_of
            read(recipe, stage, index)  # what is missing is said before a model loads
        session = assemble(recipe)
        session.run, session.console, session.ranks = record, console, ranks
        for policy in session.policies.values():
            policy.ranks = ranks
        for engine in session.engines.values():
            if hasattr(engine, "say"):
                engine.say = session.say
        named = recipe.trackers if ranks.leads else ()
        session.trackers = Trackers(named, folder / "trackers", recipe.name, recipe.model_dump(), session.say)
        _inspect_tasks(session, folder, ranks)
        place = record.place
        for note in record.notes:
            session.say(note)
        if place is not None:
            for policy in session.policies.values():
                policy.load(place, place / "training")
            session.say(f"resuming {folder} at stage {record.state['stage']}, step {record.state['step']}")
        for index, stage in enumerate(recipe.stages):
            if index < record.state.get("stage", 0):
                continue
            if isinstance(stage, RL):
                await rl(session, stage, index)
            elif isinstance(stage, SFT):
                await sft(session, stage, index)
            elif isinstance(stage, DPO):
                await dpo(session, stage, index)
            elif isinstance(stage, Collect):
                await collect(session, stage, index)
            elif ranks.leads:
                await evaluate_stage(session, stage, index)
            record.finish_stage(index)
            ranks.wait()
        session.trackers.close()
        if not ranks.leads:
            return RunResult(folder, record.results)
        _compare(session, record.results)
        if len(record.results) > 1:
            from cothink.stages.comparing import evaluated
            from cothink.stages.reports import page

            write_atomic(folder / "comparison.md", page(evaluated({recipe.name: (folder, record.results)})))
        return RunResult(folder, record.results)
    finally:
        record.close()


def _folder(recipe: Recipe, folder: Path, ranks: Ranks) -> Run:
    """The run folder: open to the leading process, followed by the others."""
    if ranks.leads:
        run = Run(folder, recipe.to_yaml(), recipe.seed, ranks.count)
        ranks.first(run.state)
        return run
    from cothink.follower import Follower

    return Follower(folder, ranks.first({}))


def _together(recipe: Recipe, record: Run, ranks: Ranks) -> None:
    """Raises RanksError for a stage still to come that several processes cannot share."""
    for index in range(record.state.get("stage", 0), len(recipe.stages)):
        kind = recipe.stages[index].kind
        if ranks.count > 1 and kind not in ("rl", "evaluate"):
            raise RanksError(
                f"stage {index} ({kind}) runs in one process, and there are {ranks.count}: run this recipe with "
                "`cothink run` alone until that stage is done (Ctrl-C in the next one), then start it with torchrun"
            )


def _inspect_tasks(session: Any, folder: Path | None, ranks: Ranks) -> None:
    """Leaves out tasks whose gold is not right against itself; says and writes (`data.json`) what was left out."""
    from cothink.tasks import report
    from cothink.verify import check_golds

    found: dict[str, Any] = {}
    for name, tasks in session.tasks.items():
        loaded = report(tasks)
        problems = ranks.first(check_golds(tasks) if ranks.leads else [])
        bad = {line.partition(": gold ")[0] for line in problems}
        session.tasks[name] = [t for t in tasks if t.id not in bad]
        found[name] = {"tasks": len(session.tasks[name]), "loading": loaded.splitlines(), "bad_golds": problems}
        for line in [*loaded.splitlines(), *(f"left out {p}" for p in problems[:5])]:
            session.say(f"tasks.{name}: {line}")
        if len(problems) > 5:
            more = "" if folder is None else f", see {folder / 'data.json'}"
            session.say(f"tasks.{name}: left out {len(problems) - 5} more{more}")
    if folder is not None and ranks.leads:
        write_atomic(folder / "data.json", json.dumps(found, indent=2, ensure_ascii=False))


def _compare(session: Any, results: Mapping[str, Any]) -> None:
    """Says how the last evaluation of each data set differs from the first one on the same tasks."""
    from cothink.stages.evaluate import difference, points

    by_set: dict[Any, list[str]] = {}
    for label, values in results.items():
        # Equal names of tasks do not make them equal: `on` says which data set they are from.
        by_set.setdefault(str(values.get("on")), []).append(label)
    for first, *_, last in (labels for labels in by_set.values() if len(labels) > 1):
        before, after = results[first], results[last]
        if before["per_task"] and before["per_task"].keys() == after["per_task"].keys():
            session.say(f"{last} - {first}: {points(difference(after, before))} (paired, 95 %)")


class LoadedTeam:
    """A team ready to answer questions; `name` is what its target is called."""

    def __init__(self, session: Any, seed: int = 0, name: str | None = None):
        self.session, self._seed, self._asked = session, seed, 0
        self.name = name or session.recipe.name

    def solve(self, question: str, **options: Any) -> Solution:
        """The team's answer; works in a script and inside a running event loop, which it blocks (see `asolve`)."""
        return run_sync(self.asolve(question, **options))

    async def asolve(self, question: str, **options: Any) -> Solution:
        """The team's answer without blocking the event loop; options are the fields of `answering.Wish` (`votes=5`)."""
        from cothink.answering import Wish

        found = await self.answer(question, Wish(**options))
        episode = found.episode
        return Solution(found.text, found.answer, episode.turns, episode.finish.reason)

    async def answer(self, question: str, wish: Wish | None = None, ears: Ears | None = None) -> Answer:
        """Everything about an answer; `ears` hears its turns as they are spoken."""
        from cothink.answering import answer

        self._asked += 1
        return await answer(self.session, question, wish, seed=(self._seed, self._asked), ears=ears)


def load_team(source: str | Path | Mapping[str, Any], *, seed: int = 0, overrides: Sequence[str] = ()) -> LoadedTeam:
    """The team of a target as `compare` knows them: trained where it is a run folder, else as its models come.

    `overrides` change its recipe, as in `run`.
    """
    from cothink import wiring
    from cothink.session import assemble
    from cothink.stages.systems import system

    one = system(source, overrides=overrides)
    if overrides and one.plain:
        raise RunError(
            f"{one.name} is a model without a recipe: there is nothing to change with {', '.join(overrides)}"
        )
    needs = wiring.needs(one.recipe)
    if needs:
        what = f"the workflow {one.recipe.team.workflow.name} of {one.name} reads {' and '.join(needs)} of a task"
        raise RunError(f"{what}: it cannot answer a plain question. Name a team with another workflow")
    return LoadedTeam(assemble(one.recipe, one.weights, with_tasks=False), seed, one.name)


def evaluate(
    source: str | Path | Mapping[str, Any],
    *,
    on: str | None = None,
    suite: str | Sequence[str] | None = None,
    k: int = 1,
    limit: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    out: str | Path | None = None,
    console: Any = None,
) -> dict[str, Any]:
    """Figures of one system; what `source` can be and the options are those of `compare`."""
    found = compare(
        [source], on=on, suite=suite, k=k, limit=limit, temperature=temperature, seed=seed, out=out, console=console
    )  # fmt: skip
    (values,) = found["systems"].values()
    return values


def compare(
    targets: Sequence[str | Path | Mapping[str, Any]],
    *,
    on: str | None = None,
    suite: str | Sequence[str] | None = None,
    k: int = 1,
    limit: int | None = None,
    temperature: float | None = None,
    seed: int | None = None,
    equal_cost: str | Path | Mapping[str, Any] | None = None,
    cost: Literal["generated", "all"] = "generated",
    max_tokens: int | None = None,
    diagnose: bool = False,
    overrides: Sequence[str] = (),
    out: str | Path | None = None,
    console: Any = None,
) -> dict[str, Any]:
    """Several systems on the same questions: `systems` (name -> figures), `comparisons`, `equal_cost`, `notes`.

    A target is a run folder (its trained team), a recipe, `openai:MODEL@URL`, or a model's name; `LABEL=TARGET` names
    it. The questions are those of a `suite`, or of the set `on` (default: test) of the first target with a recipe.
    `k` plays each question; `equal_cost` is a single model that gets as many votes as each team's tokens buy, `cost`
    what counts as tokens. `diagnose` asks who in each team helps, and plays all again without each role that others
    read. `out` keeps every finished question, so that a call with the same folder goes on.
    """
    from cothink.models import is_outside
    from cothink.stages import systems

    if k < 1 or not targets:
        raise RunError("evaluate: name at least one system, and k of at least 1")
    named = [*targets, *([] if equal_cost is None else [equal_cost])]
    every = [systems.system(target, max_tokens=max_tokens, overrides=overrides) for target in named]
    plain, recipes = any(one.plain for one in every), any(not one.plain for one in every)
    unseen = any(is_outside(part.model) for one in every for part in one.recipe.policies.values())
    for dead, why in (
        (on and suite, "`on` names a set of the recipe, `suite` sets of their own; give one of the two"),
        (cost == "all" and equal_cost is None, "`cost` is what an equal-cost comparison counts; name its single model"),
        (cost == "all" and unseen, "a server does not tell its prompt tokens; leave `cost` at generated"),
        (max_tokens and not plain, "`max_tokens` is for plain models; a role has its own: team.roles.ROLE.max_tokens"),
        (overrides and not recipes, f"there is no recipe to change with {', '.join(overrides)}"),
    ):
        if dead:
            raise RunError(f"evaluate: {why}")
    sets, notes = systems.questions(every, on or "test", suite, limit)
    plan = systems.Plan(sets, k, temperature, seed, None if out is None else Path(out), console, cost, diagnose, notes)
    every = systems.fitted(every, sets)
    teams, single = (every, None) if equal_cost is None else (every[:-1], every[-1])
    return run_sync(systems.evaluate(teams, plan, single))


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end, inside a running event loop too (a notebook): there on a thread of its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    found: list[Any] = []

    def target() -> None:
        try:
            found.append((True, asyncio.run(work)))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=target, name="cothink")
    thread.start()
    thread.join()
    done, value = found[0]
    if not done:
        raise value
    return value


def report(
    targets: Sequence[str | Path],
    *,
    out: str | Path = "report.html",
    svg: str | Path | None = None,
    episodes: int = 8,
) -> tuple[Path, list[Path]]:
    """Writes one self-contained HTML page about runs and evaluation folders; returns its path and those of the plots.

    `targets` are run folders and folders of `compare(..., out=)`. `episodes` is how many of each run are shown, `svg` a
    folder for the curves as files.
    """
    from cothink.report import folders, page
    from cothink.stages.comparing import evaluated
    from cothink.stages.reports import tables

    if not targets:
        raise RunError("report: name at least one run folder")
    path = Path(out)
    if path.is_dir():
        raise RunError(f"report: --out {path} is a folder; name the HTML file to write")
    places = [Path(target) for target in targets]
    measured = {p: json.loads((p / "results.json").read_bytes()) for p in places if folders.is_evaluation(p)}
    runs = folders.named([p for p in places if p not in measured])
    found = {"Evaluations": evaluated({run.name: (run.path, run.results) for run in runs if run.results})}
    alike = len({place.name for place in measured}) < len(measured)
    found |= {f"Evaluation {place if alike else place.name}": tables(v) for place, v in measured.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.page(runs, {k: v for k, v in found.items() if v}, episodes), encoding="utf-8")
    return path, [] if svg is None else page.write_svgs(runs, Path(svg))
