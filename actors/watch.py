"""Who wants to know when something has been committed. Nobody polls: a commit calls back."""

from __future__ import annotations

import threading
from collections.abc import Callable

Callback = Callable[[], None]


class Watch:
    """Callbacks for one instance, or for any. Called on the persistence actor's thread: they must only tell or set."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, list[Callback]] = {}
        self._any: list[Callback] = []

    def add(self, instance: str | None, callback: Callback) -> Callback:
        """Call back after each commit of the instance, or of any; what is returned ends it."""
        with self._lock:
            callbacks = self._any if instance is None else self._of.setdefault(instance, [])
            callbacks.append(callback)

        def remove() -> None:
            with self._lock:
                callbacks.remove(callback)
                if instance is not None and not callbacks and self._of.get(instance) is callbacks:
                    del self._of[instance]

        return remove

    def committed(self, instances: list[str]) -> None:
        if not self._of and not self._any:
            return
        with self._lock:
            called = [callback for name in instances for callback in self._of.get(name, ())] + self._any
        for callback in called:
            callback()

    def wake_all(self) -> None:
        """Something other than a commit has changed: let everybody look."""
        with self._lock:
            called = [callback for callbacks in self._of.values() for callback in callbacks] + self._any
        for callback in called:
            callback()
