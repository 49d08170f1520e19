"""A world of one thread, one step at a time.

Owns `Stage`: the list of everything that could happen next, from which a schedule chooses, and the dispatchers that
put the same actors there which threads would run in service. The same choices give the same run. It must never look at
a clock, draw a random number or start a thread: whoever makes the stage brings the schedule.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import msgspec
import pykka

from understudy.actors.dispatcher import PooledActor
from understudy.actors.promise import BlockedInsideActor, current

__all__ = ["Deadlock", "Job", "Livelock", "Stage", "SteppingDispatcher"]

STEPS_BEFORE_LIVELOCK = 1_000_000


class Deadlock(RuntimeError):
    """Somebody waits, and nothing is left that could happen; tell, post or advance something first."""


class Livelock(RuntimeError):
    """The stage doesn't come to rest; look for actors that keep telling each other, or raise max_steps."""


class Job(msgspec.Struct, frozen=True):
    """Work of somebody who isn't an actor, done in one step."""

    run: Callable[[], object]
    label: str

    def __str__(self) -> str:
        return self.label


Choose = Callable[[int], int]
Trace = Callable[[PooledActor | None, object], None]


def oldest(_: int) -> int:
    """The schedule that takes everything in the order in which it became ready."""
    return 0


class Stage:
    """Runs actors and jobs on the caller's thread, in the order that `choose(number_of_ready) -> index` decides.

    `trace` is called before every step: with an actor and its message, or with None for the message where the step is
    the actor's `on_start`; with None for the actor and the label where it is a job. Whoever waits for a promise of the
    stage drives it meanwhile. A job may do so too; an actor may not, as everywhere.
    """

    def __init__(self, *, choose: Choose = oldest, trace: Trace | None = None) -> None:
        self.trace = trace
        self._choose = choose
        self._ready: list[PooledActor | Job] = []
        self._interrupt: KeyboardInterrupt | None = None

    @property
    def ready(self) -> Sequence[PooledActor | Job]:
        """What could happen next, longest ready first; not to be kept or changed."""
        return self._ready

    def dispatcher(self, name: str) -> SteppingDispatcher:
        """A new dispatcher whose actors take part in the schedule of this stage."""
        return SteppingDispatcher(name, self)

    def post(self, job: Callable[[], object], *, label: str = "") -> None:
        """Make a call one of the things that could happen next; what it raises is raised by `step`."""
        self._ready.append(Job(job, label))

    def step(self) -> bool:
        """Let one thing happen: one message, one on_start or one job. False if nothing is ready."""
        self._check_outside()
        if not self._ready:
            return False
        self.play(self._choose(len(self._ready)))
        return True

    def play(self, index: int) -> None:
        """Let the one of `ready` happen that has this index; for a schedule that sees more than this stage."""
        self._check_outside()
        assert 0 <= index < len(self._ready), f"choose gave {index} of {len(self._ready)} that are ready"
        self._play(self._ready.pop(index))

    def __len__(self) -> int:
        """How many things could happen next."""
        return len(self._ready)

    def run_until_idle(self, *, max_steps: int = STEPS_BEFORE_LIVELOCK) -> int:
        """Step until nothing is ready; the number of steps, or `Livelock` if more than `max_steps` would be needed."""
        for steps in range(max_steps):
            if not self.step():
                return steps
        if self._ready:
            raise Livelock(f"{len(self._ready)} still ready after {max_steps} steps, first {self._ready[0]}")
        return max_steps

    def run_until(self, condition: Callable[[], bool], *, max_steps: int = STEPS_BEFORE_LIVELOCK) -> bool:
        """Step until the condition holds; False if nothing is ready before it does."""
        for _ in range(max_steps):
            if condition():
                return True
            if not self.step():
                return False
        if condition():
            return True
        raise Livelock(f"{max_steps} steps did not bring about what was waited for; {len(self._ready)} are ready")

    def drive(self, condition: Callable[[], bool], *, timeout_s: float | None) -> None:
        """For `Promise.get`. Time stands still on a stage: a limited wait ends when nothing is left to happen."""
        if self.run_until(condition):
            return
        if timeout_s is not None:
            raise pykka.Timeout(f"no answer within {timeout_s} seconds: nothing is ready on the stage")
        raise Deadlock(
            "nothing is ready on the stage, and what is waited for has not happened; advance the clock or tell an actor"
        )

    def enter(self, actor: PooledActor) -> None:
        """For dispatchers: the actor is ready."""
        self._ready.append(actor)

    def leave(self, dispatcher: SteppingDispatcher) -> list[PooledActor]:
        """For dispatchers: nothing of it is to happen any more; the actors of it that were ready."""
        ready, self._ready = self._ready, []
        leaving: list[PooledActor] = []
        for item in ready:
            if isinstance(item, PooledActor) and item.inbox.dispatcher is dispatcher:
                leaving.append(item)
            else:
                self._ready.append(item)
        return leaving

    def interrupt(self, interrupt: KeyboardInterrupt) -> None:
        """For dispatchers: raise this on the driving thread once the step is over."""
        self._interrupt = interrupt

    def _check_outside(self) -> None:
        if current.actor is not None:
            raise BlockedInsideActor(f"{current.actor} can't drive the stage; only a caller from outside can")

    def _play(self, item: PooledActor | Job) -> None:
        if isinstance(item, Job):
            self._note(None, item.label)
            item.run()
        else:
            self._play_actor(item)

    def _play_actor(self, actor: PooledActor) -> None:
        begins = not actor.is_started
        self._note(actor, None if begins else actor.inbox.peek())
        if actor.run_slice(0 if begins else 1):
            actor.inbox.dispatcher.schedule(actor)
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _note(self, actor: PooledActor | None, message: object) -> None:
        if self.trace is not None:
            self.trace(actor, message)


class SteppingDispatcher:
    """What `Dispatcher` is in service, on a stage; made by `Stage.dispatcher`."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name = name
        self.driver = stage
        self._numbers = itertools.count()
        self._stopped = False

    def start(self) -> None:
        """Nothing to do: actors run when somebody steps."""

    def stop(self, timeout_s: float) -> bool:  # noqa: ARG002  # On a stage nothing takes time.
        """Let none of its actors take another step, and refuse what is left in their inboxes."""
        self._stopped = True
        for actor in self.driver.leave(self):
            actor.perish()
        return True

    def next_number(self) -> int:
        return next(self._numbers)

    def schedule(self, actor: PooledActor) -> None:
        if self._stopped:
            actor.perish()
        else:
            self.driver.enter(actor)

    def failed(self, failure: BaseException) -> None:
        # On a stage a Ctrl-C strikes in the middle of some actor, but it was meant for whoever drives.
        if isinstance(failure, KeyboardInterrupt):
            self.driver.interrupt(failure)
