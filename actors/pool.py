"""The task pool, as the others see it: jobs, their outcomes, how they are cancelled; and the pool of a stage.

The promise that each job's `done` is called once and never twice holds for every pool. A pool decides nothing about
attempts and retries, and keeps nothing that the stored state does not also say: a job lost with the process is released
again from there. `actors/threads.py` has the pool of a service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from math import inf
from time import monotonic
from typing import Any, Final, Protocol

import msgspec

from understudy.actors.clock import Clock
from understudy.model.errors import Closed, Conflict


class Returned(msgspec.Struct, frozen=True):
    value: object


class Raised(msgspec.Struct, frozen=True):
    error: BaseException  # Its traceback begins in the handler.


class Overran(msgspec.Struct, frozen=True):
    timeout_ms: int  # Since its start or its last heartbeat. The handler may still be at work.


class Abandoned(msgspec.Struct, frozen=True):
    reason: str  # The handler was not run at all.


Outcome = Returned | Raised | Overran | Abandoned


class CancelSignal:
    """What a handler and the pool say to each other while it runs: "stop, please" and "I am still alive"."""

    __slots__ = ("_callbacks", "beaten_s", "cancelled")

    def __init__(self) -> None:
        self.cancelled = False
        self.beaten_s = -inf  # On the monotonic clock.
        self._callbacks: list[Callable[[], None]] = []

    def beat(self) -> None:
        """Count the timeout anew from here."""
        self.beaten_s = monotonic()

    def cancel(self) -> None:
        """Ask the handler to stop. Also the pool does so, at its timeout."""
        self.cancelled = True
        self._call()

    def on_cancel(self, callback: Callable[[], None]) -> None:
        """Call back once: on the canceller's thread, or here and now if it has been. It must neither raise nor wait."""
        self._callbacks.append(callback)
        if self.cancelled:
            self._call()

    def _call(self) -> None:
        # `pop` is atomic, and either side looks only after it has written: nothing is lost, nothing called twice.
        while True:
            try:
                callback = self._callbacks.pop()
            except IndexError:
                return
            callback()


class Job(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One attempt, bound to its arguments."""

    key: str  # Unique among the jobs that have not ended.
    run: Callable[[], Any]  # Gives an awaitable if `is_async`.
    done: Callable[[Outcome], None]  # Called once, on a thread of the pool; must only tell.
    lane: str = "local"
    is_async: bool = False
    timeout_ms: int | None = None
    signal: CancelSignal = msgspec.field(default_factory=CancelSignal)


class Pool(Protocol):
    """Takes jobs, and tells each one's `done` how it ended."""

    def submit(self, job: Job) -> None:
        """Run it when there is room. Raises `Conflict` for the key of a job not yet ended, `Closed` after `stop`."""

    def cancel(self, key: str) -> None:
        """Cancel its signal. A job that has not begun then ends as `Abandoned`; a key that is not here is no error."""

    def running(self) -> int:
        """How many handlers have begun and are not done with; one that overran is no longer counted."""

    def stop(self, timeout_s: float, *, cancel: bool = False) -> bool:
        """Take no more jobs, and wait for the running ones; True when all have ended.

        Jobs that have not begun, and whatever runs on beyond the limit, are dropped without a word: `done` would reach
        actors that are gone, and the stored state still says that these attempts are outstanding. Nobody's signal is
        cancelled unless `cancel` says so.
        """


CANCELLED: Final = Abandoned("cancelled before it began; the handler was not run")


HANG: Final = object()
"""What a stand-in returns to a `SteppingPool` to say that it never returns."""


class _Stage(Protocol):
    def post(self, job: Callable[[], object], *, label: str = "") -> None: ...


class SteppingPool:
    """Runs each handler as one step of a stage, on the caller's thread; a timeout is an alarm of the virtual clock."""

    def __init__(self, stage: _Stage, clock: Clock) -> None:
        self._stage = stage
        self._clock = clock
        self._jobs: dict[str, Job] = {}
        self._begun: dict[str, Job] = {}
        self._closed = False

    def submit(self, job: Job) -> None:
        if self._closed:
            raise Closed(f"the task pool has been stopped; {job.key!r} was not run")
        if self._jobs.setdefault(job.key, job) is not job:
            raise Conflict(f"job {job.key!r} has not ended; every attempt needs a key of its own")
        self._stage.post(lambda: self._step(job), label=f"run {job.key}")

    def cancel(self, key: str) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.signal.cancel()

    def running(self) -> int:
        return len(self._begun)

    def stop(self, timeout_s: float, *, cancel: bool = False) -> bool:  # noqa: ARG002  # As the protocol has it.
        """Drop everything. Nothing could end while the only thread waits, so it does not."""
        self._closed = True
        begun, self._begun = self._begun, {}
        self._jobs.clear()
        for job in begun.values():
            self._clock.after(_alarm_of(job), None, _silence)
            if cancel:
                job.signal.cancel()
        return not begun

    def _step(self, job: Job) -> None:
        if self._jobs.get(job.key) is not job:
            return  # Dropped by `stop`.
        if job.signal.cancelled:
            self._end(job, CANCELLED)
            return
        self._begun[job.key] = job
        outcome = _loop_outcome_of(job) if job.is_async else outcome_of(job.run)
        if isinstance(outcome, Returned) and outcome.value is HANG:
            self._hang(job)
        else:
            self._end(job, outcome)

    def _hang(self, job: Job) -> None:
        if job.timeout_ms is not None:
            outcome = Overran(job.timeout_ms)
            self._clock.after(_alarm_of(job), job.timeout_ms, lambda: self._overrun(job, outcome))

    def _overrun(self, job: Job, outcome: Overran) -> None:
        self._end(job, outcome)
        job.signal.cancel()

    def _end(self, job: Job, outcome: Outcome) -> None:
        self._begun.pop(job.key, None)
        if self._jobs.pop(job.key, None) is job:
            job.done(outcome)


def outcome_of(run: Callable[[], Any]) -> Outcome:
    try:
        return Returned(run())
    except BaseException as error:
        return Raised(_without_our_frame(error))


async def awaited_outcome_of(job: Job) -> Outcome:
    # Nothing may escape: asyncio lets a SystemExit out of a task stop the loop, which may be the caller's.
    try:
        return Returned(await job.run())
    except BaseException as error:
        return Raised(_without_our_frame(error))


def _loop_outcome_of(job: Job) -> Outcome:
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(awaited_outcome_of(job))
    finally:
        loop.close()


def _without_our_frame(error: BaseException) -> BaseException:
    return error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)


def _alarm_of(job: Job) -> str:
    return f"timeout of {job.key}"


def _silence() -> None:
    """What a cleared alarm would ring."""
