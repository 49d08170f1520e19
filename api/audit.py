"""Whether a database holds what was written to it: every instance, its history, and what stands around them.

An audit only reads, and it may read beside a running service. It keeps no transaction open for that: the rows of an
instance come from one statement, and its history, which only grows, is cut to their version. Whatever is wrong is a
`Violation` and the audit goes on; an instance that cannot be read is one violation, however much of it is broken.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import attrs
import peewee

from understudy.actors.system import Limits
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import Damaged, UnderstudyError
from understudy.model.invariants import Mark, Subject, Violation, examine
from understudy.model.values import digest
from understudy.store.connection import explained
from understudy.store.loading import Loaded, load
from understudy.store.ownership import OwnerFile
from understudy.store.reads import Reads, Record
from understudy.store.schema import TABLES

PAGE: Final = 200  # Instances that are read together.
MOST_LINES: Final = 50  # Violations that are shown to people; `as_dict` has all.

Progress = Callable[[int, int], None]  # Told how many instances are done, of how many.


@attrs.frozen(kw_only=True)
class Report:
    """What an audit has found."""

    instances: int
    commits: int
    violations: tuple[Violation, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.violations

    @property
    def lines(self) -> tuple[str, ...]:
        """For people: one line for each violation, then what was read."""
        shown = [str(violation) for violation in self.violations[:MOST_LINES]]
        if len(self.violations) > MOST_LINES:
            shown.append(f"... and {len(self.violations) - MOST_LINES:,} more")
        read = f"{self.instances:,} instances with {self.commits:,} commits, read in {self.seconds:.1f} s"
        if self.ok:
            return (f"Everything is as it was written: {read}.",)
        advice = "Do not go on with this file: find out what happened to the disk, and restore a backup."
        return (*shown, f"{len(self.violations):,} violation(s) in {read}.", advice)

    def as_dict(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "instances": self.instances,
            "commits": self.commits,
            "seconds": round(self.seconds, 3),
            "violations": [attrs.asdict(violation) for violation in self.violations],
        }


def audit(reads: Reads, *, progress: Progress | None = None) -> Report:
    """Read everything and check it."""
    began_s = time.monotonic()
    walk = _Walk(reads)
    for id_, question in _QUESTIONS:
        walk.ask(id_, question)
    walk.ask("rows", lambda _reads: walk.instances(progress))
    walk.ask("I10", walk.epochs)
    return Report(
        instances=walk.read,
        commits=walk.commits,
        violations=tuple(walk.violations),
        seconds=time.monotonic() - began_s,
    )


class _Walk:
    """The way through a database."""

    def __init__(self, reads: Reads) -> None:
        self._reads = reads
        self._graphs: dict[int, Graph] = {}
        self._kept_ms = Limits().keep_answers_ms
        self._highest_epoch = 0
        self.read = 0
        self.commits = 0
        self.violations: list[Violation] = []

    def ask(self, id_: str, question: Callable[[Reads], Iterator[str | Violation]]) -> None:
        """Take all answers. A question that cannot be answered is a violation too: the file is not readable there."""
        try:
            for answer in question(self._reads):
                self.violations.append(Violation(id_, answer) if isinstance(answer, str) else answer)
        except UnderstudyError as error:
            self.violations.append(Violation(id_, str(error)))

    def instances(self, progress: Progress | None) -> Iterator[Violation]:
        total = sum(self._reads.count().values())
        page: list[str] = []
        for id_ in self._reads.ids(page=PAGE):
            page.append(id_)
            if len(page) == PAGE:
                yield from self._page(page)
                page.clear()
                if progress is not None:
                    progress(self.read, total)
        yield from self._page(page)
        if progress is not None:
            progress(self.read, total)

    def _page(self, ids: list[str]) -> Iterator[Violation]:
        with explained(self._reads.path):
            found = load(self._reads.connection(), ids, self._graph) if ids else {}
        for id_ in ids:
            self.read += 1
            loaded = found.get(id_)
            try:
                if not isinstance(loaded, Loaded):
                    raise loaded or Damaged("it is in the list of instances, but its row is not found")
                records = self._records(id_, loaded.stored.version)
            except UnderstudyError as error:
                yield Violation("rows" if not isinstance(loaded, Loaded) else "I11", str(error), id_)
            else:
                yield from self._examine(id_, loaded, records)

    def _records(self, id_: str, version: int) -> list[Record]:
        """The history up to the version that was read; a service may have gone on since."""
        records = self._reads.check_chain(id_)[:version]
        self.commits += len(records)
        if len(records) < version:
            raise Damaged(f"it is at version {version}, but only {len(records)} commits of it are there")
        return records

    def _examine(self, id_: str, loaded: Loaded, records: list[Record]) -> list[Violation]:
        try:
            commits = [record.entries for record in records]
        except ValueError as error:
            return [Violation("I11", f"its history cannot be decoded ({error})", id_)]
        entries = tuple(entry for commit in commits for entry in commit)
        sizes = tuple(len(commit) for commit in commits)
        marks = tuple(Mark(record.n, record.epoch) for record in records)
        self._highest_epoch = max(self._highest_epoch, *(mark.epoch for mark in marks))
        return examine(
            Subject(
                instance=loaded.instance,
                graph=loaded.graph,
                history=entries,
                marks=marks,
                sizes=sizes,
                version=loaded.stored.version,
                answers_kept_ms=self._kept_ms,
            )
        )

    def _graph(self, no: int) -> Graph:
        found = self._graphs.get(no)
        if found is None:
            row = self._reads.definition(no)
            if row is None:
                raise Damaged(f"its definition {no} is missing")
            found = self._graphs[no] = Graph(decode_definition(row[0]), version=row[1], no=no)
        return found

    def epochs(self, reads: Reads) -> Iterator[str]:
        """Asked last: the owner's epoch only rises."""
        epoch = reads.owner()[1]
        if epoch < self._highest_epoch:
            yield f"the owner's epoch is {epoch}, but there are commits of epoch {self._highest_epoch}"


# --- what concerns the whole database ---------------------------------------------------------------------------------


def _pages(reads: Reads) -> Iterator[str]:
    return (row[0] for row in reads.rows("PRAGMA integrity_check(20)") if row[0] != "ok")


def _references(reads: Reads) -> Iterator[str]:
    for table, row, parent, _key in reads.rows("PRAGMA foreign_key_check"):
        yield f"a row of {table} ({row}) refers to one of {parent} that is not there"


def _definitions(reads: Reads) -> Iterator[str]:
    for no, name, version, written in reads.definitions():
        row = reads.definition(no)
        if row is None or digest(row[0]) != written:
            yield f"version {version} of {name!r} is not what was deployed"


def _tail(reads: Reads) -> Iterator[str]:
    """A chain cannot see that its newest links are missing; whoever was told of them can."""
    told = [*reads.subscribers(), *((hold[0], hold[3]) for hold in reads.held())]
    last = reads.last_seq()  # After the cursors: it only rises.
    for subscriber, cursor in told:
        if cursor > last:
            yield f"{subscriber} was told of commit {cursor}, but the last one here is {last}: newer ones are lost"


def _stray_commits(reads: Reads) -> Iterator[str]:
    for name, version, rows in reads.rows(_STRAYS):
        if name is None:
            yield f"{rows} commits belong to no instance"
        else:
            yield f"{name} is at version {version}, but {rows} commits are its own"


def _assignments(reads: Reads) -> Iterator[str]:
    for message, name, instance, wait in reads.rows(_ASTRAY):
        yield f"message {message} ({name}) is assigned to wait {wait} of {instance}, which does not wait for it"


def _unclaimed(reads: Reads) -> Iterator[str]:
    for message, name, instance, wait in reads.rows(_APART):
        yield f"message {message} ({name}) lies unused while wait {wait} of {instance} waits for it"


def _committers(reads: Reads) -> Iterator[str]:
    """Whoever was replaced commits no more: along the one sequence epochs only rise."""
    for seq, epoch, before in reads.rows(_BACKWARDS):
        yield f"commit {seq} is of epoch {epoch}, and stands behind one of epoch {before}"


def _secrets(reads: Reads) -> Iterator[str]:
    """The owner's control secret lets whoever knows it command the runtime: it belongs into the owner file alone."""
    secret = _control_secret(reads.path)
    if secret is None:
        return
    for table in TABLES:
        named = table._meta.table_name
        texts = [field.column_name for field in table._meta.sorted_fields if isinstance(field, peewee.TextField)]
        for column in texts:
            statement = f'SELECT count(*) FROM "{named}" WHERE instr("{column}", ?) > 0'
            if reads.rows(statement, (secret,))[0][0]:
                yield f"the owner's control secret stands in {named}.{column}; open a Runtime, which makes a new one"


def _control_secret(path: str) -> str | None:
    """None where there is no owner file, which asking would make, or none that we may read."""
    if not Path(f"{os.path.realpath(path)}-owner").is_file():
        return None
    try:
        with OwnerFile.of(path) as file:
            address = file.address()
    except UnderstudyError:
        return None
    return None if address is None else address.secret


def _recorded_results(reads: Reads) -> Iterator[str]:
    for instance, task in reads.rows(_LEFT_OVER):
        yield f"the result of task {task} of {instance} is recorded, but nobody will use it"


# The rows of history are counted in one pass: there is no index by instance.
_STRAYS: Final = """
SELECT i.id, i.version, h.rows FROM (SELECT instance, count(*) AS rows FROM history GROUP BY instance) h
LEFT JOIN instance i ON i.no = h.instance WHERE i.no IS NULL OR h.rows > i.version
"""
_ASTRAY: Final = """
SELECT m.no, m.name, i.id, m.wait FROM message m LEFT JOIN instance i ON i.no = m.instance
LEFT JOIN wait w ON w.instance = m.instance AND w.id = m.wait AND w.kind = 'message'
  AND w.name = m.name AND w.key = m.key
WHERE m.instance IS NOT NULL AND w.id IS NULL
"""
# A result that was recorded for a step that was then stopped stays until its instance ends; after that it must not.
_LEFT_OVER: Final = """
SELECT coalesce(i.id, r.instance), r.task FROM work r LEFT JOIN instance i ON i.no = r.instance
LEFT JOIN token t ON t.instance = r.instance AND t.task = r.task AND t.status = 'executing'
WHERE t.id IS NULL AND (i.no IS NULL OR i.status = 'ended' OR r.task > i.serial)
"""
# Whatever never expires is given to the oldest wait of its name and key in the commit that brings the later of the two.
_APART: Final = """
SELECT m.no, m.name, i.id, w.id FROM message m
JOIN wait w ON w.kind = 'message' AND w.name = m.name AND w.key = m.key JOIN instance i ON i.no = w.instance
WHERE m.instance IS NULL AND m.expires_ms IS NULL
  AND NOT EXISTS (SELECT 1 FROM message t WHERE t.instance = w.instance AND t.wait = w.id)
"""
_BACKWARDS: Final = """
SELECT seq, epoch, before FROM (SELECT seq, epoch, lag(epoch) OVER (ORDER BY seq) AS before FROM history)
WHERE epoch < before
"""
_QUESTIONS: Final[tuple[tuple[str, Callable[[Reads], Iterator[str]]], ...]] = (
    ("file", _pages),
    ("references", _references),
    ("definitions", _definitions),
    ("I8", _tail),
    ("I2", _stray_commits),
    ("I10", _committers),
    ("messages", _assignments),
    ("I8", _unclaimed),
    ("results", _recorded_results),
    ("I17", _secrets),
)
