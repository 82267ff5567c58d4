"""The judge task (spec/rema.md 6.2, §7 row 34): verdicts, splits, JudgeBench, message lists, swapped orders."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cothink.engines.scripted import engine as scripted
from cothink.stages.answers import row_of
from cothink.stages.judging import swap_consistency
from cothink.stages.reports import markdown, table
from cothink.stages.summary import summarise
from cothink.tasks import DataError, judge, judgebench, question_key_of, wordpairs, wordsums
from cothink.team import Job, play
from cothink.types import Completion, Episode, Finish, PlayError, Role, Task
from cothink.verify import check_golds, compare, extract, find_verdict, has_verdict, verify
from cothink.workflows import judge as workflow


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("A is better: [[A]]", "A"),
        ("[[B]] because ... so [[B]].", "B"),
        ("[[A]] no, [[B]]", None),
        ("neither", None),
        ("", None),
        ("[A] [[a]] [[C]] [[A] ]", None),
        ("[[[B]]]", "B"),
    ],
)
def test_row34_exactly_one_kind_of_marker(text, side):
    """rema §7 row 34."""
    assert find_verdict(text) == side == extract(text, "verdict")
    words = {"A": "right", "B": "wrong", None: "unparsable"}
    assert verify("verdict", "A", text).verdict == words[side]


def test_a_verdict_goes_the_way_of_every_answer():
    assert has_verdict("x [[B]]") and not has_verdict("x [B]")
    assert compare("verdict", "A", "A").right and compare("verdict", "A", "B").verdict == "wrong"
    assert verify("verdict", "C", "[[A]]").verdict == "error"
    assert check_golds([Task("a", "q", "A", {"kind": "verdict"}), Task("b", "q", "D", {"kind": "verdict"})]) == [
        "b: gold 'D' is error against itself: the gold verdict is 'D'; write A or B"
    ]


def rows_file(folder, rows):
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ranked(n, questions=None):
    """Rows of a better and a worse answer, in three subsets."""
    return [
        {"prompt": f"question {k % (questions or n)}", "chosen": f"good {k}", "rejected": f"bad {k}", "subset": s}
        for k, s in zip(range(n), "xyz" * n)
    ]


def test_rows_of_any_common_shape(tmp_path):
    tuples = [
        {"instruction": "q1", "A": "a", "B": "b", "label": "A"},
        {"question": "q2", "response_A": "a", "response_B": "b", "label": "B>A"},
        {"prompt": "q3", "answer_a": "a", "answer_b": "b", "winner": "[[B]]"},
        {"prompt": "q4", "A": "same", "B": "same ", "label": "A"},
        {"prompt": "q5", "A": "a", "B": "b", "label": "tie"},
        {"prompt": "q1", "A": "a", "B": "b", "label": "B"},
        {"prompt": "q1", "A": "b", "B": "a", "label": "B"},
    ]
    path = rows_file(tmp_path, tuples)
    sides = [judge.load(split, path=path, test=1, rule="loose") for split in ("train", "test")]
    found = {(t.question, t.answer) for side in sides for t in side}
    assert found == {("q1", "A"), ("q1", "B"), ("q2", "B"), ("q3", "B")}
    assert {s.reason for s in sides[0].skipped} == {
        "both answers are the same", "label 'tie' is none of A, B, A>B, B>A, [[A]], [[B]]", "repeated question",
    }  # fmt: skip
    with pytest.raises(DataError, match="no pair of answers among: question, x"):
        judge.load(path=rows_file(tmp_path, [{"question": "q", "x": 1}]))


def test_a_ranked_row_is_ordered_by_a_coin_or_comes_in_both_orders(tmp_path):
    path = rows_file(tmp_path, ranked(200))
    one = judge.load(path=path, test=50)
    assert len(one) == 150 and 50 < Counter(t.answer for t in one)["A"] < 100
    for task in one:
        assert task.meta["answer_a" if task.answer == "A" else "answer_b"].startswith("good")
    assert one == judge.load(path=path, test=50) and one != judge.load(path=path, test=50, seed=1)
    both = judge.load(path=path, test=50, swap="both")
    assert len(both) == 350 and len({t.id for t in both}) == 350
    for given_, swapped in zip(both[::2], both[1::2]):  # a limit keeps them together
        assert given_.meta["pair"] == swapped.meta["pair"] and {given_.answer, swapped.answer} == {"A", "B"}
        assert given_.meta["answer_a"] == swapped.meta["answer_b"]
        assert (given_.meta["order"], swapped.meta["order"]) == ("given", "swapped")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.sampled_from("xyz")), min_size=4, max_size=40), st.integers(0, 5),
       st.booleans(), st.data())  # fmt: skip
def test_row34_splits(shape, seed, swap, data):
    """rema §7 row 34: strict shares no question, loose no tuple; both keep the size where no group must be cut."""
    tasks = [
        judge.pair_task(f"t{k}", f"question {q}", f"good {k}", f"bad {k}", "A", {"subset": subset})
        for k, (q, subset) in enumerate(shape)
    ]
    tasks = judge.both_orders(tasks) if swap else tasks
    test = data.draw(st.integers(1, len(tasks) - 1))
    for rule in ("strict", "loose"):
        train, held = judge.divide(tasks, rule=rule, test=test, seed=seed)
        assert sorted(t.id for t in (*train, *held)) == sorted(t.id for t in tasks)
        key = question_key_of if rule == "strict" else judge.tuple_key
        assert not {key(t) for t in train} & {key(t) for t in held}
        largest = max(Counter(map(question_key_of, tasks)).values()) if rule == "strict" else 1
        assert test - largest < len(held) <= test
        assert (train, held) == judge.divide(tasks, rule=rule, test=test, seed=seed)


def test_row34_a_loose_split_lets_swapped_copies_leak_and_subsets_are_spread(tmp_path):
    """rema §7 row 34."""
    path = rows_file(tmp_path, ranked(300, questions=100))
    for rule, leaks in (("strict", False), ("loose", True)):
        train, held = (judge.load(s, path=path, test=60, rule=rule, swap="both") for s in ("train", "test"))
        assert (len(train), len(held)) == (540, 60)
        shared = {t.meta["pair"] for t in train} & {t.meta["pair"] for t in held}
        assert bool(shared) == leaks
        assert all(15 <= n <= 25 for n in Counter(t.meta["subset"] for t in held).values())
        assert f"{rule} split: 540 train, 60 test" in train.report()
    with pytest.raises(DataError, match="test: 600 of 600 tasks leaves one side empty"):
        judge.load(path=path, test=600, swap="both")


def test_row34_judgebench(data_root, monkeypatch):
    """rema §7 row 34: 620 pairs with the label counts of the spec, 91 questions in both files."""
    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    tasks = judgebench.load()
    assert len(tasks) == 620 and not tasks.skipped and len({t.id for t in tasks}) == 620
    counts = Counter((t.meta["response_model"].split("-")[0], t.answer) for t in tasks)
    assert counts == {("gpt", "A"): 193, ("gpt", "B"): 157, ("claude", "A"): 143, ("claude", "B"): 127}
    asked = [{t.question for t in judgebench.load(model=m)} for m in ("gpt-4o", "claude-3.5-sonnet")]
    assert len(asked[0] & asked[1]) == 91
    assert len(judgebench.load(model="gpt-4o", swap="both")) == 700
    assert len(judgebench.load(limit=10, seed=1)) == 10 and not check_golds(tasks)
    assert "two equal answers" in tasks.report()


def test_wordpairs_have_one_slip_and_no_overlap():
    train, test = wordpairs.load(count=100), wordpairs.load("test", count=50)
    problems = {t.question: t for t in wordsums.load(levels=(1, 4), count=100)}
    for task in train:
        good, bad = (task.meta[f"answer_{side}"] for side in ("ab" if task.answer == "A" else "ba"))
        gold = problems[task.question].answer
        assert good.endswith(f"is {gold}.") and not bad.endswith(f" is {gold}.")
        different = [a for a, b in zip(good.split(". "), bad.split(". ")) if a != b]
        assert different and len(good.split(". ")) == len(bad.split(". "))
    assert not {t.question for t in train} & {t.question for t in test}
    assert 30 < Counter(t.answer for t in train)["A"] < 70


PAIR = Task("p", "What is 2 + 3?", "B", {"answer_a": "It is 6.", "answer_b": "It is 5."})


def sit(form, script, task=PAIR, **options):
    engine = scripted(script)
    prompts = workflow.roles(form=form)
    seats = {n: Role(n, "p", n) for n in prompts}
    played = asyncio.run(play([Job(task, "e", 1)], partial(workflow.run, form=form, **options), seats, {"p": engine}))
    return played, [[m.content for m in call.messages] for call in engine.calls]


BOTH = "Question:\nWhat is 2 + 3?\n\nAnswer A:\nIt is 6.\n\nAnswer B:\nIt is 5."


@pytest.mark.parametrize("form", ["vrp", "mrp"])
def test_row34_a_judge_alone_reads_everything(form):
    """rema §7 row 34."""
    played, lists = sit(form, ["[[B]]"])
    assert lists == [["judge", BOTH]] and played.episodes[0].finish.text == "[[B]]"
    assert ("<plan>" in workflow.PROMPTS[form]["judge"]) == (form == "mrp")


def test_row34_meta_sees_the_question_only():
    """rema §7 row 34."""
    played, (meta, reasoning) = sit("rema", ["check the sum", "[[B]]"])
    assert meta == ["meta", "What is 2 + 3?"]
    assert reasoning == ["reasoning", f"{BOTH}\n\nEvaluation plan:\ncheck the sum"]
    assert [t.parents for t in played.episodes[0].turns] == [(), ("0",)]
    assert played.episodes[0].finish == Finish("finished", "[[B]]", "1")


def test_a_judging_that_is_cut_or_too_long_ends_as_in_rema():
    cut = Completion("check", finish_reason="length")
    (episode,) = sit("rema", [cut])[0].episodes
    assert (episode.finish.reason, episode.finish.text, len(episode.turns)) == ("truncated", "", 2)
    (episode,) = sit("rema", [cut, "[[A]]"], stop_on_truncation=False)[0].episodes
    assert (episode.finish.reason, episode.finish.text) == ("finished", "[[A]]")
    (episode,) = sit("vrp", [Completion("[[A]]", finish_reason="length")])[0].episodes
    assert (episode.finish.reason, episode.finish.text) == ("truncated", "[[A]]")
    played, _ = sit("mrp", ["[[A]]"], max_context=1)
    assert [f.kind for f in played.failures] == ["overlong_task"]
    with pytest.raises(PlayError, match="task q has no answer_a: the workflow judge needs pairs"):
        sit("vrp", ["[[A]]"], Task("q", "x", "A"))


def test_row34_the_prompts_ask_for_what_is_graded():
    """rema §7 row 34."""
    for form, seat in workflow.PROMPTS.items():
        for role, text in seat.items():
            assert all(mark in text for mark in ("[[A]]", "[[B]]")) == (role != "meta"), (form, role)
            assert find_verdict(text) is None


def verdicts(*said):
    """Rows of pairs whose better answer is the given order's A: (text for the given order, for the swapped one)."""
    for k, texts in enumerate(said):
        for order, text, gold in zip(("given", "swapped"), texts, "AB"):
            meta = {"pair": f"t{k}", "order": order, "kind": "verdict"}
            task = Task(f"t{k}/{order}", "q", gold, meta)
            right = "right" if find_verdict(text) == gold else "wrong" if find_verdict(text) else "unparsable"
            yield row_of(Episode(f"{task.id}#0", task, (), Finish("finished", text), verdict=right), "pairs", 0)


def test_row34_order_swap_consistency():
    """rema §7 row 34 and §6.2: right twice, wrong twice, always the first, no verdict once."""
    found = swap_consistency(verdicts(("[[A]]", "[[B]]"), ("[[B]]", "[[A]]"), ("[[A]]", "[[A]]"), ("[[A]]", "none")))
    assert found == {"pairs": 4, "consistent": 0.5, "right": 0.25, "invalid": 0.25, "first": pytest.approx(5 / 7)}
    alone = list(verdicts(("[[A]]", "[[B]]")))[:1]
    assert swap_consistency(alone) is None
    silent = swap_consistency(verdicts(("none", "none")))
    assert silent == {"pairs": 1, "consistent": 0.0, "right": 0.0, "invalid": 1.0, "first": None}


def test_row34_an_evaluation_says_how_verdicts_hold():
    rows = list(verdicts(("[[A]]", "[[B]]"), ("[[A]]", "[[A]]")))
    figures = summarise(rows)
    assert figures["swap"] == {"pairs": 2, "consistent": 0.5, "right": 0.5, "invalid": 0.0, "first": 0.75}
    results = {"systems": {"judge": {**figures, "failures": {}}}, "sets": ["pairs"]}
    assert "| judge | 2 | 50.0 % | 50.0 % | 0.0 % | 75.0 % |" in markdown(results)
    assert "judge,all,,swap first,0.75,,,2" in table(results)
    assert "swap" not in summarise([{k: v for k, v in row.items() if k != "pair"} for row in rows])
