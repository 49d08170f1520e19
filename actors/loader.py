"""The actor that reads instances, off the threads that decide and write.

Everything that waits to be activated is read by one statement. While the writer is degraded nothing is read: what the
file holds is not certain before there is a new connection.
"""

from __future__ import annotations

from typing import Any, Final

from understudy.actors.definitions import Definitions
from understudy.actors.directory import Directory
from understudy.actors.dispatcher import PooledActor, Scheduler
from understudy.actors.messages import Barrier, Flush, Load, Order
from understudy.model.errors import Damaged, UnderstudyError
from understudy.store.connection import explained
from understudy.store.loading import load

MOST_TOGETHER: Final = 500


class Hold:
    """Told to the loader: read nothing until `Resume`."""


class Resume:
    """Told to the loader: read on."""


class LoaderActor(PooledActor):
    """Owns a reading connection."""

    def __init__(self, database: Any, definitions: Definitions, directory: Directory, *, dispatcher: Scheduler) -> None:
        super().__init__(dispatcher=dispatcher)
        self._database = database
        self._definitions = definitions
        self._directory = directory
        self._waiting: list[str] = []
        self._barriers: list[Barrier] = []
        self._flush_told = False
        self._held = False

    def on_receive(self, message: Any) -> None:
        kind = type(message)
        if kind is Load:
            self._waiting.append(message.id)
            self._soon()
        elif kind is Flush:
            self._flush_told = False
            self._flush()
        elif kind is Barrier:
            self._barriers.append(message)
            self._soon()
        elif kind is Hold:
            self._held = True
        else:
            assert kind is Resume, message
            self._held = False
            self._soon()

    def _soon(self) -> None:
        if not self._flush_told:
            self._flush_told = True
            self.actor_ref.tell(Flush())

    def _flush(self) -> None:
        if self._held:
            return
        ids, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
        if ids:
            self._read(ids)
        if self._waiting:
            self._soon()
            return
        barriers, self._barriers = self._barriers, []
        for barrier in barriers:
            barrier.passed()

    def _read(self, ids: list[str]) -> None:
        try:
            with explained(self._database.database):
                found = load(self._database.connection(), ids, self._definitions.graph)
        except UnderstudyError as error:
            for name in ids:
                self._unreadable(name, error)
            return
        for name in ids:
            result = found.get(name)
            if isinstance(result, Damaged):
                self._unreadable(name, result)
            else:
                self._directory.loaded(name, result)

    def _unreadable(self, name: str, error: UnderstudyError) -> None:
        for message in self._directory.unreadable(name):
            if isinstance(message, Order) and message.answer is not None:
                message.answer.reject(error)
