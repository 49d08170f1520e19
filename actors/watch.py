"""Who wants to know when something has been committed. Nobody polls: a commit calls back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

Callback = Callable[[], None]

logger = logging.getLogger(__name__)


class Watch:
    """Callbacks for one instance, or for any. Called on the persistence actor's thread: they must only tell or set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, list[Callback]] = {}
        self._any: list[Callback] = []

    def add(self, instance: str | None, callback: Callback) -> Callback:
        """Call back after each commit of the instance, or of any; what is returned ends it, and may be repeated."""
        with self._lock:
            callbacks = self._any if instance is None else self._of.setdefault(instance, [])
            callbacks.append(callback)

        def remove() -> None:
            with self._lock:
                if callback in callbacks:
                    callbacks.remove(callback)
                if instance is not None and not callbacks and self._of.get(instance) is callbacks:
                    del self._of[instance]

        return remove

    def committed(self, instances: list[str]) -> None:
        if not self._of and not self._any:
            return
        with self._lock:
            called = [callback for name in instances for callback in self._of.get(name, ())] + self._any
        _call(called)

    def wake_all(self) -> None:
        """Something other than a commit has changed: let everybody look."""
        with self._lock:
            called = [callback for callbacks in self._of.values() for callback in callbacks] + self._any
        _call(called)


def _call(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        try:
            callback()
        except Exception:  # A watcher's mistake must not stop the writer.
            logger.exception("somebody who watches for commits raised")
