"""The rarer changes, each with a transaction of its own: typed request in, rows changed, typed answer out after the
commit.

A new one is a class here or a module beside it; neither the writer nor the persistence actor changes for it.
"""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from understudy.model.definition import Definition
from understudy.model.errors import Conflict, Rejected
from understudy.store.commit import Answered


@attrs.frozen
class Deploy:
    """Make a definition known. The same content again is the same definition; new content gets the next version."""

    definition: Definition
    version: int | None = None  # Given by the author: then other content under it is a conflict.

    def run(self, connection: Any) -> tuple[int, int]:
        name, digest = self.definition.name, self.definition.digest
        same = connection.execute(
            "SELECT no, version FROM definition WHERE name = ? AND digest = ?", (name, digest)
        ).fetchone()
        if same is not None:
            if self.version is not None and same[1] != self.version:
                raise Conflict(f"this content of {name!r} is deployed as version {same[1]}, not {self.version}")
            return same[0], same[1]
        newest = connection.execute(
            "SELECT coalesce(max(version), 0) FROM definition WHERE name = ?", (name,)
        ).fetchone()[0]
        version = newest + 1 if self.version is None else self.version
        taken = connection.execute(
            "SELECT 1 FROM definition WHERE name = ? AND version = ?", (name, version)
        ).fetchone()
        if taken is not None:
            raise Conflict(f"version {version} of {name!r} is deployed with other content; give it a new version")
        cursor = connection.execute(
            "INSERT INTO definition (name, version, digest, body) VALUES (?, ?, ?, ?)",
            (name, version, digest, self.definition.body),
        )
        return cursor.lastrowid, version


@attrs.frozen
class Beat:
    """A sign of life for those who wait to take over."""

    def run(self, connection: Any) -> None:
        connection.execute("UPDATE owner SET beat = beat + 1 WHERE partition = 0")


@attrs.frozen
class Leave:
    """The owner goes in good order: whatever is out and not named here was never begun, and is not lost.

    It stands where the owner's name stood, so that the next one takes both away at once.
    """

    unfinished: frozenset[str]  # The keys of the attempts whose handlers still ran.

    def run(self, connection: Any) -> None:
        left = msgspec.json.encode(sorted(self.unfinished)).decode()
        connection.execute("UPDATE owner SET holder = '', address = ? WHERE partition = 0", (left,))


@attrs.frozen
class Recall:
    """What was answered under a key before; if nothing was, `first` is the answer from now on."""

    key: str
    first: Answered | None = None

    def run(self, connection: Any) -> Answered | None:
        row = connection.execute(
            "SELECT key, digest, answer, expires_ms FROM request WHERE key = ?", (self.key,)
        ).fetchone()
        if row is not None:
            return Answered(*row)
        if self.first is not None:
            connection.execute(
                "INSERT INTO request (key, digest, answer, expires_ms) VALUES (?, ?, ?, ?)",
                (self.first.key, self.first.digest, self.first.answer, self.first.expires_ms),
            )
        return self.first


@attrs.frozen
class Purge:
    """Drop messages and stored answers whose time is over."""

    now_ms: int

    def run(self, connection: Any) -> int:
        messages = connection.execute(
            "DELETE FROM message WHERE expires_ms <= ? AND instance IS NULL", (self.now_ms,)
        ).rowcount
        requests = connection.execute("DELETE FROM request WHERE expires_ms <= ?", (self.now_ms,)).rowcount
        return int(messages) + int(requests)


class Hold(msgspec.Struct, frozen=True):
    """An instance whose deliveries wait: from which row, after how many tries, until when, and why."""

    instance: int
    seq: int
    tries: int
    due_ms: int | None
    error: str


@attrs.frozen
class MoveCursor:
    """How far a subscriber has come."""

    name: str
    cursor: int
    held: tuple[Hold, ...] = ()
    released: tuple[int, ...] = ()

    def run(self, connection: Any) -> None:
        connection.execute(
            "INSERT INTO subscriber (name, partition, cursor) VALUES (?, 0, ?) "
            "ON CONFLICT (name, partition) DO UPDATE SET cursor = max(cursor, excluded.cursor)",
            (self.name, self.cursor),
        )
        for hold in self.held:
            connection.execute(
                "INSERT INTO held (subscriber, instance, seq, tries, due_ms, error) VALUES (?, ?, ?, ?, ?, ?) "
                "ON CONFLICT (subscriber, instance) DO UPDATE SET seq = excluded.seq, tries = excluded.tries, "
                "due_ms = excluded.due_ms, error = excluded.error",
                (self.name, hold.instance, hold.seq, hold.tries, hold.due_ms, hold.error),
            )
        for instance in self.released:
            connection.execute("DELETE FROM held WHERE subscriber = ? AND instance = ?", (self.name, instance))


@attrs.frozen
class RetryHeld:
    """An operator wants a subscriber's held deliveries tried again."""

    name: str
    instance: str
    now_ms: int

    def run(self, connection: Any) -> None:
        changed = connection.execute(
            "UPDATE held SET due_ms = ?, tries = 0 WHERE subscriber = ? AND instance = "
            "(SELECT no FROM instance WHERE id = ?)",
            (self.now_ms, self.name, self.instance),
        ).rowcount
        if changed == 0:
            raise Rejected(f"nothing of {self.instance} is held back from {self.name}")
