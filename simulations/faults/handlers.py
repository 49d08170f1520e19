"""Handlers that fail, hang, dawdle, or give what nobody can store: whatever one does, only its own attempt ends.

Each of these makes one conduct of the world's script likely. What history says of an attempt is compared with what the
ledger says that its handler did: a success that no handler had, or a mishap that nobody was told of, is a finding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, ClassVar, Final

from understudy.model import events as e
from understudy.model.definition import decode_definition
from understudy.model.kinds import Task
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.faults.endings import DONE, FAILED, Ending, endings_of, still_out
from understudy.simulations.ledger import Line
from understudy.simulations.node import Life
from understudy.simulations.plugins import QUARANTINE, SURVIVE, Fault, fault
from understudy.simulations.script import Act, Conduct

if TYPE_CHECKING:
    from understudy.simulations.world import World

SLOWEST_MS: Final = 8_000  # Longer than the timeouts of most tasks.
TIMEOUT: Final = "timeout"  # The code of a failure.


class Misconduct(Fault):
    """Some attempts do one thing that they should not."""

    kind = "handlers"
    must = SURVIVE
    conduct: ClassVar[Conduct]
    words: ClassVar[str]  # How the message of such a failure begins.

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self.struck: list[tuple[Line, Act]] = []

    def arm(self, world: World) -> None:
        world.script.odds[self.conduct] = min(0.12, 6 * self.rate)
        world.on_called.append(lambda life, line, act: self.called(world, life, line, act))

    def called(self, world: World, life: Life, line: Line, act: Act) -> None:
        if act.conduct is self.conduct:
            world.fault(self.name, f"{line.key}/{line.attempt}", node=life.name)
            self.struck.append((line, act))

    def check(self, world: World) -> Iterable[str]:
        endings, out = endings_of(world), still_out(world)
        transactional = Evidence.of(world).transactional  # Their statements fail by themselves, as storage does.
        for line, act in self.struck:
            attempt = (line.key, line.attempt)
            named = f"attempt {line.attempt} of {line.key} ({line.handler})"
            ending = endings.get(attempt)
            if attempt in out:
                yield f"{named}: its handler came to {act.conduct.value}, and nobody was told"
            elif ending is not None and ending.how == DONE:
                yield f"{named} is done by commit {ending.seq}, but its handler came to {act.conduct.value}"
            elif line.handler in transactional or attempt in world.raised or ending is None or ending.how != FAILED:
                continue
            elif not self.is_fitting(ending, act):
                yield f"{named} failed as {ending.message!r}, but its handler came to {act.conduct.value}"

    def is_fitting(self, ending: Ending, act: Act) -> bool:
        """Who has dawdled as well may have been stopped for that."""
        return ending.message.startswith(self.words) or (act.delay_ms > 0 and ending.code == TIMEOUT)


@fault
class FailsFirst(Misconduct):
    """A handler raises before it has done anything."""

    name = "handler fails before its effect"
    conduct = Conduct.FAIL_FIRST
    words = "Mishap: "


@fault
class FailsAfter(Misconduct):
    """A handler has done its work, and raises."""

    name = "handler fails after its effect"
    conduct = Conduct.FAIL_AFTER
    words = "Mishap: "


@fault
class Exits(Misconduct):
    """A handler wants to end the process; only its attempt ends."""

    name = "handler raises SystemExit"
    conduct = Conduct.EXIT
    words = "SystemExit"


@fault
class Interrupts(Misconduct):
    """A handler raises what Ctrl-C raises."""

    name = "handler raises KeyboardInterrupt"
    conduct = Conduct.INTERRUPT
    words = "KeyboardInterrupt"


@fault
class GivesNoValue(Misconduct):
    """A handler returns an object that no JSON can hold."""

    name = "handler returns what cannot be stored"
    conduct = Conduct.UNSERIALIZABLE
    words = "BadValue: "


@fault
class GivesTooMuch(Misconduct):
    """A handler returns more than may be stored in one value."""

    name = "handler returns too much"
    conduct = Conduct.TOO_LARGE
    words = "BadValue: "


@fault
class Hangs(Misconduct):
    """A handler never returns. One with a timeout is given up then; one without returns when faults are over."""

    name = "handler hangs"
    conduct = Conduct.HANG
    words = ""

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self._settled_step = 0

    def arm(self, world: World) -> None:
        super().arm(world)
        Evidence.of(world)  # By which is known when a commit was written.
        world.on_settle.append(lambda: self._release(world))

    def _release(self, world: World) -> None:
        self._settled_step = world.steps
        for life in world.all_lives():
            life.pool.release_hanging()

    def check(self, world: World) -> Iterable[str]:
        endings, out = endings_of(world), still_out(world)
        for line, _act in self.struck:
            attempt = (line.key, line.attempt)
            ending = endings.get(attempt)
            if attempt in out:
                yield f"attempt {line.attempt} of {line.key} hangs for ever"
            elif ending is not None and ending.how == DONE and ending.step <= self._settled_step:
                yield f"attempt {line.attempt} of {line.key} is done by commit {ending.seq}, but hung until later"


@fault
class Dawdles(Fault):
    """A handler takes long, and some of them longer than they may."""

    name = "handler is slow"
    kind = "handlers"
    must = SURVIVE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self.struck: list[tuple[Line, Act]] = []

    def arm(self, world: World) -> None:
        world.script.slow = min(0.5, 20 * self.rate)
        world.script.slowest_ms = SLOWEST_MS

        def called(life: Life, line: Line, act: Act) -> None:
            if act.delay_ms:
                world.fault(self.name, f"{line.key}/{line.attempt} takes {act.delay_ms} ms", node=life.name)
                self.struck.append((line, act))

        world.on_called.append(called)

    def check(self, world: World) -> Iterable[str]:
        """Whoever took longer than it may cannot have succeeded; a stopped process looks at its watch too late."""
        if any("pause" in name for name in world.counts):
            return
        timeouts, endings = _timeouts(world), endings_of(world)
        for line, act in self.struck:
            timeout_ms = timeouts.get(line.handler)
            ending = endings.get((line.key, line.attempt))
            if timeout_ms is None or act.delay_ms <= timeout_ms or ending is None:
                continue
            if ending.how == DONE:
                words = f"is done by commit {ending.seq}, after {act.delay_ms} ms of {timeout_ms}"
                yield f"attempt {line.attempt} of {line.key} {words}"
            elif ending.how == FAILED and ending.code != TIMEOUT:
                words = f"took {act.delay_ms} ms of {timeout_ms}, and failed as {ending.message!r}"
                yield f"attempt {line.attempt} of {line.key} {words}"


def _timeouts(world: World) -> dict[str, int | None]:
    """How long each handler may take; only of those for which all definitions agree."""
    found: dict[str, int | None] = {}
    for (body,) in world.peek("SELECT body FROM definition ORDER BY no"):
        for node in decode_definition(body).nodes:
            if not isinstance(node, Task) or node.transactional:
                continue
            for task in (node, node.undo):
                if task is not None and found.setdefault(task.handler, task.timeout_ms) != task.timeout_ms:
                    found[task.handler] = None
    return found


@fault
class Poison(Fault):
    """One handler always fails, until faults are over. Whoever needs it is stuck where all can see it."""

    name = "poison"
    kind = "handlers"
    must = QUARANTINE

    def __init__(self, random: Random, rate: float) -> None:
        super().__init__(random, rate)
        self.handler = ""
        self.struck: list[Line] = []

    def arm(self, world: World) -> None:
        world.on_opened.append(lambda life: self._choose(world, life))
        world.on_called.append(lambda life, line, _act: self._called(world, life, line))
        world.on_settle.append(lambda: world.script.always.pop(self.handler, None))

    def _choose(self, world: World, life: Life) -> None:
        if not self.handler and life.handlers and not world.is_settling:
            self.handler = self.random.choice(sorted(life.handlers))
            world.script.always.setdefault(self.handler, Conduct.FAIL_FIRST)

    def _called(self, world: World, life: Life, line: Line) -> None:
        if line.handler == self.handler and not line.had_effect:
            world.fault(self.name, f"{line.key}/{line.attempt}", node=life.name)
            self.struck.append(line)

    def check(self, world: World) -> Iterable[str]:
        yield from self._unseen(world)
        yield from self._infected(world)

    def _unseen(self, world: World) -> Iterator[str]:
        """Each failure is followed by something in the same commit: another try, an incident, or an end."""
        endings, out = endings_of(world), still_out(world)
        for line in self.struck:
            ending = endings.get((line.key, line.attempt))
            if ending is not None and ending.how == DONE:
                yield f"attempt {line.attempt} of {line.key} is done by commit {ending.seq}, but {self.handler} fails"
            elif (line.key, line.attempt) in out:
                yield f"attempt {line.attempt} of {line.key} has failed, and nobody was told"
        evidence = Evidence.of(world)
        for instance in {line.instance: None for line in self.struck}:
            for row in evidence.histories.get(instance, ()):
                for entry in row.entries:
                    kinds = {type(event) for event in entry.events}
                    if e.AttemptFailed in kinds and kinds.isdisjoint(_FOLLOWS):
                        yield f"{instance}: an attempt has failed with commit {row.seq}, and nothing has followed"

    def _infected(self, world: World) -> Iterator[str]:
        """Whoever has never met the handler has no incident of it, and goes on."""
        met = {line.instance for line in self.struck}
        evidence = Evidence.of(world)
        for instance, standing in evidence.instances.items():
            if instance not in met and standing.is_runnable and standing.is_moving:
                yield f"{instance} has never met {self.handler}, and yet has not gone on"


_FOLLOWS: Final = frozenset(
    {e.WaitOpened, e.AttemptStarted, e.IncidentRaised, e.ScopeFailing, e.EndingBegun, e.TokenEnded, e.InstanceEnded}
)
