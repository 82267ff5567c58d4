"""Every recipe checks, and the README's workflow keeps the rules; test_docs_commands.py runs the rest of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pages import PAGES, ROOT, blocks

import cothink

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


def test_readme_workflow_passes_the_kit():
    from cothink.checks import check_workflow

    _, workflow = blocks(PAGES[0], "python")
    place: dict = {}
    exec(workflow.text, place)
    check_workflow(place["run"], roles={"writer": "", "critic": ""})
