"""solve and chat: what a person sees, what a pipe gets, and what a model's text cannot do to a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from scripted_team import team

from cothink import api, cli

DEMO = str(Path(__file__).parents[2] / "recipes" / "rema-demo.yaml")
QUESTION = "Tom counts apples. Tom has 5 apples. Tom gets 3 apples. How many apples does Tom have now?"


def pair(call):
    """meta plans and then ends; reasoning works, and then states an answer."""
    turn = sum(m.role == "user" for m in call.messages)
    if call.policy == "meta":
        return "add them" if turn == 1 else "say it [FINISH]"
    return "5 + 3" if turn == 1 else "so \\boxed{8}"


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs a command line on a scripted team; returns exit code, stdout, stderr and the engine."""

    def run(script, *arguments, stdin="", **seat):
        made, speaker = team(script, **seat)
        monkeypatch.setattr(api, "load_team", lambda target, overrides=(): made)
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as left:
            cli.main([str(a) for a in arguments])
        seen = capsys.readouterr()
        return int(left.value.code or 0), seen.out, seen.err, speaker

    return run


def test_a_pipe_gets_the_answer_on_stdout_and_the_turns_on_stderr(call):
    code, out, err, _ = call(pair, "solve", "5 + 3?", "--team", "t")
    assert code == 0 and out == "8\n"
    assert err.splitlines()[:4] == [
        "meta: add them", "reasoning: 5 + 3", "meta: say it [FINISH]", "reasoning (answer): so \\boxed{8}",
    ]  # fmt: skip
    assert re.fullmatch(r"4 turns, 4 tokens, \d+\.\d s", err.splitlines()[4]) and "\x1b" not in err
    assert call(pair, "solve", "-", "--team", "t", stdin="5 + 3?\n")[1] == "8\n"


def test_votes_are_counted_and_the_winner_is_marked(call):
    answers = iter("788")

    def voter(asked):
        return "go [FINISH]" if asked.policy == "meta" else f"\\boxed{{{next(answers)}}}"

    code, out, err, _ = call(voter, "solve", "?", "--team", "t", "--votes", 3)
    assert (code, out) == (0, "8\n")
    lines = err.splitlines()
    assert "reasoning 1/3: \\boxed{7}" in lines and "reasoning 2/3 (answer): \\boxed{8}" in lines
    assert lines[-1] == "votes: 8 x 2, 7 x 1"


def test_json_holds_everything_and_nothing_goes_to_stderr(call):
    code, out, err, _ = call(pair, "solve", "5 + 3?", "--team", "t", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "") and (found["question"], found["answer"]) == ("5 + 3?", "8")
    assert found["text"] == "so \\boxed{8}" and found["whole"] and found["tokens"] == {"prompt": 12, "generated": 4}
    assert [t["role"] for t in found["plays"][0]["turns"]] == ["meta", "reasoning"] * 2


EVIL = "\x1b]0;owned\x07\x1b[2J\r\x9b1mred\x08\u202egnp\ud800 \\boxed{\x1b[31m1\x9b}"


def test_what_a_model_says_cannot_command_the_terminal(call):
    """Escapes, the 8-bit ones too, carriage returns, direction overrides and half surrogates are written out."""

    def evil(asked):
        return EVIL + (" [FINISH]" if asked.policy == "meta" else "")

    for more in ([], ["--json"]):
        code, out, err, _ = call(evil, "solve", "?", "--team", "t", *more)
        assert code == 0
        for text in (out, err):
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]", text), text
    assert "owned" in call(evil, "solve", "?", "--team", "t")[2]


def test_a_conversation_is_remembered_until_it_is_forgotten(call):
    stdin = "one?\n\ntwo?\n/new\nthree?\n/help\n/quit\nfour?\n"
    code, out, err, speaker = call(pair, "chat", "t", stdin=stdin)
    assert code == 0 and out == "8\n8\n8\n"
    asked = [c.messages[1].content for c in speaker.calls if c.policy == "meta" and len(c.messages) == 2]
    wanted = "Conversation so far:\n\nUser: one?\n\nAssistant: so \\boxed{8}\n\nAnswer the last message of this"
    assert asked[0] == "one?" and asked[1].startswith(wanted) and asked[2] == "three?" and len(asked) == 3
    assert "there is no /help: /new forgets" in err
    rows = [json.loads(line) for line in call(pair, "chat", "t", "--json", stdin="a?\nb?\n")[1].splitlines()]
    assert [row["question"] for row in rows] == ["a?", "b?"]


def test_a_pipe_ends_at_the_first_failure(call):
    def broken(asked):
        raise RuntimeError("no weights")

    code, out, err, speaker = call(broken, "chat", "t", stdin="one?\ntwo?\n")
    assert (code, out) == (1, "") and "error: all 1 episodes failed; the first error: no weights" in err
    assert len(speaker.calls) == 1 and "Traceback" not in err


def test_what_cannot_be_asked_is_said_before_anything_is_sampled(call, tmp_path, capsys):
    code, _, err, speaker = call(pair, "solve", "?", "--team", "t", "--max-turns", 9)
    assert code == 2 and "--max-turns: 9 is not among the 1 to 3 turns" in err and not speaker.calls
    code, _, err, _ = call(pair, "solve", "?", "--team", "t", "--votes", 2, "--temperature", 0)
    assert code == 2 and "--votes: at temperature 0 every play is the same" in err
    assert call(pair, "solve", " ", "--team", "t")[0] == 2
    code, _, err, _ = call(pair, "solve", "\udcff", "--team", "t")  # what Python makes of bytes that are no UTF-8
    assert code == 1 and err == "error: the question is not valid Unicode: it holds half of a surrogate pair\n"


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("nowhere", 1, "there is no 'nowhere'. Name a run folder"),
        ("{tmp}", 1, "is neither a run folder"),
        ("missing.yaml", 2, "missing.yaml"),
        ("recipes/rema-judge-tiny.yaml", 1, "it cannot answer a plain question"),
    ],
)
def test_a_bad_target_is_said_clearly(target, code, words, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    for command in (["solve", "?", "--team"], ["chat"], ["serve", "--port", "0"]):
        with pytest.raises(SystemExit) as left:
            cli.main([*command, target.format(tmp=tmp_path)])
        err = capsys.readouterr().err
        assert left.value.code == code and words in err and "Traceback" not in err, err


def started(*arguments, **options):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    return subprocess.Popen([sys.executable, "-m", "cothink.cli", *arguments], env=environment, **options)


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *arguments):
        self._line, inner = pty.openpty()
        self.program = started(*arguments, stdin=inner, stdout=inner, stderr=inner, start_new_session=True)
        os.close(inner)
        self._left = ""

    def until(self, words, seconds=90.0):
        """What comes up to the words, and with them; what follows is for the next call."""
        ends = time.monotonic() + seconds
        while words not in self._left:
            assert time.monotonic() < ends, f"{words!r} never came in {self._left!r}"
            if select.select([self._line], [], [], 0.1)[0]:
                try:
                    self._left += os.read(self._line, 4096).decode(errors="replace")
                except OSError:  # the program has closed its side
                    break
        found, words, self._left = self._left.partition(words)
        assert words, f"the program ended after {found!r}"
        return found + words

    def type(self, text):
        os.write(self._line, text.encode())

    def close(self):
        os.close(self._line)
        return self.program.wait(30)


def test_a_person_talks_in_a_terminal_in_colours_and_leaves_with_ctrl_d():
    seat = Terminal("chat", DEMO)
    try:
        seat.until("you: ")
        seat.type(QUESTION + "\n")
        shown = seat.until("answer: ")
        assert "\x1b[1;36mmeta: " in shown and "\x1b[1;32mreasoning (answer): " in shown
        seat.until("you: ")
        seat.type("\x04")
        assert seat.program.wait(90) == 0
    finally:
        seat.program.kill()
        seat.close()


@pytest.fixture
def endless(tiny_folder, tmp_path):
    """A recipe whose model says its first token without end: its last layer gives zeros, and all tokens are equal."""
    from safetensors.torch import load_file, save_file

    model = tmp_path / "endless"
    shutil.copytree(tiny_folder, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"].zero_()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 1 << 20}
    (model / "config.json").write_text(json.dumps(config))
    recipe = {
        "name": "endless",
        "team": {
            "workflow": "solo",
            "roles": {"solver": {"policy": "p", "system": "go", "max_tokens": 1 << 19, "temperature": 0}},
        },
        "policies": {"p": {"model": str(model)}},
        "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate"}],
    }
    path = tmp_path / "endless.yaml"
    path.write_text(json.dumps(recipe))
    return path


def test_ctrl_c_stops_an_answer_and_then_the_chat(endless):
    seat = Terminal("chat", str(endless))
    try:
        seat.until("you: ")
        seat.type("hello\n")
        seat.until("is thinking")
        time.sleep(0.3)
        seat.program.send_signal(signal.SIGINT)
        seat.until("stopped; the question is forgotten")
        seat.until("you: ")
        time.sleep(0.5)  # the prompt is there a moment before anybody reads
        seat.program.send_signal(signal.SIGINT)
        seen = seat.until("interrupted")
        assert seat.program.wait(90) == 130 and "Traceback" not in seen
    finally:
        seat.program.kill()
        seat.close()


def test_ctrl_c_leaves_solve_cleanly(endless):
    seat = Terminal("solve", "hi", "--team", str(endless))
    try:
        seat.until("is thinking")
        time.sleep(0.3)
        seat.program.send_signal(signal.SIGINT)
        seen = seat.until("interrupted")
        assert seat.program.wait(90) == 130 and "Traceback" not in seen and seen.count("\x1b[?25h") == 1  # the cursor
    finally:
        seat.program.kill()
        seat.close()


def test_a_tree_that_training_needs_is_one_line_when_it_answers():
    """MALT's three alternatives a level are for collecting: an answer takes one of each role."""
    roles = ("generator", "verifier", "refiner")
    made = api.load_team({
        "name": "tree", "team": {"workflow": {"name": "malt", "branching": [3, 3, 3]},
                                 "roles": {r: {"policy": "p", "max_tokens": 8} for r in roles}},
        "policies": {"p": {"model": "builtin:tiny"}}, "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate"}],
    })  # fmt: skip
    assert [turn.role for turn in made.solve(QUESTION).turns] == list(roles)
