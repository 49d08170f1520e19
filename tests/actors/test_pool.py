"""The task pools: every job ends once, and no handler can hurt the pool or another job."""

import asyncio
import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors import threads as pools
from understudy.actors.clock import VirtualClock
from understudy.actors.pool import (
    HANG,
    Abandoned,
    CancelSignal,
    Job,
    Outcome,
    Overran,
    Raised,
    Returned,
    SteppingPool,
)
from understudy.actors.stepping import Stage
from understudy.actors.threads import ThreadPool
from understudy.model.errors import Closed, Conflict

PATIENCE_S = 5


class Listener:
    """Makes jobs, and hears how they end."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[str, Outcome]] = queue.SimpleQueue()

    def job(self, key: str, run: Callable[[], object], **fields: Any) -> Job:
        return Job(key=key, run=run, done=lambda outcome: self.heard.put((key, outcome)), **fields)

    def next(self) -> tuple[str, Outcome]:
        return self.heard.get(timeout=PATIENCE_S)

    def next_of(self, number: int) -> dict[str, Outcome]:
        outcomes = [self.next() for _ in range(number)]
        assert len(dict(outcomes)) == number, f"somebody ended twice: {outcomes}"
        return dict(outcomes)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def make() -> Iterator[Callable[..., ThreadPool]]:
    made: list[ThreadPool] = []

    def make_pool(*arguments: int, **options: Any) -> ThreadPool:
        made.append(ThreadPool(*arguments, **options))
        return made[-1]

    yield make_pool
    for pool in made:
        pool.stop(0)


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging handlers wait for; set at the end, so that no thread outlives its test."""
    event = threading.Event()
    yield event
    event.set()


# --- threads ----------------------------------------------------------------------------------------------------------


def test_a_job_ends_with_what_its_handler_returned(make: Any, listener: Any) -> None:
    make().submit(listener.job("one", lambda: 42))

    assert listener.next() == ("one", Returned(42))


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, GeneratorExit, BaseException, MemoryError])
def test_whatever_a_handler_raises_ends_its_job_and_not_its_thread(make: Any, listener: Any, kind: Any) -> None:
    pool = make(1)

    def fail() -> None:
        raise kind("on purpose")

    pool.submit(listener.job("bad", fail))
    pool.submit(listener.job("good", threading.current_thread))
    outcomes = listener.next_of(2)

    assert type(outcomes["bad"].error) is kind
    assert outcomes["bad"].error.__traceback__.tb_frame.f_code.co_name == "fail"
    assert isinstance(outcomes["good"], Returned)


def test_a_listener_that_raises_does_not_cost_a_thread(
    make: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make(1)

    def refuse(_: Outcome) -> None:
        raise SystemExit

    pool.submit(Job(key="deaf", run=lambda: 1, done=refuse))
    pool.submit(listener.job("next", lambda: 2))

    assert listener.next() == ("next", Returned(2))
    assert "the listener of job 'deaf' raised" in caplog.text


def test_no_lane_has_more_threads_than_its_bound_and_lanes_do_not_wait_for_each_other(
    make: Any, listener: Any, release: Any
) -> None:
    pool = make(2)
    begun: queue.SimpleQueue[str] = queue.SimpleQueue()

    def wait(name: str) -> str:
        begun.put(name)
        release.wait()
        return threading.current_thread().name

    for number in range(5):
        pool.submit(listener.job(f"local {number}", lambda: wait("local")))
    pool.submit(listener.job("other", lambda: wait("other"), lane="other"))
    first = sorted(begun.get(timeout=PATIENCE_S) for _ in range(3))
    running = pool.running()
    release.set()
    outcomes = listener.next_of(6)

    assert first == ["local", "local", "other"]
    assert running == 3
    assert len({outcomes[f"local {number}"].value for number in range(5)}) == 2


def test_handlers_that_block_get_all_threads(make: Any, listener: Any) -> None:
    pool = make(8)
    all_there = threading.Barrier(8)

    for number in range(8):
        pool.submit(listener.job(str(number), lambda: all_there.wait(PATIENCE_S)))

    assert all(isinstance(outcome, Returned) for outcome in listener.next_of(8).values())


@given(threads=st.integers(1, 4), submitters=st.integers(1, 3), number=st.integers(1, 60))
def test_every_job_ends_once_however_many_submit_at_once(threads: Any, submitters: Any, number: Any) -> None:
    pool, listener = ThreadPool(threads), Listener()

    def submit(name: int) -> None:
        for count in range(number):
            pool.submit(listener.job(f"{name}/{count}", str, timeout_ms=60_000))

    senders = [threading.Thread(target=submit, args=(name,)) for name in range(submitters)]
    for sender in senders:
        sender.start()
    listener.next_of(submitters * number)

    assert pool.stop(PATIENCE_S)
    assert listener.heard.empty()


def test_a_key_is_refused_until_its_job_has_ended(make: Any, listener: Any, release: Any) -> None:
    pool = make()
    pool.submit(listener.job("same", release.wait))

    with pytest.raises(Conflict, match="'same' has not ended"):
        pool.submit(listener.job("same", lambda: 2))
    release.set()
    listener.next()
    pool.submit(listener.job("same", lambda: 3))

    assert listener.next() == ("same", Returned(3))


def test_a_sleeping_thread_keeps_nothing_of_its_last_job_alive(make: Any, listener: Any) -> None:
    class Thing:
        pass

    pool = make(1)
    thing = Thing()
    gone = threading.Event()
    weakref.finalize(thing, gone.set)
    pool.submit(listener.job("holds it", lambda thing=thing: None))
    listener.next()

    del thing
    gc.collect()

    assert gone.wait(PATIENCE_S)


# --- timeouts ---------------------------------------------------------------------------------------------------------


def test_a_handler_that_hangs_is_reported_and_its_thread_replaced(make: Any, listener: Any, release: Any) -> None:
    pool = make(1)
    signal, cancelled = CancelSignal(), threading.Event()
    signal.on_cancel(cancelled.set)

    pool.submit(listener.job("hangs", release.wait, timeout_ms=30, signal=signal))
    pool.submit(listener.job("behind it", lambda: "ran"))

    assert listener.next() == ("hangs", Overran(30))
    assert listener.next() == ("behind it", Returned("ran"))
    assert cancelled.wait(PATIENCE_S)
    assert (pool.running(), pool.hanging()) == (0, 1)


def test_the_late_result_of_a_handler_that_overran_is_ignored_and_its_thread_ends(
    make: Any, listener: Any, release: Any
) -> None:
    pool = make(1)
    threads = []

    def come_late() -> str:
        threads.append(threading.current_thread())
        release.wait()
        return "late"

    pool.submit(listener.job("late", come_late, timeout_ms=20))
    overran = listener.next()
    release.set()
    threads[0].join(PATIENCE_S)
    pool.submit(listener.job("next", lambda: "next"))

    assert overran == ("late", Overran(20))
    assert listener.next() == ("next", Returned("next"))
    assert listener.heard.empty()
    assert pool.hanging() == 0


def test_heartbeats_move_the_timeout(make: Any, listener: Any) -> None:
    pool = make()
    signal = CancelSignal()

    def work() -> str:
        for _ in range(6):
            threading.Event().wait(0.05)
            signal.beat()
        return "still alive"

    pool.submit(listener.job("beats", work, timeout_ms=250, signal=signal))

    assert listener.next() == ("beats", Returned("still alive"))


def test_a_handler_that_stops_to_beat_overruns(make: Any, listener: Any, release: Any) -> None:
    signal = CancelSignal()

    def work() -> None:
        signal.beat()
        release.wait()

    make().submit(listener.job("silent", work, timeout_ms=30, signal=signal))

    assert listener.next() == ("silent", Overran(30))


def test_a_short_timeout_is_kept_on_a_thread_that_had_a_long_one_before(make: Any, listener: Any, release: Any) -> None:
    pool = make(1)
    pool.submit(listener.job("long", lambda: 1, timeout_ms=3_600_000))
    pool.submit(listener.job("none", lambda: 2))
    pool.submit(listener.job("short", release.wait, timeout_ms=20))

    assert listener.next_of(3)["short"] == Overran(20)


def test_a_lane_with_too_many_hanging_handlers_refuses_jobs_until_one_returns(
    make: Any, listener: Any, release: Any
) -> None:
    pool = make(1, abandoned_limit=1)
    threads = []

    def hang() -> None:
        threads.append(threading.current_thread())
        release.wait()

    for number in range(2):
        pool.submit(listener.job(f"hangs {number}", hang, timeout_ms=20))
    pool.submit(listener.job("queued", lambda: 1))
    hung = listener.next_of(3)
    pool.submit(listener.job("new", lambda: 2))
    refused = listener.next()
    pool.submit(listener.job("elsewhere", lambda: 3, lane="other"))
    elsewhere = listener.next()
    release.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    pool.submit(listener.job("afterwards", lambda: 4))

    assert "2 handlers of lane 'local' overran their timeouts and still hang; 1 may" in hung["queued"].reason
    assert isinstance(refused[1], Abandoned)
    assert elsewhere == ("elsewhere", Returned(3))
    assert listener.next() == ("afterwards", Returned(4))


# --- cancelling and stopping ------------------------------------------------------------------------------------------


def test_a_running_handler_sees_that_it_is_cancelled(make: Any, listener: Any) -> None:
    pool = make()
    signal = CancelSignal()
    begun, cancelled = threading.Event(), threading.Event()
    signal.on_cancel(cancelled.set)

    def work() -> bool:
        begun.set()
        cancelled.wait(PATIENCE_S)
        return signal.cancelled

    pool.submit(listener.job("works", work, signal=signal))
    assert begun.wait(PATIENCE_S)
    pool.cancel("works")
    pool.cancel("unknown")

    assert listener.next() == ("works", Returned(True))


def test_a_job_cancelled_before_it_began_is_not_run(make: Any, listener: Any, release: Any) -> None:
    pool = make(1)
    pool.submit(listener.job("first", release.wait))
    pool.submit(listener.job("second", lambda: pytest.fail("it was run")))

    pool.cancel("second")
    release.set()
    outcomes = listener.next_of(2)

    assert outcomes["second"] == Abandoned("cancelled before it began; the handler was not run")


def test_a_callback_of_a_signal_is_called_once_whichever_comes_first() -> None:
    early, late, calls = CancelSignal(), CancelSignal(), []

    early.on_cancel(lambda: calls.append("early"))
    early.cancel()
    early.cancel()
    late.cancel()
    late.on_cancel(lambda: calls.append("late"))

    assert calls == ["early", "late"]


def test_stopping_waits_for_what_runs_and_drops_what_has_not_begun(make: Any, listener: Any, release: Any) -> None:
    pool = make(1)
    begun = threading.Event()
    signal = CancelSignal()

    def work() -> str:
        begun.set()
        release.wait()
        return "finished"

    pool.submit(listener.job("runs", work, signal=signal))
    pool.submit(listener.job("waits", lambda: pytest.fail("it was run")))
    assert begun.wait(PATIENCE_S)
    stopped: queue.SimpleQueue[bool] = queue.SimpleQueue()
    stopper = threading.Thread(target=lambda: stopped.put(pool.stop(PATIENCE_S)))
    stopper.start()
    release.set()

    assert stopped.get(timeout=PATIENCE_S)
    assert listener.next() == ("runs", Returned("finished"))
    assert listener.heard.empty()
    assert not signal.cancelled
    with pytest.raises(Closed, match="'too late' was not run"):
        pool.submit(listener.job("too late", lambda: 1))


def test_what_outlasts_the_stop_is_not_heard_of_again(make: Any, listener: Any, release: Any) -> None:
    pool = make(1)
    threads = []
    begun = threading.Event()

    def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        release.wait()

    pool.submit(listener.job("slow", work))
    assert begun.wait(PATIENCE_S)

    all_ended = pool.stop(0)
    release.set()
    threads[0].join(PATIENCE_S)

    assert not all_ended
    assert listener.heard.empty()


def test_stopping_cancels_when_told_to(make: Any, listener: Any) -> None:
    pool = make()
    signal = CancelSignal()
    begun, cancelled = threading.Event(), threading.Event()
    signal.on_cancel(cancelled.set)

    def work() -> bool:
        begun.set()
        return cancelled.wait(PATIENCE_S)

    pool.submit(listener.job("works", work, signal=signal))
    assert begun.wait(PATIENCE_S)

    assert pool.stop(PATIENCE_S, cancel=True)
    assert listener.next() == ("works", Returned(True))


# --- coroutines -------------------------------------------------------------------------------------------------------


def test_thousands_of_coroutines_run_at_once_on_a_loop_of_the_pool(make: Any, listener: Any) -> None:
    pool = make(async_limit=3_000)
    arrived = 0
    all_there = asyncio.Event()

    async def meet() -> str:
        nonlocal arrived
        arrived += 1
        if arrived == 3_000:
            all_there.set()
        await all_there.wait()
        return threading.current_thread().name

    for number in range(3_000):
        pool.submit(listener.job(str(number), meet, is_async=True, timeout_ms=60_000))

    assert set(listener.next_of(3_000).values()) == {Returned("understudy-async")}


def test_no_more_coroutines_run_than_the_limit_and_the_rest_follows(make: Any, listener: Any) -> None:
    pool = make(async_limit=3)
    now, most = 0, 0

    async def work() -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1

    for number in range(50):
        pool.submit(listener.job(str(number), work, is_async=True))
    listener.next_of(50)

    assert most == 3


def test_coroutines_run_on_the_callers_loop_where_one_is_given(listener: Any) -> None:
    async def main() -> Outcome:
        loop = asyncio.get_running_loop()
        pool = ThreadPool(loop=loop)
        ended: asyncio.Future[Outcome] = loop.create_future()

        async def where() -> bool:
            return asyncio.get_running_loop() is loop

        pool.submit(Job(key="here", run=where, done=ended.set_result, is_async=True))
        outcome = await ended
        assert await asyncio.to_thread(pool.stop, PATIENCE_S)
        return outcome

    assert asyncio.run(main()) == Returned(True)


def test_a_callers_loop_that_is_closed_ends_its_jobs_with_a_reason(make: Any, listener: Any) -> None:
    loop = asyncio.new_event_loop()
    loop.close()

    async def work() -> None: ...

    make(loop=loop).submit(listener.job("homeless", work, is_async=True))

    assert "stop the pool before its loop" in listener.next()[1].reason


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_whatever_a_coroutine_raises_ends_its_job_and_not_the_loop(make: Any, listener: Any, kind: Any) -> None:
    pool = make()

    async def fail() -> None:
        await asyncio.sleep(0)
        raise kind("on purpose")

    async def succeed() -> str:
        return "fine"

    pool.submit(listener.job("bad", fail, is_async=True))
    bad = listener.next()
    pool.submit(listener.job("good", succeed, is_async=True))

    assert type(bad[1].error) is kind
    assert listener.next() == ("good", Returned("fine"))


def test_a_task_that_a_coroutine_left_behind_cannot_end_the_loop(
    make: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make()

    async def crash() -> None:
        raise SystemExit

    async def leave_behind() -> object:
        return asyncio.get_running_loop().create_task(crash())

    async def succeed() -> str:
        return "fine"

    pool.submit(listener.job("careless", leave_behind, is_async=True))
    listener.next()
    pool.submit(listener.job("good", succeed, is_async=True))

    assert listener.next() == ("good", Returned("fine"))


def test_a_coroutine_that_overruns_is_cancelled(make: Any, listener: Any) -> None:
    pool = make()
    unwound = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            unwound.set()

    pool.submit(listener.job("hangs", hang, is_async=True, timeout_ms=20))

    assert listener.next() == ("hangs", Overran(20))
    assert unwound.wait(PATIENCE_S)
    assert pool.stop(PATIENCE_S)


def test_cancelling_a_coroutine_raises_inside_it(make: Any, listener: Any) -> None:
    pool = make()
    begun = threading.Event()

    async def hang() -> None:
        begun.set()
        await asyncio.Event().wait()

    pool.submit(listener.job("hangs", hang, is_async=True))
    assert begun.wait(PATIENCE_S)
    pool.cancel("hangs")

    assert type(listener.next()[1].error) is asyncio.CancelledError


def test_coroutines_that_do_not_let_themselves_be_cancelled_are_refused_company(make: Any, listener: Any) -> None:
    pool = make(async_limit=1)
    enough: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()

    async def insist() -> None:
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        enough.put(lambda: loop.call_soon_threadsafe(event.set))
        while not event.is_set():
            try:
                await event.wait()
            except asyncio.CancelledError:
                continue

    async def succeed() -> None: ...

    pool.submit(listener.job("insists", insist, is_async=True, timeout_ms=20))
    pool.submit(listener.job("behind it", succeed, is_async=True))
    outcomes = listener.next_of(2)
    pool.submit(listener.job("new", succeed, is_async=True))

    assert outcomes["insists"] == Overran(20)
    assert "1 async handlers overran" in outcomes["behind it"].reason
    assert isinstance(listener.next()[1], Abandoned)
    enough.get()()


def test_a_coroutine_that_blocks_its_loop_does_not_stop_the_others_for_ever(
    make: Any, listener: Any, release: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "PULSE_S", 0.05)
    pool = make()
    blocked: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()

    async def block() -> str:
        blocked.put(threading.current_thread())
        release.wait()
        return "late"

    async def succeed() -> str:
        return "on another loop"

    pool.submit(listener.job("blocks", block, is_async=True, timeout_ms=20))
    thread = blocked.get(timeout=PATIENCE_S)
    pool.submit(listener.job("behind it", succeed, is_async=True))

    assert listener.next() == ("blocks", Overran(20))
    assert listener.next() == ("behind it", Returned("on another loop"))
    release.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert listener.heard.empty()


def test_stopping_waits_for_coroutines_and_ends_the_loop(
    make: Any, listener: Any, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make()
    threads = []
    begun = threading.Event()

    async def work() -> None:
        threads.append(threading.current_thread())
        begun.set()
        for _ in range(100):
            await asyncio.sleep(0)

    pool.submit(listener.job("works", work, is_async=True))
    assert begun.wait(PATIENCE_S)
    all_ended = pool.stop(PATIENCE_S)
    threads[0].join(PATIENCE_S)

    assert all_ended
    assert listener.next() == ("works", Returned(None))
    assert not threads[0].is_alive()
    assert caplog.text == ""


# --- on a stage -------------------------------------------------------------------------------------------------------


class Rehearsed:
    """A stepping pool with its stage and clock."""

    def __init__(self) -> None:
        self.stage = Stage()
        self.clock = VirtualClock(1_000)
        self.pool = SteppingPool(self.stage, self.clock)
        self.outcomes: list[tuple[str, Outcome]] = []

    def submit(self, key: str, run: Callable[[], object], **fields: Any) -> None:
        self.pool.submit(Job(key=key, run=run, done=lambda outcome: self.outcomes.append((key, outcome)), **fields))

    def run(self) -> None:
        while self.stage.step():
            pass


def test_on_a_stage_each_handler_is_one_step_on_the_callers_thread() -> None:
    world = Rehearsed()
    world.submit("one", threading.current_thread)
    world.submit("two", threading.current_thread)

    before = list(world.outcomes)
    world.stage.step()
    between = list(world.outcomes)
    world.stage.step()

    assert before == []
    assert between == [("one", Returned(threading.current_thread()))]
    assert len(world.outcomes) == 2


def test_on_a_stage_handlers_may_raise_anything_and_be_coroutines() -> None:
    world = Rehearsed()

    def fail() -> None:
        raise SystemExit

    async def wait_a_little() -> str:
        await asyncio.sleep(0)
        return "awaited"

    world.submit("bad", fail)
    world.submit("async", wait_a_little, is_async=True)
    world.run()

    assert isinstance(world.outcomes[0][1], Raised)
    assert world.outcomes[1] == ("async", Returned("awaited"))


@pytest.mark.parametrize("is_async", [False, True])
def test_on_a_stage_a_handler_that_hangs_overruns_when_virtual_time_says_so(is_async: Any) -> None:
    async def hang() -> object:
        return HANG

    world = Rehearsed()
    world.submit("hangs", hang if is_async else lambda: HANG, is_async=is_async, timeout_ms=500)
    world.run()

    world.clock.advance(499)
    before = list(world.outcomes), world.pool.running()
    world.clock.advance(1)

    assert before == ([], 1)
    assert world.outcomes == [("hangs", Overran(500))]
    assert world.pool.running() == 0


def test_on_a_stage_a_cancelled_job_is_not_run() -> None:
    world = Rehearsed()
    world.submit("cancelled", lambda: pytest.fail("it was run"))

    world.pool.cancel("cancelled")
    world.run()

    assert isinstance(world.outcomes[0][1], Abandoned)


def test_on_a_stage_a_stopped_pool_has_dropped_everything() -> None:
    world = Rehearsed()
    world.submit("hangs", lambda: HANG, timeout_ms=500)
    world.run()
    world.submit("waits", lambda: pytest.fail("it was run"))

    all_ended = world.pool.stop(0)
    world.run()
    world.clock.advance(1_000)

    assert not all_ended
    assert world.outcomes == []
    with pytest.raises(Closed):
        world.submit("too late", lambda: 1)
