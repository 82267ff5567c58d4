"""Every command and every piece of Python on every page is run, on a small run; what cannot be run is named here."""

from __future__ import annotations

import io
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest
from pages import PAGES, ROOT, blocks, commands, name_of

import cothink
from cothink import api, cli, serve

QUESTION = "Ann counts pens. Ann has 6 pens. Ann buys 2 pens. How many pens does Ann have now?\n"
ELSEWHERE = {"docs/serve.md": "tests/e2e/test_serve_page.py", "docs/view.md": "tests/e2e/test_look.py"}
"""Pages whose commands another test runs."""
NOT_RUN = {
    "cothink run recipes/rema-single-paper.yaml": "an 8B model of the hub, and a GPU for it",
    "cothink run mixed.yaml": "its planner speaks through a server",
}
"""Beginnings of commands that are checked as far as a recipe can be, and not run."""
RUN = [name for name in map(name_of, PAGES) if name not in ELSEWHERE]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def smaller(recipe, overrides):
    """The overrides that make a run of a recipe as small as it goes."""
    found = []
    for name, tasks in recipe.tasks.items():
        if "count" in tasks.options or tasks.name == "wordsums":
            found.append(f"tasks.{name}.count=12")
    for k, stage in enumerate(recipe.stages):
        if stage.kind == "rl":
            found += [f"stages.{k}.steps=1", f"stages.{k}.tasks_per_step=2", f"stages.{k}.episodes_per_task=4"]
        elif stage.kind in ("evaluate", "collect"):
            found.append(f"stages.{k}.limit=2")
    return [*overrides, *found]


def shrunk(arguments):
    """Arguments of a command, with sizes that fit a test."""
    name, *rest = arguments
    if name == "run":
        out = rest.index("--out") if "--out" in rest else len(rest)
        recipe, *overrides = rest[:out]
        return [name, recipe, *smaller(cothink.Recipe.load(recipe, overrides), overrides), *rest[out:]]
    if name == "evaluate":
        if "--limit" in rest:
            rest[rest.index("--limit") + 1] = "2"
        return [name, *rest, *([] if "--limit" in rest else ["--limit", "2"])]
    return arguments


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder as a reader has it: the recipes, and the run that most pages speak of."""
    folder = tmp_path_factory.mktemp("pages")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    demo, overrides = folder / "recipes" / "rema-demo.yaml", ["stages.1.steps=20"]
    api.run(demo, smaller(cothink.Recipe.load(demo, overrides), overrides), out=folder / "runs" / "rema-demo")
    return folder


@pytest.fixture
def here(place, monkeypatch):
    """Works in that folder, with `run` and `compare` made small and servers asked once."""
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(serve, "serve", asked_once)
    monkeypatch.setattr("cothink.report.app.serve", looked_at)

    def run(recipe, overrides=(), **options):
        return api.run(recipe, smaller(cothink.Recipe.load(recipe, overrides), overrides), **options)

    monkeypatch.setattr(cothink, "run", run, raising=False)
    monkeypatch.setattr(
        cothink, "compare", lambda targets, **options: api.compare(targets, **(options | {"limit": 2})), raising=False
    )
    yield place
    for name, module in [*sys.modules.items()]:  # the next page may save another file of that name
        if str(getattr(module, "__file__", None)).startswith(str(place)):
            del sys.modules[name]


def asked_once(load, *, host, port, key, limits, grace, say):
    """In place of a server that runs until it is stopped: one question to the same app."""
    testing = pytest.importorskip("fastapi.testclient")
    from cothink.serve.app import app
    from cothink.serve.desk import Desk

    team = load()
    with testing.TestClient(app(Desk(team, limits), key)) as client:
        assert client.get("/health").status_code == 200
        asked = {"model": team.name, "messages": [{"role": "user", "content": QUESTION}]}
        reply = client.post("/v1/chat/completions", json=asked)
    assert reply.status_code == 200 and reply.json()["choices"][0]["message"]["content"], reply.text


def looked_at(root, evaluated, port, said):
    """In place of the viewer that runs until it is stopped."""
    testing = pytest.importorskip("fastapi.testclient")
    from cothink.report.app import app

    reply = testing.TestClient(app(root, evaluated), base_url="http://127.0.0.1").get("/api/runs")
    assert reply.status_code == 200 and reply.json()["runs"]


def call(arguments):
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    return left.value.code or 0


def follow(line, monkeypatch, capsys):
    """Runs one command line of a page, or checks it where it is no command of ours; fails on what it does not know."""
    given, _, command = line.rpartition(" | ")
    program, *arguments = shlex.split(command, comments=True)
    if any(line.startswith(start) for start in NOT_RUN):
        arguments = ["check", *arguments[1:]]
    if program == "cothink":
        if "paper" in line and not api_data().is_dir():
            return
        monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(given)[1] if given else QUESTION))
        code = call(shrunk(arguments))
        found = capsys.readouterr()
        assert code == 0, (line, found.err)
        assert found.out.strip() or arguments[0] in ("serve", "view"), line
    elif program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M), line
    elif program == "pip":
        extras = re.search(r"\[([\w,]+)\]", line)
        assert extras and not set(extras[1].split(",")) - set(EXTRAS), line
    elif line.startswith("python -m pytest "):
        assert pytest.main(["-q", "-p", "no:cacheprovider", *arguments[2:]]) == 0, line
    elif program == "python":
        assert (ROOT / arguments[0]).is_file(), line
    else:
        assert line == "source .venv/bin/activate", f"nothing here runs or checks: {line}"


def api_data():
    from cothink.tasks import data_root

    return data_root()


def test_the_walk_finds_pages_and_commands():
    lines = [line for page in PAGES for block in blocks(page, "bash") for line in commands(block)]
    assert len(RUN) > 8 and sum(line.startswith("cothink ") for line in lines) > 30
    for start in NOT_RUN:
        assert any(line.startswith(start) for line in lines), f"{start} is on no page: take it off the list"
    for page, test in ELSEWHERE.items():
        assert Path(page).stem + ".md" in (ROOT / test).read_text(), f"{test} does not run {page}"
    for page in PAGES:
        assert {b.language for b in blocks(page)} <= {"", "bash", "python", "yaml", "text"}, name_of(page)


@pytest.mark.parametrize("page", RUN)
def test_a_page_works_as_written(page, here, monkeypatch, capsys):
    names: dict = {"__name__": "page"}
    for block in blocks(ROOT / page):
        if block.file is not None:
            (here / block.file).write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, page, "exec"), names)
        elif block.language == "yaml":
            (here / "shown.yaml").write_text(block.text)
            cothink.Recipe.load(here / "shown.yaml")
        elif block.language == "bash":
            for line in commands(block):
                follow(line, monkeypatch, capsys)


@pytest.mark.parametrize(
    "line",
    [
        "cothink evaluate runs/rema-demo --limits 3",
        "cothink check recipes/rema-demo.yaml stages.1.step=5",
        "make coffee",
        "pip install 'cothink[nothing]'",
        "python bench/nothing.py",
        "ls",
    ],
)
def test_a_command_that_does_not_work_is_found(line, here, monkeypatch, capsys):
    with pytest.raises(AssertionError):
        follow(line, monkeypatch, capsys)
