"""Bad input of every kind, at every way in: a clear error or a counted skip; no traceback, nothing lost in silence.

`bench/fuzz.py` feeds the same generators for longer, with a seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from hostile_cases import ERROR, LOADED, SKIPPED, cases

CASES = {case.name: case for case in cases()}
EXAMPLES = {"a run folder: show, report, view": 12, "recipe: values and keys": 30}


@pytest.mark.parametrize("name", CASES)
def test_it_is_an_error_or_counted(name):
    case = CASES[name]
    seen = set()

    @settings(
        max_examples=EXAMPLES.get(name, 40), deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )  # fmt: skip
    @given(case.examples)
    def fed(example) -> None:
        seen.add(case.feed(example))

    fed()
    assert seen <= {LOADED, ERROR, SKIPPED} and seen
