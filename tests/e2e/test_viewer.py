"""The viewer over HTTP: what it lists, filters and pages, what it refuses, and that it reads runs as they grow."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("fastapi", reason="the viewer needs fastapi: pip install 'cothink[serve]'")
pytest.importorskip("httpx", reason="its test client needs httpx")

from fastapi.testclient import TestClient

from cothink.report.app import app
from cothink.stages.comparing import evaluated


def row(k: int) -> dict:
    return {"stage": 1, "step": k, "time": float(k), "reward": k / 10, "accuracy": k / 20}


@pytest.fixture
def shelf(tmp_path, made_run, made_episode):
    """Two runs below one folder, and what does not belong to it."""
    wrong = made_episode("t1", ("meta", "<b>bold</b>"), ("reasoning", r"\boxed{5}"), accuracy=0.0)
    right = made_episode("t2", ("meta", r"\boxed{3}"), ("reasoning", r"\boxed{4}"))
    for name, after in (
        ("one", [wrong, right]),
        ("group/two", [{**wrong, "accuracy": 1.0, "verdict": "right"}, right]),
    ):
        made_run(
            tmp_path / "runs" / name, metrics=[row(1), row(2)],
            episodes={"01-rl/000001": [wrong] * 3, "01-rl/000002": [right] * 60 + [wrong], "02-after/000000": after},
        )  # fmt: skip
    made_run(tmp_path / "outside", metrics=[row(1)])
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "outside")
    return tmp_path / "runs"


@pytest.fixture
def client(shelf):
    return TestClient(app(shelf, evaluated), base_url="http://127.0.0.1")


def test_runs_are_listed_and_read(client):
    found = client.get("/api/runs").json()["runs"]
    assert {r["name"] for r in found} == {"one", "group/two"}  # a link out of the folder is not followed
    assert {(r["status"], r["progress"], r["reward"]) for r in found} == {("running", "step 2 of 4", 0.2)}
    one = client.get("/api/run", params={"run": "group/two"}).json()
    assert "builtin:tiny" in one["html"]
    found = client.get("/api/stages", params={"run": "group/two"}).json()
    assert found == {"stages": {"01-rl": [1, 2], "02-after": [0]}, "roles": ["meta", "reasoning"]}


def test_curves_come_again_only_when_something_was_added(client, shelf):
    first = client.get("/api/curves", params={"run": "one"}).json()
    assert first["html"].count("<svg") == 2
    assert "html" not in client.get("/api/curves", params={"run": "one", "seen": first["version"]}).json()
    with (shelf / "one" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(3)) + "\n")
    then = client.get("/api/curves", params={"run": "one", "seen": first["version"]}).json()
    assert 'data-frame="1 3 ' in then["html"] and 'data-frame="1 2 ' in first["html"]
    both = client.get("/api/curves", params={"run": ["one", "group/two"]}).json()
    assert 'data-name="group/two"' in both["html"]


def test_episodes_are_filtered_and_paged_and_read(client):
    ask = {"run": "one", "stage": "01-rl"}
    first = client.get("/api/episodes", params={**ask, "step": 2}).json()
    assert len(first["items"]) == 50 and first["read"] == 50
    rest = client.get("/api/episodes", params={**ask, "step": 2, "start": first["then"]}).json()
    assert len(rest["items"]) == 11 and rest["then"] is None
    wrong = client.get("/api/episodes", params={**ask, "verdict": "wrong"}).json()["items"]
    assert [item["step"] for item in wrong] == [1, 1, 1, 2]  # all steps
    assert len(client.get("/api/episodes", params={**ask, "step": 2, "flip": "fixed"}).json()["items"]) == 50
    found = client.get("/api/episode", params={**ask, "step": 2, "offset": wrong[3]["offset"]}).json()["html"]
    assert "&lt;b&gt;bold" in found and "<b>bold" not in found
    assert "return <b>0</b>" in found and "advantage <b>-0.5</b>" in found
    tree = client.get("/api/episode", params={**ask, "step": 1, "offset": 0, "view": "tree"}).json()["html"]
    assert 'class="episode tree"' in tree


def test_two_runs_side_by_side(client):
    both = {"a": "one", "b": "group/two"}
    found = client.get("/api/compare", params=both).json()
    assert found["labels"] == ["after"] and "Where the recipes differ" in found["html"]
    (item,) = client.get("/api/pairs", params={**both, "label": "after"}).json()["items"]
    assert "question t1" in item["html"]
    pair = client.get("/api/pair", params={**both, "label": "after", "first": item["a"], "second": item["b"]}).json()
    assert 'badge wrong">wrong' in pair["a"] and 'badge right">right' in pair["b"]
    assert len(client.get("/api/pairs", params={**both, "label": "after", "differ": False}).json()["items"]) == 2


@pytest.mark.parametrize(
    "query",
    [
        "run?run=../outside", "run?run=/etc", "run?run=link", "run?run=", "curves?run=..%2foutside",
        "episodes?run=one&stage=../../outside/episodes", "episodes?run=one&stage=..", "episodes?run=nobody&stage=01-rl",
        "episode?run=one&stage=01-rl&step=9&offset=0", "pairs?a=one&b=group/two&label=../x",
    ],
)  # fmt: skip
def test_what_the_folder_does_not_hold_is_not_found(client, query):
    assert client.get(f"/api/{query}").status_code == 404


def test_bad_requests_are_told_what_is_wrong(client):
    bad = client.get("/api/episode", params={"run": "one", "stage": "01-rl", "step": 1, "offset": 3})
    assert bad.status_code == 400 and "not the beginning of an episode" in bad.json()["detail"]
    for query in ("low=abc", "start=x", "start=-1:0", "flip=sideways", "words=" + "x" * 501):
        assert client.get(f"/api/episodes?run=one&stage=01-rl&{query}").status_code == 422, query
    assert client.get("/api/episodes?run=one&stage=01-rl&start=9:0").status_code == 400
    assert client.get("/static/../app.py").status_code == 404 and client.get("/view.py").status_code == 404


def test_only_this_machine_may_ask_and_pages_may_run_nothing_foreign(client):
    assert client.get("/api/runs", headers={"host": "evil.example"}).status_code == 400
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
    assert "access-control-allow-origin" not in page.headers
    for path in ("/", "/view.js", "/keys.js", "/view.css", "/style.css"):
        answer = client.get(path)
        assert answer.status_code == 200 and "//" not in answer.text.replace("// ", "").replace("://", "://x"), path
    assert client.post("/api/runs").status_code == 405


def test_a_run_that_cannot_be_read_does_not_hide_the_others(client, shelf):
    (shelf / "one" / "recipe.yaml").write_text("name: [")
    found = {r["name"]: r for r in client.get("/api/runs").json()["runs"]}
    assert found["one"]["status"] == "unreadable" and "not valid YAML" in found["one"]["progress"]
    assert found["group/two"]["status"] == "running"
    assert client.get("/api/run", params={"run": "one"}).status_code == 400


def test_odd_values_break_no_list(client, shelf, made_episode):
    """Numbers JSON has no word for, halves of surrogate pairs, and lines whose fields have other kinds."""
    run = shelf / "one"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({**row(3), "reward": float("nan"), "accuracy": float("inf"), "tokens_total": 1.0}) + "\n")
    (run / "recipe.yaml").write_text('name: x\nteam: {roles: {"a\\ud800": {policy: p}}}\nstages: []\n')
    found = {r["name"]: r for r in client.get("/api/runs").json()["runs"]}
    assert found["one"]["reward"] is None and found["one"]["accuracy"] is None
    assert "<svg" in client.get("/api/curves", params={"run": "one"}).json()["html"]
    assert client.get("/api/stages", params={"run": "one"}).json()["roles"] == ["a\ud800"]
    assert "U+D800" in client.get("/api/run", params={"run": "one"}).json()["html"]
    good = made_episode("t", ("meta", "x"))
    bad = [
        {**good, "turns": [{**good["turns"][0], key: value}]}
        for key, value in (("tokens", "many"), ("logprobs", "x"), ("logprobs", [None]), ("advantage", {}), ("role", 1),
                           ("advantage", ["x"]), ("parents", 1), ("pieces", [1]), ("return", "x"), ("id", {}))
    ]  # fmt: skip
    bad += [{**good, "rewards": [{"value": 1}]}, {**good, "rewards": 3}, {**good, "turns": 3}]
    path = run / "episodes" / "01-rl" / "000003.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in [*bad, good]))
    ask = {"run": "one", "stage": "01-rl", "step": 3}
    listed = client.get("/api/episodes", params=ask).json()
    assert (len(listed["items"]), listed["read"], listed["unreadable"]) == (1, 1, len(bad))
    assert client.get("/api/episode", params={**ask, "offset": 0}).status_code == 400
