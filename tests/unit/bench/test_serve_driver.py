"""The order and the times of sending, on a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from app.bench.serve.arrivals import arrival_times
from app.bench.serve.conversation import Conversation, Message, Turn, Workload
from app.bench.serve.driver import Driver, LoopLag
from app.bench.serve.exchange import Exchange, Failure
from app.bench.serve.settings import LoadSettings


class Time:
    """Passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        for _ in range(10):  # whoever is ready goes first
            await asyncio.sleep(0)
        self.seconds += seconds


def conversation(name: str, num_turns: int = 1, arrival_s: float | None = None) -> Conversation:
    turns = tuple(
        Turn(max_tokens=1, messages=(Message(role="user", content=f"{name}.{place}"),)) for place in range(num_turns)
    )
    return Conversation(name=name, turns=turns, arrival_s=arrival_s)


class Server:
    """Answers each turn with its own text in capitals after `work`; keeps what came in which order."""

    def __init__(self, time: Time, work: Callable[[str], Awaitable[Failure | None]]) -> None:
        self.events: list[tuple[str, str]] = []
        self.running = 0
        self.most_running = 0
        self.alive = True
        self._time = time
        self._work = work

    async def send(self, turn: Turn, last_reply: str) -> Exchange:
        name = turn.messages[0].content
        sent = self._time.now()
        self.events.append(("sent", f"{name}<{last_reply}>"))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            failure = await self._work(name)
        finally:
            self.running -= 1
        self.events.append(("ended", name))
        return Exchange(sent=sent, end=self._time.now(), text=name.upper(), failure=failure)

    async def answers(self) -> bool:
        return self.alive


async def at_once(_name: str) -> None:
    await asyncio.sleep(0)


def driven(server: Server, time: Time, concurrency: int = 8) -> Driver:
    return Driver(send=server.send, answers=server.answers, now=time.now, sleep=time.sleep, concurrency=concurrency)


def test_a_turn_is_sent_after_the_reply_before_it_and_is_given_that_reply() -> None:
    async def scenario() -> None:
        # given
        time = Time()
        server = Server(time, at_once)
        driver = driven(server, time)

        # when two conversations run side by side
        assert await driver.run([conversation("a", 3), conversation("b", 3)], [0.0, 0.0])

        # then
        for name in "ab":
            own = [(event, text) for event, text in server.events if text.startswith(name)]
            assert own == [
                ("sent", f"{name}.0<>"),
                ("ended", f"{name}.0"),
                ("sent", f"{name}.1<{name.upper()}.0>"),
                ("ended", f"{name}.1"),
                ("sent", f"{name}.2<{name.upper()}.1>"),
                ("ended", f"{name}.2"),
            ]
        assert server.most_running == 2
        assert [one.place for one in driver.sent() if one.conversation.name == "a"] == [0, 1, 2]

    asyncio.run(scenario())


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_conversations_run_than_asked_for(concurrency: int) -> None:
    async def scenario() -> None:
        # given
        time = Time()
        server = Server(time, at_once)
        names = [f"c{place}" for place in range(7)]

        # when
        await driven(server, time, concurrency).run([conversation(name, 2) for name in names], [0.0] * 7)

        # then, and they begin in order
        assert server.most_running == concurrency
        begun = [text.split(".")[0] for event, text in server.events if event == "sent" and ".0<" in text]
        assert begun == names

    asyncio.run(scenario())


def test_conversations_begin_when_they_are_due() -> None:
    async def scenario() -> None:
        # given
        time = Time()
        server = Server(time, at_once)
        driver = driven(server, time)

        # when
        await driver.run([conversation("a"), conversation("b"), conversation("c")], [0.0, 1.5, 4.0])

        # then
        assert [one.exchange.sent for one in driver.sent()] == [100.0, 101.5, 104.0]
        assert [one.due for one in driver.sent()] == [100.0, 101.5, 104.0]

    asyncio.run(scenario())


def test_a_conversation_without_a_slot_is_sent_late_and_keeps_when_it_was_due() -> None:
    async def scenario() -> None:
        # given one slot and a first reply that takes ten seconds
        time = Time()

        async def slow(_name: str) -> None:
            await time.sleep(10.0)

        driver = driven(Server(time, slow), time, concurrency=1)

        # when
        await driver.run([conversation("a"), conversation("b")], [0.0, 1.0])

        # then
        second = driver.sent()[1]
        assert (second.due, second.exchange.sent) == (101.0, 111.0)

    asyncio.run(scenario())


def test_a_conversation_that_nothing_holds_back_is_due_when_it_gets_its_slot() -> None:
    async def scenario() -> None:
        # given
        time = Time()

        async def slow(_name: str) -> None:
            await time.sleep(10.0)

        driver = driven(Server(time, slow), time, concurrency=1)

        # when
        await driver.run([conversation("a"), conversation("b")], [None, None])

        # then
        assert [one.due for one in driver.sent()] == [one.exchange.sent for one in driver.sent()] == [100.0, 110.0]

    asyncio.run(scenario())


def test_after_a_failed_turn_the_rest_of_its_conversation_is_not_sent() -> None:
    async def scenario() -> None:
        # given
        time = Time()

        async def failing(name: str) -> Failure | None:
            return Failure(kind="refused", message="full", status=503) if name == "a.1" else None

        driver = driven(Server(time, failing), time)

        # when
        assert await driver.run([conversation("a", 4), conversation("b", 2)], [0.0, 0.0])

        # then
        sent = [(one.conversation.name, one.place) for one in driver.sent()]
        assert sorted(sent) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]

    asyncio.run(scenario())


@pytest.mark.parametrize("alive", [True, False])
def test_a_lost_connection_ends_the_run_only_if_the_server_is_gone(alive: bool) -> None:
    async def scenario() -> None:
        # given a request that waits for ever beside one whose connection is lost
        time = Time()
        released = asyncio.Event()

        async def work(name: str) -> Failure | None:
            if name == "a.0":
                return Failure(kind="connection lost", message="reset")
            if name == "b.0":
                released.set()
                await asyncio.Event().wait() if not alive else None
            return None

        server = Server(time, work)
        server.alive = alive
        driver = driven(server, time, concurrency=2)

        # when
        reached_the_end = await driver.run([conversation(name) for name in "abc"], [0.0] * 3)

        # then nothing that was sent is forgotten
        assert reached_the_end is alive
        failures = {one.conversation.name: one.exchange.failure for one in driver.sent()}
        assert failures["a"].label == "connection lost"
        if alive:
            assert (failures["b"], failures["c"]) == (None, None)
        else:
            assert failures["b"].label == "interrupted"

    asyncio.run(scenario())


def test_a_cancelled_run_keeps_what_was_done_and_names_what_was_running() -> None:
    async def scenario() -> None:
        # given
        time = Time()
        second_began = asyncio.Event()

        async def work(name: str) -> None:
            if name == "b.0":
                second_began.set()
                await asyncio.Event().wait()

        driver = driven(Server(time, work), time, concurrency=1)
        running = asyncio.create_task(driver.run([conversation(name) for name in "abc"], [0.0] * 3))
        await second_began.wait()

        # when
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        # then
        first, second = driver.sent()
        assert first.exchange.failure is None
        assert second.exchange.failure.label == "interrupted"

    asyncio.run(scenario())


class TestArrivals:
    @staticmethod
    def workload(turns: int = 1, count: int = 2000) -> Workload:
        conversations = tuple(conversation(str(place), turns, arrival_s=2.0 * place) for place in range(count))
        return Workload(name="test", conversations=conversations)

    def test_without_a_rate_nothing_is_held_back(self) -> None:
        assert arrival_times(self.workload(count=3), LoadSettings(), 0) == [None, None, None]

    @pytest.mark.parametrize("turns", [1, 4])
    def test_a_rate_is_one_of_requests_whatever_the_turns(self, turns: int) -> None:
        # when
        times = arrival_times(self.workload(turns), LoadSettings(rate="5"), 7)

        # then
        assert times[0] == 0.0
        assert times == sorted(times)
        assert 2000 * turns / times[-1] == pytest.approx(5.0, rel=0.1)

    def test_gaps_follow_from_the_seed_and_are_those_of_random_arrivals(self) -> None:
        # when
        times = arrival_times(self.workload(), LoadSettings(rate="5"), 7)
        gaps = [later - earlier for earlier, later in pairwise(times)]

        # then: an exponential distribution has a median of ln 2 times its mean
        assert times == arrival_times(self.workload(), LoadSettings(rate="5"), 7)
        assert times != arrival_times(self.workload(), LoadSettings(rate="5"), 8)
        assert sorted(gaps)[len(gaps) // 2] == pytest.approx(0.2 * 0.693, rel=0.1)

    def test_a_trace_keeps_its_own_times_scaled(self) -> None:
        load = LoadSettings(rate="trace", time_scale=0.25)
        assert arrival_times(self.workload(count=4), load, 0) == [0.0, 0.5, 1.0, 1.5]
        assert arrival_times(self.workload(count=2), LoadSettings(rate="trace"), 0) == [0.0, 2.0]


def test_the_largest_lateness_of_the_loop_is_kept() -> None:
    async def scenario() -> None:
        # given sleeps that last longer than they were asked to
        time = Time()
        extra = iter((0.001, 0.5, 0.0))

        async def oversleep(seconds: float) -> None:
            try:
                time.seconds += seconds + next(extra)
            except StopIteration:
                await asyncio.Event().wait()

        lag = LoopLag(now=time.now, sleep=oversleep)

        # when
        watching = asyncio.create_task(lag.watch())
        await asyncio.sleep(0)
        watching.cancel()
        with pytest.raises(asyncio.CancelledError):
            await watching

        # then
        assert lag.largest_s == pytest.approx(0.5)

    asyncio.run(scenario())
