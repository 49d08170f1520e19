"""A small database to be torn, and all the ways in which it is.

The sample holds a row in every table, some of them such as only a crash leaves behind, and its bytes are the same each
time, but for what SQLite draws for its logs. What is done to it depends on the chance that is handed in alone. Nothing
here opens a damaged file: what becomes of it is judged in `torn`.
"""

from __future__ import annotations

import random
import shutil
import sqlite3
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from understudy.rehearsal import Rehearsal
from understudy.simulations.child import PROCESSES, Given, bundle, entry, journey, nap, parcel
from understudy.store.lending import Loan
from understudy.store.writer import Publish, Writer

FRAME: Final = struct.Struct(">6I")  # The header of a page in the log.
PAGE_BYTES: Final = 4_096
LOG_HEADER_BYTES: Final = 32
FILE_HEADER_BYTES: Final = 100


# --- the sample -------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Files:
    """A database file and the log beside it, as bytes."""

    file: bytes
    log: bytes = b""

    def write(self, path: Path) -> None:
        for suffix in ("-shm", "-wal", "-owner"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.unlink(missing_ok=True)  # A new file: SQLite shares what it knows of an old one within a process.
        path.write_bytes(self.file)
        if self.log:
            path.with_name(path.name + "-wal").write_bytes(self.log)


@attrs.frozen(kw_only=True)
class Sample:
    """One database at three moments: when it was new, after its first checkpoint, and after its last commit."""

    first: Files  # All commits up to the checkpoint are in the log.
    second: Files  # The file as the checkpoint left it, all later commits in the log.
    whole: Files  # Everything is in the file.


def make_sample(folder: Path) -> Sample:
    """Rehearsals know neither time nor chance, so that each makes the same one."""
    shutil.rmtree(folder, ignore_errors=True)
    play = Rehearsal(folder, *PROCESSES)
    system = play.node.system
    assert system is not None
    writer, path = system.writer, Path(play.path)
    writer.run(_Anonymous())  # The owner's name has the number of this process in it.
    _begin(play)
    first = _files(path)
    writer.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    _go_on(play)
    _leave_in_the_middle(play, writer)
    second = _files(path)
    play.node.crash()
    system.close_files()
    _fold(path)
    return Sample(first=first, second=second, whole=_files(path))


@attrs.frozen
class _Anonymous:
    def run(self, connection: Any) -> None:
        connection.execute("UPDATE owner SET holder = 'somebody' WHERE partition = 0")


def _begin(play: Rehearsal) -> None:
    play.subscribe("faithful", _nothing)
    for number in (1, 2, 3):  # The third journey is undone.
        play.start(journey, Given(number), id=f"journey-{number}", title=f"to {number}", tags={"year": "2026"})
        play.start(parcel, Given(number), id=f"parcel-{number}")
    play.start(bundle, Given(4), id="bundle-4")
    play.start(nap, Given(5), id="nap-5")
    play.send("parcel-1", "paid", "card", key=1, request_key="paid/1")
    play.publish("paid", "twice", key=2, request_key="paid/2")
    play.publish("paid", "early", key=77, ttl="3d", request_key="paid/77")


def _go_on(play: Rehearsal) -> None:
    def refuse(change: Any) -> None:
        if change.instance == "entry-6":
            raise ConnectionError("no line")

    play.subscribe("grumpy", refuse, tries=1)
    play.start(entry, Given(6), id="entry-6")
    play.start(nap, Given(8), id="nap-8")
    play.start(parcel, Given(9), id="parcel-9")
    play.send("parcel-9", "gossip", "for later", ttl="5d", request_key="gossip/9")
    play.pause("parcel-9", request_key="pause/9")
    play.stand_in("invoice", _fail)
    play.start(bundle, Given(10), id="bundle-10")  # Stops with an incident.
    play.start(parcel, Given(11), id="parcel-11")
    play.start(parcel, Given(12), id="parcel-12")
    play.cancel("parcel-11", reason="not wanted", request_key="cancel/11")
    play.publish("paid", "for nobody yet", key=88)
    play.start(journey, Given(13), id="journey-13")
    play.hang("depart")
    play.start(journey, Given(16), id="journey-16")  # In the middle of a saga.


def _leave_in_the_middle(play: Rehearsal, writer: Writer) -> None:
    """Stop where a crash might: a message is assigned and not consumed, a transaction is recorded and not used."""
    request = {"process": entry.name, "id": "entry-14", "variables": entry.encode_input(Given(14))}
    play.node.submit("start", request).get(timeout=30)  # Unlike `start`, it does not wait until everything rests.
    instance, task, attempt = writer.connection.execute(
        "SELECT t.instance, t.task, t.attempt FROM token t JOIN instance i ON i.no = t.instance WHERE i.id = 'entry-14'"
    ).fetchone()
    Loan(writer, instance=instance, task=task, attempt=attempt).commit('"entered 14"')
    writer.write([Publish("paid", "3", '"at last"')], now_ms=play.clock.now_ms())


def _fold(path: Path) -> None:
    """Move the log into the file; the last connection that can write then removes it."""
    database = sqlite3.connect(path, isolation_level=None)
    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    database.close()


def _files(path: Path) -> Files:
    log = path.with_name(path.name + "-wal")
    return Files(file=path.read_bytes(), log=log.read_bytes() if log.exists() else b"")


def _fail() -> None:
    raise ValueError("out of paper")


def _nothing(_change: Any) -> None:
    pass


# --- damage -----------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Damage:
    """What was done to the files, and after how many of the sample's commits they must read, where that is known."""

    kind: str
    where: str
    files: Files
    commits: int | None = None


class Logs:
    """Where the commits of the sample's two logs end, counted through both."""

    def __init__(self, sample: Sample) -> None:
        self.first = _commit_ends(sample.first.log)
        self.second = _commit_ends(sample.second.log)
        self.total = len(self.first) + len(self.second)

    def commits_before(self, which: str, byte: int) -> int:
        """How many commits are whole when nothing from that byte on counts."""
        if which == "first":
            return sum(end <= byte for end in self.first)
        return len(self.first) + sum(end <= byte for end in self.second)


def _commit_ends(log: bytes) -> list[int]:
    """A frame is a header and a page; the second number of its header is not 0 when it is the last of a commit."""
    size = FRAME.size + PAGE_BYTES
    starts = range(LOG_HEADER_BYTES, len(log), size)
    return [start + size for start in starts if FRAME.unpack_from(log, start)[1]]


def draw_damage(chance: random.Random, sample: Sample, logs: Logs) -> Damage:
    kind = chance.choices(tuple(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    return KINDS[kind][1](chance, sample, logs)


def _log_cut(chance: random.Random, sample: Sample, logs: Logs) -> Damage:
    which, files = _with_log(chance, sample)
    byte = chance.randrange(len(files.log))
    return Damage(
        kind="log cut",
        where=f"{which} log at byte {byte}",
        files=attrs.evolve(files, log=files.log[:byte]),
        commits=logs.commits_before(which, byte),
    )


def _log_flip(chance: random.Random, sample: Sample, logs: Logs) -> Damage:
    which, files = _with_log(chance, sample)
    byte, bit = chance.randrange(len(files.log)), chance.randrange(8)
    frame = byte - (byte - LOG_HEADER_BYTES) % (FRAME.size + PAGE_BYTES) if byte >= LOG_HEADER_BYTES else 0
    return Damage(
        kind="log flip",
        where=f"{which} log, byte {byte}, bit {bit}",
        files=attrs.evolve(files, log=_flipped(files.log, byte, bit)),
        commits=logs.commits_before(which, frame),
    )


def _file_flip(chance: random.Random, sample: Sample, _logs: Logs) -> Damage:
    """Every second flip is aimed: at any page alike, and there at a byte in use, for most of a page is not."""
    file = sample.whole.file
    byte, bit = chance.randrange(len(file)), chance.randrange(8)
    if chance.random() < 0.5:
        start = byte - byte % PAGE_BYTES
        used = [at for at in range(start, start + PAGE_BYTES) if file[at]]
        byte = chance.choice(used)
    files = Files(file=_flipped(file, byte, bit))
    return Damage(kind="file flip", where=f"page {byte // PAGE_BYTES + 1}, byte {byte}, bit {bit}", files=files)


def _header_flip(chance: random.Random, sample: Sample, _logs: Logs) -> Damage:
    which, files = chance.choice((("whole", sample.whole), ("second", sample.second)))
    byte, bit = chance.randrange(FILE_HEADER_BYTES), chance.randrange(8)
    files = attrs.evolve(files, file=_flipped(files.file, byte, bit))
    return Damage(kind="header flip", where=f"{which} file, byte {byte}, bit {bit}", files=files)


def _file_cut(chance: random.Random, sample: Sample, _logs: Logs) -> Damage:
    """Some cuts are between two pages, and some leave nothing."""
    which, files = chance.choice((("whole", sample.whole), ("second", sample.second)))
    byte = chance.randrange(len(files.file))
    byte = chance.choice((byte, byte - byte % PAGE_BYTES, chance.randrange(2 * PAGE_BYTES), 0))
    files = attrs.evolve(files, file=files.file[:byte])
    return Damage(kind="file cut", where=f"{which} file at byte {byte}", files=files)


def _old_log(chance: random.Random, sample: Sample, logs: Logs) -> Damage:
    """A log from a backup beside a file that has gone on since."""
    which, ends, log = chance.choice(
        (("first", logs.first, sample.first.log), ("second", logs.second, sample.second.log))
    )
    newer = sample.whole if which == "second" else chance.choice((sample.whole, sample.second))
    end = chance.choice(ends)
    files = Files(file=newer.file, log=log[:end])
    where = f"{which} log up to byte {end} beside a file of {len(newer.file)} bytes"
    return Damage(kind="old log", where=where + (" (whole)" if newer is sample.whole else ""), files=files)


def _old_file(chance: random.Random, sample: Sample, logs: Logs) -> Damage:
    """A file from a backup beside a log that has been begun anew since."""
    end = chance.choice(logs.second)
    files = Files(file=sample.first.file, log=sample.second.log[:end])
    return Damage(kind="old file", where=f"second log up to byte {end} beside the first file", files=files)


KINDS: Final[dict[str, tuple[int, Callable[[random.Random, Sample, Logs], Damage]]]] = {
    "log cut": (15, _log_cut),
    "log flip": (15, _log_flip),
    "file flip": (45, _file_flip),
    "header flip": (8, _header_flip),
    "file cut": (8, _file_cut),
    "old log": (7, _old_log),
    "old file": (2, _old_file),
}


def _with_log(chance: random.Random, sample: Sample) -> tuple[str, Files]:
    return ("first", sample.first) if chance.random() < 0.3 else ("second", sample.second)


def _flipped(data: bytes, byte: int, bit: int) -> bytes:
    changed = bytearray(data)
    changed[byte] ^= 1 << bit
    return bytes(changed)
