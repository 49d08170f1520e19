"""One transition of one instance, ready to be written.

`pack` turns what changed in an instance into rows, a history row and checksums. It runs where the instance lives, so
that the writer only adds numbers. The checksum is a sum over all rows of the instance, kept up by what changed: a
load compares it, because SQLite does not notice a flipped bit. It is a sum of squares: CRCs are linear, and two rows
that had swapped a character would often have the same sum.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any, Final

import msgspec

from understudy.model.events import Entry
from understudy.model.instance import Instance
from understudy.model.states import Status
from understudy.store.batch import BRIEF, HOT, Batch

_ENCODER = msgspec.json.Encoder()
_encode = _ENCODER.encode
_SEEDS: Final = {
    name: zlib.crc32(name.encode())
    for name in ("instance", "scope", "token", "variable", "wait", "undo", "incident", "buffered")
}
_MASK: Final = (1 << 62) - 1
_HEAD: Final = HOT.index("head")


class Stored(msgspec.Struct):
    """What an activation knows of its instance's rows in the store."""

    no: int = 0  # 0: not stored yet.
    version: int = 0
    head: int = 0
    digest: str = ""
    rows_sum: int = 0


class Answered(msgspec.Struct, frozen=True):
    """The answer to a command that carried a key; stored in the command's own commit."""

    key: str
    digest: str
    answer: str
    expires_ms: int


class Commit(msgspec.Struct):
    """What is to be written, all or nothing."""

    id: str
    activation: int
    stored: Stored  # What it was decided on.
    rows_sum: int
    digest: str
    at_ms: int
    epoch: int
    events: str
    cold: list[Any] | None
    hot: list[Any]
    is_usual: bool  # The last hot columns are as in `USUAL`.
    rows: list[tuple[str, msgspec.Raw]]
    gone: list[tuple[str, Any]]
    match: list[tuple[str, str]]  # For each wait that came or went and each message that leaves: its name and key.
    thrown: list[Any]
    consumed: list[int]
    taken_work: list[int]
    requests: list[Answered]

    @property
    def version(self) -> int:
        return self.stored.version + 1

    @property
    def size(self) -> int:
        """About how much there is to write, in characters: whatever is large in the rows is in the events too."""
        return len(self.events)

    def add_to(self, batch: Batch, *, seq: int, no: int, message_no: int) -> None:
        """Put the rows into a batch, with the numbers that the writer has given out."""
        hot = self.hot
        hot[_HEAD] = seq
        if self.cold is not None:
            batch.add("new", (no, *self.cold, *hot))
        elif self.is_usual:
            batch.add("moved", (no, self.stored.version, *hot[: len(BRIEF)]))
        else:
            batch.add("turned", (no, self.stored.version, *hot))
        for table, row in self.rows:
            batch.add(table, (no, row))
        for table, key in self.gone:
            batch.add("no_" + table, (no, *key) if type(key) is tuple else (no, key))
        batch.add(
            "history", (seq, no, self.version, self.stored.head, self.at_ms, self.epoch, self.events, self.digest)
        )
        for name, key in self.match:
            batch.expect(name, key)
        for offset, message in enumerate(self.thrown):
            batch.add("message", (message_no + offset, message.name, message.key, message.payload, message.expires_ms))
        for number in self.consumed:
            batch.add("consumed", (number, no))
        for task in self.taken_work:
            batch.add("taken_work", (no, task))
        for request in self.requests:
            batch.add("request", (request.key, request.digest, request.answer, request.expires_ms))

    def advance(self, *, seq: int, no: int) -> Stored:
        """What is stored once this is durable."""
        return Stored(no, self.version, seq, self.digest, self.rows_sum)


def pack(
    instance: Instance, stored: Stored, entries: list[Entry], *, epoch: int, activation: int, requests: list[Answered]
) -> Commit:
    """Everything that has changed since the last commit. The instance counts as settled from here on."""
    rows: list[tuple[str, msgspec.Raw]] = []
    gone: list[tuple[str, Any]] = []
    match: list[tuple[str, str]] = []
    total = stored.rows_sum
    for table, changed in instance.tables().items():
        if not changed.changed:
            continue
        seed = _SEEDS[table]
        for key, before in changed.changed.items():
            now = changed.get(key)
            if before is now:
                continue
            if before is not None:
                total -= zlib.crc32(_encode(before), seed) ** 2
            if now is not None:
                text = _encode(now)
                total += zlib.crc32(text, seed) ** 2
                rows.append((table, msgspec.Raw(text)))
            elif before is not None:
                gone.append((table, key))
            if table == "wait":
                wait = now or before
                if wait is not None and wait.kind == "message":
                    match.append((wait.name, wait.key))
    match += ((thrown.name, thrown.key) for thrown in instance.thrown)
    events = _encode(entries).decode()
    at_ms = entries[-1].at_ms
    version = stored.version + 1
    digest = chain_digest(stored.digest, instance.id, version, at_ms, epoch, events)
    total &= _MASK
    commit = Commit(
        instance.id,
        activation,
        stored,
        total,
        digest,
        at_ms,
        epoch,
        events,
        _cold(instance) if stored.version == 0 else None,
        _hot(instance, version, digest, total),
        _is_usual(instance),
        rows,
        gone,
        match,
        list(instance.thrown),
        list(instance.consumed),
        list(instance.taken_work),
        requests,
    )
    instance.settle()
    return commit


def chain_digest(previous: str, instance: str, n: int, at_ms: int, epoch: int, events: str) -> str:
    """Over the bytes written and the predecessor's digest: a changed, missing or foreign row breaks the chain."""
    head = f"{previous}|{len(instance)}|{instance}|{n}|{at_ms}|{epoch}|".encode()
    return hashlib.blake2b(head + events.encode(), digest_size=16).hexdigest()


def rows_sum(instance: Instance) -> int:
    """The sum over all rows, computed from nothing."""
    total = 0
    for table, rows in instance.tables().items():
        seed = _SEEDS[table]
        for row in rows.values():
            total += zlib.crc32(_encode(row), seed) ** 2
    return total & _MASK


def checksum(instance: Instance, version: int, total: int) -> int:
    """The sum over the rows and over the instance's own row."""
    own = _encode([version, instance.id, *_facts(instance), _tags(instance)])
    return int(total + zlib.crc32(own, _SEEDS["instance"]) ** 2) & _MASK


def _facts(instance: Instance) -> list[Any]:
    return [
        instance.definition,
        instance.given_digest,
        instance.title,
        instance.trigger,
        instance.by,
        instance.caused_by,
        instance.created_ms,
        instance.status,
        instance.outcome,
        instance.ending,
        instance.resting,
        instance.serial,
        instance.changed_ms,
        instance.ended_ms,
        instance.error,
        instance.result,
    ]


def _tags(instance: Instance) -> str:
    return _encode(instance.tags).decode()


def _cold(instance: Instance) -> list[Any]:
    return [
        instance.id,
        instance.definition,
        instance.given_digest,
        instance.title,
        _tags(instance),
        instance.trigger,
        instance.by,
        instance.caused_by,
        instance.created_ms,
    ]


def _hot(instance: Instance, version: int, digest: str, total: int) -> list[Any]:
    return [
        version,
        instance.status,
        1 if instance.is_runnable else 0,
        instance.serial,
        0,  # The head: the writer's sequence number.
        digest,
        checksum(instance, version, total),
        instance.changed_ms,
        instance.outcome,
        instance.ending,
        instance.resting,
        instance.ended_ms,
        instance.error,
        instance.result,
    ]


def _is_usual(instance: Instance) -> bool:
    return (
        instance.resting is Status.PENDING
        and instance.ending is None
        and not instance.is_ended
        and not instance.error
        and not instance.result
    )
