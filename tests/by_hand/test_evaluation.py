"""Evaluation by hand: pass@k, maj@k, intervals, averages, pairs, equal cost, resuming (rema §7 row 38, malt O13)."""

from __future__ import annotations

import asyncio
import csv
import io
import json
from collections import Counter

import pytest

from cothink import stats, suites
from cothink.engines.scripted import engine as scripted
from cothink.recipe import Recipe
from cothink.record import RunError
from cothink.resolve import RecipeError, bind, resolve
from cothink.session import Session
from cothink.stages import reports, systems, versus
from cothink.stages.answers import PATIENCE, Answers, ask
from cothink.stages.summary import Questions, figure, macro, summarise
from cothink.types import Completion, PlayError, Task


def task(name, gold="1", level=None):
    return Task(name, f"question {name}", gold, {"kind": "number", **({"level": level} if level is not None else {})})


def session_of(reply, **team):
    tree = {
        "name": "s",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "trainable": False}}, **team},
        "policies": {"p": {"model": "table"}},
        "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate"}],
    }
    recipe = Recipe.load(tree)
    run = bind(resolve("workflow", recipe.team.workflow.name), recipe.team.workflow.options, "team.workflow")
    engine = scripted(reply)
    return Session(recipe, recipe.roles(), run, {}, {"p": engine}, {}), engine


def from_table(table):
    """Answers of each question in the order of its plays."""
    lines = {name: iter(answers.split()) for name, answers in table.items()}

    def reply(call):
        answer = next(lines[call.messages[-1].content.removeprefix("question ")])
        return "no idea" if answer == "-" else f"\\boxed{{{answer}}}"

    return reply


def rows_of(table, sets, k, gold="1"):
    session, _ = session_of(from_table(table))
    tasks = {name: [task(q, gold, level=len(q)) for q in names.split()] for name, names in sets.items()}
    return asyncio.run(ask(session, tasks, k, "seed"))


# gold 1; right plays 2, 2, 1, 0 of 4
TABLE = {"a": "1 1 2 -", "b": "2 2 1 1", "c": "3 4 1 5", "dd": "- - - -"}


def test_figures_by_hand():
    """rema §7 row 38."""
    rows, failures = rows_of(TABLE, {"one": "a b c", "two": "dd"}, 4)
    found = summarise(rows)
    assert (found["n"], found["k"], found["episodes"], +failures) == (4, 4, 16, Counter())
    assert found["accuracy"] == pytest.approx((0.5 + 0.5 + 0.25 + 0) / 4)
    # pass@2 = 1 - C(wrong, 2) / C(4, 2): a and b 1 - 1/6, c 1 - 3/6
    assert {k: v[0] for k, v in found["pass_at"].items()} == pytest.approx(
        {"1": 0.3125, "2": (5 / 6 + 5 / 6 + 1 / 2) / 4, "4": 0.75}
    )
    # votes of four: a 1; b ties at two each and 2 came first; c four answers, 3 came first; dd nobody votes
    assert found["maj_at"]["4"] == [0.25, *stats.wilson(1, 4)]
    # votes of two: a (1 1) (2 -): 1, 2; b (2 2) (1 1): 2, 1; c (3 4) (1 5): 3, 1
    assert found["maj_at"]["2"][0] == pytest.approx((0.5 + 0.5 + 0.5 + 0) / 4)
    assert found["macro"][0] == pytest.approx(((0.5 + 0.5 + 0.25) / 3 + 0) / 2)
    assert found["sets"]["one"]["n"] == 3 and found["sets"]["two"] == {
        "accuracy": 0.0, "low": 0.0, "high": stats.wilson(0, 1)[1], "n": 1,
    }  # fmt: skip
    assert found["by_level"]["1"]["n"] == 3 and found["levels"] == pytest.approx({"1": 1.25 / 3, "2": 0.0})
    assert found["verdicts"] == {"right": 5 / 16, "unparsable": 5 / 16, "wrong": 6 / 16}
    assert found["per_task"] == {"one/a": 0.5, "one/b": 0.5, "one/c": 0.25, "two/dd": 0.0}
    assert found["low"] < found["accuracy"] < found["high"]  # bootstrap over questions
    assert (found["tokens"], found["calls"], found["rounds"]) == (16, 16, 1.0)  # one id for each text
    assert found["roles"]["solver"] == {"turns": 16, "tokens": 16, "prompt_tokens": 32, "cut": 0.0, "void": 0.0}


def test_one_play_a_question_is_a_proportion():
    rows, _ = rows_of({"a": "1", "b": "2", "c": "1"}, {"one": "a b c"}, 1)
    found = summarise(rows)
    assert (found["accuracy"], found["low"], found["high"]) == (2 / 3, *stats.wilson(2, 3))
    assert found["macro"] == [2 / 3, *stats.wilson(2, 3)] and list(found["per_task"]) == ["a", "b", "c"]


def test_where_every_question_counts_the_same_the_interval_still_has_a_width():
    assert figure([0.5, 0.5]) == [0.5, *stats.wilson(1, 2)] and figure([]) == [0.0, 0.0, 1.0]
    assert macro([[0.0] * 6, [0.0] * 6]) == pytest.approx([0.0, *stats.wilson(0, 12)])
    # sets of 2 and 6: 4 / (1/2 + 1/6) = 6 questions' worth
    assert macro([[1.0] * 2, [1.0] * 6]) == pytest.approx([1.0, *stats.wilson(6, 6)])


def test_votes_count_equal_answers_and_their_earliest_play():
    assert stats.majority_at_k([0, 1, 1, None], [True, False, False, False], 1) == 0.25
    assert stats.majority_at_k([0, 1, 1, None], [True, False, False, False], 2) == 0.5
    assert stats.majority_at_k([0, 1, 1, None], [True, False, False, False], 3) == 0.0  # the fourth is not used
    with pytest.raises(ValueError, match="majority_at_k"):
        stats.majority_at_k([0], [True], 2)
    rows, _ = rows_of({"a": "0.5 2 1/2 2"}, {"one": "a"}, 4, gold="1/2")
    assert [row["vote"] for row in rows] == [0, 1, 0, 1] and summarise(rows)["maj_at"]["4"][0] == 1.0


def test_statistics_against_scipy():
    import numpy as np
    from scipy import stats as oracle

    for right, n in ((6, 30), (0, 9), (372, 500)):
        want = oracle.binomtest(right, n).proportion_ci(method="wilson")
        assert stats.wilson(right, n) == pytest.approx((want.low, want.high), abs=1e-12)
    values = [0.25 * (k % 5) for k in range(200)]
    want = oracle.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(1)).confidence_interval
    assert stats.bootstrap_mean(values)[1:] == pytest.approx((want.low, want.high), abs=0.005)
    gains = [values[k] - values[(7 * k + 3) % 200] for k in range(200)]
    want = oracle.bootstrap((gains,), np.mean, method="percentile", rng=np.random.default_rng(2)).confidence_interval
    assert stats.paired_bootstrap(gains)[1:] == pytest.approx((want.low, want.high), abs=0.01)
    # groups of one value each leave nothing to draw; of two groups each weighs a half whatever its size
    assert stats.bootstrap_macro([[1.0] * 10, [0.0] * 30]) == (0.5, 0.5, 0.5)


def test_tests_against_scipy_and_statsmodels():
    from scipy import stats as oracle
    from statsmodels.stats.contingency_tables import mcnemar
    from statsmodels.stats.multitest import multipletests

    for a in range(13):
        for b in range(13):
            if a + b:
                assert stats.mcnemar(a, b) == pytest.approx(oracle.binomtest(a, a + b).pvalue, abs=1e-12)
                assert stats.mcnemar(a, b) == pytest.approx(mcnemar([[9, a], [b, 4]], exact=True).pvalue, abs=1e-12)
            if a <= 8 and b <= 8:
                want = oracle.fisher_exact([[a, 8 - a], [b, 8 - b]]).pvalue
                assert stats.fisher_exact(a, 8, b, 8) == pytest.approx(want, abs=1e-12)
    for found in ([0.01, 0.04, 0.03], [0.9, 0.6, 0.001, 0.02], [0.05], [0.2] * 5):
        assert stats.holm(found) == pytest.approx(list(multipletests(found, method="holm")[1]), abs=1e-12)


def test_what_is_not_graded_is_counted_apart_and_late_plays_are_wrong():
    async def reply(call):
        name = call.messages[-1].content[-1]
        if name == "l":
            await asyncio.sleep(5)
        return {"u": "I think 1", "w": "\\boxed{2}", "r": "\\boxed{1}"}[name]

    session, _ = session_of(reply, deadline=0.2)
    rows, failures = asyncio.run(ask(session, {"s": [task(c) for c in "urwl"]}, 1, 0))
    found = summarise(rows)
    assert failures == {"deadline": 1} and found["accuracy"] == 0.25 and found["n"] == 4
    assert found["verdicts"] == dict.fromkeys(("failed", "right", "unparsable", "wrong"), 0.25)
    assert found["finish"] == {"deadline": 0.25, "finished": 0.75}


def seeded(call):
    return f"\\boxed{{{call.seed % 3}}}"


TASKS = {"one": [task(f"q{k}") for k in range(6)], "two": [task(f"q{k}", level=k) for k in range(5)]}


def test_killed_and_resumed_equals_uninterrupted_without_a_repeated_question(tmp_path):
    """Issue 6: a kill in the middle, even of a line, repeats no finished question and changes no byte."""
    session, _ = session_of(seeded)
    whole, _ = asyncio.run(ask(session, TASKS, 3, "s", answers=Answers(tmp_path / "whole.jsonl")))

    path, calls = tmp_path / "parts.jsonl", []

    def dies(call):
        calls.append(call.messages[-1].content)
        if len(calls) == 14:
            raise KeyboardInterrupt
        return seeded(call)

    session, _ = session_of(dies, concurrency=3)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(ask(session, TASKS, 3, "s", answers=Answers(path)))
    done = Counter((row["set"], row["task"]) for row in map(json.loads, path.read_text().splitlines()))
    assert 0 < len(done) < 11 and set(done.values()) == {3}
    path.write_bytes(path.read_bytes()[:-20])  # the last line is torn, so one question has two plays
    session, engine = session_of(seeded)
    rows, _ = asyncio.run(ask(session, TASKS, 3, "s", answers=Answers(path)))
    assert rows == whole and path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(engine.calls) == 33 - 3 * len(done) + 1
    again, engine = session_of(seeded)
    assert asyncio.run(ask(again, TASKS, 3, "s", answers=Answers(path)))[0] == whole and not engine.calls


def test_questions_of_an_engine_of_ours_are_played_and_kept_in_fixed_blocks(tmp_path):
    """Issue 6: what shares a pass does not depend on a kill: each block of `concurrency` plays begins afresh."""

    def blocks(path, dies_at=None):
        seen = [[]]

        def reply(call):
            if sum(map(len, seen)) == dies_at:
                raise KeyboardInterrupt
            seen[-1].append(call.messages[-1].content)
            return seeded(call)

        session, engine = session_of(reply, concurrency=6)
        engine.forget = lambda: seen.append([])
        asyncio.run(ask(session, TASKS, 2, "s", answers=Answers(path)))
        return seen[1:]

    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    found = blocks(whole)
    assert list(map(len, found)) == [6, 6, 6, 4]
    with pytest.raises(KeyboardInterrupt):
        blocks(part, dies_at=9)
    assert part.read_bytes() == b"".join(whole.read_bytes().splitlines(keepends=True)[:6])
    assert blocks(part) == [[], *found[1:]] and part.read_bytes() == whole.read_bytes()


def test_more_plays_are_added_to_those_that_are_there(tmp_path):
    path = tmp_path / "a.jsonl"
    session, engine = session_of(seeded)
    few, _ = asyncio.run(ask(session, TASKS, 2, "s", answers=Answers(path)))
    many, _ = asyncio.run(ask(session, TASKS, 5, "s", answers=Answers(path)))
    assert len(engine.calls) == 11 * 5
    assert many == asyncio.run(ask(session_of(seeded)[0], TASKS, 5, "s"))[0]
    assert asyncio.run(ask(session, TASKS, 2, "s", answers=Answers(path)))[0] == few and len(engine.calls) == 55


def test_other_questions_in_the_file_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    session, _ = session_of(seeded)
    asyncio.run(ask(session, {"one": [task("x")]}, 1, "s", answers=Answers(path)))
    with pytest.raises(RunError, match="the data has changed"):
        asyncio.run(ask(session, {"one": [task("x", gold="7")]}, 1, "s", answers=Answers(path)))


def test_a_question_that_failed_by_an_error_is_tried_again(tmp_path):
    broken = {"on": True}

    def reply(call):
        if broken["on"] and call.messages[-1].content.endswith("q1"):
            raise PlayError("the server is down")
        return "\\boxed{1}"

    session, _ = session_of(reply)
    answers = Answers(tmp_path / "a.jsonl")
    rows, failures = asyncio.run(ask(session, {"one": TASKS["one"]}, 2, "s", answers=answers))
    assert len(rows) == 10 and failures == {"error": 2}
    broken["on"] = False
    rows, failures = asyncio.run(ask(session, {"one": TASKS["one"]}, 2, "s", answers=Answers(tmp_path / "a.jsonl")))
    assert len(rows) == 12 and not +failures


def test_a_server_that_is_down_stops_the_evaluation():
    def reply(call):
        raise PlayError("nobody there")

    session, engine = session_of(reply, concurrency=1)
    many = {"one": [task(f"q{k}") for k in range(50)]}
    with pytest.raises(PlayError, match="nobody there"):
        asyncio.run(ask(session, many, 1, "s"))
    assert len(engine.calls) == PATIENCE
    with pytest.raises(PlayError, match="nobody there"):
        asyncio.run(ask(session, {"one": [task("q")]}, 1, "s"))


def outcomes(text, name="s"):
    rows, _ = rows_of({f"q{k}": answer for k, answer in enumerate(text.split())}, {name: _names(text)}, 1)
    return Questions(rows)


def _names(text):
    return " ".join(f"q{k}" for k in range(len(text.split())))


def test_pairs_are_compared_exactly_and_corrected_by_holm():
    a = outcomes("1 " * 15 + "2 " * 5 + "1 " * 4)
    b = outcomes("2 " * 15 + "1 " * 5 + "1 " * 4)
    c = outcomes("1 " * 24)
    ab, ac, bc = versus.compare({"a": a, "b": b, "c": c})
    assert (ab["only_a"], ab["only_b"], ab["questions"]) == (15, 5, 24)
    assert ab["mcnemar_p"] == pytest.approx(0.0414, abs=5e-5)  # malt O13
    assert (ac["only_a"], ac["only_b"]) == (0, 5) and ac["mcnemar_p"] == pytest.approx(2 * 0.5**5)
    assert bc["mcnemar_p"] == pytest.approx(2 * 0.5**15)
    # smallest first: x 3, x 2, x 1, never falling
    assert bc["holm_p"] == pytest.approx(3 * bc["mcnemar_p"])
    assert ab["holm_p"] == pytest.approx(2 * ab["mcnemar_p"]) and ac["holm_p"] == pytest.approx(ab["holm_p"])
    assert ab["difference"][0] == pytest.approx(10 / 24) and ab["difference"][1] < 10 / 24 < ab["difference"][2]
    assert ab["relative_gain"] == pytest.approx(10 / 9)  # 19 against 9


def test_only_shared_questions_are_compared():
    one, two = outcomes("1 1 2"), outcomes("1 2")
    (found,) = versus.compare({"one": one, "two": two})
    assert (found["questions"], found["not_shared"], found["only_a"], found["only_b"]) == (2, 1, 1, 0)
    with pytest.raises(ValueError, match="no question in common"):
        versus.compare({"one": one, "two": Questions([{**r, "task": "z"} for p in two.plays.values() for r in p])})


def answer(texts, sizes):
    """A script: the k-th play of a question says texts[k], in sizes[k] tokens."""
    seen: Counter[str] = Counter()

    def reply(call):
        question = call.messages[-1].content
        k = seen[question]
        seen[question] += 1
        ids = tuple(range(sizes[k % len(sizes)]))
        return Completion(texts[k % len(texts)], call.prompt_ids, ids, (0.0,) * len(ids))

    return reply


def test_a_team_buys_votes_with_its_tokens():
    tasks = {"s": [task(f"q{k}") for k in range(10)]}
    team = Questions(asyncio.run(ask(session_of(answer(["\\boxed{1}"], [30]))[0], tasks, 1, 0))[0])
    single = session_of(answer(["\\boxed{2}", "\\boxed{1}", "\\boxed{1}"], [10]))[0]
    first = Questions(asyncio.run(ask(single, tasks, 1, 0))[0])
    assert versus.votes_worth(team, first, "generated") == 3
    assert versus.votes_worth(first, team, "generated") == 1  # never none
    # each prompt has two messages, an id each: 32 tokens against 12
    assert versus.votes_worth(team, first, "all") == 3
    single = session_of(answer(["\\boxed{2}", "\\boxed{1}", "\\boxed{1}"], [10]))[0]
    every = Questions(asyncio.run(ask(single, tasks, 3, 0))[0])
    found = versus.equal_cost("team", team, "one", every, "generated", 3)
    assert found["single_accuracy"][0] == 1.0 and found["difference"][0] == 0.0  # two of three votes are right
    assert (found["team_tokens_per_question"], found["single_tokens_per_question"], found["votes"]) == (30, 30, 3)
    alone = versus.equal_cost("team", team, "one", every, "generated", 1)
    assert (alone["single_accuracy"][0], alone["only_a"], alone["mcnemar_p"]) == (0.0, 10, pytest.approx(2 * 0.5**10))
    with pytest.raises(ValueError, match="fewer than 4 plays"):
        versus.equal_cost("team", team, "one", every, "generated", 4)


def test_reports_hold_the_same_figures_and_state_their_rules():
    rows, _ = rows_of(TABLE, {"one": "a b c", "two": "dd"}, 4)
    other, _ = rows_of({**TABLE, "dd": "1 1 1 1"}, {"one": "a b c", "two": "dd"}, 4)
    both = {"x|y": Questions(rows), "z": Questions(other)}
    results = {
        "systems": {"x|y": summarise(rows), "z": summarise(other)}, "sets": {"one": 3, "two": 1},
        "comparisons": versus.compare(both), "notes": ["a note"],
        "equal_cost": [versus.equal_cost("x|y", both["x|y"], "z", both["z"], "generated", 2)],
    }  # fmt: skip
    text = reports.markdown(results)
    assert "| x\\|y | 31.2 [" in text and "pass@4" in text and "a tie goes to the answer given first" in text
    assert "| vote of 4 | x\\|y - z | -25.0 [" in text and "- a note" in text and "31.2 %" in text
    for title in ("## Cost", "## By sets", "## By levels", "## Compared", "## At equal cost"):
        assert title in text
    widths = {line.count("|") - 2 * line.count("\\|") for line in text.splitlines() if line.startswith("| vote")}
    assert len(widths) == 1
    lines = list(csv.DictReader(io.StringIO(reports.table(results))))
    found = {(r["system"], r["set"], r["level"], r["metric"]): r for r in lines}
    assert float(found["x|y", "all", "", "accuracy"]["value"]) == 0.3125
    assert float(found["z", "two", "", "accuracy"]["value"]) == 1.0
    assert float(found["x|y", "all", "", "share unparsable"]["value"]) == 5 / 16
    assert float(found["x|y", "all", "", "maj@4"]["high"]) == stats.wilson(1, 4)[1]


def test_suites_name_sets_groups_levels_generators_and_files(tmp_path):
    assert list(suites.sets("rema")) == ["math500", "gsm8k", "aime24", "amc23", "gaokao2023en", "minerva", "olympiad"]
    assert len(suites.sets("math")) == 8 and list(suites.sets(["csqa", "malt"])) == ["csqa", "gsm8k", "math500"]
    found = suites.load(["wordsums:3", "wordsums:2-4"])
    assert {t.meta["level"] for t in found["wordsums:3"]} == {3} and len(found["wordsums:2-4"]) == 500
    rows = tmp_path / "mine.jsonl"
    rows.write_text('{"question": "1 + 1?", "answer": "2"}\n')
    assert suites.load(str(rows))[str(rows)][0].answer == "2"
    for wrong, hint in (("gsm9k", "'gsm8k'"), ("gym:", "gym:GENERATOR"), ("wordsums:x", "wordsums:LOW-HIGH")):
        with pytest.raises(RecipeError, match=hint):
            suites.sets(wrong)
    with pytest.raises(RecipeError, match="names no set"):
        suites.sets([])


def test_a_suite_may_be_any_generator_of_reasoning_gym():
    pytest.importorskip("reasoning_gym")
    ((task_, *_),) = suites.load("gym:leg_counting").values()
    assert task_.meta["gym"]["name"] == "leg_counting"


def test_the_sets_have_the_published_sizes(data_root, monkeypatch):
    """rema §6.4 and row 38: eight subsets, their duplicates noted."""
    monkeypatch.setenv("COTHINK_DATA", str(data_root))
    found = suites.load("math")
    assert {name: len(tasks) for name, tasks in found.items()} == {
        "math500": 500, "gsm8k": 1319, "aime24": 30, "aime25": 30, "amc23": 40, "gaokao2023en": 385, "minerva": 272,
        "olympiad": 675,
    }  # fmt: skip
    (note,) = [n for n in systems._twice(found) if "amc23" in n and "gaokao2023en" in n]
    assert note.startswith("8 questions stand both in")
    assert len(suites.load("csqa")["csqa"]) == 1221


def test_a_recipes_stage_may_play_a_suite():
    tree = {
        "name": "s",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "trainable": False}}},
        "policies": {"p": {"model": "table"}},
        "tasks": {"test": {"name": "wordsums", "split": "test"}},
        "stages": [{"kind": "evaluate", "suite": ["wordsums:1", "wordsums:2"], "limit": 3}],
    }
    recipe = Recipe.load(tree)
    assert recipe.stages[0].suite == ("wordsums:1", "wordsums:2")
    assert "on:" not in recipe.to_yaml()
    tree["stages"][0]["on"] = "test"
    with pytest.raises(RecipeError, match="the stage plays a suite"):
        Recipe.load(tree)
    tree["stages"][0] = {"kind": "evaluate", "suite": "wordsum"}
    with pytest.raises(RecipeError, match=r"stages\.0\.suite: unknown suite 'wordsum'.*did you mean 'wordsums'"):
        Recipe.load(tree)
    tree["stages"][0] = {"kind": "evaluate", "suite": "wordsums:0-9"}
    assert Recipe.load(tree).stages[0].suite == "wordsums:0-9"  # the numbers are the loader's to refuse
