"""Every row of a specification's "Done means" is named in a test: `rema §7 row 12`, or `row12` in the test's name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LISTS = {"rema": ("§7", 43), "malt": ("§10", 36), "credit": ("§9", 13)}
ORACLES = 17  # of malt §9: O1 to O17


def numbers(text: str) -> set[int]:
    """The numbers of "3", "5to7", "1, 2 and 4"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:(?:to| to |-)(\d+))?", text):
        found |= set(range(int(first), int(last or first) + 1))
    return found


def named(spec: str, place: str) -> dict[int, list[str]]:
    """The tests of each row."""
    found: dict[int, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        tree = ast.parse(path.read_text())
        about = ast.get_docstring(tree) or ""
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or not node.name.startswith("test_"):
                continue
            said = re.findall(
                rf"{spec} {place} rows? ((?:\d+(?:, | and | to |-)?)+)", ast.get_docstring(node) or ""
            )  # fmt: skip
            if f"{spec}.md" in about or f"{spec} §" in about:
                said += re.findall(r"rows?(\d+(?:to\d+)?)", node.name)
            for row in set().union(*map(numbers, said)):
                found.setdefault(row, []).append(f"{path.name}::{node.name}")
    return found


@pytest.mark.parametrize("spec", LISTS)
def test_every_row_has_a_test(spec):
    place, count = LISTS[spec]
    found = named(spec, place)
    assert sorted(found) == [*range(1, count + 1)]


def test_every_oracle_has_a_test():
    """malt §9."""
    found = {int(n) for path in TESTS.rglob("test_*.py") for n in re.findall(r"\bO(\d+)\b", path.read_text())}
    assert sorted(found) == [*range(1, ORACLES + 1)]


def test_numbers_are_read():
    assert numbers("5to7") == {5, 6, 7} and numbers("18, 19 and 42") == {18, 19, 42}
