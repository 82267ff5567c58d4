"""docs/faults.md names every test of test_faults.py, each in one row, and no test that is not there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in (ROOT / "docs" / "faults.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| fault |")
]


def names_in(name):
    tree = ast.parse((ROOT / "tests" / name).read_text())
    return [f.name for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name.startswith("test_")]


def test_every_fault_has_a_test_and_every_test_a_row():
    assert len(ROWS) > 10 and all(len(row) == 3 and all(row) for row in ROWS)
    named = Counter(name for *_, cell in ROWS for name in re.findall(r"`(test_\w+)`", cell))
    assert all(re.search(r"`test_\w+`", row[2]) for row in ROWS)
    assert max(named.values()) == 1
    assert set(names_in("e2e/test_faults.py")) <= named.keys()
    elsewhere = {name for file in ("e2e/test_trainer_skips.py", "equal/test_trl_dpo.py") for name in names_in(file)}
    assert named.keys() <= elsewhere.union(names_in("e2e/test_faults.py"))
