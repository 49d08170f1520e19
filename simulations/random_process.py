"""Processes that nobody has written: structured ones, drawn from a seed, always valid for the builder.

They have everything that a process may have, nested as it comes: tasks with retries, timeouts and undos, some of them
transactional, parallel branches of which some are not awaited, choices, loops that count, sagas in sagas, sleeps, waits
with a way for being late, messages thrown at other instances, early ends. All variables are numbers; a step uses only
what is surely there. Every instance can end: loops are bounded, and whoever waits without a limit waits for a message
that somebody can send.
"""

from __future__ import annotations

import inspect
import sqlite3
from collections.abc import Callable
from random import Random
from typing import Any, Final

import attrs

from understudy.actors.handlers import Context
from understudy.process import Process
from understudy.simulations.script import Mishap
from understudy.steps import Step, choose, end, parallel, repeat, saga, sleep, terminate, throw, wait, when
from understudy.tasks import Retry, Task, task

LEAST_STEPS: Final = 4
MOST_STEPS: Final = 16
DEEPEST: Final = 4
REFUSES: Final = "refuses"
LEDGER: Final = "CREATE TABLE IF NOT EXISTS effects (key TEXT NOT NULL)"  # What transactional tasks write to.


def random_process(random: Random, name: str) -> Process[Any, Any]:
    """A process that takes a number `n`. Its handlers have names of their own, so that several go together."""
    return _Author(random, name).process()


def refusing(process: Process[Any, Any]) -> list[str]:
    """The handlers that fail by themselves, for some numbers: nothing else is to be expected of them."""
    return [name for name in process.handlers if name.startswith(f"{process.name}_{REFUSES}")]


@attrs.frozen(kw_only=True)
class _Place:
    """Where a step is to stand."""

    depth: int = 0
    in_saga: bool = False
    may_end: bool = True  # Not in a branch that others wait for.

    def deeper(self, **changes: Any) -> _Place:
        return attrs.evolve(self, depth=self.depth + 1, **changes)


Known = tuple[str, ...]  # Variables that are surely there.
One = Task[..., Any] | Step
Drawn = tuple[list[One], Known]


class _Author:
    def __init__(self, random: Random, name: str) -> None:
        self._random = random
        self._name = name
        self._left = random.randrange(LEAST_STEPS, MOST_STEPS)
        self._count = 0

    def process(self) -> Process[Any, Any]:
        steps, known = self._block(_Place(), ("n",), least=self._left // 2)
        return Process(self._name, *steps, takes={"n": int}, gives=self._random.choice(known))

    def _chance(self, odds: float) -> bool:
        return self._random.random() < odds

    def _new(self, what: str) -> str:
        self._count += 1
        return f"{what}{self._count}"

    # --- sequences ---

    def _block(self, place: _Place, known: Known, *, least: int = 1) -> Drawn:
        """At least one step, and more for as long as there are any left."""
        steps: list[One] = []
        while len(steps) < least or (self._left > 0 and self._chance(0.5)):
            self._left -= 1
            step, known = self._step(place, known)
            steps.append(step)
            if self._left <= 0:
                break
        return steps, known

    def _step(self, place: _Place, known: Known) -> tuple[One, Known]:
        kinds = _FLAT if place.depth >= DEEPEST or self._left <= 0 else _ALL
        draw = self._random.choices([kind for kind, _ in kinds], [weight for _, weight in kinds])[0]
        return draw(self, place, known)

    # --- steps inside which nothing else is ---

    def _task(self, place: _Place, known: Known) -> tuple[One, Known]:
        into = self._new("v")
        taken = tuple(self._random.sample(known, self._random.randrange(0, min(3, len(known)) + 1)))
        made = self._made(f"{self._name}_{into}", taken, into, place)
        return made, (*known, into)

    def _made(self, name: str, taken: Known, into: str, place: _Place) -> Task[..., Any]:
        random = self._random
        is_transactional = self._chance(0.12)
        make = task(
            name=name,
            into=into,
            retry=_retry(random),
            timeout=None if self._chance(0.4) else f"{random.randrange(200, 3_000)}ms",
            on_failure=random.choice(("", "", "", "incident", "fail")),
            transactional=is_transactional,
        )
        salt = random.randrange(10)
        function = _stores(name, taken, salt) if is_transactional else _computes(name, taken, salt)
        made: Task[..., Any] = make(function)
        if place.in_saga and self._chance(0.7):
            undo = made.undo(name=f"undo_{name}", retry=_retry(random), timeout="2s")
            undo(_computes(f"undo_{name}", random.choice(((), (into,), (*taken[:1], into))), salt))
        return made

    def _sleep(self, _place: _Place, known: Known) -> tuple[One, Known]:
        return sleep(f"{self._random.randrange(1, 6_000)}ms"), known

    def _wait(self, place: _Place, known: Known) -> tuple[One, Known]:
        random = self._random
        into = self._new("m") if self._chance(0.6) else ""
        late: list[One] | None = None
        timeout = None if self._chance(0.3) else f"{random.randrange(100, 8_000)}ms"
        if timeout is not None and self._chance(0.6):
            late, _ = self._block(place.deeper(), known)
        key = "n" if self._chance(0.7) else ""
        message = f"{self._name}_{random.choice(('go', 'stop'))}"
        step = wait(message, key=key, into=into, gives=int, timeout=timeout, late=late)
        return step, (*known, into) if into and late is None else known

    def _throw(self, _place: _Place, known: Known) -> tuple[One, Known]:
        ttl = None if self._chance(0.5) else f"{self._random.randrange(1, 5_000)}ms"
        key = f"({self._random.choice(known)}) % 3"
        return throw(f"{self._name}_go", key=key, payload=self._random.choice(known), ttl=ttl), known

    # --- steps with others inside ---

    def _parallel(self, place: _Place, known: Known) -> tuple[One, Known]:
        inside = place.deeper(may_end=False)
        drawn = [self._block(inside, known) for _ in range(self._random.randrange(2, 4))]
        given = [name for _, given in drawn for name in given[len(known) :]]
        return parallel(*(steps for steps, _ in drawn)), (*known, *given)

    def _loose(self, place: _Place, known: Known) -> tuple[One, Known]:
        """A branch that nobody waits for: in a loop it may still be on its way when the next round begins."""
        alone, _ = self._parallel(place.deeper(may_end=False), known) if self._chance(0.6) else self._task(place, known)
        steps, on = self._block(place.deeper(may_end=False), known)
        return parallel([alone, end()], steps), on

    def _choose(self, place: _Place, known: Known) -> tuple[One, Known]:
        first, second = (self._block(place.deeper(), known)[0] for _ in range(2))
        if self._chance(0.1):  # None may be true: that is for an operator.
            return choose((self._condition(known), first), (self._condition(known), second)), known
        otherwise: list[One] | tuple[()] = second if self._chance(0.7) else ()
        return choose((self._condition(known), first), otherwise=otherwise), known

    def _when(self, place: _Place, known: Known) -> tuple[One, Known]:
        return when(self._condition(known), *self._block(place.deeper(), known)[0]), known

    def _finish(self, place: _Place, known: Known) -> tuple[One, Known]:
        """An early end for some."""
        stop: Step = end() if place.may_end and self._chance(0.6) else terminate()
        steps: list[One] = [self._task(place, known)[0]] if self._chance(0.3) else []
        return when(self._condition(known), *steps, stop), known

    def _repeat(self, place: _Place, known: Known) -> tuple[One, Known]:
        count = self._new("c")
        inside = place.deeper()
        steps, given = self._block(inside, known)
        if self._chance(0.3):
            step, given = self._loose(inside, given)
            steps.append(step)
        rounds = self._random.randrange(1, 4)
        counter = _counter(f"{self._name}_{count}", count)
        if self._chance(0.4):
            return repeat(steps, counter, whilst=f"default({count}, 0) < {rounds}"), known
        return repeat(steps, counter, until=f"{count} >= {rounds}"), (*given, count)

    def _saga(self, place: _Place, known: Known) -> tuple[One, Known]:
        """What it gives is not counted on: an early end inside may leave it out."""
        steps, _ = self._block(place.deeper(in_saga=True, may_end=True), known)
        if self._chance(0.5):
            steps.append(self._doomed(known))
        return saga(*steps), known

    def _doomed(self, known: Known) -> One:
        """A step that fails for good in some instances, so that there is something to undo."""
        name = f"{self._name}_{self._new(REFUSES)}"
        return task(name=name)(_refuses(name, self._random.choice(known), self._random.randrange(2, 4)))

    def _condition(self, known: Known) -> str:
        name, random = self._random.choice(known), self._random
        return f"{name} % {random.randrange(2, 4)} == {random.randrange(2)}"


Draw = Callable[[_Author, _Place, Known], tuple[One, Known]]
_FLAT: Final[tuple[tuple[Draw, int], ...]] = (
    (_Author._task, 12),
    (_Author._sleep, 1),
    (_Author._wait, 2),
    (_Author._throw, 1),
)
_ALL: Final[tuple[tuple[Draw, int], ...]] = (
    *_FLAT,
    (_Author._parallel, 4),
    (_Author._loose, 1),
    (_Author._choose, 1),
    (_Author._when, 1),
    (_Author._finish, 1),
    (_Author._repeat, 3),
    (_Author._saga, 4),
)


def _retry(random: Random) -> Retry | None:
    if random.random() < 0.3:
        return None
    return Retry(random.randrange(2, 5), first=random.choice(("0ms", "10ms", "300ms")), factor=1.5)


# --- handlers ---------------------------------------------------------------------------------------------------------


def _computes(name: str, taken: Known, salt: int) -> Callable[..., int]:
    """A handler whose result follows from what it is given."""

    def handler(**given: int) -> int:
        return (sum(given.values()) + salt) % 10

    return _signed(handler, name, _numbers(taken))


def _refuses(name: str, taken: str, of: int) -> Callable[..., int]:
    """A handler that fails for good for one number in so many."""

    def handler(**given: int) -> int:
        if given[taken] % of == 0:
            raise Mishap(f"{name} refuses {given[taken]}")
        return 0

    return _signed(handler, name, _numbers((taken,)))


def _stores(name: str, taken: Known, salt: int) -> Callable[..., int]:
    """A handler that writes a row in the transaction that records its result."""

    def handler(connection: sqlite3.Connection, context: Context, **given: int) -> int:
        connection.execute(LEDGER)
        connection.execute("INSERT INTO effects VALUES (?)", (context.key,))
        return (sum(given.values()) + salt) % 10

    kind = inspect.Parameter.KEYWORD_ONLY
    lent = [
        inspect.Parameter("connection", kind, annotation=sqlite3.Connection),
        inspect.Parameter("context", kind, annotation=Context),
    ]
    return _signed(handler, name, [*_numbers(taken), *lent])


def _counter(name: str, variable: str) -> Task[..., Any]:
    """Counts the rounds of a loop in a variable of its own."""

    def handler(**given: int) -> int:
        return given.get(variable, 0) + 1

    parameter = inspect.Parameter(variable, inspect.Parameter.KEYWORD_ONLY, annotation=int, default=0)
    return task(name=name, into=variable, retry=Retry(3, first="10ms"))(_signed(handler, name, [parameter]))


def _numbers(names: Known) -> list[inspect.Parameter]:
    return [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=int) for name in names]


def _signed(handler: Callable[..., int], name: str, parameters: list[inspect.Parameter]) -> Callable[..., int]:
    """The handler with a signature that says what it takes, as the builder reads it."""
    handler.__name__ = handler.__qualname__ = name
    handler.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]  # Python reads it there.
    return handler
