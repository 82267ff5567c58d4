"""docs/hostile.md: every row names tests that are there, every hostile test has a row, its counts are true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "hostile.md").read_text()
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith("| output |")
]
NAME = re.compile(r"`(\w+/test_\w+\.py)::(test_\w+)`")
WHOLE = ("e2e/test_hostile.py", "by_hand/test_verify_hacks.py", "e2e/test_outside_replies.py")
"""Files whose every test writes something hostile."""
LISTS = ("DIFFERENT", "SAME", "TEXTS", "STATED")
BESIDE = {"test_there_are_enough"}


def names_in(path):
    tree = ast.parse((ROOT / "tests" / path).read_text())
    return {f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")}


def test_every_row_names_tests_that_are_there():
    assert len(ROWS) > 15 and all(len(row) == 3 and all(row) for row in ROWS)
    for row in ROWS:
        named = NAME.findall(row[2])
        assert named and ", ".join(f"`{path}::{name}`" for path, name in named) == row[2], row
        for path, name in named:
            assert name in names_in(path), f"tests/{path} has no {name}"


def test_every_hostile_test_has_a_row():
    said = {name for *_, cell in ROWS for name in NAME.findall(cell)}
    for path in WHOLE:
        missing = {name for name in names_in(path) if (path, name) not in said} - BESIDE
        assert not missing, f"docs/hostile.md has no row for {missing} of {path}"


def test_the_counts_are_those_of_the_lists():
    tree = ast.parse((ROOT / "tests" / "by_hand" / "test_verify_hacks.py").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)]
    lists = {node.targets[0].id: ast.literal_eval(node.value) for node in nodes if node.targets[0].id in LISTS}
    many = {name: sum(map(len, v.values())) if isinstance(v, dict) else len(v) for name, v in lists.items()}
    assert f"({many['DIFFERENT']} pairs)" in PAGE and f"({many['TEXTS']} texts)" in PAGE
    assert f"({many['SAME']} pairs, {many['STATED']} texts)" in PAGE
