"""The task pool of a service: threads of its own for plain handlers, an event loop for `async def`.

It owns the threads and the loop on which handlers run, and their timeouts. A handler may raise anything, hang for ever,
or come back long after its timeout: neither a thread of the pool nor another job may suffer.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from math import inf
from time import monotonic

from understudy.actors.pool import (
    CANCELLED,
    Abandoned,
    Job,
    Outcome,
    Overran,
    Raised,
    awaited_outcome_of,
    outcome_of,
)
from understudy.model.errors import Closed, Conflict

PULSE_S = 1.0
"""How long an event loop may take to answer, after a handler on it overran, before it counts as blocked."""

_log = logging.getLogger(__name__)


class ThreadPool:
    """Daemon threads for plain handlers, an event loop for `async def`, one watchdog for all timeouts.

    `threads` bounds each lane, `async_limit` the coroutines of all lanes. A thread whose handler overran is abandoned
    and replaced; while more than `abandoned_limit` of a lane hang, its jobs end as `Abandoned`. If a `loop` is given,
    `stop` must not be called on its thread: what it waits for could not end.
    """

    def __init__(
        self,
        threads: int = 8,
        *,
        abandoned_limit: int | None = None,
        async_limit: int = 1000,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.threads = threads
        self.abandoned_limit = 2 * threads if abandoned_limit is None else abandoned_limit
        self.async_limit = async_limit
        self.closed = False
        self.watchdog = _Watchdog()
        self._lock = threading.Lock()
        self._ended = threading.Condition(threading.Lock())
        self._jobs: dict[str, Job] = {}
        self._lanes: dict[str, _Lane] = {}
        self._loops = [_LoopLane(self, loop)]  # The last one takes new jobs; those before it were blocked by a handler.

    def submit(self, job: Job) -> None:
        if self.closed:
            raise Closed(f"the task pool has been stopped; {job.key!r} was not run")
        if self._jobs.setdefault(job.key, job) is not job:
            raise Conflict(f"job {job.key!r} has not ended; every attempt needs a key of its own")
        if job.is_async:
            self._loops[-1].submit(job)
        else:
            (self._lanes.get(job.lane) or self._lane(job.lane)).submit(job)

    def cancel(self, key: str) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.signal.cancel()

    def running(self) -> int:
        return sum(seat.busy for seat in self._seats())

    def hanging(self) -> int:
        """How many handlers overran and have not come back."""
        return sum(lane.hanging for lane in self._all_lanes())

    def stop(self, timeout_s: float, *, cancel: bool = False) -> bool:
        with self._lock:
            self.closed = True
        for lane in self._all_lanes():
            for job in lane.close():
                self._jobs.pop(job.key, None)
        if cancel:
            for job in list(self._jobs.values()):
                job.signal.cancel()
        with self._ended:
            all_ended = self._ended.wait_for(lambda: self.running() == 0, timeout_s)
        for seat in self._seats():
            seat.take()
        for loop in self._loops:
            loop.finish()
        self.watchdog.stop()
        return all_ended

    # What follows is for the lanes.

    def end(self, job: Job, outcome: Outcome) -> None:
        """Report a job's end. Whoever calls this has taken the job from its seat or its queue, so it happens once."""
        self._jobs.pop(job.key, None)
        try:
            job.done(outcome)
        except BaseException:  # The thread outlives a listener that is gone.
            _log.exception("the listener of job %r raised; its outcome is lost until recovery", job.key)

    def leave(self, seat: _Seat) -> None:
        """Free a seat, and wake up `stop` if it waits for that."""
        seat.busy = False
        if self.closed:
            with self._ended:
                self._ended.notify_all()

    def refuse(self, jobs: list[Job], reason: str) -> None:
        """End jobs that were not run: on the watchdog's thread, since this one may be the caller's."""

        def end_all(_: float) -> None:
            for job in jobs:
                self.end(job, Abandoned(reason))

        if jobs:
            self.watchdog.at(-inf, end_all)

    def replace_loop(self, blocked: _LoopLane) -> bool:
        """Give coroutines another loop of ours than the one that a handler blocks; False if too many are blocked."""
        with self._lock:
            if self._loops[-1] is blocked:
                self._loops = [loop for loop in self._loops if not loop.is_over]
                if len(self._loops) > self.abandoned_limit:
                    return False
                self._loops.append(_LoopLane(self, None))
        self.forward(blocked)
        return True

    def forward(self, blocked: _LoopLane) -> None:
        """Hand what waits at a loop that was replaced to the next one. After `stop` it is dropped."""
        for job in blocked.close():
            if not self.closed:
                self._loops[-1].submit(job)

    def _lane(self, name: str) -> _Lane:
        with self._lock:
            return self._lanes.setdefault(name, _Lane(self, name))

    def _all_lanes(self) -> list[_Lane | _LoopLane]:
        with self._lock:
            return [*self._lanes.values(), *self._loops]

    def _seats(self) -> list[_Seat]:
        return [seat for lane in self._all_lanes() for seat in list(lane.seats)]


class _Seat:
    """The place of one running handler. Whoever takes the job from it, and nobody else, reports how it ended."""

    __slots__ = ("_job", "_lock", "_overran", "_started_s", "_watchdog", "_watched_s", "busy")

    def __init__(self, watchdog: _Watchdog, overran: Callable[[_Seat, Job], None]) -> None:
        self.busy = False  # Until `done` has been called.
        self._lock = threading.Lock()
        self._job: Job | None = None
        self._started_s = 0.0
        self._watchdog = watchdog
        self._watched_s = inf  # The watchdog's next look here: one in a timeout, however many jobs come and go.
        self._overran = overran

    def give(self, job: Job) -> None:
        self.busy = True
        if job.timeout_ms is None:
            self._job = job
            return
        self._started_s = monotonic()
        self._job = job  # Written before `_watched_s` is read; `_look` does the reverse, so that one sees the other.
        deadline_s = self._started_s + job.timeout_ms / 1000
        if deadline_s < self._watched_s:
            self._watch(deadline_s)

    def take(self) -> Job | None:
        with self._lock:
            job, self._job = self._job, None
        return job

    def _watch(self, deadline_s: float) -> None:
        self._watched_s = deadline_s
        self._watchdog.at(deadline_s, self._look)

    def _look(self, at_s: float) -> None:
        if at_s != self._watched_s:
            return  # An earlier look was arranged since, and it arranges the next one.
        self._watched_s = inf
        with self._lock:
            job = self._job
            if job is None or job.timeout_ms is None:
                return
            deadline_s = max(self._started_s, job.signal.beaten_s) + job.timeout_ms / 1000
            overran = deadline_s <= monotonic()
            if overran:
                self._job = None
        if overran:
            self._overran(self, job)
        else:
            self._watch(deadline_s)


class _Lane:
    """The threads of one lane.

    A thread that has finished a job takes the next one itself, and only one sleeper is being woken at any moment: it
    wakes the next if work is left when it arrives. So short handlers are run by few threads, since the woken ones wait
    for the GIL and find the work done; while a handler that blocks gives up the GIL, and the next thread is there.
    """

    def __init__(self, pool: ThreadPool, name: str) -> None:
        self.hanging = 0
        self.seats: set[_Seat] = set()
        self._pool = pool
        self._name = name
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._sleepers: list[threading.Lock] = []  # The last to fall asleep is woken first: its memory is still warm.
        self._size = 0
        self._waking = False
        self._closed = False

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        # The job is queued before this look, and a thread looks at the queue after it lay down: one sees the other.
        if not self._waking and (self._sleepers or self._size < self._pool.threads):
            self._wake_one()

    def close(self) -> list[Job]:
        with self._lock:
            self._closed = True
            while self._sleepers:
                self._sleepers.pop().release()
        return _drained(self._queue)

    def _wake_one(self) -> None:
        with self._lock:
            if self._waking or self._closed or not self._queue:
                return
            reason = self._obstacle()
            if reason is None:
                return
        self._pool.refuse(_drained(self._queue), reason)

    def _obstacle(self) -> str | None:
        """Wake or start a thread; or say why there cannot be one."""
        limit = self._pool.abandoned_limit
        if self.hanging > limit:
            return (
                f"{self.hanging} handlers of lane {self._name!r} overran their timeouts and still hang; {limit} may. "
                "It takes no jobs until some of them return. Find out what they wait for, or restart the service; with "
                'isolation="process" they would have been killed'
            )
        if self._sleepers:
            self._waking = True
            self._sleepers.pop().release()
        elif self._size < self._pool.threads:
            return self._start_thread()
        return None

    def _start_thread(self) -> str | None:
        self._size += 1
        self._waking = True  # Before the start, since the thread says itself that it is awake.
        try:
            threading.Thread(target=self._work, name=f"understudy-{self._name}-{self._size}", daemon=True).start()
        except RuntimeError as error:
            self._size -= 1
            self._waking = False
            if not self._size:
                return f"no thread could be started for lane {self._name!r} ({error}); lower the threads of the service"
        return None

    def _work(self) -> None:
        seat = _Seat(self._pool.watchdog, self._abandon)
        self.seats.add(seat)
        bed = threading.Lock()
        bed.acquire()
        self._awake()
        while True:
            try:
                job = self._queue.popleft()
            except IndexError:
                if not self._sleep(bed):
                    return
            else:
                if not self._run(seat, job):
                    return
                del job  # A sleeping thread keeps nobody's arguments alive.

    def _sleep(self, bed: threading.Lock) -> bool:
        with self._lock:
            if self._closed:
                return False
            self._sleepers.append(bed)
            if self._queue:
                self._sleepers.pop()
                return True
        bed.acquire()
        self._awake()
        return not self._closed

    def _awake(self) -> None:
        self._waking = False
        if len(self._queue) > 1:
            self._wake_one()

    def _run(self, seat: _Seat, job: Job) -> bool:
        """False if the thread was given up meanwhile."""
        seat.give(job)
        if job.signal.cancelled or self._closed:
            return self._skip(seat)
        outcome = outcome_of(job.run)
        if seat.take() is None:
            self._come_back(seat)
            return False
        self._pool.end(job, outcome)
        self._pool.leave(seat)
        return True

    def _skip(self, seat: _Seat) -> bool:
        job = seat.take()
        if job is not None and not self._closed:
            self._pool.end(job, CANCELLED)
        self._pool.leave(seat)
        return True

    def _abandon(self, seat: _Seat, job: Job) -> None:
        with self._lock:
            self._size -= 1
            self.hanging += 1
        _end_overrun(self._pool, seat, job)
        self._wake_one()
        job.signal.cancel()

    def _come_back(self, seat: _Seat) -> None:
        # The late result counts for nothing, and the thread has been replaced: it ends.
        with self._lock:
            self.hanging -= 1
            self.seats.discard(seat)


class _LoopLane:
    """The coroutines of all lanes, on one event loop: the caller's, or one of ours on a daemon thread."""

    def __init__(self, pool: ThreadPool, loop: asyncio.AbstractEventLoop | None) -> None:
        self.hanging = 0
        self.seats: set[_Seat] = set()
        self._pool = pool
        self._loop = loop
        self._is_ours = loop is None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._queue: deque[Job] = deque()
        self._free: list[_Seat] = []
        self._called = False  # A `_fill` is under way on the loop; it will see whatever is queued by then.
        self._blocked = False
        self._closed = False
        self.is_over = False

    def submit(self, job: Job) -> None:
        self._queue.append(job)
        if self._closed:
            self._pool.forward(self)
        elif self._blocked or self.hanging >= self._pool.async_limit:
            self._refuse()
        elif not self._called:
            self._called = True
            self._call(self._fill)

    def close(self) -> list[Job]:
        self._closed = True
        return _drained(self._queue)

    def finish(self) -> None:
        """Close our loop: at once if it is empty, else when its last coroutine ends."""
        if self._thread is None:
            return
        self._call(self._stop_if_empty)
        if self._is_empty() and self._thread is not threading.current_thread():
            self._thread.join(PULSE_S)

    def _call(self, callback: Callable[[], object]) -> None:
        try:
            self._running_loop().call_soon_threadsafe(callback)
        except RuntimeError as error:
            self._called = False
            reason = f"the pool's event loop takes no calls ({error}); stop the pool before its loop"
            self._pool.refuse(_drained(self._queue), reason)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_serve, args=(loop,), name="understudy-async", daemon=True)
                self._thread.start()
                self._loop = loop
            return self._loop

    def _fill(self) -> None:
        self._called = False
        while self._free or len(self.seats) < self._pool.async_limit:
            try:
                job = self._queue.popleft()
            except IndexError:
                return
            if job.signal.cancelled:
                self._pool.end(job, CANCELLED)
            else:
                self._begin(job)

    def _begin(self, job: Job) -> None:
        seat = self._free.pop() if self._free else _Seat(self._pool.watchdog, self._abandon)
        self.seats.add(seat)
        seat.give(job)
        task = self._running_loop().create_task(awaited_outcome_of(job))
        task.add_done_callback(lambda task: self._end(seat, job, task))
        job.signal.on_cancel(lambda: self._call(task.cancel))

    def _end(self, seat: _Seat, job: Job, task: asyncio.Task[Outcome]) -> None:
        if seat.take() is None:
            with self._lock:
                self.hanging -= 1
            self.seats.discard(seat)
        else:
            # Only a task that was cancelled before its first step has no result.
            self._pool.end(job, Raised(asyncio.CancelledError()) if task.cancelled() else task.result())
            self._pool.leave(seat)
            self._free.append(seat)
        if self._closed:
            self._stop_if_empty()
        elif self._queue:
            self._fill()

    def _stop_if_empty(self) -> None:
        if self._is_ours and self._is_empty():
            self.is_over = True
            self._running_loop().stop()

    def _is_empty(self) -> bool:
        return len(self.seats) == len(self._free)

    def _abandon(self, seat: _Seat, job: Job) -> None:
        with self._lock:
            self.hanging += 1
        _end_overrun(self._pool, seat, job)
        if self.hanging >= self._pool.async_limit:
            self._refuse()
        answered = threading.Event()
        self._call(lambda: self._answer(answered))
        self._pool.watchdog.at(monotonic() + PULSE_S, lambda _: None if answered.is_set() else self._block())
        job.signal.cancel()

    def _answer(self, answered: threading.Event) -> None:
        answered.set()
        self._blocked = False

    def _block(self) -> None:
        if not (self._is_ours and self._pool.replace_loop(self)):
            self._blocked = True
            self._refuse()

    def _refuse(self) -> None:
        reason = (
            f"{self.hanging} async handlers overran their timeouts and still hang, or one blocks the event loop. Find "
            "out what they wait for, or restart the service; a handler that sleeps or reads without `await` must be a "
            "plain def"
        )
        self._pool.refuse(_drained(self._queue), reason)


class _Watchdog:
    """One thread that looks at things when it is time, by the monotonic clock, and sleeps until then."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._looks: list[tuple[float, int, Callable[[float], object]]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def at(self, at_s: float, look: Callable[[float], object]) -> None:
        entry = (at_s, next(self._numbers), look)
        with self._changed:
            heapq.heappush(self._looks, entry)
            if self._thread is None and not self._stopped:
                self._thread = threading.Thread(target=self._run, name="understudy-watchdog", daemon=True)
                self._thread.start()
            elif self._looks[0] is entry:
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            at_s, _, look = due
            try:
                look(at_s)
            except BaseException:  # All timeouts hang on this thread.
                _log.exception("a look of the watchdog raised; it goes on")

    def _wait(self) -> tuple[float, int, Callable[[float], object]] | None:
        with self._changed:
            while not self._stopped:
                if not self._looks:
                    self._changed.wait()
                elif (left_s := self._looks[0][0] - monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    return heapq.heappop(self._looks)
            return None


def _end_overrun(pool: ThreadPool, seat: _Seat, job: Job) -> None:
    assert job.timeout_ms is not None, f"job {job.key!r} has no timeout to overrun"
    pool.end(job, Overran(job.timeout_ms))
    pool.leave(seat)


def _drained(queue: deque[Job]) -> list[Job]:
    """Everything queued. Others may take jobs at the same time: each `popleft` gives one to one of us."""
    jobs = []
    with contextlib.suppress(IndexError):
        while True:
            jobs.append(queue.popleft())
    return jobs


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    stopped = False
    while not stopped:
        try:
            loop.run_forever()
            stopped = True
        except BaseException:  # A task that a handler left behind raised SystemExit or the like.
            _log.exception("a task on the pool's event loop raised; the loop goes on")
    loop.close()
