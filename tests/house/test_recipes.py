"""Every recipe checks, and what the README shows works as written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import cothink

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


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


def test_readme_recipe_loads(tmp_path):
    (text,) = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(text)
    assert cothink.Recipe.load(tmp_path / "recipe.yaml").team.workflow.name == "rema"


def test_readme_python_compiles_and_its_workflow_passes_the_kit():
    from cothink.checks import check_workflow

    use, workflow = blocks("python")
    compile(use, "README", "exec")
    place: dict = {}
    exec(workflow, place)
    check_workflow(place["run"], roles={"writer": "", "critic": ""})


def test_readme_commands_exist():
    commands = set(re.findall(r"^cothink (\w+)", "\n".join(blocks("bash")), re.M))
    assert {"check", "run", "evaluate", "solve", "models", "verify"} <= commands
    for name in commands:
        done = subprocess.run([sys.executable, "-m", "cothink.cli", name, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    targets = set(re.findall(r"^make ([\w-]+)", "\n".join(blocks("bash")), re.M))
    makefile = (ROOT / "Makefile").read_text()
    assert {"demo", "test", "install"} <= targets and all(re.search(rf"^{t}:", makefile, re.M) for t in targets)


def test_readme_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 4
    assert not [link for link in links if not link.startswith("http") and not (ROOT / link).exists()]
