"""Shares of work by hand, without any other process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from cothink.batch import shares
from cothink.ranks import Ranks, RanksError, buckets, joined
from cothink.stages.playing import _whole
from cothink.team import Failure, Played
from cothink.types import Episode, Finish, PlayError, Sample, Task


def test_three_processes_share_seven_tasks():
    assert [Ranks(k, 3).share("abcdefg") for k in range(3)] == [["a", "d", "g"], ["b", "e"], ["c", "f"]]
    assert Ranks(1, 2).share("a") == []
    assert Ranks().share("abc") == ["a", "b", "c"] and Ranks().gather(4) == [4] and Ranks().first(5) == 5


def sample(unit, *ids):
    n = len(ids)
    return Sample("p", "r", unit, ids, (-1,) + (0,) * (n - 1), (0.0,) * n, (1.0,) * n)


def test_shares_keep_units_whole_and_tokens_even():
    """Units of 4, 2, 2 and 4 tokens by their beginnings: middles at 2, 5, 7 and 10 of 12, cut at 6."""
    a, b, c, d = (sample("a", 1, 1, 1, 1), sample("b", 2, 2), sample("c", 3, 3), sample("d", 4, 4, 4, 4))
    assert shares([d, b, a, c], 2) == [[a, b], [c, d]]
    both = sample("a", 5, 5)  # of the first unit, though it begins otherwise: 6 + 2 + 2 + 4, cut at 7
    assert shares([both, d, c, b, a], 2) == [[a, both], [b, c, d]]
    assert shares([d, a], 1) == [[d, a]] and shares([], 2) == [[], []]
    assert sorted(map(len, shares([a], 3))) == [0, 0, 1]


def test_buckets_hold_neighbours_of_one_kind():
    x, y, z, w = torch.zeros(3), torch.zeros(2), torch.zeros(9), torch.zeros(1, dtype=torch.bfloat16)
    assert [[t.numel() for t in b] for b in buckets([x, y, z, w], 5)] == [[3, 2], [9], [1]]
    assert [len(b) for b in buckets([x, w], 9)] == [1, 1] and buckets([]) == []


def played(task, k):
    return Episode(f"{task.id}#{k}", task, (), Finish("finished", ""))


def test_gathered_plays_stand_in_the_order_of_the_tasks():
    a, b, c = (Task(name, "", "") for name in "abc")
    late = Failure("b", "b#1", "deadline", "")
    found = _whole([Played((played(a, 0), played(a, 1), played(c, 0))), Played((played(b, 0),), (late,))], [a, b, c])
    assert [e.id for e in found.episodes] == ["a#0", "a#1", "b#0", "c#0"] and found.failures == (late,)
    with pytest.raises(PlayError, match="all 1 episodes failed; the first error: gone"):
        _whole([Played(()), Played((), (Failure("a", "a#0", "error", "gone"),))], [a])


def test_a_wrong_start_is_said(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RanksError, match="WORLD_SIZE is 2, and RANK"), joined():
        raise AssertionError
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(RanksError, match="start with torchrun"), joined():
        raise AssertionError


def test_one_process_needs_no_torch():
    program = (
        "import sys; from cothink.ranks import joined\nwith joined() as r: r.add_gradients([]); r.wait()\n"
        "assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
