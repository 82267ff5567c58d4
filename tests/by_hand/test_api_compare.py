"""What a run says at its end: the last evaluation of a data set against the first one of the same set, and no other."""

from __future__ import annotations

from types import SimpleNamespace

from cothink.api import _compare


def test_sets_whose_tasks_share_names_are_not_compared():
    def result(on, *right):
        return {"on": on, "per_task": {f"test/{k}": float(r) for k, r in enumerate(right)}}

    said: list[str] = []
    session = SimpleNamespace(say=said.append)
    results = {
        "before": result("test", 0, 0, 1, 0),
        "before-hard": result("hard", 0, 0, 0, 0),
        "after": result("test", 1, 0, 1, 1),
        "after-hard": result("hard", 1, 0, 0, 0),
    }
    _compare(session, results)
    assert [line.partition(":")[0] for line in said] == ["after - before", "after-hard - before-hard"]
    assert "+50.0 points" in said[0] and "+25.0 points" in said[1]
    said.clear()
    _compare(session, {k: results[k] for k in ("before", "after-hard")})
    assert said == []
