"""A disk that forgets, fails and dies on command.

It keeps files by name, and of each what a power cut would still find apart from what was only written. It counts
every write, sync, truncation and deletion, and dies, fails or fills up at the one it is told to. A dead disk never
changes again, whoever still writes to it; `kill` and `power_cut` make the next life's disk from it. It knows nothing
of SQLite, draws no chance of its own and never looks at a clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from random import Random
from typing import Final, Literal, NamedTuple, NoReturn, Protocol

import attrs

from understudy.simulations.memory import Died as Died  # One death for every kind of storage.

SECTOR_BYTES: Final = 512  # What lands whole or not at all.

Kind = Literal["write", "sync", "truncate", "delete", "lock"]
FaultKind = Literal["full", "io", "write", "sync", "read", "busy"]
Image = Mapping[str, bytes]

# Which operations each kind of fault strikes; "read" strikes reads, which are counted apart.
STRIKES: Final[dict[FaultKind, tuple[Kind, ...]]] = {
    "full": ("write",),
    "io": ("write", "sync", "truncate", "delete"),
    "write": ("write", "truncate", "delete"),
    "sync": ("sync",),
    "read": (),
    "busy": ("lock",),
}


class Failed(Exception):
    """The operation was refused; `kind` is of the operation, or "full" or "busy"."""

    def __init__(self, kind: str, file: str) -> None:
        super().__init__(f"{kind} of {file} was refused")
        self.kind = kind


class Operation(NamedTuple):
    """What was asked of the disk, whether or not it was done."""

    kind: Kind
    file: str


@attrs.frozen(kw_only=True)
class Fault:
    """From the operation of this number on, that many operations are refused if they are of its kind."""

    kind: FaultKind
    at: int
    count: int = 1

    def covers(self, number: int) -> bool:
        return self.at <= number < self.at + self.count


class User(Protocol):
    """Whoever has files of the disk open."""

    def abandon(self) -> None:
        """The process is gone: let go of everything, without touching the disk."""


class Change(NamedTuple):
    """Something that is written and not synced: a power cut may keep it, lose it, or tear it apart."""

    serial: int
    offset: int
    data: bytes | None  # None: the file was cut, or made longer, to `offset` bytes.
    before: bytes
    size_before: int


class File:
    """The bytes that a process sees, and how to get back from them to those that are durable."""

    __slots__ = ("content", "is_entered", "name", "pending")

    def __init__(self, name: str, content: bytes | bytearray = b"", *, is_entered: bool = False) -> None:
        self.name = name
        self.content = bytearray(content)
        self.pending: list[Change] = []
        self.is_entered = is_entered  # Whether the directory durably has it.

    def copy(self) -> File:
        twin = File(self.name, self.content, is_entered=self.is_entered)
        twin.pending = self.pending.copy()
        return twin

    def write(self, serial: int, offset: int, data: bytes) -> None:
        content = self.content
        self.pending.append(Change(serial, offset, data, bytes(content[offset : offset + len(data)]), len(content)))
        _put(content, offset, data)

    def cut(self, serial: int, size: int) -> None:
        content = self.content
        self.pending.append(Change(serial, size, None, bytes(content[size:]), len(content)))
        _resize(content, size)

    def durable(self) -> bytearray:
        """The content without all that is pending."""
        content = bytearray(self.content)
        for change in reversed(self.pending):
            if change.data is not None:
                content[change.offset : change.offset + len(change.before)] = change.before
                del content[change.size_before :]
            else:
                del content[change.size_before :]
                content += change.before
        return content


class Disk:
    """One life of a disk. `crash_at` and the faults count the operations of this life, from 1."""

    _numbers = itertools.count(1)

    def __init__(self, image: Image | None = None, *, seed: int = 0) -> None:
        self.number = next(Disk._numbers)  # Tells the disks of a process apart; nothing may be decided by it.
        self.seed = seed
        self.life = 1
        self.openings = 0
        self.files = {name: File(name, content, is_entered=True) for name, content in (image or {}).items()}
        self.operations: list[Operation] = []
        self.reads = 0
        self.struck: dict[FaultKind, int] = {}  # How many operations the faults have refused.
        self.crash_at: int | None = None
        self.torn_sectors = 0  # Of a write that dies or is refused, so many sectors land nevertheless.
        self.is_dead = False
        self.users: list[User] = []
        self._serial = 0
        self._faults: list[Fault] = []
        self._removed: dict[str, File] = {}  # Deleted files that a power cut would bring back.

    # --- what goes wrong ---

    def fail(self, kind: FaultKind, *, at: int | None = None, count: int = 1) -> None:
        """Refuse operations from the given number on, or from the next one; of reads, the number is that of the read.

        A lock that is refused counts as an operation, because otherwise a busy period would never pass.
        """
        done = self.reads if kind == "read" else len(self.operations)
        self._faults.append(Fault(kind=kind, at=done + 1 if at is None else at, count=count))

    def heal(self) -> None:
        """End all faults."""
        self._faults.clear()

    @property
    def has_faults(self) -> bool:
        return bool(self._faults)

    def check(self) -> None:
        """Raise `Died` if the process is dead."""
        if self.is_dead:
            raise Died(self._epitaph())

    def flip(self, name: str, byte: int, bit: int) -> None:
        """Turn one bit over, as a bad medium does; no operation is counted."""
        self.check()
        self.files[name].content[byte] ^= 1 << bit

    def truncate(self, name: str, size: int) -> None:
        """Lose the end of a file for good; no operation is counted."""
        self.check()
        file = self.files[name]
        file.pending.clear()
        del file.content[size:]

    # --- lives and backups ---

    def kill(self) -> Disk:
        """End the process. The next life finds all that was written; what is not synced, a later power cut may take."""
        self._end()
        heir = self._heir()
        heir.files = {name: file.copy() for name, file in self.files.items()}
        heir._removed = {name: file.copy() for name, file in self._removed.items()}
        heir._serial = self._serial
        return heir

    def power_cut(self, random: Random) -> Disk:
        """End the machine. Of what was not synced anything may be kept, lost or torn, in any order."""
        self._end()
        fates = _Fates(random, [change for file in self._every_file() for change in file.pending])
        heir = self._heir()
        for name in dict.fromkeys([*self.files, *self._removed]):
            found = self._found(name, fates)
            if found is not None:
                heir.files[name] = File(name, fates.content(found), is_entered=True)
        return heir

    def snapshot(self) -> dict[str, bytes]:
        """A backup of all files, as a process sees them."""
        return {name: bytes(file.content) for name, file in self.files.items()}

    def restore(self, image: Image) -> None:
        """Put a backup in the place of all files. Whoever has one open keeps the old one, as after a rename."""
        self.check()
        self.files = {name: File(name, content, is_entered=True) for name, content in image.items()}
        self._removed.clear()

    def _end(self) -> None:
        self.is_dead = True
        users, self.users = self.users, []
        for user in users:
            user.abandon()

    def _heir(self) -> Disk:
        heir = Disk(seed=self.seed)
        heir.life = self.life + 1
        return heir

    def _every_file(self) -> Iterator[File]:
        yield from self.files.values()
        yield from self._removed.values()

    def _found(self, name: str, fates: _Fates) -> File | None:
        """What the directory has under a name after a power cut."""
        old, new = self._removed.get(name), self.files.get(name)
        if new is not None and new.is_entered:
            return new
        return new if fates.keeps_entry() else old

    # --- what a process asks ---

    def open(self, name: str) -> File:
        """The file of this name; it is made if it is not there."""
        file = self.files.get(name)
        if file is None:
            file = File(name)
            if not self.is_dead:
                self.files[name] = file
        return file

    def read(self, file: File, offset: int, amount: int) -> bytearray:
        self.reads += 1
        if self._faults:
            for fault in self._faults:
                if fault.kind == "read" and fault.covers(self.reads):
                    self._refuse(fault, "read", file.name)
        return file.content[offset : offset + amount]

    def write(self, file: File, offset: int, data: bytes) -> None:
        self.check()
        try:
            self._count("write", file.name)
        except (Died, Failed):
            if self.torn_sectors:
                file.write(self._next_serial(), offset, _first_sectors(offset, data, self.torn_sectors))
            raise
        file.write(self._next_serial(), offset, data)

    def cut(self, file: File, size: int) -> None:
        self._count("truncate", file.name)
        file.cut(self._next_serial(), size)

    def sync(self, file: File) -> None:
        """Make a file durable; the first time its place in the directory too, and with it all that changed there."""
        self._count("sync", file.name)
        file.pending.clear()
        if not file.is_entered:
            self._settle()

    def delete(self, name: str, *, is_durable: bool = False) -> None:
        self._count("delete", name)
        file = self.files.pop(name, None)
        if file is not None and file.is_entered:
            self._removed.setdefault(name, file)
        if is_durable:
            self._settle()

    def lock(self, name: str) -> None:
        """Somebody wants to write a database; refused, and only then counted, while the disk is to be busy."""
        self.check()
        number = len(self.operations) + 1
        if any(fault.kind == "busy" and fault.covers(number) for fault in self._faults):
            self._count("lock", name)

    def _settle(self) -> None:
        for file in self.files.values():
            file.is_entered = True
        self._removed.clear()

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _count(self, kind: Kind, name: str) -> None:
        """Let the operation happen by returning."""
        self.check()
        self.operations.append(Operation(kind, name))
        number = len(self.operations)
        if self.crash_at is not None and number >= self.crash_at:
            self.is_dead = True
            raise Died(self._epitaph())
        for fault in self._faults:
            if fault.covers(number) and kind in STRIKES[fault.kind]:
                self._refuse(fault, kind, name)

    def _refuse(self, fault: Fault, kind: str, name: str) -> NoReturn:
        self.struck[fault.kind] = self.struck.get(fault.kind, 0) + 1
        raise Failed(fault.kind if fault.kind in ("full", "busy") else kind, name)

    def _epitaph(self) -> str:
        if not self.operations:
            return "the process died before its first operation"
        last = self.operations[-1]
        return f"the process died at operation {len(self.operations)}, {last.kind} of {last.file}"


class _Fates:
    """What a power cut does to each pending change.

    A disk that writes in order keeps all up to some change and tears that one. One that does not keeps any subset,
    with a share that is drawn first, so that almost all and almost nothing are as likely as the middle.
    """

    def __init__(self, random: Random, changes: list[Change]) -> None:
        self._random = random
        self._share = random.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        in_order = bool(changes) and random.random() < 0.4
        self._last = random.choice(sorted(change.serial for change in changes)) if in_order else None

    def content(self, file: File) -> bytearray:
        content = file.durable()
        for change in file.pending:
            if self._keeps(change):
                _apply(content, change)
            elif self._tears(change):
                self._tear(content, change)
        return content

    def keeps_entry(self) -> bool:
        """Whether a change of the directory is kept."""
        return self._random.random() < (0.5 if self._last is not None else self._share)

    def _keeps(self, change: Change) -> bool:
        if self._last is not None:
            return change.serial < self._last
        return self._random.random() < self._share

    def _tears(self, change: Change) -> bool:
        if self._last is not None:
            return change.serial == self._last
        return self._share > 0.0 and self._random.random() < 0.5

    def _tear(self, content: bytearray, change: Change) -> None:
        """Some sectors land. The file may have grown for all of them: then those that are missing are zeros."""
        if change.data is None:
            return
        for offset, piece in _sectors(change.offset, change.data):
            if self._random.random() < 0.5:
                _put(content, offset, piece)
        end = change.offset + len(change.data)
        if len(content) < end and self._random.random() < 0.5:
            _resize(content, end)


def _apply(content: bytearray, change: Change) -> None:
    if change.data is None:
        _resize(content, change.offset)
    else:
        _put(content, change.offset, change.data)


def _put(content: bytearray, offset: int, data: bytes) -> None:
    if len(content) < offset:
        _resize(content, offset)
    content[offset : offset + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content += bytes(size - len(content))


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """The data in pieces, none of which crosses the border of a sector."""
    start = 0
    while start < len(data):
        end = min(start + SECTOR_BYTES - (offset + start) % SECTOR_BYTES, len(data))
        yield offset + start, data[start:end]
        start = end


def _first_sectors(offset: int, data: bytes, count: int) -> bytes:
    """What lands if a write ends after so many sectors; never all of it."""
    pieces = [piece for _offset, piece in _sectors(offset, data)]
    return b"".join(pieces[: min(count, len(pieces) - 1)])
