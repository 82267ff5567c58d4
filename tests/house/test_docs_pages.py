"""Pages hang together: links and anchors lead somewhere, the site builds, tables name what is there, all of it."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import get_args

import pytest
from pages import FENCE, PAGES, ROOT, name_of
from test_recipes import RECIPES

import cothink
from cothink import estimators, losses, parts, suites
from cothink.cli import app
from cothink.resolve import KINDS, names

RECORDS = [ROOT / name for name in ("CONTRIBUTING.md", "DECISIONS.md", "EXPERIMENTS.md", "CHANGELOG.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ROWS = re.compile(r"^\| `([\w-]+)` \| [^|]+ \| ([\w, ]+) \|$", re.M)


def prose(page: Path) -> str:
    """A page without its fenced blocks and its inline code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


def broken(page: Path) -> list[str]:
    """The links of a page to a file or a heading that is not there."""
    found = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        if "://" not in link and (not there.exists() or (anchor and anchor not in anchors(there))):
            found.append(link)
    return found


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name_of)
def test_links_lead_somewhere(page):
    assert not broken(page)


def glued(text: str) -> list[str]:
    """First items of lists without an empty line before them: GitHub shows a list, the site a paragraph."""
    lines = FENCE.sub("", text).splitlines()
    starts = [k for k, line in enumerate(lines) if re.match(r"- |\d+\. ", line)]
    return [lines[k] for k in starts if _in_text(lines[:k])]


def _in_text(before: list[str]) -> bool:
    block = list(takewhile(str.strip, reversed(before)))
    return bool(block) and not block[0].startswith("#") and not any(re.match(r"- |\d+\. ", line) for line in block)


@pytest.mark.parametrize("page", [*PAGES, *RECORDS], ids=name_of)
def test_lists_stand_apart(page):
    assert not glued(page.read_text(encoding="utf-8"))


def test_a_glued_list_is_found():
    assert glued("Said:\n- one\n- two\n\n- three\nlazily\n- four\n\nThen\n1. five\n") == ["- one", "1. five"]


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A head, here\n[a](page.md#a-head-here) [b](#a-head) [c](gone.md) `[d](code.md)` [e](https://x.y/z)\n"
    )
    assert broken(page) == ["#a-head", "gone.md"]


def test_the_walk_finds_links_and_anchors():
    found = [link for page in PAGES for link in LINK.findall(prose(page))]
    assert len(found) > 50 and any("#" in link for link in found)
    assert anchors(ROOT / "docs" / "view.md") >= {"who-in-the-team-helps", "looking-at-runs"}


def test_every_page_is_in_the_sites_navigation():
    site = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r": (\S+\.md)$", site, re.M)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.parent != ROOT}
    assert len(listed) == len(set(listed)) and set(listed) == pages | {"EXPERIMENTS.md", "DECISIONS.md"}


def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'cothink[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "methods" / "rema" / "index.html").read_text()
    assert 'href="../../EXPERIMENTS/"' in page and 'src="../../img/collapse.svg"' in page
    assert (tmp_path / "site" / "EXPERIMENTS" / "index.html").is_file() and not (tmp_path / "site" / "site.py").exists()


def needs(recipe):
    """The extras and the question files that a recipe cannot do without."""
    found = {"trl"} if {stage.kind for stage in recipe.stages} & {"sft", "dpo"} else set()
    if recipe.team.workflow.options.get("constrain"):
        found.add("grammar")
    loaders = {block.name for block in recipe.tasks.values()}
    suite = any(getattr(stage, "suite", None) for stage in recipe.stages)
    data = {stage.data.name for stage in recipe.stages if stage.kind == "sft"} & {"dialogues", "files"}
    if loaders - {"wordsums", "wordpairs"} or suite or data:
        found.add("data")
    models = {policy.model for policy in recipe.policies.values()}
    return found | {"cpu" if models == {"builtin:tiny"} else "smollm2" if "smollm2" in models else "gpu"}


def test_the_table_of_recipes_has_every_recipe_and_what_it_needs(data_root, monkeypatch):
    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    rows = ROWS.findall((ROOT / "docs" / "recipes.md").read_text().split("## Every recipe")[1])
    assert sorted(name for name, _ in rows) == [path.stem for path in RECIPES]
    for name, said in rows:
        assert set(said.split(", ")) == needs(cothink.Recipe.load(ROOT / "recipes" / f"{name}.yaml")), name


def words(page: str, column: int) -> set[str]:
    """The names in code of one column of a page's tables: those with an underscore, which no plain word has."""
    rows = [line.split("|") for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("| ")]
    code = [part for row in rows if len(row) > column + 1 for part in re.findall(r"`([^`]+)`", row[column])]
    return {word for part in code for word in re.findall(r"[A-Za-z_]\w*", part) if "_" in word}


def test_the_words_for_people_from_elsewhere_are_ours():
    trees = [tree for tree in vars(parts).values() if isinstance(tree, type) and issubclass(tree, parts.Tree)]
    known = {key for tree in [*trees, cothink.Recipe] for key in tree.model_fields}
    known |= {name for kind in KINDS for name in names(kind)} | set(signature(losses.policy).parameters)
    for values in (losses.Ratio, losses.Clip, losses.KL, losses.Aggregate, estimators.Scope):
        known |= set(get_args(values))
    said = words("coming-from.md", 1)
    assert len(said) > 30 and said - known == {"max_context", "engine_gap"}  # of workflows, of the metrics


def test_the_words_of_trl_are_trls():
    trl = pytest.importorskip("trl")
    theirs = {f.name for kind in (trl.GRPOConfig, trl.SFTConfig, trl.DPOConfig) for f in fields(kind)}
    theirs |= set(signature(trl.GRPOTrainer.__init__).parameters)
    said = words("coming-from.md", 2)
    values = {"normalize_then_sum", "sampling_logp_difference"}  # of an option, of the metrics
    assert len(said) > 25 and said - theirs == values


def test_the_suites_on_the_page_are_those_there_are():
    table = (ROOT / "docs" / "evaluate.md").read_text().split("## Questions")[1].split("## Several")[0]
    said = set(re.findall(r"`([\w:-]+)`", table))
    assert {*suites.SETS, *suites.GROUPS} <= said


def test_every_command_is_on_a_page():
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [c.name or c.callback.__name__ for c in app.registered_commands
               if f"cothink {c.name or c.callback.__name__}" not in text]  # fmt: skip
    assert not missing
