"""Every recipe checks, and the README's workflow keeps the rules; test_docs_commands.py runs the rest of it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
from pages import PAGES, ROOT, blocks

import cothink
from cothink import cli

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_the_walk_finds_recipes():
    assert len(RECIPES) >= 7


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_recipe_checks(path, data_root, monkeypatch):
    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    recipe = cothink.Recipe.load(path)
    assert recipe.name == path.stem
    assert path.read_text().startswith("#"), "a recipe says in its first lines what it is for"


@pytest.mark.parametrize("path", [p for p in RECIPES if "demo" in p.stem], ids=lambda p: p.stem)
def test_check_command_needs_no_torch(path):
    program = (
        "import sys; from cothink.cli import app; app(['check', sys.argv[1]], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-1000:]
    assert "finished; graded: turn" in done.stdout


FITTED = [path for path in RECIPES if "--memory" in path.read_text()]


def test_the_recipes_for_gpus_by_their_sizes_are_there():
    assert {path.stem for path in FITTED} >= {"rema-8b-1x80gb", "rema-8b-8x80gb", "rema-8b-2nodes"}


@pytest.mark.parametrize("path", FITTED, ids=lambda p: p.stem)
def test_the_memory_that_a_recipe_states_is_the_one_predicted(path, capsys):
    header = re.sub(r"\n# *", " ", path.read_text().partition("\nname:")[0])
    command, stated = re.findall(r"`cothink (check [^`]*--memory [^`]*)`\s+predicts\s+(\d+) GB", header)[0]
    with pytest.raises(SystemExit) as end:
        cli.main([str(ROOT / word) if word.startswith("recipes/") else word for word in shlex.split(command)])
    said = capsys.readouterr().out
    assert not end.value.code and "it fits: " in said
    assert round(float(re.findall(r"together +([\d.]+) GB of", said)[0])) == int(stated)


def test_readme_workflow_passes_the_kit():
    from cothink.checks import check_workflow

    _, workflow = blocks(PAGES[0], "python")
    place: dict = {}
    exec(workflow.text, place)
    check_workflow(place["run"], roles={"writer": "", "critic": ""})
