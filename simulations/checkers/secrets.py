"""I17: what users give as values stands where values stand, and in no text that Understudy makes.

`world.secrets` are values that a workload has put into variables or payloads. They belong into the columns that hold
users' values: variables, payloads, results, what an undo is given, and the correlation key of a message, which its
author has chosen. Anywhere else they are a leak: in a history entry beside those fields, in an incident, a fault or a
title, in an answer that is kept, in an error that a client is told, in a log record, in a transcript. What a handler's
own exception says is its author's word, and is stored as it is: a workload that keeps secrets must not raise them.

The owner's own secret does not exist in a world, which has no sockets; `understudy audit` looks for it in a real file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec
import peewee

from understudy.model import events as e
from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence
from understudy.simulations.plugins import Checker, checker
from understudy.store.schema import TABLES

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World

LOGGERS: Final = ("understudy", "pykka")
_OF_USERS: Final = frozenset(
    {
        "variable.value",
        "undo.given",
        "buffered.key",
        "buffered.payload",
        "message.key",
        "message.payload",
        "wait.key",
        "work.result",
        "instance.result",
        "history.events",  # Looked at event by event.
    }
)
_VALUES: Final[dict[type[e.Event], tuple[str, ...]]] = {
    e.InstanceStarted: ("variables",),
    e.VariablesSet: ("values",),
    e.TaskCompleted: ("result",),
    e.MessageBuffered: ("key", "payload"),
    e.MessageThrown: ("key", "payload"),
    e.WaitOpened: ("key",),
    e.UndoRecorded: ("given",),
    e.InstanceEnded: ("result",),
}


class Ear(logging.Handler):
    """Hears everything that is logged while a world with secrets lives, and lets nobody else hear it."""

    def __init__(self, secrets: list[str]) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[str] = []
        self._secrets = secrets
        self._loggers = [logging.getLogger(name) for name in LOGGERS]
        self._before = [(logger.level, logger.propagate) for logger in self._loggers]
        for logger in self._loggers:
            logger.addHandler(self)
            logger.setLevel(logging.DEBUG)
            logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if any(secret in text for secret in self._secrets):
            self.found.append(f"{record.name} has logged a secret: {record.msg!r}")

    def leave(self) -> None:
        for logger, (level, propagate) in zip(self._loggers, self._before, strict=True):
            logger.removeHandler(self)
            logger.propagate = propagate
            if logger.level == logging.DEBUG:  # Else whoever had silenced it has given it back already.
                logger.setLevel(level)


@checker
class Secrets(Checker):
    id = "I17"
    statement = "no secret stands in history, logs or console beside the values that users gave"

    def __init__(self) -> None:
        self._ear: Ear | None = None

    def watch(self, world: World) -> None:
        Evidence.of(world)
        world.on_opened.append(lambda life: self._listen(life, world))

    def _listen(self, _life: Life, world: World) -> None:
        if world.secrets and self._ear is None:
            self._ear = Ear(world.secrets)
            world.on_close.append(self._ear.leave)

    def find(self, world: World) -> Iterable[str | Violation]:
        if not world.secrets:
            return
        yield from () if self._ear is None else self._ear.found
        for where, text, instance in (*_history(Evidence.of(world)), *_tables(world), *_told(world)):
            if any(secret in text for secret in world.secrets):
                yield Violation(self.id, f"a secret stands in {where}", instance)


def _history(evidence: Evidence) -> Iterator[tuple[str, str, str]]:
    for row in evidence.rows:
        for entry in row.entries:
            events = [_bare(event) for event in entry.events]
            text = msgspec.json.encode(msgspec.structs.replace(entry, events=events)).decode()
            yield f"commit {row.version} ({entry.cause}), beside the users' values", text, row.instance


def _bare(event: Any) -> Any:
    """The event without what users gave."""
    fields = _VALUES.get(type(event), ())
    return msgspec.structs.replace(event, **{name: _emptied(getattr(event, name)) for name in fields})


def _emptied(value: Any) -> Any:
    return dict.fromkeys(value, "") if isinstance(value, dict) else ""


def _tables(world: World) -> Iterator[tuple[str, str, str]]:
    for table in TABLES:
        for field in table._meta.sorted_fields:
            named = f"{table._meta.table_name}.{field.column_name}"
            if isinstance(field, peewee.TextField) and named not in _OF_USERS:
                rows = world.peek(f'SELECT "{field.column_name}" FROM "{table._meta.table_name}"')
                yield named, "\n".join(row[0] for row in rows if row[0] is not None), ""


def _told(world: World) -> Iterator[tuple[str, str, str]]:
    for operation in world.operations:
        yield f"what #{operation.number} was told ({operation.error})", operation.reason, operation.instance
    for moment in world.trace.moments:
        yield f"the transcript of step {moment.step}", moment.text, moment.instance
