"""The actor that reads instances, off the threads that decide and write.

Everything that waits to be activated is read by one statement. While the writer is degraded nothing is read: what the
file holds is not certain before there is a new connection. When reading fails, callers are told so; what has no caller
(a timer, a result, a message) is kept and tried again, because nobody else would. A damaged instance is set aside.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from understudy.actors.answers import answer
from understudy.actors.clock import Clock
from understudy.actors.definitions import Definitions
from understudy.actors.directory import Directory, Message
from understudy.actors.dispatcher import PooledActor, Scheduler
from understudy.actors.messages import Barrier, Flush, Load, Order
from understudy.model.errors import Damaged, UnderstudyError
from understudy.store.connection import explained
from understudy.store.loading import load

MOST_TOGETHER: Final = 500
FIRST_BACKOFF_MS: Final = 50
LONGEST_BACKOFF_MS: Final = 5_000

logger = logging.getLogger("understudy")


class Hold:
    """Told to the loader: read nothing until `Resume`."""


class Resume:
    """Told to the loader: read on."""


class TryAgain:
    """Told to the loader by the clock: read what could not be read."""


class LoaderActor(PooledActor):
    """Owns a reading connection. Without a clock it does not try again."""

    def __init__(
        self,
        database: Any,
        definitions: Definitions,
        directory: Directory,
        *,
        clock: Clock | None = None,
        dispatcher: Scheduler,
    ) -> None:
        super().__init__(dispatcher=dispatcher)
        self._database = database
        self._definitions = definitions
        self._directory = directory
        self._clock = clock
        self._waiting: list[str] = []
        self._barriers: list[Barrier] = []
        self._kept: list[tuple[str, Message]] = []  # What waits for the next try, in its order.
        self._backoff_ms = FIRST_BACKOFF_MS
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
        elif kind is Resume:
            self._held = False
            self._soon()
        else:
            assert kind is TryAgain, message
            self._try_again()

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
            self._keep(ids, error)
            return
        self._backoff_ms = FIRST_BACKOFF_MS
        for name in ids:
            result = found.get(name)
            if isinstance(result, Damaged):
                logger.error("%s is set aside: %s", name, result)
                self._refuse(name, result)
            else:
                self._directory.loaded(name, result)

    # --- what cannot be read ---

    def _refuse(self, name: str, error: UnderstudyError) -> list[Message]:
        """Tell the callers; the others are handed back."""
        others: list[Message] = []
        for message in self._directory.unreadable(name):
            if isinstance(message, Order) and message.answer is not None:
                answer(message, error)
            else:
                others.append(message)
        return others

    def _keep(self, ids: list[str], error: UnderstudyError) -> None:
        kept = [(name, message) for name in ids for message in self._refuse(name, error)]
        if self._clock is None or not kept:
            return
        if not self._kept:
            logger.warning("instances cannot be read now, and are tried again: %s", error)
            tell = self.actor_ref.tell
            self._clock.after("loader", self._backoff_ms, lambda: tell(TryAgain()))
            self._backoff_ms = min(2 * self._backoff_ms, LONGEST_BACKOFF_MS)
        self._kept += kept

    def _try_again(self) -> None:
        kept, self._kept = self._kept, []
        for name, message in kept:
            self._directory.tell(name, message)
