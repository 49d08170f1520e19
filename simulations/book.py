"""What lives on one file have said, against what the file holds after each of them.

A `Book` belongs to one database. It is told every line of every life, and looks into the file when no life writes:
everything acknowledged is there, histories have only grown, no handler was called that was not ordered, none was left
out that is said to have run, a transaction counts once, and nothing was committed by an owner that was replaced. It
believes what the audit says of the rest. A book that has found the file older than it was finds so again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from understudy.actors.handlers import key_of
from understudy.audit import audit
from understudy.model import events as e
from understudy.model.values import decode
from understudy.simulations.child import ACKNOWLEDGEMENTS, Line, entry, number_of
from understudy.store.connection import open_reader
from understudy.store.migrations import check_latest
from understudy.store.reads import Readers, Reads
from understudy.store.writer import MESSAGES_OF_A_LIFE

_ENTRIES: Final = msgspec.json.Decoder(list[e.Entry])
_HISTORY: Final = """
SELECT h.seq, i.id, h.n, h.epoch, h.digest, h.events FROM history h JOIN instance i ON i.no = h.instance ORDER BY h.seq
"""


class Fence(msgspec.Struct, frozen=True):
    """A replacement: nothing behind this place may be of an epoch before this one."""

    epoch: int
    seq: int
    message: int  # The last message that was published in an epoch before.


class Book:
    """The evidence of one file, from its first life on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acknowledged: dict[tuple[str, str], str] = {}  # Kind, and instance or key, to what was said of it.
        self.calls: set[tuple[str, int]] = set()  # Key and attempt.
        self.commits = 0
        self.lost: set[tuple[str, str]] = set()
        self._told: dict[str, set[int]] = {}
        self._fences: list[Fence] = []
        self._digests: dict[str, list[str]] = {}
        self._epoch = 0  # The owner's, as it was last seen.
        self._histories = _Histories()

    def hear(self, lines: list[Line]) -> None:
        """Take in what a life has said. What a life saw is compared with what others saw of the same."""
        for line in lines:
            if line.say in ACKNOWLEDGEMENTS:
                self.acknowledged[line.say, line.key or line.of] = line.text or line.of
            elif line.say == "call":
                self.calls.add((line.key, line.number))
            elif line.say == "told":
                self._told.setdefault(line.of, set()).add(line.number)

    def fence(self, epoch: int) -> None:
        """A life has taken over, and whoever owned the file before stands still: remember how far the file is."""
        with self._reads() as reads:
            limit = epoch * MESSAGES_OF_A_LIFE
            last = reads.rows("SELECT coalesce(max(no), 0) FROM message WHERE no < ?", (limit,))[0][0]
            self._fences.append(Fence(epoch, reads.last_seq(), last))

    def check(self) -> list[str]:
        """Everything that is not as it must be."""
        with self._reads() as reads:
            found = [f"the audit says {violation}" for violation in audit(reads).violations]
            rows = reads.rows(_HISTORY)
            found += self._check_growth(rows)
            found += self._check_epochs(rows, reads)
            self._histories.take(rows[self.commits :])
            self.commits = len(rows)
            found += self._check_acknowledged(reads)
            found += self._check_calls()
            found += self._check_told()
            found += self._check_journal(reads)
        return found

    def check_end(self) -> list[str]:
        """Likewise, once a life has brought everything to its end."""
        found = self.check()
        ended = self._histories.ended
        found += [f"{id_} has not ended" for id_ in self._digests if id_ not in ended]
        for id_, digests in self._digests.items():
            if len(self._told.get(id_, ())) < len(digests):
                found.append(f"I7: the subscriber was told {len(self._told.get(id_, ()))} of {len(digests)} of {id_}")
        return found

    def unacknowledged(self) -> int:
        """How much was done that nobody was told of: instances that were started, and commands under a key."""
        known = self.acknowledged
        starts = sum(("start", id_) not in known for id_ in self._digests)
        commands = sum(("send", key) not in known and ("publish", key) not in known for key in self._keys)
        return starts + commands

    @property
    def instances(self) -> int:
        return len(self._digests)

    # --- one question each ---

    def _check_growth(self, rows: list[Any]) -> Iterator[str]:
        """I9: what was there once is there for ever, unchanged."""
        now: dict[str, list[str]] = {}
        for _seq, id_, _n, _epoch, digest, _events in rows:
            now.setdefault(id_, []).append(digest)
        for id_, before in self._digests.items():
            if now.get(id_, [])[: len(before)] != before:
                yield f"I9: the history of {id_} had {len(before)} commits, and is no longer what it was"
        self._digests = now

    def _check_epochs(self, rows: list[Any], reads: Reads) -> Iterator[str]:
        """I10: epochs rise along the sequence, and whoever was replaced has committed and published nothing more."""
        highest = 0
        for seq, id_, n, epoch, _digest, _events in rows:
            if epoch < highest:
                yield f"I10: commit {n} of {id_} (seq {seq}) is of epoch {epoch}, behind one of epoch {highest}"
            highest = max(highest, epoch)
            for fence in self._fences:
                if seq > fence.seq and epoch < fence.epoch:
                    yield f"I10: {id_} (seq {seq}) was committed by epoch {epoch} after {fence.epoch} had taken over"
        for fence in self._fences:
            limit = fence.epoch * MESSAGES_OF_A_LIFE
            late = reads.rows("SELECT no FROM message WHERE no > ? AND no < ?", (fence.message, limit))
            yield from (f"I10: message {no} was published after epoch {fence.epoch} had taken over" for (no,) in late)
        epoch = reads.owner()[1]
        if epoch < max(highest, self._epoch):
            yield f"I10: the owner's epoch is {epoch}, and was {max(highest, self._epoch)} before"
        self._epoch = epoch

    def _check_acknowledged(self, reads: Reads) -> Iterator[str]:
        """I8: nothing that was acknowledged is lost."""
        self._keys = {key for (key,) in reads.rows("SELECT key FROM request")}
        outcomes = {id_: (outcome, result) for id_, outcome, result in reads.rows(_OUTCOMES)}
        pending = Counter(key for (key,) in reads.rows("SELECT key FROM message WHERE name = 'paid'"))
        for (kind, of), said in self.acknowledged.items():
            if not self._is_kept(kind, of, said, outcomes, pending):
                self.lost.add((kind, of))
                yield f"I8: the acknowledged {kind} of {of} is lost"

    def _is_kept(self, kind: str, of: str, said: str, outcomes: dict[str, Any], pending: Counter[str]) -> bool:
        if kind == "start":
            return of in self._digests
        if kind == "send":
            return of in self._keys and self._histories.commands[of] == 1
        if kind == "publish":  # It is there, or it was consumed, and not both.
            taken = self._histories.published[said]
            return of in self._keys and taken + pending[str(number_of(said))] == 1
        outcome, result = outcomes.get(of, (None, ""))
        return said == f"{outcome} {decode(result) if result else ''}"

    def _check_calls(self) -> Iterator[str]:
        """I3: a handler is called only by a committed order, and every result has a call behind it."""
        called = {key for key, _attempt in self.calls}
        for key, attempt in sorted(self.calls - self._histories.ordered):
            yield f"I3: attempt {attempt} of {key} was made, but is not in history"
        for key in sorted(self._histories.completed - called):
            yield f"I3: {key} is completed, but its handler was never called"

    def _check_told(self) -> Iterator[str]:
        """I7: a subscriber is told of everything in its order, and of nothing that is not there."""
        for id_, numbers in self._told.items():
            if numbers != set(range(1, len(numbers) + 1)):
                yield f"I7: of {id_} the subscriber was told {sorted(numbers)}, with gaps"
            elif len(numbers) > len(self._digests.get(id_, ())):
                yield f"I7: of {id_} the subscriber was told {len(numbers)} commits, more than there are"

    def _check_journal(self, reads: Reads) -> Iterator[str]:
        """What a transactional task writes is there once, if and only if its result was recorded."""
        if not reads.rows("SELECT 1 FROM sqlite_schema WHERE name = 'journal'"):
            return
        written = Counter(key for (key,) in reads.rows("SELECT key FROM journal"))
        recorded = {key_of(*row) for row in reads.rows(_RECORDED)}
        done = {key for key in self._histories.completed if key.startswith(f"{entry.name}-")} | recorded
        yield from (f"the transaction of {key} counts {times} times" for key, times in written.items() if times > 1)
        yield from (f"the transaction of {key} is lost" for key in sorted(done - written.keys()))
        yield from (f"the transaction of {key} counts, its result does not" for key in sorted(written.keys() - done))

    @contextmanager
    def _reads(self) -> Iterator[Reads]:
        readers = Readers(str(self.path), self._open)
        try:
            yield Reads(readers)
        finally:
            readers.close()

    def _open(self) -> Any:
        database = open_reader(str(self.path))
        check_latest(database, str(self.path))
        return database


_OUTCOMES: Final = "SELECT id, outcome, result FROM instance"
_RECORDED: Final = "SELECT i.id, w.task FROM work w JOIN instance i ON i.no = w.instance"


class _Histories:
    """What all histories say together; each row is taken once."""

    def __init__(self) -> None:
        self.commands: Counter[str] = Counter()  # How often a key stands in history.
        self.published: Counter[str] = Counter()  # How many published messages an instance has consumed.
        self.ordered: set[tuple[str, int]] = set()  # Key and attempt.
        self.completed: set[str] = set()
        self.ended: set[str] = set()
        self._tasks: dict[tuple[str, int], str] = {}  # Instance and token, to the key of the task that is out.

    def take(self, rows: list[Any]) -> None:
        for _seq, id_, _n, _epoch, _digest, events in rows:
            for turn in _ENTRIES.decode(events):
                if turn.key:
                    self.commands[turn.key] += 1
                for event in turn.events:
                    self._event(id_, event)

    def _event(self, id_: str, event: Any) -> None:
        match event:
            case e.TaskOpened(token=token, task=task):
                self._tasks[id_, token] = key_of(id_, task)
                self.ordered.add((key_of(id_, task), 1))
            case e.AttemptStarted(token=token, attempt=attempt):
                self.ordered.add((self._tasks[id_, token], attempt))
            case e.AttemptLost(token=token, attempt=attempt):
                self.ordered.add((self._tasks[id_, token], attempt + 1))
            case e.TaskCompleted(token=token, skipped=False):
                self.completed.add(self._tasks[id_, token])
            case e.WaitConsumed(message=message) if message:
                self.published[id_] += 1
            case e.InstanceEnded():
                self.ended.add(id_)
