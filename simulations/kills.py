"""Real files, real kills: a service is killed, or stopped past its lease and replaced, again and again.

The parent hears each acknowledgement from the life that gave it, ends that life at a moment drawn from the seed, and
opens the file: nothing acknowledged may be missing, and nothing may be in it that could not be. What is drawn depends
on the seed and the number of the loop; what the kernel makes of it does not, so that a loop that has failed may pass
when it is run again. A few loops share a file, and then a last life brings all that is open to its end.
"""

from __future__ import annotations

import random
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import attrs

from understudy.simulations.book import Book
from understudy.simulations.child import ACKNOWLEDGEMENTS, Order
from understudy.simulations.lives import Life, Lives

Progress = Callable[[int, int], None]  # Told how many loops are done, of how many.

LOOPS_OF_A_BOOK: Final = 20  # On one file: an audit reads all of it after each.
LIVES_OF_A_LOOP: Final = 2
LATEST_KILL_S: Final = 0.020  # After the first acknowledgement, or after the beginning.
EARLY_SHARE: Final = 0.15  # Of the kills: while the life opens the file, and recovers from the one before.
STANDBY_SHARE: Final = 0.8  # Of the rivals. One that comes later first tries for a while to reach the owner.
NUDGE_S: Final = 0.002
LEASE_MS: Final = 60


@attrs.frozen(kw_only=True)
class KillReport:
    """What was done, and what came of it."""

    seed: int
    loops: int
    kills: int
    early_kills: int  # Before the life had acknowledged anything.
    stops: int  # Owners that were stopped, replaced and woken up.
    nudges: int  # Stops that had to be repeated, because they had struck inside a write.
    acknowledgements: int
    lost: int
    unacknowledged: int  # Done, and nobody was told of it.
    calls: int  # Of handlers, each attempt counted once.
    instances: int
    commits: int
    seconds: float
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def loops_per_s(self) -> float:
        return self.loops / self.seconds if self.seconds else 0.0

    def rows(self) -> list[tuple[str, str]]:
        """For a table: what was counted, and how often."""
        return [
            ("kill loops", f"{self.loops:,}"),
            ("kills, of them while opening", f"{self.kills:,}, {self.early_kills:,}"),
            ("owners stopped and replaced", f"{self.stops:,}"),
            ("acknowledgements", f"{self.acknowledgements:,}"),
            ("acknowledgements lost", f"{self.lost:,}"),
            ("unacknowledged but durable", f"{self.unacknowledged:,}"),
            ("instances, commits", f"{self.instances:,}, {self.commits:,}"),
            ("attempts of handlers", f"{self.calls:,}"),
            ("loops/s", f"{self.loops_per_s:,.1f}"),
            ("violations", f"{len(self.violations):,}"),
        ]


def kill_loops(
    folder: str | Path,
    *,
    loops: int,
    seed: int,
    stop_share: float = 0.2,
    report: Progress | None = None,
    only: int | None = None,
) -> KillReport:
    """Kill a service so many times. `only` is the number of one loop: those before it on the same file run too."""
    first, last = (0, loops) if only is None else (only - only % LOOPS_OF_A_BOOK, only + 1)
    began_s = time.monotonic()
    place = Path(folder) / "kills"
    place.mkdir(parents=True, exist_ok=True)
    with Lives() as lives:
        butcher = _Butcher(lives, place, seed, stop_share)
        for loop in range(first, last):
            butcher.run(loop, is_last=loop + 1 in (last, loop + LOOPS_OF_A_BOOK - loop % LOOPS_OF_A_BOOK))
            if report is not None:
                report(loop - first + 1, last - first)
    if not butcher.violations:
        shutil.rmtree(place, ignore_errors=True)
    return butcher.report(last - first, time.monotonic() - began_s)


@attrs.frozen(kw_only=True)
class Draw:
    """What a loop draws."""

    is_stop: bool
    is_early: bool
    after_s: float
    role: str  # Of the life that is stopped: "owner" gives up when it is replaced, "auto" becomes a client.
    is_standby: bool  # The rival is there before, and calls through the owner.


def draw_loop(seed: int, loop: int, *, stop_share: float) -> Draw:
    """The first life on a file is never killed early: there would be nothing to look at."""
    chance = random.Random(f"{seed}/{loop}")
    is_stop = chance.random() < stop_share
    is_early = chance.random() < EARLY_SHARE and not is_stop and loop % LOOPS_OF_A_BOOK > 0
    after_s = chance.uniform(0, LATEST_KILL_S)
    return Draw(
        is_stop=is_stop,
        is_early=is_early,
        after_s=after_s,
        role=chance.choice(("owner", "auto")),
        is_standby=chance.random() < STANDBY_SHARE,
    )


class _Butcher:
    """Runs the loops, one book after the other."""

    def __init__(self, lives: Lives, folder: Path, seed: int, stop_share: float) -> None:
        self.violations: list[str] = []
        self._lives = lives
        self._folder = folder
        self._seed = seed
        self._stop_share = stop_share
        self._book: Book | None = None
        self._books: list[Book] = []
        self._kills = self._early = self._stops = self._nudges = self._unacknowledged = 0

    def run(self, loop: int, *, is_last: bool) -> None:
        book = self._book = self._book or self._open(loop)
        draw = draw_loop(self._seed, loop, stop_share=self._stop_share)
        try:
            if draw.is_stop:
                self._stop(book, loop, draw)
            else:
                self._kill(book, loop, draw)
            self._violate(loop, book.check())
            if is_last:
                self._finish(book, loop)
                self._violate(loop, book.check_end())
        except _Useless as error:
            self._violate(loop, [str(error)])
        if is_last:
            self._unacknowledged += book.unacknowledged()
            self._book = None
            if not self.violations:  # Else the file is kept, for whoever wants to look into it.
                shutil.rmtree(book.path.parent, ignore_errors=True)

    def report(self, loops: int, seconds: float) -> KillReport:
        return KillReport(
            seed=self._seed,
            loops=loops,
            kills=self._kills,
            early_kills=self._early,
            stops=self._stops,
            nudges=self._nudges,
            acknowledgements=sum(len(book.acknowledged) for book in self._books),
            lost=sum(len(book.lost) for book in self._books),
            unacknowledged=self._unacknowledged,
            calls=sum(len(book.calls) for book in self._books),
            instances=sum(book.instances for book in self._books),
            commits=sum(book.commits for book in self._books),
            seconds=seconds,
            violations=tuple(self.violations),
        )

    def _open(self, loop: int) -> Book:
        folder = self._folder / f"from-{loop}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        book = Book(folder / "killed.db")
        self._books.append(book)
        return book

    # --- the ends of lives ---

    def _kill(self, book: Book, loop: int, draw: Draw) -> None:
        life = self._begin("serve", book, LIVES_OF_A_LOOP * loop)
        if not draw.is_early:
            self._await(life, "acknowledges anything", *ACKNOWLEDGEMENTS)
        self._lives.listen_for(draw.after_s)
        self._end(book, life)
        self._kills += 1
        self._early += not life.has_acknowledged

    def _stop(self, book: Book, loop: int, draw: Draw) -> None:
        """Stop an owner past its lease, let a rival take over, and wake it up: it must commit nothing more."""
        first = LIVES_OF_A_LOOP * loop
        owner = self._begin("serve", book, first, role=draw.role, lease_ms=LEASE_MS)
        self._await(owner, "acknowledges anything", *ACKNOWLEDGEMENTS)
        rival = self._begin("serve", book, first + 1, role="auto", lease_ms=LEASE_MS) if draw.is_standby else None
        if rival is not None:
            self._await(rival, "finds the owner", *ACKNOWLEDGEMENTS)
        self._lives.listen_for(draw.after_s)
        self._stand_still(book, owner)
        if rival is None:
            rival = self._begin("serve", book, first + 1, role="auto", lease_ms=LEASE_MS)
        self._await(rival, "takes over", "owner")
        self._replaced(book, loop, owner, rival)
        self._lives.listen_for(draw.after_s)
        self._end(book, rival)
        self._end(book, owner)
        self._stops += 1

    def _replaced(self, book: Book, loop: int, owner: Life, rival: Life) -> None:
        book.fence(rival.epoch)
        if rival.epoch <= owner.epoch:
            self._violate(loop, [f"I10: the rival serves in epoch {rival.epoch}, the owner in {owner.epoch}"])
        self._lives.wake(owner)
        self._await(owner, "notices that it was replaced", "deposed")

    def _stand_still(self, book: Book, life: Life) -> None:
        """Outside of its writes: one that stands still inside of one keeps SQLite's own lock, which nobody can take."""
        self._lives.stop(life)
        while _is_locked(book.path):
            self._nudges += 1
            self._lives.wake(life)
            self._lives.listen_for(NUDGE_S)
            self._lives.stop(life)

    def _finish(self, book: Book, loop: int) -> None:
        life = self._begin("finish", book, LIVES_OF_A_LOOP * (loop + 1))
        self._await(life, "brings everything to its end", "finished")
        self._lives.bury(life)
        book.hear(life.lines)

    def _begin(self, do: str, book: Book, life: int, *, role: str = "owner", lease_ms: int = 1_000) -> Life:
        return self._lives.begin(
            Order(do, path=str(book.path), life=life, seed=str(self._seed), role=role, lease_ms=lease_ms)
        )

    def _end(self, book: Book, life: Life) -> None:
        code = self._lives.kill(life)
        book.hear(life.lines)
        if code != -signal.SIGKILL:
            raise _Useless(f"a life has ended by itself (exit code {code}); the last it said is {life.lines[-1:]}")

    def _await(self, life: Life, what: str, *words: str) -> None:
        if not self._lives.listen(lambda: life.has_said(*words)):
            why = self._lives.explain(life)
            self._lives.kill_all()
            raise _Useless(f"a life never {what}: {why}")

    def _violate(self, loop: int, found: list[str]) -> None:
        self.violations += (f"seed {self._seed}, loop {loop}: {what}" for what in found)


class _Useless(Exception):
    """A life does not do what it is there for."""


def _is_locked(path: Path) -> bool:
    database = sqlite3.connect(path, timeout=0, isolation_level=None)
    try:
        database.execute("BEGIN IMMEDIATE")
        database.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return True
    finally:
        database.close()
    return False
