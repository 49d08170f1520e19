"""The one place that writes.

A `Writer` belongs to the persistence actor. It takes changes, refuses in Python what it can see to be wrong, writes
the rest as one statement, and says of each whether it landed. When the statement fails for a reason that surely left
nothing behind, its halves are written, and their halves, so that only the culprit is refused. When the reason leaves
it open whether the commit landed (I/O, disk full, busy), it raises `Unknown`: nobody may go on from memory after that.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from understudy.model.errors import Conflict, Damaged, Fenced, Rejected, UnderstudyError
from understudy.store.batch import MATCHED, WRITE, Batch, Unwritable, statements
from understudy.store.commit import Answered, Commit, Stored
from understudy.store.connection import FILES, Database, Settings, Storage, explain, explained
from understudy.store.migrations import migrate
from understudy.store.operations import Beat


class Landed(msgspec.Struct, frozen=True):
    """It is durable."""

    stored: Stored | None = None
    answer: Any = None


class Refused(msgspec.Struct, frozen=True):
    """Nothing of it was written."""

    reason: str  # "stale", "duplicate", "missing" or "constraint"
    error: UnderstudyError
    first: dict[str, Answered] = {}  # For "duplicate": what was answered under these keys before.


class Delivery(msgspec.Struct, frozen=True):
    """A published message that now belongs to a wait of an instance."""

    instance: str
    message: int
    wait: int
    payload: str


class Written(msgspec.Struct):
    """What became of a batch, change by change, and the messages that it has matched."""

    results: list[Landed | Refused]
    deliveries: list[Delivery]


class Unknown(Exception):
    """The write failed in a way that does not tell whether it landed."""


class Publish(msgspec.Struct, frozen=True):
    """A message for whoever waits for it, now or later."""

    name: str
    key: str
    payload: str
    expires_ms: int | None = None
    requests: list[Answered] = []

    @property
    def size(self) -> int:
        return len(self.payload)


Change = Commit | Publish


class Operation(Protocol):
    """A rarer change with a transaction of its own, after the fence was checked.

    Running it twice must be no different from running it once: it is repeated when nobody knows whether it landed.
    """

    def run(self, connection: Any) -> Any: ...


MESSAGES_OF_A_LIFE: Final = 10_000_000_000  # Each epoch numbers its messages from its own multiple of this.


class Counters(NamedTuple):
    """The last numbers given out."""

    seq: int
    instance: int
    message: int


class Writer:
    """The writing connection, its epoch and its counters."""

    def __init__(self, path: str, settings: Settings, *, storage: Storage = FILES) -> None:
        self.path = path
        self.settings = settings
        self.storage = storage
        self.epoch = 0
        self._versions: dict[int, int] = {}
        self._counters = Counters(0, 0, 0)
        self._connection: Any = None
        self._open()

    def _open(self) -> None:
        self.database: Database = self.storage.writer(self.path, self.settings)
        try:
            with explained(self.path):
                self.migrated = migrate(self.database, self.path)
                self._connection = self.database.connection()
                for statement in statements():
                    self.connection.execute(statement)
                self._read_counters()
        except BaseException:
            self.close()
            raise
        self._versions.clear()

    @property
    def connection(self) -> Any:
        if self._connection is None:
            raise Unknown(f"{self.path} is not open")
        return self._connection

    def _read_counters(self) -> None:
        """A message is gone once it is consumed: its number must not come again, neither now nor in another life."""
        read = self.connection.execute
        seq, instance, message = (
            read(f"SELECT coalesce(max({column}), 0) FROM {table}").fetchone()[0]
            for column, table in (("seq", "history"), ("no", "instance"), ("no", "message"))
        )
        first = self.epoch * MESSAGES_OF_A_LIFE
        self._counters = Counters(seq, instance, max(message, first, self._counters.message))

    # --- ownership ---

    def take_over(self, holder: str, *, after_epoch: int | None = None) -> int:
        """Become the owner: the epoch rises, and whoever owned the file before can commit no more."""
        with explained(self.path), self.database.atomic("IMMEDIATE"):
            epoch = self.connection.execute("SELECT epoch FROM owner WHERE partition = 0").fetchone()[0]
            if after_epoch is not None and epoch != after_epoch:
                raise Conflict(f"{self.path} was taken over by another process meanwhile")
            self.connection.execute(
                "UPDATE owner SET epoch = ?, holder = ?, beat = 0 WHERE partition = 0", (epoch + 1, holder)
            )
        self.epoch = epoch + 1
        with explained(self.path):
            self._read_counters()
        return self.epoch

    def reopen(self) -> None:
        """A new connection after an unknown failure; the epoch stays ours only if the file still says so."""
        self.close()
        self._open()
        with explained(self.path):
            epoch = self.connection.execute("SELECT epoch FROM owner WHERE partition = 0").fetchone()[0]
        if epoch != self.epoch:
            raise Fenced()

    def close(self) -> None:
        self._connection = None
        if not self.database.is_closed():
            self.database.close()

    # --- batches ---

    def write(self, changes: Sequence[Change], *, now_ms: int) -> Written:
        """Write all that may be written; the answers stand in the order of the changes."""
        results: dict[int, Landed | Refused] = {}
        deliveries: list[Delivery] = []
        waiting = list(range(len(changes)))
        try:
            while waiting:
                waiting, later = self._admit(changes, waiting, results)
                if waiting:
                    deliveries += self._write_together(changes, waiting, results, now_ms)
                waiting = later
        except Fenced as fenced:
            if any(isinstance(result, Landed) for result in results.values()):
                # Whoever hears "fenced" asks the next owner again: a part that has landed must not be among them.
                raise Unknown(f"a part of the batch was written, then: {fenced}") from fenced
            raise
        return Written([results[n] for n in range(len(changes))], deliveries)

    def forget(self, no: int) -> None:
        """The instance has no activation any more."""
        self._versions.pop(no, None)

    def _admit(
        self, changes: Sequence[Change], numbers: list[int], results: dict[int, Landed | Refused]
    ) -> tuple[list[int], list[int]]:
        """Refuse what is visibly wrong.

        A key that stands twice in the batch lets its second change wait for the first.
        """
        known = self._answered(changes[n] for n in numbers)
        admitted: list[int] = []
        later: list[int] = []
        keys: set[str] = set()
        for number in numbers:
            change = changes[number]
            if isinstance(change, Commit) and change.cold is None:
                version = self._versions.get(change.stored.no)
                if version is not None and version != change.stored.version:
                    error = Conflict(f"{change.id} is at version {version}, not at {change.stored.version}")
                    results[number] = Refused("stale", error)
                    continue
            if change.requests:
                wanted = {request.key for request in change.requests}
                first = {key: known[key] for key in wanted if key in known}
                if first:
                    results[number] = Refused("duplicate", Conflict("a command of this key was answered before"), first)
                    continue
                if wanted & keys:
                    later.append(number)
                    continue
                keys |= wanted
            admitted.append(number)
        return admitted, later

    def _answered(self, changes: Iterable[Change]) -> dict[str, Answered]:
        keys = [request.key for change in changes for request in change.requests]
        if not keys:
            return {}
        rows = self._read(
            "SELECT key, digest, answer, expires_ms FROM request WHERE key IN (SELECT value FROM json_each(?))",
            (msgspec.json.encode(keys).decode(),),
        )
        return {row[0]: Answered(*row) for row in rows}

    def _write_together(
        self, changes: Sequence[Change], numbers: list[int], results: dict[int, Landed | Refused], now_ms: int
    ) -> list[Delivery]:
        counters = self._counters
        batch = Batch()
        landed = {number: self._add(batch, changes[number]) for number in numbers}
        refusal = self._execute(batch, now_ms)
        if refusal is None:
            results.update(landed)
            for result in landed.values():
                if result.stored is not None:
                    self._versions[result.stored.no] = result.stored.version
            return self._matched(batch)
        self._counters = counters  # Nothing landed: the numbers were not used.
        if len(numbers) == 1:
            results[numbers[0]] = self._with_answers(changes[numbers[0]], refusal)
            return []
        middle = len(numbers) // 2
        first = self._write_together(changes, numbers[:middle], results, now_ms)
        return first + self._write_together(changes, numbers[middle:], results, now_ms)

    def _with_answers(self, change: Change, refusal: Refused) -> Refused:
        if refusal.reason != "duplicate":
            return refusal
        return msgspec.structs.replace(refusal, first=self._answered([change]))

    def _add(self, batch: Batch, change: Change) -> Landed:
        seq, last_no, message = self._counters
        if isinstance(change, Publish):
            message += 1
            self._counters = Counters(seq, last_no, message)
            batch.add("message", (message, change.name, change.key, change.payload, change.expires_ms))
            batch.expect(change.name, change.key)
            for request in change.requests:
                batch.add("request", (request.key, request.digest, request.answer, request.expires_ms))
            return Landed(answer={"message": message})
        seq += 1
        no = change.stored.no
        if no == 0:
            no = last_no = last_no + 1
        change.add_to(batch, seq=seq, no=no, message_no=message + 1)
        self._counters = Counters(seq, last_no, message + len(change.thrown))
        return Landed(stored=change.advance(seq=seq, no=no))

    def _execute(self, batch: Batch, now_ms: int) -> Refused | None:
        try:
            self.connection.execute(WRITE, batch.parameters(self.epoch, now_ms))
        except (sqlite3.IntegrityError, sqlite3.DataError, Unwritable, UnicodeEncodeError) as error:
            return _refusal(error)
        except sqlite3.Error as error:
            raise self.failure(error) from error
        return None

    def _matched(self, batch: Batch) -> list[Delivery]:
        if not batch.match:
            return []
        return [Delivery(*row) for row in self._read(MATCHED, ())]

    def _read(self, statement: str, parameters: tuple[Any, ...]) -> list[Any]:
        try:
            rows: list[Any] = self.connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as error:
            raise self.failure(error) from error
        return rows

    # --- operations ---

    def run(self, operation: Operation) -> Any:
        """An operation in a transaction of its own."""
        connection = self.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                self.check_fence()
                answer = operation.run(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except (sqlite3.IntegrityError, sqlite3.DataError) as error:
            raise Rejected(f"the database refuses this ({error})") from error
        except sqlite3.Error as error:
            raise self.failure(error) from error
        return answer

    def check_fence(self) -> None:
        """Inside a transaction: whether the file is still ours."""
        if self.connection.execute("SELECT epoch FROM owner WHERE partition = 0").fetchone()[0] != self.epoch:
            raise Fenced()

    def probe(self) -> None:
        """Write something that changes nothing, to see whether writing works."""
        self.run(Beat())

    def checkpoint(self) -> None:
        """Move what is in the log into the file, as far as readers allow. Only this connection ever does."""
        self._read("PRAGMA wal_checkpoint(PASSIVE)", ())

    def failure(self, error: sqlite3.Error) -> Damaged | Unknown:
        """What a failure of the database means for whoever was writing."""
        explained_error = explain(error, self.path)
        return explained_error if isinstance(explained_error, Damaged) else Unknown(str(explained_error))


def _refusal(error: Exception) -> Refused:
    text = str(error)
    if text == "fenced":
        raise Fenced() from error
    if text == "stale":
        return Refused("stale", Conflict("the instance has moved on since this was decided"))
    if text == "missing":
        return Refused("missing", Conflict("what this commit relies on is no longer there"))
    if "UNIQUE" in text and "request.key" in text:
        return Refused("duplicate", Conflict("a command of this key was answered before"))
    if "UNIQUE" in text and "instance.id" in text:
        return Refused("duplicate", Conflict("an instance of this id exists"))
    return Refused("constraint", Rejected(f"the database refuses this commit ({text})"))
