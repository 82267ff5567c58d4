"""A softmax table learns the teams that vote and revise, through the real rl stage (see test_table.py)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from test_table import PAIR, PROGRAM

CASES = {
    "self-refine": ("self_refine", {}, {"solver": "s"}, "joint"),
    "debate": ("debate", {"agents": 2, "rounds": 2}, {"solver": "s", "debater": "d"}, "joint"),
    "plans x solutions": ("rerank", {"plans": 2, "solutions": 2}, PAIR, "joint"),
}


@pytest.mark.parametrize("name", CASES)
def test_table_learns(name):
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(case=CASES[name])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    before, after, seconds = map(float, done.stdout.split())
    assert before < 0.6 and after > 0.8, f"{name}: {before:.2f} -> {after:.2f} in {seconds:.2f} s"
