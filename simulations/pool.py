"""The task pool of a node in a world: a handler runs as one step, and what it gives arrives when its time has passed.

Between the two the handler has had its effect and nobody has heard of it: that is where crashes hurt. A job that hangs
is ended by its timeout, or by the world when faults are over. What becomes of results on their way (lost with the node,
late, twice) is the world's affair.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from understudy.actors.pool import CANCELLED, Job, Outcome, Overran, outcome_of
from understudy.model.errors import Closed, Conflict
from understudy.simulations.script import PLAIN, Act, Conduct


class Surroundings(Protocol):
    """What a pool needs of its world."""

    def post(self, job: Callable[[], object], *, label: str) -> None:
        """Make it one of the things that could happen next in this life of the node."""

    def later(self, delay_ms: int, job: Callable[[], object], *, label: str) -> None:
        """Likewise, when so much time has passed."""

    def overrun_after(self, delay_ms: int, job: Callable[[], object]) -> None:
        """Likewise, and at that very moment; by the monotonic clock, as in a service."""

    act: Act  # What the handler that was called last does.


class WorldPool:
    """Runs handlers on the world's one thread."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._world = surroundings
        self._jobs: dict[str, Job] = {}
        self._begun: dict[str, Job] = {}
        self._hanging: dict[str, tuple[Job, Outcome]] = {}
        self._closed = False

    def submit(self, job: Job) -> None:
        if self._closed:
            raise Closed(f"the task pool has been stopped; {job.key!r} was not run")
        if self._jobs.setdefault(job.key, job) is not job:
            raise Conflict(f"job {job.key!r} has not ended; every attempt needs a key of its own")
        self._world.post(lambda: self._begin(job), label=f"run {job.key}")

    def cancel(self, key: str) -> None:
        job = self._jobs.get(key)
        if job is not None:
            job.signal.cancel()

    def running(self) -> int:
        return len(self._begun)

    def stop(self, timeout_s: float, *, cancel: bool = False) -> bool:  # noqa: ARG002  # As the protocol has it.
        """Drop everything: nothing could end while the only thread waits."""
        self._closed = True
        is_quiet = not self._begun
        if cancel:
            for job in self._begun.values():
                job.signal.cancel()
        self._jobs.clear()
        self._begun.clear()
        self._hanging.clear()
        return is_quiet

    def release_hanging(self) -> None:
        """Let everybody who hangs return after all."""
        hanging, self._hanging = self._hanging, {}
        for job, outcome in hanging.values():
            self._world.later(0, partial(self._end, job, outcome), label=f"end {job.key}")

    def _begin(self, job: Job) -> None:
        if self._jobs.get(job.key) is not job:
            return
        if job.signal.cancelled:
            self._end(job, CANCELLED)
            return
        self._begun[job.key] = job
        self._world.act = PLAIN
        outcome = outcome_of(job.run)
        act = self._world.act
        if act.conduct is Conduct.HANG:
            self._hanging[job.key] = (job, outcome)
        elif act.delay_ms:
            self._world.later(act.delay_ms, lambda: self._end(job, outcome), label=f"end {job.key}")
        else:
            self._end(job, outcome)
            return
        if job.timeout_ms is not None and self._jobs.get(job.key) is job:
            self._world.overrun_after(job.timeout_ms, lambda: self._overrun(job))

    def _overrun(self, job: Job) -> None:
        assert job.timeout_ms is not None
        if self._jobs.get(job.key) is not job:
            return  # It came back in time.
        self._hanging.pop(job.key, None)
        self._end(job, Overran(job.timeout_ms))
        job.signal.cancel()

    def _end(self, job: Job, outcome: Outcome) -> None:
        if self._jobs.get(job.key) is not job:
            return  # It overran, or the pool was stopped.
        del self._jobs[job.key]
        self._begun.pop(job.key, None)
        job.done(outcome)
