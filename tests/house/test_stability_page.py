"""docs/stability.md: every setting of the credit methods, presets as they are, tests that exist (credit §3 to §5)."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

import pytest

from cothink import counterfactual, credit, estimators, losses, offpolicy
from cothink.parts import Credit, Curriculum, Filter, Gate, Influence, Schedule
from cothink.presets import PRESETS
from cothink.resolve import names

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "stability.md").read_text()
SETTINGS, _, PRESET_TABLE = PAGE.partition("## Presets")
ROWS = [[c.strip() for c in re.split(r"(?<!\\)\|", line)[1:-1]] for line in SETTINGS.splitlines() if line[:3] == "| `"]
CODE = {"E": 21, "W": 17, "I": 6}
"""How many codes of each letter section 4 has."""


def written() -> set[str]:
    """Every word in code of the first column."""
    return {word for row in ROWS for part in re.findall(r"`([^`]+)`", row[0]) for word in re.findall(r"[\w.]+", part)}


def test_every_value_of_every_setting_is_on_the_page():
    kinds = (
        losses.Ratio, losses.Clip, losses.KL, losses.Aggregate, offpolicy.OffPolicy, estimators.Scope,
        estimators.Weighting, counterfactual.Name, credit.Unfinished,
    )  # fmt: skip
    wanted = {value for kind in kinds for value in get_args(kind)} | set(names("estimator"))
    for part, key in ((Filter, "name"), (Schedule, "name")):
        wanted |= set(get_args(part.model_fields[key].annotation))
    wanted |= {key for part in (Gate, Influence, Curriculum, Filter, Credit) for key in part.model_fields} - {"name"}
    assert len(wanted) > 60 and wanted - written() <= {"none"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_every_row_names_a_test_that_exists(row):
    assert len(row) == 4 and all(row)
    if row[3] == "the same":
        return
    (path, name) = re.fullmatch(r"`(tests/\S+\.py)::(\w+)`", row[3]).groups()
    functions = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
    assert name in functions


def test_presets_are_as_the_page_says():
    rows = re.findall(r"^\| `([\w.]+)` \| `(\S+)` \| `(\S+)` \|$", PRESET_TABLE, re.M)
    assert len(rows) > 10
    for key, *said in rows:
        for preset, value in zip(("stable_v0", "rema_paper"), said, strict=True):
            found = PRESETS[preset]
            for part in key.split("."):
                found = found[part]
            assert str(found) == value, (preset, key)


def test_every_code_of_the_configuration_check_is_tested():
    """credit §4: by a case of test_rules.py, or by a test that says so where no recipe can be wrong that way."""
    cases = (ROOT / "tests" / "by_hand" / "test_rules.py").read_text()
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    said = {code for text in texts for code in re.findall(r"credit §4 (\w\d\d)", text)}
    codes = {f"{letter}{n:02d}" for letter, count in CODE.items() for n in range(1, count + 1)}
    assert sorted(c for c in codes if not re.search(rf"\b{c}\b", cases) and c not in said) == []


def test_codes_on_the_page_are_those_of_the_rules():
    source = "".join(path.read_text() for path in (ROOT / "src" / "cothink").glob("*rules.py"))
    known = set(re.findall(r'"([EWI]\d\d)"', source)) | {"E08", "E12", "I03"}  # idle, or refused by the type
    assert set(re.findall(r"\[([EWI]\d\d)\]", PAGE)) <= known
