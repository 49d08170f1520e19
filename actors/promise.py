"""An answer that comes later.

Owns the one kind of future that Understudy uses: settled once, watched by callbacks, and waited for only outside of
actors. It works wherever pykka expects a `Future`. It must never run an actor itself, and never let a callback's
exception reach whoever settles: that is usually an actor in the middle of a message.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar

import pykka

__all__ = ["BlockedInsideActor", "Driver", "Promise", "current"]

T = TypeVar("T")
ExceptionInfo = tuple[type[BaseException] | None, BaseException | None, TracebackType | None]
Outcome = tuple[Any, BaseException | None, TracebackType | None]

logger = logging.getLogger(__name__)


class BlockedInsideActor(RuntimeError):
    """An actor tried to wait, and would have stopped every actor on its thread; let the answer come as a message."""


class Driver(Protocol):
    """Whatever makes the world go on while its only thread waits; a stepping stage is one."""

    def drive(self, condition: Callable[[], bool], *, timeout_s: float | None) -> None:
        """Return as soon as the condition holds; raise if it never will."""


class Current(threading.local):
    """What the calling thread is doing: the actor that it runs, or None."""

    actor: object | None = None


current = Current()


class Promise(pykka.Future[T]):
    """A value or an exception, now or later; the first settlement wins and later ones are ignored.

    A promise without a driver is settled by some other thread, and `get` blocks until then. In a world of one thread
    nobody else could settle it: there the promise is given that world as its `driver`, and `get` lets the driver run
    until it is settled.
    """

    __slots__ = ("_callbacks", "_first", "_outcome", "driver")

    # pykka sets a hook on the futures that `map`, `join` and the like derive. No other promise pays for the attribute.
    _get_hook: Callable[[float | None], T] | None = None

    def __init__(self, *, driver: Driver | None = None) -> None:
        self.driver = driver
        self._outcome: Outcome | None = None
        self._first = threading.Lock()  # Taken for good by the first settlement; it is never waited for.
        self._callbacks: list[Callable[[Promise[T]], object]] = []

    def __repr__(self) -> str:
        if self._outcome is None:
            return "<Promise pending>"
        value, error, _ = self._outcome
        return f"<Promise resolved {value!r}>" if error is None else f"<Promise rejected {error!r}>"

    @property
    def done(self) -> bool:
        """Whether `get` would return, or raise what was rejected with, at once."""
        return self._outcome is not None

    @property
    def error(self) -> BaseException | None:
        """What the promise was rejected with; None while it is pending and once it is resolved."""
        return None if self._outcome is None else self._outcome[1]

    def resolve(self, value: T) -> bool:
        """Settle with a value; False if it was settled already."""
        return self._settle((value, None, None))

    def reject(self, exception: BaseException) -> bool:
        """Settle with an exception, which `get` will raise; False if it was settled already."""
        return self._settle((None, exception, exception.__traceback__))

    def add_done_callback(self, callback: Callable[[Promise[T]], object]) -> None:
        """Call back once with this promise: on the thread that settles it, or at once if it is settled."""
        self._callbacks.append(callback)
        if self._outcome is not None:
            self._call_back()

    def get(self, *, timeout: float | None = None) -> Any:
        """The value, waited for up to `timeout` seconds, then `pykka.Timeout`; inside an actor only if settled."""
        value, error, traceback = self._outcome or self._wait(timeout)
        if error is not None:
            # The same exception may be raised many times; without this every time would lengthen its traceback.
            raise error.with_traceback(traceback)
        return value

    def set(self, value: T | None = None) -> None:
        """What pykka calls to answer. Settled already, it does not raise as pykka's does: that would break its loop."""
        self._settle((value, None, None))

    def set_exception(self, exc_info: ExceptionInfo | None = None) -> None:
        """What pykka calls to answer with an exception: the one given, or the one being handled."""
        kind, error, traceback = exc_info or sys.exc_info()
        if error is None:
            assert kind is not None, "set_exception() outside of an except block needs exc_info"
            error = kind()
        self._settle((None, error, traceback))

    def _settle(self, outcome: Outcome) -> bool:
        if not self._first.acquire(blocking=False):
            return False
        self._outcome = outcome
        self._call_back()
        return True

    def _call_back(self) -> None:
        # A callback is added before the outcome is looked at, and the outcome set before the callbacks are looked at.
        # Hence one side or both get here after both happened, and `pop` hands every callback to exactly one of them.
        while self._callbacks:
            try:
                callback = self._callbacks.pop(0)
            except IndexError:
                return
            try:
                callback(self)
            except BaseException:
                logger.exception("a callback of %r raised", self)

    def _wait(self, timeout_s: float | None) -> Outcome:
        if self._get_hook is not None:
            self.resolve(self._get_hook(timeout_s))
        elif current.actor is not None:
            raise BlockedInsideActor(
                f"{current.actor} would wait for an answer and stop every actor on its thread; "
                "use add_done_callback, or have the answer told to it as a message"
            )
        elif self.driver is not None:
            self.driver.drive(lambda: self._outcome is not None, timeout_s=timeout_s)
        else:
            self._block(timeout_s)
        assert self._outcome is not None, "the wait for a promise ended before it was settled"
        return self._outcome

    def _block(self, timeout_s: float | None) -> None:
        gate = threading.Lock()
        gate.acquire()

        def open_gate(_: Promise[T]) -> None:
            gate.release()

        self.add_done_callback(open_gate)
        limit_s = -1 if timeout_s is None else min(max(timeout_s, 0), threading.TIMEOUT_MAX)
        if not gate.acquire(timeout=limit_s) and self._outcome is None:
            with contextlib.suppress(ValueError):  # It is being called at this very moment.
                self._callbacks.remove(open_gate)
            raise pykka.Timeout(f"no answer within {timeout_s} seconds")
