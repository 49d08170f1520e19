"""A database, open for looking at: committed rows, now or as they were after an earlier commit.

It needs no owner and starts no actor: nothing here writes, and nothing here waits for anybody who does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import attrs

from understudy.model.apply import decode_fault, fold
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import Damaged, Rejected, Unavailable, UnderstudyError
from understudy.model.events import AttemptFailed, UndoFinished, UndoRecorded
from understudy.model.instance import Instance
from understudy.model.values import check_name
from understudy.state import State, state_of
from understudy.store.connection import Database, open_reader
from understudy.store.migrations import check_latest
from understudy.store.ownership import OwnerFile
from understudy.store.reads import Detail, Readers, Reads, Summary


class Source:
    """The questions that the reading commands ask."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._readers = Readers(path, self._open)
        self._graphs: dict[int, Graph] = {}
        self.reads = Reads(self._readers)

    def _open(self) -> Database:
        check_file(self.path)
        database = open_reader(self.path)
        try:
            check_latest(database, self.path)
        except BaseException:
            database.close()
            raise
        return database

    def close(self) -> None:
        self._readers.close()

    def detail(self, id_: str) -> Detail:
        return self.reads.detail(check_name(id_, what="ID"))

    def detail_at(self, id_: str, n: int) -> Detail:
        """The instance as it was after its commit `n`: what its history folds to."""
        now = self.detail(id_)
        if n > now.summary.version:
            raise Rejected(f"{id_} has commits 1 to {now.summary.version}; there is no commit {n}")
        records = self.reads.history(id_)[:n]
        if [record.n for record in records] != list(range(1, n + 1)):
            raise Damaged(f"the history of {id_} has gaps; run `understudy audit {self.path}`")
        past = fold(entry for record in records for entry in record.entries)
        return _detail_of(past, now, n, records[-1].digest)

    def state(self, detail: Detail) -> State:
        return state_of(detail, self.graph(detail.definition))

    def traces(self, detail: Detail) -> dict[int, str]:
        """For each open incident the trace of the last failed attempt, where there was one."""
        if not detail.incidents:
            return {}
        last: dict[int, str] = {}
        for record in self.reads.history(detail.summary.id)[: detail.summary.version]:
            for entry in record.entries:
                last.update({event.token: event.trace for event in entry.events if isinstance(event, AttemptFailed)})
        return {incident.id: last[incident.token] for incident in detail.incidents if last.get(incident.token)}

    def undone(self, id_: str) -> list[str]:
        """The steps that were undone, in the order of undoing."""
        node_of: dict[int, str] = {}
        found = []
        for event in (
            event for record in self.reads.history(id_) for entry in record.entries for event in entry.events
        ):
            if isinstance(event, UndoRecorded):
                node_of[event.undo] = event.node
            elif isinstance(event, UndoFinished) and event.how == "done":
                found.append(node_of[event.undo])
        return found

    def has_owner(self) -> bool | None:
        """Whether a process runs this database now; None when we may not know."""
        owner_file = Path(f"{Path(self.path).resolve()}-owner")
        if not owner_file.exists():
            return False  # Asking would make the file.
        try:
            with OwnerFile.of(self.path) as file:
                return file.is_alive(self.reads.owner()[1])
        except (UnderstudyError, OSError):
            return None

    def graph(self, no: int) -> Graph:
        if no not in self._graphs:
            row = self.reads.definition(no)
            if row is None:
                raise Damaged(f"definition {no} is missing in {self.path}; run `understudy audit {self.path}`")
            self._graphs[no] = Graph(decode_definition(row[0]), version=row[1], no=no)
        return self._graphs[no]


@contextlib.contextmanager
def opened(path: str) -> Iterator[Source]:
    source = Source(path)
    try:
        yield source
    finally:
        source.close()


def check_file(path: str) -> None:
    """A slip in the path must not make a new database, and is worth a better word than SQLite's."""
    try:
        if Path(path).is_file():
            return
        what = "it is a folder" if Path(path).is_dir() else "there is no such file"
    except (OSError, ValueError) as error:
        what = str(error)
    raise Unavailable(f"{path} is no database: {what}")


def _detail_of(past: Instance, now: Detail, n: int, digest: str) -> Detail:
    summary: Summary = attrs.evolve(
        now.summary,
        status=past.status.value,
        outcome=None if past.outcome is None else past.outcome.value,
        version=n,
        changed_ms=past.changed_ms,
        ended_ms=past.ended_ms,
        fault=decode_fault(past.error),
        result=past.result,
        incidents=len(past.incidents),
    )
    return Detail(
        summary=summary,
        definition=past.definition,
        head=0,
        digest=digest,
        tokens=_rows(past.tokens),
        scopes=_rows(past.scopes),
        waits=_rows(past.waits),
        incidents=_rows(past.incidents),
        undos=_rows(past.undos),
        variables={name: variable.value for (_scope, name), variable in sorted(past.variables.items())},
        buffered=len(past.buffer),
    )


V = TypeVar("V")


def _rows(table: Mapping[int, V]) -> tuple[V, ...]:
    return tuple(table[id_] for id_ in sorted(table))
