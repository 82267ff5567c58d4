"""The generated word problems: gold recomputed by an independent reader, ranges, splits, options."""

from __future__ import annotations

import re

import pytest

from cothink.tasks import wordsums
from cothink.tasks.wordsums import FOOD, GAINS, LOSSES, STARTS, apply, load, side


def read(question: str) -> int:
    """Solve a question from its English text alone."""
    asked = re.search(r"How many (\w+) (?:does (\w+) have now|are left with (\w+))\?$", question)
    assert asked, question
    thing, name = asked[1], asked[2] or asked[3]
    opening, *sentences = question[: asked.start()].strip().split(". ")
    assert opening == f"{name} counts {thing}"
    total = 0
    for sentence in sentences:
        told = re.fullmatch(r"(\w+) ([a-z ]+?) (?:(\d+)|the) (\w+)\.?", sentence)
        assert told, sentence
        who, verb, number, what = told.groups()
        assert verb != "eats" or what in FOOD
        if (who, what) != (name, thing):
            continue
        if verb == "doubles":
            total *= 2
        elif verb in STARTS:
            total = int(number)
        else:
            assert verb in GAINS or verb in LOSSES or verb == "eats"
            total += int(number) if verb in GAINS else -int(number)
    return total


def test_the_gold_answer_is_what_the_english_says():
    tasks = load(count=400) + load("test", count=400)
    assert [str(read(task.question)) for task in tasks] == [task.answer for task in tasks]


def test_the_steps_lead_to_the_answer_and_never_leave_the_range():
    for task in load(count=400):
        steps = task.meta["steps"]
        assert len(steps) == task.meta["level"] + 1 and steps[0].startswith("start ")
        total = 0
        for step in steps:
            total = apply(total, step)
            assert 0 <= total <= 99
        assert str(total) == task.answer


def test_one_problem_by_hand():
    steps = ["start 5", "add 3", "double", "take 2"]
    total = 0
    totals = [total := apply(total, step) for step in steps]
    assert totals == [5, 8, 16, 14]


def test_no_number_skeleton_is_on_both_sides():
    train, test = load(count=1500), load("test", count=1500)
    skeletons = [{tuple(task.meta["steps"]) for task in tasks} for tasks in (train, test)]
    assert not skeletons[0] & skeletons[1]
    assert {side(steps) for steps in skeletons[0]} == {"train"}
    assert {side(steps) for steps in skeletons[1]} == {"test"}
    assert not {task.id for task in train} & {task.id for task in test}


def test_the_same_options_give_the_same_tasks_and_another_seed_gives_others():
    assert load(levels=[2, 5], count=50) == load(levels=(2, 5), count=50)
    assert load(levels=[2, 5], count=50) == load(levels=[2, 5], count=80)[:50]
    assert load(count=50, seed=1) != load(count=50)


def test_counts_levels_and_distractors_are_as_asked():
    assert (len(load()), len(load("test"))) == (2000, 500)
    tasks = load(levels=[2, 4], count=300)
    assert {task.meta["level"] for task in tasks} == {2, 3, 4}
    assert len({task.question for task in tasks}) == 300
    assert {task.meta["level"] for task in load(levels=8, count=5)} == {8}
    assert {len(task.meta["noise"]) for task in load(count=100, distractors=[1, 2])} == {1, 2}
    for task in load(levels=3, count=50, distractors=0):
        assert task.question.count(".") == 5 and task.meta["noise"] == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"split": "dev"}, "unknown split 'dev'; write 'train' or 'test'"),
        ({"levels": 0}, r"levels .* within 1..8, got 0"),
        ({"levels": [2, 9]}, "within 1..8"),
        ({"levels": [5, 2]}, "levels"),
        ({"levels": "2-5"}, "levels"),
        ({"count": 0}, "count must be a whole number of at least 1, got 0"),
        ({"count": 2.5}, "count"),
        ({"distractors": -1}, "distractors"),
    ],
)
def test_a_bad_option_is_named(options, says):
    with pytest.raises(ValueError, match=says):
        load(**options)


def test_a_used_up_space_is_an_error_not_an_endless_search(monkeypatch):
    monkeypatch.setattr(wordsums, "_skeleton", lambda rng, level: (["start 5", "add 3"], 8))
    kind = side(["start 5", "add 3"])
    # 10 names x 8 things x 2 starts x 4 gains x 2 questions
    with pytest.raises(ValueError, match=r"only 1\d\d\d different problems found for levels 1-1; lower count \(1281\)"):
        load(kind, levels=1, count=1281, distractors=0)
