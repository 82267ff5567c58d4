"""docs/methods: every function, recipe and test file that a page names is there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "methods").glob("*.md"))
MODULE = re.compile(r"`((?:[a-z_]+\.)*[a-z_]+\.[A-Za-z_]+)`")
RECIPE = re.compile(r"`((?:rema|malt)-[a-z0-9-]+)`")


def test_there_are_pages():
    assert PAGES


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_what_a_page_names_is_there(page):
    text = page.read_text()
    functions = [name for name in MODULE.findall(text) if not name.endswith((".yaml", ".md", ".py", ".json", ".jsonl"))]
    recipes, files = RECIPE.findall(text), re.findall(r"`(tests/[\w/]+\.py)", text)
    assert len(functions) > 10 and len(recipes) > 3
    for name in functions:
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(f"cothink.{module}"), attribute), name
    for name in recipes:
        assert (ROOT / "recipes" / f"{name}.yaml").is_file(), name
    for name in files:
        assert (ROOT / name).is_file(), name
