"""Every write boundary of a scenario: it is played again and again on the simulated disk, and dies at the first
operation of the disk, at the second, and so on to the last.

Nothing is sampled. Each death is a kill (what was written is there), or a power cut (what was not synced is kept, lost
or torn), or no death but a disk that is full or fails from that operation on for a while. After it the process comes
back, the scenario goes on to its end, and everything is checked. Under `relaxed` a power cut may take acknowledged
commits back: there the database must be exactly a prefix of what was committed, and nothing else is asked of clients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

import attrs

from understudy.simulations.disk import Disk, FaultKind
from understudy.simulations.disk_storage import PATH, DiskStorage, prepared_disk
from understudy.simulations.node import Life
from understudy.simulations.playing import Outcome, play
from understudy.simulations.plugins import SCENARIOS
from understudy.simulations.world import World
from understudy.store.commit import Commit
from understudy.store.connection import Settings

KILL: Final = "kill"
POWER: Final = "power"
MODES: Final = (KILL, POWER, "full", "write", "sync", "read", "busy")
PAGES: Final = 20  # After which the log is folded into the file: often, so that this is interrupted too.
FAULT_COUNTS: Final = (1, 3, 25)  # How many operations a failing disk refuses.
STEPS: Final = 40


class DiskMemory:
    """The place of a world's database: a disk, and after its death the next one."""

    def __init__(self, disk: Disk, *, mode: str, random: Random, nested: Sequence[int] = ()) -> None:
        self.disk = disk
        self.deaths = 0
        self.operations = 0  # Of all disks that are dead.
        self._mode = mode
        self._random = random
        self._nested = list(nested)  # At which operation the following lives die.

    @property
    def is_dead(self) -> bool:
        return self.disk.is_dead

    def storage(self) -> DiskStorage:
        if self.disk.is_dead:
            self.deaths += 1
            self.operations += len(self.disk.operations)
            self.disk = self.disk.power_cut(self._random) if self._mode == POWER else self.disk.kill()
            if self._nested:
                self.disk.crash_at = self._nested.pop(0)
        return DiskStorage(self.disk)

    def peek(self, statement: str) -> list[Any]:
        rows: list[Any] = DiskStorage(self.disk).reader(PATH).connection().execute(statement).fetchall()
        return rows

    def close(self) -> None:
        """Nothing outlives a disk."""


@attrs.frozen(kw_only=True)
class Point:
    """One way to die, or to fail."""

    scenario: str
    seed: int
    mode: str
    at: int
    count: int = 1
    nested: tuple[int, ...] = ()
    durability: str = "full"
    steps: int = STEPS

    def __str__(self) -> str:
        return (
            f"python -m understudy.simulations boundary {self.scenario} --seed {self.seed} --steps {self.steps} "
            f"--mode {self.mode} --at {self.at} --count {self.count} --durability {self.durability}"
            + "".join(f" --nested {at}" for at in self.nested)
        )


@attrs.frozen(kw_only=True)
class BoundaryReport:
    """What the enumeration of one scenario came to."""

    scenario: str
    boundaries: int  # How many operations the quiet run has.
    points: int
    deaths: int
    lives: int
    seconds: float
    lost: int  # Commits that a power cut took back under `relaxed`.
    violations: tuple[str, ...]


def enumerate_boundaries(
    scenario: str,
    *,
    seed: int = 1,
    steps: int = STEPS,
    modes: Sequence[str] = (KILL, POWER),
    durability: str = "full",
    stride: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> BoundaryReport:
    """Go through all of them; `stride` leaves some out."""
    began_s = time.perf_counter()
    boundaries = quiet_length(scenario, seed=seed, steps=steps, durability=durability)
    points = list(_points(scenario, seed, steps, modes, durability, range(1, boundaries + 1, stride)))
    violations: list[str] = []
    deaths = lives = lost = 0
    for number, point in enumerate(points):
        outcome, memory, missing = visit(point)
        deaths += memory.deaths
        lives += outcome.lives
        lost += missing
        violations += [f"{point}: {violation}" for violation in outcome.violations]
        if progress is not None:
            progress(number + 1, len(points))
    return BoundaryReport(
        scenario=scenario,
        boundaries=boundaries,
        points=len(points),
        deaths=deaths,
        lives=lives,
        seconds=time.perf_counter() - began_s,
        lost=lost,
        violations=tuple(violations),
    )


def quiet_length(scenario: str, *, seed: int, steps: int, durability: str) -> int:
    """How many operations the disk sees when nothing goes wrong; it must not go wrong then."""
    point = Point(scenario=scenario, seed=seed, mode=KILL, at=0, durability=durability, steps=steps)
    outcome, memory, _ = visit(point)
    assert outcome.ok, f"{point}: {outcome.violations[0]}"
    return len(memory.disk.operations)


def visit(point: Point, *, recording: bool = False) -> tuple[Outcome, DiskMemory, int]:
    """Play one of them; the outcome, the disk at the end, and how many commits are missing there."""
    disk = prepared_disk(seed=point.seed)
    if point.mode in (KILL, POWER):
        disk.crash_at = point.at or None
    elif point.at:
        disk.fail(_fault_kind(point.mode), at=point.at, count=point.count)
    random = Random(f"{point.seed}/{point.mode}/{point.at}")
    memory = DiskMemory(disk, mode=point.mode, random=random, nested=point.nested)
    settings = Settings(durability=point.durability, checkpoint_pages=PAGES, cache_kib=1_024)
    scenario = SCENARIOS[point.scenario]
    landed = _Landed()
    may_lose = point.durability == "relaxed" and point.mode == POWER
    given = attrs.evolve(
        scenario,
        options={**scenario.options, "settings": settings},
        begin=lambda world: landed.watch(world, scenario.begin, may_lose=may_lose),
        check=landed.prefix if may_lose else scenario.check,
    )
    outcome = play(
        given,
        point.seed,
        steps=point.steps,
        faults=(),
        memory=memory,
        recording=recording,
        only=("Audited",) if may_lose else None,
    )
    return outcome, memory, landed.missing


class _Landed:
    """What was committed, and what of it is there at the end."""

    def __init__(self) -> None:
        self._versions: dict[str, int] = {}
        self.missing = 0

    def watch(self, world: World, begin: Callable[[World], None], *, may_lose: bool) -> None:
        world.may_lose = may_lose
        world.on_landed.append(self._note)
        begin(world)

    def _note(self, _life: Life, commit: Commit, version: int) -> None:
        self._versions[commit.id] = max(self._versions.get(commit.id, 0), version)

    def prefix(self, world: World) -> Iterator[str]:
        """Whether a node is up. The audit says that each history is whole; here is counted how much of it is gone.

        Clients start again what is gone, so that other commits may have the old numbers at the end.
        """
        life = world.owner
        if life is None:
            yield "no node is up at the end"
            return
        for id_, version in self._versions.items():
            found = life.reads.find(id_)
            self.missing += max(0, version - (0 if found is None else found.version))


def _points(
    scenario: str, seed: int, steps: int, modes: Sequence[str], durability: str, numbers: range
) -> Iterator[Point]:
    for mode in modes:
        for at in numbers:
            counts = (1,) if mode in (KILL, POWER) else FAULT_COUNTS
            # Every third death is followed by another one while the process comes back.
            nested = (1 + at * 7 % 43,) if mode in (KILL, POWER) and at % 3 == 0 else ()
            for count in counts:
                yield Point(
                    scenario=scenario,
                    seed=seed,
                    steps=steps,
                    mode=mode,
                    at=at,
                    count=count,
                    nested=nested,
                    durability=durability,
                )


def _fault_kind(mode: str) -> FaultKind:
    assert mode in MODES, f"a boundary is visited in one of {', '.join(MODES)}, not {mode!r}"
    return mode  # type: ignore[return-value]  # As just checked.
