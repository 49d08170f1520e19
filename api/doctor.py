"""What an operator should know of a database: the file, who runs it, what is stuck, and what to do about each.

The doctor looks from outside, needs no owner and changes nothing; it makes not even the owner's file. It knows what is
stored and what the owner answers, not which handlers a service has bound. `audit` says whether the contents are right.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import attrs
import pykka

from understudy.actors.control import ControlClient
from understudy.model.durations import show_duration, show_moment
from understudy.model.errors import UnderstudyError
from understudy.requests import MEMORY
from understudy.store.connection import Database, explained, open_reader
from understudy.store.migrations import LATEST, version_of
from understudy.store.ownership import Address, OwnerFile
from understudy.store.reads import Readers, Reads

PING_S: Final = 2.0
OVERDUE_MS: Final = 10_000  # A timer may be this late without anything being wrong.
MOST_SHOWN: Final = 20  # Incidents and held deliveries that are listed one by one.
MANY_MESSAGES: Final = 1_000
LARGE_WAL: Final = 256 << 20
LITTLE_SPACE, NO_SPACE = 1 << 30, 100 << 20  # Bytes.
# In these versions connections that write or checkpoint at the same time can damage the log.
WAL_RESET_BUG: Final = ((3, 7, 0), (3, 51, 2))


class Level(Enum):
    OK = "ok"
    WARNING = "warning"  # Worth a look.
    PROBLEM = "problem"  # Somebody must act.


@attrs.frozen
class Finding:
    """One thing that was looked at."""

    level: Level
    what: str
    to_do: str = ""  # The command or the act that would change it.


@attrs.frozen(kw_only=True)
class Report:
    """All that was found, in the order in which it was looked at."""

    path: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.level is Level.PROBLEM for finding in self.findings)

    @property
    def lines(self) -> tuple[str, ...]:
        lines: list[str] = []
        for finding in self.findings:
            lines.append(f"{finding.level.value:8} {finding.what}")
            if finding.to_do:
                lines.append(f"{'':8}   {finding.to_do}")
        return tuple(lines)

    def as_dict(self) -> dict[str, Any]:
        findings = [{"level": f.level.value, "what": f.what, "to_do": f.to_do} for f in self.findings]
        return {"ok": self.ok, "path": self.path, "findings": findings}


def examine(path: str | os.PathLike[str]) -> Report:
    """Look at everything; what cannot be looked at is a finding too."""
    name = os.fspath(path)
    return Report(path=name, findings=tuple(_examine(name)))


def _examine(path: str) -> Iterator[Finding]:
    if path == MEMORY or not Path(path).is_file():
        where = "a database in memory is seen by its own process only" if path == MEMORY else f"{path} is no file"
        yield _problem(where, "give the path of a database; a Runtime makes one")
        return
    yield from _file(Path(path))
    try:
        database = open_reader(path)
    except UnderstudyError as error:
        yield _problem(str(error))
        return
    try:
        with explained(path):
            schema = list(_schema(database, path))
            yield from schema
            if all(finding.level is Level.OK for finding in schema):
                yield from _Contents(path, database).findings()
    except UnderstudyError as error:
        yield _problem(str(error))
    finally:
        database.close()


def _ok(what: str) -> Finding:
    return Finding(Level.OK, what)


def _warning(what: str, to_do: str = "") -> Finding:
    return Finding(Level.WARNING, what, to_do)


def _problem(what: str, to_do: str = "") -> Finding:
    return Finding(Level.PROBLEM, what, to_do)


# --- the file and the disk --------------------------------------------------------------------------------------------


def _file(path: Path) -> Iterator[Finding]:
    status = path.stat()
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        others = f"others may read or write {path} (its mode is {mode:04o})"
        yield _warning(others, shlex.join(["chmod", "600", str(path)]))
    else:
        yield _ok(f"{path} has {_size(status.st_size)}, and only its owner may read it")
    log = path.with_name(f"{path.name}-wal")
    logged = log.stat().st_size if log.exists() else 0
    if logged > LARGE_WAL:
        yield _warning(
            f"its log has {_size(logged)}: something keeps it from being moved into the file",
            "end whatever reads the file in one long transaction",
        )
    free = shutil.disk_usage(path.parent).free
    space = f"{_size(free)} are free on its disk"
    if free < max(NO_SPACE, 2 * logged):
        yield _problem(space, "free some space: nothing can be committed on a full disk")
    else:
        yield _warning(space, "free some space soon") if free < LITTLE_SPACE else _ok(space)
    yield _library()


def _library() -> Finding:
    version = f"SQLite {sqlite3.sqlite_version}"
    first, last = WAL_RESET_BUG
    if first <= sqlite3.sqlite_version_info <= last:
        return _ok(
            f"{version}: only the owner writes, so its WAL-reset bug is out of reach; let no other tool write here"
        )
    return _ok(version)


def _schema(database: Database, path: str) -> Iterator[Finding]:
    version = version_of(database, path)
    if version < LATEST:
        yield _problem(f"its schema is {version}, this Understudy reads {LATEST}", _command("migrate", path))
    else:
        yield _ok(f"its schema is {version}, the latest")
    mode = database.connection().execute("PRAGMA journal_mode").fetchone()[0]
    if mode == "wal":
        yield _ok("its changes go through a write-ahead log")
    else:
        yield _problem(f"its journal mode is {mode}, not wal", "put the file on a local disk and open a Runtime on it")


def _size(count: int) -> str:
    steps = ((1 << 40, "TB"), (1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB"))
    return next((f"{count / step:.1f} {unit}" for step, unit in steps if count >= step), f"{count} bytes")


def _command(name: str, path: str, *words: str) -> str:
    return shlex.join(["understudy", name, path, *words])


# --- the contents -----------------------------------------------------------------------------------------------------


class _Contents:
    """The questions that need the tables."""

    def __init__(self, path: str, database: Database) -> None:
        self._path = path
        self._reads = Reads(Readers(path, lambda: database))
        self._now_ms = time.time_ns() // 1_000_000
        self._has_owner = False

    def findings(self) -> Iterator[Finding]:
        yield from self._owner()
        counts = self._reads.count()
        total = sum(counts.values())
        by_status = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        yield _ok(f"{total:,} instances: {by_status}" if total else "it holds no instances yet")
        yield from self._incidents()
        yield from self._timers()
        yield from self._runnable()
        yield from self._messages()
        yield from self._subscribers()

    # --- who runs it ---

    def _owner(self) -> Iterator[Finding]:
        holder, epoch, beat = self._reads.owner()
        if not Path(f"{os.path.realpath(self._path)}-owner").exists():  # Asking would make the file.
            yield _ok("no process runs it now")
            return
        try:
            with OwnerFile.of(self._path) as file:
                self._has_owner = file.is_alive(epoch)
                address = file.address()
        except UnderstudyError as error:
            yield _warning(f"who runs it cannot be seen: {error}")
            return
        if not self._has_owner:
            last = f"{holder}, and ended without taking its leave" if holder else "closed in good order"
            yield _ok(f"no process runs it now; the last one was {last} (epoch {epoch})")
        elif address is None or address.epoch != epoch:
            yield _warning(
                f"{holder} runs it (epoch {epoch}), and answers nobody: a rehearsal, or one that is starting"
            )
        else:
            yield self._ping(address, holder, beat)

    def _ping(self, address: Address, holder: str, beat: int) -> Finding:
        who = f"{holder} (process {address.pid}, epoch {address.epoch})"
        try:
            health = _health(address)
        except (UnderstudyError, OSError, pykka.Timeout):
            if self._reads.owner()[2] != beat:
                return _warning(f"{who} runs it and shows signs of life, but does not answer", "look at its log")
            return _problem(
                f"{who} runs it, but neither answers nor shows a sign of life",
                "end that process if it hangs: the next Runtime on the file takes over",
            )
        if health != "open":
            return _problem(f"{who} runs it, and is {health}: nothing is committed", "look at its log and at the disk")
        return _ok(f"{who} runs it, and answers")

    # --- what is stuck ---

    def _incidents(self) -> Iterator[Finding]:
        count = self._number("SELECT count(*) FROM incident")
        for id_, incident, node, code, detail, since_ms in self._reads.rows(_INCIDENTS, (MOST_SHOWN,)):
            age = show_duration(max(0, self._now_ms - since_ms))
            yield _problem(
                f"incident {incident} of {id_} at {node} since {age}, {code}: {detail}",
                f"{_command('retry', self._path, id_, str(incident))}   (or skip, fail)",
            )
        if count > MOST_SHOWN:
            yield _problem(
                f"{count - MOST_SHOWN:,} more incidents are open", f"{_command('list', self._path)} --incident"
            )
        if count == 0:
            yield _ok("no incident is open")

    def _timers(self) -> Iterator[Finding]:
        count, oldest_ms = self._reads.rows(_OVERDUE, (self._now_ms - OVERDUE_MS,))[0]
        if count == 0:
            yield _ok("no timer is overdue")
            return
        what = f"{count:,} timers are overdue, the oldest since {show_moment(oldest_ms)}"
        if self._has_owner:
            yield _problem(what, "the process that runs it is overloaded or stuck; look at its log")
        else:
            yield _warning(what, "they fire when a Runtime opens the file")

    def _runnable(self) -> Iterator[Finding]:
        count = self._number("SELECT count(*) FROM instance WHERE runnable = 1")
        if count and not self._has_owner:
            yield _warning(
                f"{count:,} instances could go on", "they do when a Runtime with their processes opens the file"
            )

    def _messages(self) -> Iterator[Finding]:
        count = self._number("SELECT count(*) FROM message WHERE instance IS NULL")
        for_ever = self._number("SELECT count(*) FROM message WHERE instance IS NULL AND expires_ms IS NULL")
        if count == 0:
            return
        what = f"{count:,} published messages wait for somebody who takes them, {for_ever:,} of them without a limit"
        if count > MANY_MESSAGES:
            yield _warning(what, "check names and keys; publish with ttl= what is worth nothing later")
        else:
            yield _ok(what)

    def _subscribers(self) -> Iterator[Finding]:
        last = self._reads.last_seq()
        for name, cursor in self._reads.subscribers():
            yield _ok(f"subscriber {name} has seen {min(cursor, last):,} of {last:,} commits")
        for name, _no, id_, seq, tries, due_ms, error in self._reads.held()[:MOST_SHOWN]:
            what = f"commit {seq} of {id_} was not delivered to {name} in {tries} tries: {error}"
            if due_ms is None:
                yield _problem(what, f"mend the subscriber, then runtime.redeliver({name!r}, {id_!r})")
            else:
                yield _warning(what, f"it is tried again at {show_moment(due_ms)}")

    def _number(self, statement: str) -> int:
        return int(self._reads.rows(statement)[0][0])


def _health(address: Address) -> str:
    client = ControlClient(address, on_lost=lambda: None, connect_timeout_s=PING_S)
    with contextlib.closing(client):
        answer = client.call("ping", {}, timeout_s=PING_S).get(timeout=2 * PING_S)
    return str(answer["health"])


_INCIDENTS: Final = """
SELECT i.id, c.id, c.node, c.code, c.detail, c.since_ms FROM incident c JOIN instance i ON i.no = c.instance
ORDER BY c.since_ms LIMIT ?
"""
_OVERDUE: Final = """
SELECT count(*), min(w.due_ms) FROM wait w JOIN instance i ON i.no = w.instance
WHERE w.due_ms IS NOT NULL AND w.due_ms < ? AND i.status <> 'paused'
"""
