"""Torn files: databases and logs that were cut, flipped or mixed, opened by the real code.

Whatever was done to a file, it must read as it was written (*same*), as it was after one of its commits (*prefix*), or
not pass for good (*refused*: a typed error, an instance set aside, or a violation found by the audit). A file that
reads differently and passes for good is a violation, and so is an error that is none of ours. Tables whose rows carry
no checksum are counted apart, as `uncovered`. The damage of a case depends on the seed and its number alone; this
module must never look at a clock, or at the case before, to decide what a case is.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import attrs

from understudy.simulations.looking import Content, Look, content_of, look, look_by_audit, work_on
from understudy.simulations.tearing import KINDS, Damage, Files, Logs, Sample, draw_damage, make_sample
from understudy.store.connection import Settings
from understudy.store.operations import MoveCursor
from understudy.store.writer import Writer

Progress = Callable[[int, int], None]  # Told how many cases are done, of how many.

UNCOVERED: Final = ("owner", "message", "request", "work", "subscriber", "held", "schema")  # Rows without a checksum.
AUDITED_EVERY: Final = 5  # Of all cases; those that would else pass as different are always audited.
OPENED_EVERY: Final = 15  # Of all cases: a whole runtime works on the file.


@attrs.frozen(kw_only=True)
class TornReport:
    """What became of the cases."""

    seed: int
    cases: int
    outcomes: dict[str, dict[str, int]]  # By kind of damage, then "same", "prefix", "refused", "uncovered", "silent".
    refused_by: dict[str, int]  # Who was the first to refuse: "open", "load", "read" or "audit".
    uncovered: dict[str, int]  # Silent differences by table, in tables that have no checksum.
    rollbacks: int  # Prefixes that lack commits which somebody outside was told of.
    unseen: dict[str, int]  # Prefixes with nothing by which anybody could tell, by the tables that have lost rows.
    audits: int
    openings: int
    seconds: float
    violations: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def cases_per_s(self) -> float:
        return self.cases / self.seconds if self.seconds else 0.0

    def total(self, outcome: str) -> int:
        return sum(counts.get(outcome, 0) for counts in self.outcomes.values())

    def rows(self) -> list[tuple[str, str]]:
        """For a table: what was counted, and how often."""
        kinds = [
            (kind, ", ".join(f"{n:,} {name}" for name, n in counts.items())) for kind, counts in self.outcomes.items()
        ]
        return [
            ("torn files", f"{self.cases:,}"),
            *kinds,
            ("refused by", _counts(self.refused_by)),
            ("rollbacks noticed from outside", f"{self.rollbacks:,}"),
            ("rollbacks nobody can notice", _counts(self.unseen)),
            ("uncovered differences", _counts(self.uncovered)),
            ("audits, runtimes opened", f"{self.audits:,}, {self.openings:,}"),
            ("cases/s", f"{self.cases_per_s:,.0f}"),
            ("violations", f"{len(self.violations):,}"),
        ]


def torn_files(
    folder: str | Path, *, cases: int, seed: int, report: Progress | None = None, only: int | None = None
) -> TornReport:
    """Damage a small database in so many ways, one after the other; `only` is the number of one case to look at."""
    began_s = time.monotonic()
    with _quiet(), Bench(Path(folder), seed) as bench:
        numbers = range(cases) if only is None else range(only, only + 1)
        for done, number in enumerate(numbers, 1):
            bench.run(number)
            if report is not None:
                report(done, len(numbers))
    return bench.report(len(numbers), time.monotonic() - began_s)


# --- what is right ----------------------------------------------------------------------------------------------------


class Expected:
    """What the undamaged sample holds, says and does after each of its commits."""

    def __init__(self, sample: Sample, folder: Path) -> None:
        self.logs = Logs(sample)
        self._sample = sample
        self._folder = folder / "expected"
        self._folder.mkdir()
        self._path = self._folder / "rehearsal.db"
        self._contents = [self._content(commits) for commits in range(1, self.logs.total + 1)]
        self._found = {repr(content): commits for commits, content in enumerate(self._contents, 1)}
        self._looks: dict[int, Look] = {}
        self._works: dict[int, tuple[Look, Content]] = {}
        self.whole = self._contents[-1]
        self.ids = [row[2].decode() for row in self.whole["instance"]]  # type: ignore[union-attr]  # They can be read.

    def commits(self, content: Content) -> int | None:
        """After how many commits the sample was so; None if never."""
        return self._found.get(repr(content))

    def look(self, commits: int) -> Look:
        known = self._looks.get(commits)
        if known is None:
            self._files(commits).write(self._path)
            known = self._looks[commits] = look(self._path, self.ids, closely=False)
        return known

    def work(self, commits: int) -> tuple[Look, Content]:
        """What a runtime does on it, and what it leaves behind."""
        known = self._works.get(commits)
        if known is None:
            self._files(commits).write(self._path)
            known = self._works[commits] = work_on(self._folder), content_of(self._path)
        return known

    def _files(self, commits: int) -> Files:
        of_first = len(self.logs.first)
        files = self._sample.first if commits <= of_first else self._sample.second
        return attrs.evolve(files, log=files.log[: (self.logs.first + self.logs.second)[commits - 1]])

    def _content(self, commits: int) -> Content:
        self._files(commits).write(self._path)
        return content_of(self._path)


def _differences(one: Content, other: Content) -> list[str]:
    """The tables that differ."""
    return [table for table in one if one[table] != other[table]]


def last_seq(content: Content) -> int:
    """The place of the last commit in it."""
    rows = content["history"]
    return int(rows[-1][0]) if isinstance(rows, list) and rows else 0


# --- judging ----------------------------------------------------------------------------------------------------------


class Bench:
    """Where cases are made and judged, one after the other, in a folder that is there for as long as it is open."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._seed = seed
        self._folder = folder / "torn"
        self._path = self._folder / "rehearsal.db"
        self._case = ""
        self._outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
        self._refused_by: Counter[str] = Counter()
        self._uncovered: Counter[str] = Counter()
        self._unseen: Counter[str] = Counter()
        self._rollbacks = self._audits = self._openings = 0
        self._violations: dict[str, list[str]] = {}  # What is wrong, and the cases in which it was.

    def __enter__(self) -> Bench:
        self.sample = make_sample(self._folder)
        self._expected = Expected(self.sample, self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, number: int) -> None:
        damage = draw_damage(random.Random(f"{self._seed}/{number}"), self.sample, self._expected.logs)
        outcome = self.judge(damage, number, is_audited=number % AUDITED_EVERY == 0)
        self._outcomes[damage.kind][outcome] += 1
        if number % OPENED_EVERY == 0:
            self._openings += 1
            self._open(damage, outcome)

    def judge(self, damage: Damage, number: int = 0, *, is_audited: bool = True) -> str:
        """Read the damaged file: "same", "prefix", "refused", "uncovered" or "silent"; the last is a violation."""
        self._case = f"seed {self._seed}, case {number}: {damage.kind}, {damage.where}"
        damage.files.write(self._path)
        content = content_of(self._path)
        commits = self._expected.commits(content)
        if damage.commits is not None and commits is not None and commits != damage.commits:
            self._violate(f"a torn log reads as after commit {commits}, not {damage.commits}")
        found = look(self._path, self._expected.ids, closely=commits is None)
        wrong = self._wrong(commits, found)
        if is_audited or (wrong and not found.refused_by):
            self._audits += 1
            look_by_audit(self._path, found)
        for surprise in found.surprises:
            self._violate(surprise)
        if found.refused_by:
            self._refused_by[found.refused_by] += 1
            return "refused"
        if commits is not None and not wrong:
            return self._passed(content)
        return self._silent(content, wrong)

    def report(self, cases: int, seconds: float) -> TornReport:
        return TornReport(
            seed=self._seed,
            cases=cases,
            outcomes={kind: dict(sorted(counts.items())) for kind, counts in self._outcomes.items() if counts},
            refused_by=dict(sorted(self._refused_by.items())),
            uncovered=dict(sorted(self._uncovered.items())),
            rollbacks=self._rollbacks,
            unseen=dict(sorted(self._unseen.items())),
            audits=self._audits,
            openings=self._openings,
            seconds=seconds,
            violations=tuple(
                f"{what} ({len(cases)} times, first {cases[0]})" for what, cases in self._violations.items()
            ),
        )

    # --- reading ---

    def _wrong(self, commits: int | None, found: Look) -> list[str]:
        """The questions whose answers are not those of the commit that the content is of."""
        if commits is None:
            return ["rows"]
        expected = self._expected.look(commits).answers
        return [question for question, answer in found.answers.items() if answer != expected.get(question)]

    def _passed(self, content: Content) -> str:
        lost = _differences(content, self._expected.whole)
        if not lost:
            return "same"
        if last_seq(content) < last_seq(self._expected.whole):
            self._rollbacks += 1
        else:
            self._unseen[", ".join(lost)] += 1
        return "prefix"

    def _silent(self, content: Content, wrong: list[str]) -> str:
        tables = _differences(content, self._expected.whole)
        if tables and all(table in UNCOVERED for table in tables):
            self._uncovered[", ".join(tables)] += 1
            return "uncovered"
        what = f"rows of {', '.join(tables)}" if tables else f"answers to {', '.join(wrong)}"
        self._violate(f"{what} differ, and nobody notices")
        return "silent"

    # --- working ---

    def _open(self, damage: Damage, outcome: str) -> None:
        """Let the next owner work on the file: what was good stays good, and no damage comes to look good."""
        content = content_of(self._path)  # As it was judged: reading has changed nothing.
        commits = self._expected.commits(content)
        folder = self._folder / f"opened-{self._openings}"  # A new one: a runtime that fails may leave files open.
        folder.mkdir()
        path = folder / self._path.name
        damage.files.write(path)
        done = work_on(folder)
        for surprise in done.surprises:
            self._violate(f"{surprise}, in a runtime")
        if not done.refused_by:
            if outcome in ("same", "prefix") and commits is not None:
                self._compare(path, done, commits)
            elif outcome == "refused" and damage.kind == "file flip":
                self._look_again(path, content)
        shutil.rmtree(folder, ignore_errors=True)
        if outcome == "prefix":
            self._tell_from_outside(damage, content)

    def _compare(self, path: Path, done: Look, commits: int) -> None:
        expected, content = self._expected.work(commits)
        wrong = [question for question, answer in done.answers.items() if answer != expected.answers[question]]
        if wrong or _differences(content_of(path), content):
            self._violate(f"a runtime on it does otherwise: {', '.join(wrong) or 'it leaves other rows'}")

    def _look_again(self, path: Path, content: Content) -> None:
        """Damage that was noticed must still be, unless it was in rows that nobody checks or is gone."""
        damaged = [table for table in _differences(content, self._expected.whole) if table not in UNCOVERED]
        again = Look()
        look_by_audit(path, again)
        if damaged and not again.refused_by and not again.surprises:
            left = _differences(content_of(path), self._expected.work(self._expected.logs.total)[1])
            if left:
                self._violate(f"damage in {', '.join(damaged)} passes for good once a runtime was there")

    def _tell_from_outside(self, damage: Damage, content: Content) -> None:
        """A subscriber that keeps its cursor elsewhere says how far it was told; the audit must see what is missing."""
        told = last_seq(self._expected.whole)
        damage.files.write(self._path)
        writer = Writer(str(self._path), Settings(durability="relaxed"))
        try:
            writer.take_over("outside")
            writer.run(MoveCursor("outside", told))
        finally:
            writer.close()
        is_noticed = "I8" in look_by_audit(self._path, Look())
        if is_noticed != (last_seq(content) < told):
            self._violate("a subscriber that is ahead of the file is not noticed by the audit")

    def _violate(self, what: str) -> None:
        self._violations.setdefault(what, []).append(self._case)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Damaged files make the runtime's log long, and say nothing new."""
    log = logging.getLogger("understudy")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"
