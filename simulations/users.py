"""`simulate`: a user's own processes and handlers in many worlds, against the user's own invariants and ours.

A `Simulation` is what is to be simulated; `run` plays seeds of it. One seed decides about everything in its world. A
seed that fails is played twice, so that a handler which is not deterministic is told apart from a bug, and is then
shortened. Nothing here may depend on a clock, except for the figures of speed.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from random import Random
from typing import Any, Final

import attrs

import understudy.simulations.checkers
import understudy.simulations.faults  # noqa: F401  # These two fill the tables.
from understudy.actors.system import Limits
from understudy.model.errors import Rejected
from understudy.model.invariants import Violation
from understudy.simulations.crew import Crew
from understudy.simulations.outside import Outside
from understudy.simulations.playing import play
from understudy.simulations.plugins import FAULTS, Fault, Scenario
from understudy.simulations.report import Failure, Report
from understudy.simulations.schedule import Schedule, Told
from understudy.simulations.shrinking import Case, Played, Shrinker
from understudy.simulations.terms import AnyProcess, check_count, faults_of, places_of, seeds_of, terms_of
from understudy.simulations.twins import Diary, first_difference

SEEDS: Final = 200
STEPS: Final = 2_000
MOST_STEPS: Final = 10_000_000
MOST_FAULTS: Final = 8
MOST_STRIKES: Final = 50  # Of all faults together, in one world.
RATES: Final = (1 / 300, 1 / 10)  # Of a fault, for each step: a user's instance lives for some dozens of steps.
REPEATED: Final = 25  # Every so many seeds one that has passed is played again.
NOT_DETERMINISTIC: Final = "I16"

Progress = Callable[[Report], object]  # Told of what was found so far, again and again; False ends it.


class Simulation:
    """What is to be simulated. The arguments are those of `simulate`; `run` plays seeds of it."""

    def __init__(
        self,
        *processes: AnyProcess | Iterable[AnyProcess],
        start: object = None,
        instances: int | None = None,
        ids: Callable[[Any], str] | None = None,
        stand_ins: Mapping[Any, Callable[..., Any]] | None = None,
        messages: Mapping[str, object] | None = None,
        fakes: Mapping[str, Callable[[], Any]] | None = None,
        invariants: Callable[..., Any] | Iterable[Callable[..., Any]] = (),
        faults: str | Iterable[str] | None = None,
        secrets: str | Iterable[str] = (),
        must_end: bool = True,
        limits: Limits | None = None,
    ) -> None:
        self.terms = terms_of(
            processes,
            start=start,
            instances=instances,
            ids=ids,
            stand_ins=stand_ins,
            messages=messages,
            fakes=fakes,
            invariants=invariants,
            faults=faults,
            secrets=secrets,
            must_end=must_end,
            limits=limits,
        )

    def run(
        self,
        seeds: int | Iterable[int] = SEEDS,
        *,
        steps: int = STEPS,
        faults: str | Iterable[str] | None = None,
        only: str | Iterable[str] = (),
        strikes: int | None = None,
        calm: bool = False,
        jobs: int = 1,
        keep_on: bool = False,
        shrink: bool | None = None,
        progress: Progress | None = None,
    ) -> Report:
        """Play seeds until one fails, or all of them if you want to `keep_on`.

        A failure is shortened, unless it is the only world that was asked for. That one may print, too.
        """
        numbers = seeds_of(seeds)
        check_count("steps", steps, most=MOST_STEPS)
        check_count("jobs", jobs, most=256)
        simulation = self if faults is None else self._with_faults(faults)
        only = (only,) if isinstance(only, str) else tuple(only)
        if strikes is not None and strikes != 0:
            check_count("strikes", strikes, most=MOST_STEPS)
        cases = [Case(seed=seed, steps=steps, strikes=strikes, only=only, is_calm=bool(calm)) for seed in numbers]
        run = _Run(simulation, cases, progress)
        run.play(jobs=jobs, keep_on=keep_on, shrink=len(cases) > 1 if shrink is None else bool(shrink))
        return run.report

    def play(self, case: Case, *, recording: bool = False, diary: Diary | None = None) -> Played:
        """Play one world."""
        chosen = self._faults(case)
        fakes = {name: make() for name, make in self.terms.fakes.items()}
        strikes = _strikes(case.seed) if case.strikes is None else case.strikes
        chosen = [] if strikes == 0 else chosen
        known = attrs.evolve(case, strikes=strikes, faults=tuple(fault.name for fault in chosen))
        outside = Outside(self.terms, fakes, known)
        scenario = Scenario(
            name=self.terms.name,
            about="a user's simulation",
            begin=outside.begin if diary is None else diary.of(outside.begin),
            end=outside.end,
            check=outside.check,
            options={} if self.terms.limits is None else {"limits": self.terms.limits},
        )
        with self._seated(fakes), _told(case):
            outcome = play(
                scenario,
                case.seed,
                steps=case.steps,
                recording=recording,
                faults=chosen,
                schedule=_IN_ORDER if case.is_calm else None,
            )
        if case.only and not outside.planned:
            raise Rejected(f"no instance of {self.terms.name} is called {' or '.join(case.only)} with seed {case.seed}")
        if case.is_calm:
            outcome = attrs.evolve(outcome, drawn=(str(_IN_ORDER), *map(str, chosen)))
        digest = outside.digest or outcome.digest
        return Played(case=known, outcome=outcome, instances=outside.planned, digest=digest)

    def _faults(self, case: Case) -> list[Fault]:
        """Each has random numbers of its own, by its name: leaving one out changes nothing for the others."""
        if case.faults is not None:
            names = list(case.faults)
        else:
            draw = Random(f"{case.seed}/swarm of a user")
            pool = self.terms.drawn_faults
            count = draw.randrange(0, min(MOST_FAULTS, len(pool)) + 1)
            names = [*self.terms.named_faults, *draw.sample(pool, count)]
        return [FAULTS[name](Random(f"{case.seed}/fault {name}"), _rate(case.seed, name)) for name in sorted(names)]

    @contextlib.contextmanager
    def _seated(self, fakes: Mapping[str, Any]) -> Iterator[None]:
        """Fakes take the places of the globals that have their names, for as long as their world lives."""
        places = [(space, name) for name in fakes for space in places_of(name, self.terms.handlers)]
        real = [(space, name, space[name]) for space, name in places]
        try:
            for space, name in places:
                space[name] = fakes[name]
            yield
        finally:
            for space, name, value in real:
                space[name] = value

    def _with_faults(self, faults: str | Iterable[str]) -> Simulation:
        named, drawn = faults_of(faults)
        other = Simulation.__new__(Simulation)
        other.terms = attrs.evolve(self.terms, named_faults=named, drawn_faults=drawn)
        return other


def simulate(
    *processes: AnyProcess | Iterable[AnyProcess],
    start: object = None,
    seeds: int | Iterable[int] = SEEDS,
    steps: int = STEPS,
    instances: int | None = None,
    ids: Callable[[Any], str] | None = None,
    stand_ins: Mapping[Any, Callable[..., Any]] | None = None,
    messages: Mapping[str, object] | None = None,
    fakes: Mapping[str, Callable[[], Any]] | None = None,
    invariants: Callable[..., Any] | Iterable[Callable[..., Any]] = (),
    faults: str | Iterable[str] | None = None,
    secrets: str | Iterable[str] = (),
    must_end: bool = True,
    limits: Limits | None = None,
    only: str | Iterable[str] = (),
    strikes: int | None = None,
    calm: bool = False,
    jobs: int = 1,
    keep_on: bool = False,
    shrink: bool | None = None,
    progress: Progress | None = None,
) -> Report:
    """Play processes in many worlds, each with its own crashes, orders and delays, and check what must hold.

    `start` is an input, several, or a function of `random` and `number` that makes one; for several processes it is a
    mapping of processes to these. `stand_ins` play tasks by name; without one the task's own handler runs. `fakes` make
    what is outside anew for each world: they replace globals of the handlers' modules by name, and stand-ins and
    invariants take them as parameters. `messages` gives the payloads of the messages that are waited for. An invariant
    takes `history`, `ledger` and fakes; it asserts, or gives a text for what is wrong. `faults` are names (on in every
    world) or kinds (each world draws some of them); None draws from all.
    """
    simulation = Simulation(
        *processes,
        start=start,
        instances=instances,
        ids=ids,
        stand_ins=stand_ins,
        messages=messages,
        fakes=fakes,
        invariants=invariants,
        faults=faults,
        secrets=secrets,
        must_end=must_end,
        limits=limits,
    )
    return simulation.run(
        seeds,
        steps=steps,
        only=only,
        strikes=strikes,
        calm=calm,
        jobs=jobs,
        keep_on=keep_on,
        shrink=shrink,
        progress=progress,
    )


class _Run:
    """One run over many seeds."""

    def __init__(self, simulation: Simulation, cases: list[Case], progress: Progress | None) -> None:
        self._simulation = simulation
        self._cases = cases
        self._progress = progress
        self.report = Report(name=simulation.terms.name, asked=len(cases))

    def play(self, *, jobs: int, keep_on: bool, shrink: bool) -> None:
        known: dict[str, None] = {}
        with Crew(self._play if len(self._cases) > 1 else self._simulation.play, self._cases, jobs) as crew:
            for number, played in enumerate(crew):
                self.report.add(played.outcome)
                invariants = [violation.id for violation in played.outcome.violations]
                if invariants and invariants[0] not in known:
                    known[invariants[0]] = None
                    self.report.failures.append(self._failure(played, shrink=shrink))
                elif not invariants and number % REPEATED == 0:
                    self._repeat(played)
                if not self._is_wanted() or not (self.report.ok or keep_on):
                    return

    def _play(self, case: Case, *, recording: bool = False, diary: Diary | None = None) -> Played:
        """What handlers print would be printed for each of many worlds."""
        with contextlib.redirect_stdout(io.StringIO()):
            return self._simulation.play(case, recording=recording, diary=diary)

    def _is_wanted(self) -> bool:
        return self._progress is None or self._progress(self.report) is not False

    def _failure(self, found: Played, *, shrink: bool) -> Failure:
        again = self._play(found.case)
        if again.digest != found.digest:
            return self._not_deterministic(found)
        shortest = found
        if shrink:
            shortest = Shrinker(self._play, found, is_wanted=self._is_wanted).shrink()
        told = self._play(shortest.case, recording=True)
        if not any(violation.id == found.outcome.violations[0].id for violation in told.outcome.violations):
            return self._not_deterministic(shortest)
        return self._told(found, told, told.outcome.violations)

    def _repeat(self, played: Played) -> None:
        again = self._play(played.case)
        if again.digest != played.digest:
            self.report.failing_seeds.append(played.case.seed)
            self.report.failures.append(self._not_deterministic(played))

    def _not_deterministic(self, found: Played) -> Failure:
        diaries = Diary(), Diary()
        one, _ = (self._play(found.case, recording=True, diary=diary) for diary in diaries)
        text = first_difference(*diaries)
        return self._told(found, one, (Violation(NOT_DETERMINISTIC, text), *one.outcome.violations))

    def _told(self, found: Played, shown: Played, violations: tuple[Violation, ...]) -> Failure:
        wanted = found.outcome.violations[0].id if found.outcome.violations else violations[0].id
        first = [violation for violation in violations if violation.id in (NOT_DETERMINISTIC, wanted)]
        others = [violation for violation in violations if violation not in first]
        return Failure(
            name=self.report.name,
            found=found.case.seed,
            case=shown.case,
            drawn=shown.outcome.drawn,
            violations=(*first, *others),
            trace=shown.outcome.moments,
            steps=shown.outcome.steps,
            faults=shown.outcome.faults,
        )


def _strikes(seed: int) -> int:
    return round(math.exp(Random(f"{seed}/strikes").uniform(0, math.log(MOST_STRIKES))))


def _rate(seed: int, name: str) -> float:
    return math.exp(Random(f"{seed}/rate {name}").uniform(*map(math.log, RATES)))


class _InOrder(Told):
    def __init__(self) -> None:
        super().__init__(lambda _count: 0)

    def __str__(self) -> str:
        return "everything in its order"


_IN_ORDER: Final[Schedule] = _InOrder()


@contextlib.contextmanager
def _told(case: Case) -> Iterator[None]:
    """An error that is not about the process, such as one in an invariant, says in which world it came up."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the world of seed {case.seed}, {case.steps} steps")
        raise
