"""Pace and bill of an outside server, by numbers worked on paper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from cothink.engines.billing import Bill, Pace, Spent
from cothink.recipe import Recipe
from cothink.resolve import RecipeError
from cothink.types import PlayError


def usage(prompt, output):
    return SimpleNamespace(prompt_tokens=prompt, completion_tokens=output)


def test_requests_start_at_least_a_share_of_a_minute_apart():
    """30 a minute are 2 seconds apart; time that nobody used is not saved up."""
    pace = Pace(30)
    assert [pace.wait(t) for t in (100.0, 100.0, 100.5, 110.0, 110.0)] == [0.0, 2.0, 3.5, 0.0, 2.0]
    assert Pace().wait(5.0) == Pace().wait(5.0) == 0.0


def test_cost_is_counted_by_policy_and_told_once():
    """1,500 prompt tokens at 2 a million and 500 output tokens at 8: 0.003 + 0.004."""
    bill = Bill((2.0, 8.0))
    bill.add("a", usage(1000, 300), 0)
    bill.add("a", usage(500, 200), 2)
    bill.add("b", usage(10, 0), 0)
    found = bill.figures()
    assert found["a/server_cost"] == pytest.approx(0.007) and found["b/server_cost"] == pytest.approx(0.00002)
    assert [found[f"a/server_{k}"] for k in ("requests", "retries", "prompt_tokens", "output_tokens")] == [
        2,
        2,
        1500,
        500,
    ]
    assert set(bill.figures().values()) == {0.0} and bill.cost == pytest.approx(0.00702)


def test_without_prices_tokens_are_counted_and_no_cost_is_made_up():
    bill = Bill()
    bill.add("a", usage(7, 3), 0)
    bill.add("a", None, 0)
    assert bill.figures() == {
        "a/server_requests": 2, "a/server_retries": 0, "a/server_prompt_tokens": 7, "a/server_output_tokens": 3,
    }  # fmt: skip


def test_nothing_is_asked_beyond_the_limit():
    bill = Bill((0.0, 1e6), most=3.0)
    for _ in range(3):
        bill.allow()
        bill.add("a", usage(1, 1), 0)
    with pytest.raises(Spent, match=r"3 spent, and max_cost allows 3; write a larger server\.max_cost"):
        bill.allow()


@pytest.mark.parametrize("told", [None, usage(None, 3), usage("7", 3)])
def test_a_cost_that_cannot_be_counted_is_an_error(told):
    bill = Bill((1.0, 1.0))
    with pytest.raises(PlayError, match="tells no usage"):
        bill.add("a", told, 0)
    assert bill.figures()["a/server_requests"] == 1


def recipe(model="openai:big@http://127.0.0.1:9/v1", **server):
    return {
        "name": "outside",
        "team": {"workflow": "solo", "roles": {"solver": {"policy": "p", "trainable": False}}},
        "policies": {"p": {"model": model, "server": server}},
        "tasks": {"test": {"name": "wordsums", "count": 2}},
        "stages": [{"kind": "evaluate", "on": "test"}],
    }


def test_a_recipe_may_say_how_a_server_is_asked():
    Recipe.load(recipe(timeout=5, retries=0, requests_per_minute=30, prices=[1, 2], max_cost=0.5))


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (
            {"request_per_minute": 3},
            r"policies\.p\.server\.request_per_minute: unknown option .*\n.*requests_per_minute",
        ),
        ({"timeout": "soon"}, r"policies\.p\.server\.timeout"),
        ({"timeout": 0}, "timeout above 0 and retries"),
        ({"requests_per_minute": 0}, "more than 0, or leave it out"),
        ({"prices": [1, -1]}, "two, of a million prompt tokens"),
        ({"max_cost": 1}, r"prices: \[PROMPT, OUTPUT\] beside it"),
        ({"prices": [1, 1], "max_cost": 0}, "max_cost 0"),
        ({"model": "builtin:tiny", "timeout": 5}, r"policies\.p\.server: builtin:tiny is no server's model"),
    ],
)
def test_what_a_recipe_may_not_say_of_a_server(server, words):
    with pytest.raises(RecipeError, match=f"(?s){words}"):
        Recipe.load(recipe(**server))
