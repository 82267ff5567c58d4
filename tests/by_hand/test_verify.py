"""The grader: worked answers, extraction, hostile input, and the pool of killable processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from cothink.types import Task
from cothink.verify import (
    averify,
    check_golds,
    compare,
    extract,
    grade,
    grade_file,
    has_answer_format,
    has_box,
    last_box,
    verify,
    verify_task,
)

BOMB = "9^{9^{9^9}}"
CHOICES = {"A": "bank", "B": "library", "C": "department store", "D": "mall", "E": "new york"}


def boxed(answer: str) -> str:
    return f"Thus \\boxed{{{answer}}}."


@pytest.mark.parametrize(
    ("gold", "text", "verdict"),
    [
        ("18", boxed("18.0"), "right"),
        (18, boxed("18"), "right"),
        ("1000", "Final Answer: $1,000.", "right"),
        ("1,000", boxed("1{,}000"), "right"),
        ("-3", boxed("−3"), "right"),
        ("50", boxed("50\\%"), "right"),
        ("0.5", boxed("50\\%"), "right"),
        ("72", boxed("72\\text{ clips}"), "right"),
        ("72", "Final Answer: 72 clips a day", "right"),
        ("18", "Final Answer: x = 18 dollars", "right"),
        ("0.5", boxed("\\frac{1}{2}"), "right"),
        ("4", boxed("2\\sqrt{4}"), "right"),
        ("2", boxed("2\\pi"), "wrong"),
        ("2", boxed("2x"), "wrong"),
        ("12", boxed("1,2"), "wrong"),
        ("0.333333", boxed("1/3"), "wrong"),
        ("2", boxed("2 million"), "unparsable"),
        ("2", boxed("2 and also 3"), "unparsable"),
        ("5", "it is 5", "unparsable"),
        ("five", boxed("5"), "error"),
        ("", boxed("5"), "error"),
        (None, boxed("5"), "error"),
    ],
)
def test_numbers_are_compared_as_exact_rationals(gold, text, verdict):
    """rema §7 row 17."""
    assert verify("number", gold, text).verdict == verdict


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"\left(3, \pi/2\right)", True),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(\frac{\pi}{2},3)", False),
        ("3, 5, 7", "7,5,3", True),
        ("x+1", "1 + x", True),
        (r"90^\circ", "90", True),
        (r"5.4 \text{ cents}", "5.4", True),
        (r"\text{Evelyn}", "evelyn", True),
        (r"\text{(C)}", "C", True),
        ("C", r"\text{(C) } 5", True),
        ("C", "(D) 5", False),
        (r"x \in [-2,7]", "[-2,7]", True),
        (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}", True),
        (r"137 \frac{1}{2}", "137.5", True),
        ("4", "-4", False),
    ],
)
def test_expressions_are_compared_by_meaning(gold, answer, right):
    assert verify("auto", gold, boxed(answer)).verdict == ("right" if right else "wrong")


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("D", "D"),
        ("(d) mall", "D"),
        ("D: mall", "D"),
        ("D mall", "D"),
        ("**D.**", "D"),
        ("mall", "D"),
        ("The correct answer is (D).", "D"),
        ("A bank", "A"),
        ("a mall", None),
        ("A or D", None),
        ("F", None),
        ("shop", None),
    ],
)
def test_letters(answer, letter):
    assert extract(f"Final Answer: {answer}", "letter", choices=CHOICES) == letter
    expected = {"D": "right", None: "unparsable"}.get(letter, "wrong")
    assert verify("letter", "D", f"Final Answer: {answer}", choices=list(CHOICES.values())).verdict == expected


def test_a_choice_text_that_two_choices_share_is_unparsable():
    assert verify("letter", "B", boxed("park"), choices=["park", "park", "zoo"]).verdict == "unparsable"


def test_text_is_compared_without_case_and_punctuation():
    assert verify("text", "New York", "Final Answer: **new  york.**").right
    assert verify("text", "New York", boxed("\\text{York}")).verdict == "wrong"
    assert grade("text", "Paris", "The capital is Paris.").right


@pytest.mark.parametrize(
    ("text", "kind", "answer"),
    [
        ("Final Answer: Final Answer: 125", "number", "125"),
        ("Final Answer: $1,200.", "number", "1200"),
        ("Final Answer: 1\nno.\n**Final answer**: 2", "number", "2"),
        ("Final Answer: 7\nFinal Answer:", "number", "7"),
        ("Final Answer:\n\\boxed{8}", "number", "8"),
        (r"\boxed{7} then Final Answer: 8", "number", "8"),
        ("Final Answer: 7, no: \\boxed{8}", "number", "8"),
        ("Final Answer: (d) mall", "letter", "D"),
        (r"\boxed{\frac{1}{\sqrt{2}}}", "math", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{3} or \boxed{ }", "number", "3"),
        (r"\boxed{x = \boxed{5}}", "math", "5"),
        (r"\fbox{6}", "number", "6"),
        (r"\boxed{\{1,2\}}", "math", r"\{1,2\}"),
        ("no marker: 5", "number", None),
        (r"\boxed{5", "number", None),
    ],
)
def test_extraction(text, kind, answer):
    """malt §10 row 9: O16."""
    assert extract(text, kind) == answer
    assert has_answer_format(text) == (answer is not None)


def test_boxes():
    """rema §7 row 17."""
    assert last_box(r"\boxed{1} } \boxed{2}") == "2"
    assert has_box(r"\boxed{") and not has_answer_format(r"\boxed{}")
    assert not has_box("box{5}")


def test_lenient_takes_an_unboxed_value_and_strict_does_not():
    """rema §7 row 17."""
    for kind in ("number", "math", "auto"):
        assert verify(kind, "42", "the last is 42", strict=False).right
        assert verify(kind, "42", "the last is 42").verdict == "unparsable"
        assert verify(kind, "42", r"\boxed{7} which is not 42", strict=False).verdict == "wrong"
    assert grade("math", "1/2", r"We get $\frac{1}{2}$.").right
    assert grade("math", r"(3,\frac{\pi}{2})", r"(3, \pi/2)").right
    assert grade("number", "1000", "1,000").right
    assert grade("letter", "C", "I think the answer is C.").right


JUNK = ["(" * 20_000, "1" * 40_000, "x+" * 20_000, "{" * 40_000, "\\" * 40_000, "a " * 20_000, "1," * 20_000]
JUNK += ["\\boxed{" * 6_000, "Final Answer:" * 3_000, "$" * 40_000, "\\frac{" * 7_000, "-." * 20_000, "final " * 7_000]


def test_junk_is_graded_without_algebra():
    began = time.process_time()
    for junk in JUNK:
        for kind, gold in (("number", "2"), ("letter", "A"), ("text", "x")):
            assert not verify(kind, gold, boxed(junk)).right
            assert not grade(kind, gold, junk).right
        assert not verify("math", "\\frac{1}{2}", boxed(junk)).right
    assert time.process_time() - began < 10  # 0.4 s here: this catches an exponential, not a slow machine


@pytest.mark.parametrize("answer", [BOMB, "(" * 300 + "1" + ")" * 300])
def test_a_hostile_answer_costs_itself_two_seconds_and_nothing_else(answer):
    """rema §7 row 17."""
    assert verify("math", "x+1", boxed("1+x")).right  # the pool is up
    hostile = []
    thread = threading.Thread(target=lambda: hostile.append(verify("math", "x+1", boxed(answer))))
    began = time.perf_counter()
    thread.start()
    assert all(verify("math", f"x+{i}", boxed(f"{i}+x")).right for i in range(5))
    thread.join()
    assert hostile[0].verdict in ("wrong", "unparsable", "error") and hostile[0].seconds <= 2.0
    assert time.perf_counter() - began < 10
    assert verify("math", "x+1", boxed("1+x")).right


def test_the_event_loop_runs_on_while_a_hostile_answer_is_graded():
    async def play() -> tuple[list[str], int]:
        jobs = [averify("math", "x+1", boxed(answer)) for answer in [BOMB, *["1+x"] * 20]]
        grading = asyncio.gather(*jobs)
        ticks = 0
        while not grading.done():
            await asyncio.sleep(0.02)
            ticks += 1
        return [verdict.verdict for verdict in await grading], ticks

    verdicts, ticks = asyncio.run(play())
    assert verdicts == ["error"] + ["right"] * 20
    assert ticks > 10


def test_a_worker_that_dies_is_replaced():
    import signal

    from cothink.verify import pool

    assert verify("math", "x+1", boxed("1+x")).right
    workers = pool._pools["math_verify"]._pool_manager.worker_manager.workers  # type: ignore[attr-defined]
    for pid in list(workers):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.4)
    assert verify("math", "x+1", boxed("1+x")).right


SCRIPT = """
print("once")
import os, sys
from cothink.verify import verify
assert verify("math", "x+1", r"\\boxed{1+x}").right
child = os.fork()
if child == 0:
    sys.exit(0 if verify("math", "x+1", r"\\boxed{1+x}").right else 1)
assert os.waitpid(child, 0)[1] == 0
assert verify("math", "x+2", r"\\boxed{2+x}").right
"""


def test_a_script_without_a_main_guard_forks_and_ends_cleanly(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "once\n")


def test_importing_the_grader_loads_nothing_heavy():
    code = "import sys, cothink.verify; print([m for m in %r if m in sys.modules])"
    heavy = ("torch", "sympy", "pandas", "pyarrow", "numpy", "pebble", "math_verify")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = subprocess.run([sys.executable, "-c", code % (heavy,)], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_file_is_answered_in_order_and_bad_rows_keep_their_place(tmp_path):
    good = {"kind": "math", "gold": "1/2", "text": "0.5"}
    rows = [
        json.dumps(good),
        "{not json",
        json.dumps({"kind": "math", "gold": "2", "text": boxed(BOMB)}),
        json.dumps({"kind": "mth", "gold": "2", "text": "2"}),
        json.dumps({"kind": "number", "text": "2"}),
        "[1]",
        "",
        json.dumps({"kind": "number", "gold": [2], "text": "2"}),
        json.dumps({"kind": "number", "gold": "2", "text": None}),
        json.dumps({"kind": ["math"], "gold": "2", "text": "2"}),
        "[" * 100_000,
        json.dumps({"kind": "letter", "gold": "D", "text": "(d) mall", "choices": CHOICES}),
        json.dumps({"kind": "number", "gold": 18, "text": "it is 18", "strict": True}),
        json.dumps({"kind": "number", "gold": 18, "text": "it is 18"}),
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(rows) + "\n")
    counts = grade_file(str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"))
    out = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["row"] for row in out] == list(range(len(rows)))
    assert [row["verdict"] for row in out] == ["right"] + ["error"] * 10 + ["right", "unparsable", "right"]
    assert all(row["detail"] for row in out if row["verdict"] == "error")
    assert "math, number" in out[3]["detail"] and "gold" in out[4]["detail"]
    assert counts == {"right": 3, "error": 10, "unparsable": 1}


def test_golds_are_checked_by_meaning_before_training():
    tasks = [
        Task("a", "q", "18"),
        Task("b", "q", ""),
        Task("c", "q", r"\frac{1}{2}"),
        Task("d", "q", "F", {"kind": "letter", "choices": CHOICES}),
        Task("e", "q", "5", {"kind": "nmber"}),
        Task("f", "q", "twelve", {"kind": "number"}),
    ]
    assert [line.split(":")[0] for line in check_golds(tasks)] == ["b", "d", "e", "f"]


def test_a_task_names_its_kind_and_choices():
    task = Task("t", "q", "D", {"kind": "letter", "choices": CHOICES})
    assert verify_task(task, "Final Answer: mall").right
    assert verify_task(Task("t", "q", "0.5"), boxed(r"\frac{1}{2}")).right
    assert compare("auto", "0.5", "1/2").right  # two answers of a vote are the same one
