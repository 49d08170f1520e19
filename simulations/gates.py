"""Many seeds, one verdict: what every commit must pass, and how a hunter goes through seeds until one fails.

Each case of the gate is played twice, in two processes whose hashes of texts differ, and the digests of both traces
must be equal (I16): an order that depends on such a hash, on a clock or on memory addresses shows there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

import understudy.simulations.checkers
import understudy.simulations.faults
import understudy.simulations.scenarios  # noqa: F401  # These three fill the tables.
from understudy.simulations.playing import Outcome, play
from understudy.simulations.plugins import PROBES, SCENARIOS

STEPS: Final = 2_000
MAIN: Final = "random_processes"  # Every second seed plays it; the others take turns.
LONG_EVERY: Final = 35  # Of the seeds that do not play it, one in so many plays a scenario with many more steps.
HASH_SEEDS: Final = ("1", "4242")


class Case(msgspec.Struct, frozen=True):
    """One world to be played."""

    scenario: str
    seed: int
    steps: int | None = None  # None: as many as the scenario says.

    def __str__(self) -> str:
        steps = "" if self.steps is None else f" --steps {self.steps}"
        return f"python -m understudy.simulations play {self.scenario} --seed {self.seed}{steps}"


class Verdict(msgspec.Struct):
    """What became of a case, in a form that crosses a pipe."""

    case: Case
    digest: str
    steps: int
    seconds: float
    violations: list[str]
    drawn: list[str]
    faults: dict[str, int]
    probes: dict[str, int]
    lives: int
    commits: int


class Tally(msgspec.Struct):
    """The sum of many verdicts."""

    worlds: int = 0
    steps: int = 0
    seconds: float = 0.0
    lives: int = 0
    commits: int = 0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    probes: Counter[str] = msgspec.field(default_factory=Counter)
    failures: list[str] = []

    def add(self, verdict: Verdict) -> None:
        self.worlds += 1
        self.steps += verdict.steps
        self.seconds += verdict.seconds
        self.lives += verdict.lives
        self.commits += verdict.commits
        self.faults.update(verdict.faults)
        self.probes.update(verdict.probes)
        if verdict.violations:
            self.failures.append(f"{verdict.case}: {verdict.violations[0]}")

    @property
    def missed_probes(self) -> list[str]:
        return sorted(set(PROBES) - set(self.probes))


def gate_cases(count: int, *, first: int = 0) -> list[Case]:
    """The seeds of a gate: every second one is drawn processes, the others take turns; long scenarios come rarely."""
    short = sorted(name for name, scenario in SCENARIOS.items() if name != MAIN and scenario.steps <= STEPS)
    long = sorted(name for name, scenario in SCENARIOS.items() if scenario.steps > STEPS)
    return [Case(_scenario(seed, short, long), seed) for seed in range(first, first + count)]


def _scenario(seed: int, short: list[str], long: list[str]) -> str:
    if seed % 2 == 0:
        return MAIN
    turn, rest = divmod(seed // 2, LONG_EVERY)
    if rest == 0 and long:
        return long[turn % len(long)]
    return short[seed // 2 % len(short)]


def verdict(case: Case) -> Verdict:
    outcome = play(case.scenario, case.seed, steps=case.steps)
    return told(case, outcome)


def told(case: Case, outcome: Outcome) -> Verdict:
    return Verdict(
        case=case,
        digest=outcome.digest,
        steps=outcome.steps,
        seconds=outcome.seconds,
        violations=[str(violation) for violation in outcome.violations],
        drawn=list(outcome.drawn),
        faults=dict(outcome.faults),
        probes=dict(outcome.probes),
        lives=outcome.lives,
        commits=outcome.commits,
    )


def hunt(cases: Iterable[Case], *, seen: Callable[[Verdict], None] | None = None) -> Verdict | None:
    """Play until one fails."""
    for case in cases:
        found = verdict(case)
        if seen is not None:
            seen(found)
        if found.violations:
            return found
    return None


def twice(cases: Sequence[Case]) -> tuple[Tally, list[str]]:
    """Play all cases in two processes at once; the tally of one, and all that is wrong with either."""
    parts = [_Part(cases, hash_seed) for hash_seed in HASH_SEEDS]
    with ThreadPoolExecutor(len(parts)) as listeners:  # Both at once: a full pipe would stop the one nobody listens to.
        first, second = listeners.map(lambda part: list(part.verdicts()), parts)
    tally = Tally()
    for one in first:
        tally.add(one)
    problems = list(tally.failures)
    for one, other in zip(first, second, strict=True):
        if one.digest != other.digest:
            problems.append(f"{one.case}: I16: two runs of one seed differ ({one.digest} and {other.digest})")
    return tally, problems


class _Part:
    """A process that plays cases and tells of each."""

    def __init__(self, cases: Sequence[Case], hash_seed: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "understudy.simulations", "verdicts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(list(cases)))
        self._process.stdin.close()

    def verdicts(self) -> Iterator[Verdict]:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                yield msgspec.json.decode(line, type=Verdict)
        if self._process.wait() != 0:
            raise RuntimeError(f"a process that plays worlds has ended with {self._process.returncode}")


def tell_verdicts() -> None:
    """What such a process does."""
    for case in msgspec.json.decode(sys.stdin.buffer.read(), type=list[Case]):
        sys.stdout.buffer.write(msgspec.json.encode(verdict(case)) + b"\n")
        sys.stdout.buffer.flush()
