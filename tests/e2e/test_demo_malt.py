"""What `make demo-malt` promises: MALT above the untrained team, and every system (one seed here, three by hand)."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from cothink import demo_malt


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_malt_beats_the_untrained_team(tmp_path):
    """malt §10 row 36 and the issue: from questions to the comparison table."""
    pytest.importorskip("trl")
    summary = demo_malt.run(tmp_path, 11, Console(file=io.StringIO()))
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert summary["gain"]["low"] > 0
    labels = [f"{label}{vote}" for label in demo_malt.SYSTEMS for vote in ("", "+vote")]
    assert [*summary["systems"]] == labels and all(s["n"] >= 400 for s in summary["systems"].values())
    assert demo_malt.table(summary).row_count == 10
    page = (tmp_path / "malt" / "comparison.md").read_text()
    assert "vote of 3" in page and "MALT" in page


def test_the_summary_of_results(tmp_path, monkeypatch):
    """Gain is MALT minus the untrained team, both voting, paired by question; the vote has all plays' tokens."""
    right = {"SA": "001", "MA": "010", "STaR-SA": "011", "STaR-MA": "011", "MALT": "111"}

    def train(name, folder, seed, console, recipe):
        assert (name, recipe, seed) == ("malt", "malt-demo.yaml", 5)
        folder.mkdir(parents=True)
        results = {}
        for k, label in enumerate(demo_malt.SYSTEMS):
            place = folder / "episodes" / f"{k:02d}-{label}"
            place.mkdir(parents=True)
            rows = [
                {"set": "test", "task": f"t{q}", "play": n, "accuracy": float(good), "vote": int(good), "level": 2}
                for q, good in enumerate(map(int, right[label])) for n in range(3)
            ]  # fmt: skip
            (place / "000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            share = right[label].count("1") / 3
            figure = [share, 0.0, 1.0]
            results[label] = {"k": 3, "n": 3, "tokens": 90, "first": figure, "maj_at": {"3": figure},
                              "sets": {"test": {}}, "per_task": {}}  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))
        (folder / "metrics.jsonl").write_text(json.dumps({"stage": 2, "collect/tokens": 77}) + "\n")

    monkeypatch.setattr(demo_malt.demo, "train", train)
    summary = demo_malt.run(tmp_path, 5, None)
    assert summary["gain"]["mean"] == pytest.approx(2 / 3) and summary["seed"] == 5
    assert summary["systems"]["MA"] == {
        "accuracy": 1 / 3,
        "low": 0.0,
        "high": 1.0,
        "n": 3,
        "tokens": 30,
        "train_tokens": 0,
    }
    assert summary["systems"]["MALT+vote"]["tokens"] == 90 and summary["systems"]["MALT+vote"]["train_tokens"] == 77
    voted = next(e for e in summary["comparisons"] if e["a"] == "MA" and e["what"].startswith("vote"))
    assert demo_malt.sentence(voted).startswith("MALT - untrained team (vote of 3): +66.7 points [")
    assert "McNemar 2 to 0" in demo_malt.sentence(voted)


def test_the_demo_removes_only_what_a_demo_wrote(tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "malt").mkdir()
    (tmp_path / "malt" / "recipe.yaml").write_text("name: malt-demo")
    monkeypatch.setattr("sys.argv", ["demo_malt", "--out", str(tmp_path)])

    def stop(*args):
        raise SystemExit("started")

    monkeypatch.setattr(demo_malt, "run", stop)
    with pytest.raises(SystemExit, match="started"):
        demo_malt.main()
    assert (tmp_path / "thesis.txt").exists() and not (tmp_path / "malt").exists()
