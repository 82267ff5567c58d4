"""docs/serve.md: every command and every piece of code on the page is run, on a small run."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_serve import serving

from cothink import api, cli, serve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "serve.md").read_text()
SMALL = ["stages.0.limit=2", "stages.1.steps=1", "stages.1.tasks_per_step=2", "stages.2.limit=2"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


@pytest.fixture(scope="module")
def commands():
    return [line for block in blocks("bash") for line in block.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the page's run in it, made small."""
    folder = tmp_path_factory.mktemp("page")
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    api.run(folder / "recipes" / "rema-demo.yaml", ["stages.1.steps=20", *SMALL], out=folder / "runs" / "rema-demo")
    return folder


def test_the_page_has_what_is_looked_for(commands):
    words = [re.search(r"(cothink \w+|curl)", line)[1] for line in commands]
    assert set(words) == {"cothink run", "cothink solve", "cothink chat", "cothink serve", "cothink export", "curl"}
    assert commands[0] == "cothink run recipes/rema-demo.yaml stages.1.steps=20" and len(blocks("python")) == 1


def test_the_commands_run_as_written(commands, place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setenv("COTHINK_KEY", "sesame")
    served = []
    monkeypatch.setattr(serve, "serve", lambda load, **options: served.append(options))
    done = []
    for line in commands[1:]:
        if line.startswith("curl"):
            continue
        printed, _, command = line.rpartition(" | ")
        monkeypatch.setattr(sys, "stdin", io.StringIO(shlex.split(printed)[1].replace("\\n", "\n") if printed else ""))
        program, *arguments = shlex.split(command)
        with pytest.raises(SystemExit) as left:
            cli.main(arguments)
        found = capsys.readouterr()
        assert program == "cothink" and left.value.code == 0, (line, found.err)
        assert found.out.strip() or arguments[0] == "serve", line
        if "--json" in arguments:
            assert len(json.loads(found.out)["plays"]) == 5
        done.append(arguments[0])
    assert done.count("solve") == 3 and {"chat", "serve", "export"} <= set(done)
    assert [s["key"] for s in served] == [None, "sesame"] and served[1]["limits"].plays == 128
    shutil.rmtree(place / "rema-team")


def test_the_clients_of_the_page_get_answers(commands, place, monkeypatch, capsys):
    if shutil.which("curl") is None:
        pytest.skip("curl is not here")
    with serving(api.load_team(place / "runs" / "rema-demo")) as (url, _):
        here = url.removeprefix("http://")
        for line in (line for line in commands if line.startswith("curl")):
            done = subprocess.run(
                shlex.split(line.replace("127.0.0.1:8000", here)), capture_output=True, text=True, timeout=60
            )  # fmt: skip
            assert done.returncode == 0 and done.stdout and '"error"' not in done.stdout, (line, done.stdout)
        (code,) = blocks("python")
        exec(code.replace("127.0.0.1:8000", here), {})
    assert "[1/3 meta]" in capsys.readouterr().out


def test_the_options_on_the_page_are_the_commands(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    for option in set(re.findall(r"`(--[a-z-]+)`", PAGE.split("## Behind")[1].split("## As a folder")[0])):
        assert option in shown, option
