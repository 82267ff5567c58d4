"""What `make demo` promises: a learning team, an honest comparison, a summary (one seed here, three by hand)."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from cothink import demo


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_team_gains_twenty_points(tmp_path):
    out = Console(file=io.StringIO())
    summary = demo.demo(tmp_path, 11, out)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert set(summary["systems"]) == {"team_before", "team_after", "solo_before", "solo_after"}
    assert all(s["n"] >= 500 for s in summary["systems"].values())
    assert summary["gain"]["mean"] >= 0.2 and summary["gain"]["low"] > 0
    budget = summary["systems"]["team_after"]["train_tokens"], summary["systems"]["solo_after"]["train_tokens"]
    assert max(budget) / min(budget) < 1.1  # equal sampled tokens, up to the last step
    assert demo.table(summary).row_count == 4


def test_the_demo_removes_only_what_a_demo_wrote(tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "solo").mkdir()
    (tmp_path / "solo" / "notes.txt").write_text("mine")
    (tmp_path / "rema").mkdir()
    (tmp_path / "rema" / "recipe.yaml").write_text("name: rema-demo")

    def stop(*args):
        raise SystemExit("started")

    monkeypatch.setattr(demo, "demo", stop)
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="started"):
        demo.main()
    assert (tmp_path / "thesis.txt").exists() and (tmp_path / "solo" / "notes.txt").exists()
    assert not (tmp_path / "rema").exists()


def test_a_failing_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RUNS", {"team": "no-such-recipe.yaml"})
    with pytest.raises(SystemExit, match="the team run failed with exit code 2"):
        demo.train("team", tmp_path, 0, Console(file=io.StringIO()))
