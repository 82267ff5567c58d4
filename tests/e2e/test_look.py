"""Every command of docs/view.md on a real run, and a diagnosis that goes on where it stopped."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import cothink
from cothink import cli
from cothink.report import folders

PAGE = (Path(__file__).parents[2] / "docs" / "view.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", PAGE, re.S) for line in block.splitlines()]


def call(line: str) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(shlex.split(line)[1:])
    assert left.value.code in (0, None), line


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with runs/rema-demo: two steps of the built-in model, and an evaluation that is diagnosed."""
    folder = tmp_path_factory.mktemp("look")
    seats = {"meta": {"policy": "p", "system": "Plan.", "max_tokens": 24},
             "reasoning": {"policy": "p", "system": "Follow the plan.", "max_tokens": 32}}  # fmt: skip
    stages = [
        {"kind": "rl", "steps": 2, "tasks_per_step": 2, "episodes_per_task": 4, "filter": "none"},
        {"kind": "evaluate", "on": "test", "label": "after", "diagnose": True},
    ]
    cothink.run(
        {"name": "rema-demo", "output": str(folder / "runs"),
         "team": {"workflow": {"name": "rema", "max_turns": 1}, "roles": seats},
         "policies": {"p": {"model": "builtin:tiny", "learning_rate": 1e-4}},
         "tasks": {"train": {"name": "wordsums", "count": 8},
                   "test": {"name": "wordsums", "split": "test", "count": 4}},
         "stages": stages}
    )  # fmt: skip
    return folder


def test_the_page_has_commands():
    assert {line.split()[1] for line in COMMANDS} == {"report", "view", "evaluate"} and len(COMMANDS) == 5
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", PAGE):
        path = Path(__file__).parents[2] / "docs" / picture
        assert path.stat().st_size < 80_000, picture


def test_every_command_of_the_page(place, monkeypatch):
    monkeypatch.chdir(place)
    for line in (line for line in COMMANDS if " view " not in line):
        call(line)
    page = (place / "report.html").read_text()
    for words in ("After each turn", "Who fixed and who spoilt", "Evaluation who", "The watch"):
        assert words in page, words
    assert len(list((place / "reports" / "curves").glob("*.svg"))) > 8
    assert "After each turn" in (place / "reports" / "who" / "results.md").read_text()


def test_view_serves_the_folder_until_it_is_interrupted(place):
    pytest.importorskip("fastapi", reason="the viewer needs fastapi: pip install 'cothink[serve]'")
    httpx = pytest.importorskip("httpx", reason="asks the viewer")
    (line,) = (line for line in COMMANDS if " view " in line)
    command = [sys.executable, "-m", "cothink.cli", *shlex.split(line)[1:], "--port", "0"]
    with subprocess.Popen(command, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as viewer:
        try:
            address = viewer.stdout.readline().split()[0]
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
            found = httpx.get(address + "api/runs", trust_env=False, timeout=60).json()["runs"]
            told = [(run["name"], run["status"], run["progress"]) for run in found]
            assert told == [("rema-demo", "finished", "step 2 of 2")]
            viewer.send_signal(signal.SIGINT)
            _, errors = viewer.communicate(timeout=60)
        finally:
            viewer.kill()
    assert viewer.returncode in (0, 130) and "Traceback" not in errors


def test_without_its_extra_the_viewer_says_what_to_install(place, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(SystemExit) as left:
        cli.main(["view", str(place / "runs")])
    assert left.value.code == 2 and "pip install 'cothink[serve]'" in " ".join(capsys.readouterr().err.split())


def test_training_keeps_tokens_with_their_log_probs(place):
    run = folders.Folder(place / "runs" / "rema-demo")
    rows = [json.loads(line) for line in run.episodes()["00-rl"][0].read_text().splitlines()]
    turn = next(t for t in rows[0]["turns"] if t["tokens"])
    assert len(turn["pieces"]) == len(turn["logprobs"]) == turn["tokens"] and all(p <= 0 for p in turn["logprobs"])
    assert turn["text"] in "".join(turn["pieces"])


def test_a_diagnosis_silences_only_who_others_read_and_is_kept(place, monkeypatch):
    run = folders.Folder(place / "runs" / "rema-demo")
    assert [*run.episodes()] == ["00-rl", "01-after", "01-after-without-meta"]
    quiet = [json.loads(line) for line in run.episodes()["01-after-without-meta"][0].read_text().splitlines()]
    assert len(quiet) == 4 and all(t["text"] == "" for row in quiet for t in row["turns"] if t["role"] == "meta")
    roles = run.results["after"]["diagnosis"]["roles"]
    assert "silent" in roles["meta"] and "silent" not in roles["reasoning"]
    out = place / "again"
    first = cothink.compare([place / "runs" / "rema-demo"], limit=3, diagnose=True, out=out)
    monkeypatch.setattr("cothink.stages.systems.assemble", lambda *a, **k: pytest.fail("a model was loaded"))
    written = (out / "results.json").read_bytes()
    assert (
        cothink.compare([place / "runs" / "rema-demo"], limit=3, diagnose=True, out=out)["systems"] == first["systems"]
    )
    assert (out / "results.json").read_bytes() == written
