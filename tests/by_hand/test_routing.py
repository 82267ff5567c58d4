"""Who answers, who answers instead, and what is counted: the pool of workers, with workers made of plain Python."""

import asyncio

import pytest

from cothink.engines import routing
from cothink.engines.routing import Gone, Homes, Pool, Seat
from cothink.types import Completion, PlayError


class Fake:
    """Says its prompt backwards once it is let go; `dies` ends it at its next answer instead."""

    def __init__(self, name, starts=True):
        self.name, self.starts, self.dies, self.ended = name, starts, False, False
        self.asked, self.open = [], asyncio.Event()

    def ready(self):
        if self.starts == "never":
            raise Gone(f"{self.name} could not start")
        return self.starts

    def end(self):
        self.ended = True

    async def answer(self, prompt, n):
        self.asked.append(prompt)
        await self.open.wait()
        if self.dies:
            raise Gone(f"{self.name} was killed")
        return [Completion("", prompt, (*reversed(prompt), k), (0.0,) * (len(prompt) + 1)) for k in range(n)]


class House:
    """A pool of fakes, all that were ever started, and what was said."""

    def __init__(self, size, **kinds):
        self.made, self.said, self.kinds, self.free = [], [], kinds, False
        self.pool = Pool(self.start, size, self.said.append)

    def start(self):
        made = Fake(f"w{len(self.made)}", self.kinds.get(f"w{len(self.made)}", True))
        self.made.append(made)
        if self.free:
            made.open.set()
        return made

    def ask(self, *prompt, n=1, policy="p"):
        return asyncio.ensure_future(self.pool.ask(policy, prompt, n, lambda w: w.answer(prompt, n)))

    def asked(self):
        return [made.asked for made in self.made]

    def let_go(self):
        self.free = True
        for made in self.made:
            made.open.set()


async def turn():
    for _ in range(10):
        await asyncio.sleep(0)


def test_the_longest_known_beginning_decides():
    homes, a, b, c = Homes(), Seat(1, None), Seat(2, None), Seat(3, None)
    assert homes.find((1, 2)) is None
    homes.keep((1, 2), a)
    homes.keep((1, 2, 3, 0), b)
    homes.keep((1, 2, 3), c)
    assert homes.find((1, 2, 9)) is a
    assert homes.find((1, 2, 3, 5)) is c  # (1, 2, 3, 0) comes between the two in order, and is no beginning
    assert homes.find((1, 2, 3, 0)) is homes.find((1, 2, 3, 0, 7, 7)) is b
    assert (
        homes.find((1,)) is None and homes.find((2, 1)) is None and homes.find((0,)) is None and homes.find(()) is None
    )


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(routing, "KEPT", 3)
    homes, seat = Homes(), Seat(1, None)
    for k in range(5):
        homes.keep((k,), seat)
    assert [homes.find((k,)) for k in range(5)] == [None, None, None, seat, seat]


def test_the_least_busy_worker_is_asked_and_a_chat_stays_where_it_began():
    async def scene():
        house = House(2)
        big, small, next_ = house.ask(1, n=3), house.ask(2), house.ask(3)
        await turn()
        assert house.asked() == [[(1,)], [(2,), (3,)]]  # 3 answers are owed here, 1 and 1 there
        house.let_go()
        await asyncio.gather(big, small, next_)
        assert [seat.answers for seat in house.pool.seats] == [seat.requests for seat in house.pool.seats] == [0, 0]
        await house.ask(2, 2, 0, 7)  # what the second worker was asked and said, and more
        await house.ask(1, 1, 2, 7)  # the third answer of the first one
        await house.ask(2, 2, 0, 7, policy="q")  # another policy's chat: both are idle, so the first
        assert house.asked() == [[(1,), (1, 1, 2, 7), (2, 2, 0, 7)], [(2,), (3,), (2, 2, 0, 7)]]
        house.pool.forget()
        await house.ask(2, 2, 0, 7)
        assert house.asked()[0][-1] == (2, 2, 0, 7)

    asyncio.run(scene())


def test_a_chat_leaves_a_worker_that_owes_too_much(monkeypatch):
    monkeypatch.setattr(routing, "SLACK", 2)

    async def scene():
        house = House(2)
        house.let_go()
        await house.ask(1)
        for made in house.made:
            made.open.clear()
        waiting = [house.ask(1, 1, 0, k) for k in range(4)]
        await turn()
        assert [len(asked) for asked in house.asked()] == [1 + 3, 1]  # 0, 1 and 2 owed: within the slack; 3 is not
        house.let_go()
        await asyncio.gather(*waiting)

    asyncio.run(scene())


def test_a_death_in_the_middle_loses_nothing_and_is_told():
    async def scene():
        house = House(2)
        asked = [house.ask(k) for k in range(5)]
        await turn()
        assert house.asked() == [[(0,), (2,), (4,)], [(1,), (3,)]]
        house.made[0].dies = True
        house.let_go()
        done = await asyncio.gather(*asked)
        assert [found[0].output_ids for found in done] == [(k, 0) for k in range(5)]  # each its own answer, once
        assert house.made[0].ended and len(house.made) == 3 and not house.made[1].ended
        again = [prompt for made in house.made[1:] for prompt in made.asked]
        assert sorted(again) == [(k,) for k in range(5)]
        assert (house.pool.deaths, house.pool.repeated) == (1, 3)
        (said,) = house.said
        assert said.startswith("worker 1 of 2 has ended (w0 was killed)")
        assert "its 3 open requests are asked again (workers lost so far: 1)" in said
        assert [seat.number for seat in house.pool.seats] == [1, 2]

    asyncio.run(scene())


def test_a_worker_that_is_starting_is_left_in_peace_until_it_can_be_asked(monkeypatch):
    monkeypatch.setattr(routing, "POLL", 0.001)

    async def scene():
        house = House(1, w1=False)
        house.made[0].dies = True
        house.let_go()
        asked = house.ask(5)
        await asyncio.sleep(0.02)
        assert not asked.done() and house.made[1].asked == []
        house.made[1].starts = True
        house.let_go()
        assert (await asked)[0].output_ids == (5, 0)
        await house.ask(5, 5, 0)
        assert house.made[1].asked == [(5,), (5, 5, 0)]

    asyncio.run(scene())


def test_a_request_that_kills_whoever_answers_fails_alone():
    async def scene():
        house = House(2)
        call = house.pool.ask

        async def poison(worker):
            worker.dies = True
            return await worker.answer((6,), 1)

        bad = asyncio.ensure_future(call("p", (6,), 1, poison))
        house.let_go()
        with pytest.raises(PlayError, match=r"3 workers in a row ended over one request of policy p.*was killed"):
            await bad
        assert (await house.ask(7))[0].output_ids == (7, 0)
        assert house.pool.deaths == 3

    asyncio.run(scene())


def test_workers_that_never_start_end_the_play(monkeypatch):
    monkeypatch.setattr(routing, "POLL", 0.0)

    async def scene():
        house = House(2, **{f"w{k}": "never" for k in range(50)})
        with pytest.raises(PlayError, match=r"7 workers in a row ended before any had answered.*could not start"):
            await house.ask(1)
        with pytest.raises(PlayError, match="workers in a row ended"):
            await house.ask(2)
        assert len(house.made) == 2 + 6

    asyncio.run(scene())


def test_a_request_that_nobody_waits_for_owes_nothing():
    async def scene():
        house = House(1)
        asked = house.ask(1, n=4)
        await turn()
        asked.cancel()
        await turn()
        assert house.pool.seats[0].answers == house.pool.seats[0].requests == 0

    asyncio.run(scene())
