"""Attempts in a process of their own: in the parent an attempt becomes bytes, in the child a call again.

The child decodes the arguments by the handler's own annotations, calls it and encodes the result, so that no object of
the user's ever crosses. Killing is the runner's affair; here nothing may outlive the call.
"""

from __future__ import annotations

import asyncio
import importlib
import typing
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from understudy.actors.handlers import Handler, arguments, encode_result
from understudy.actors.isolation import ProcessRunner, beat
from understudy.model.effects import RunTask

if TYPE_CHECKING:  # The child would import all of asyncio for it.
    from understudy.actors.pool import CancelSignal

BOOT_MS: Final = 60_000  # How long a child may take to start and to import the handler's module.


class Isolation:
    """Runs attempts in children. Safe to use from any thread of the pool; there is no child before the first call."""

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._runner = ProcessRunner(entry="understudy.actors.isolated:answer")

    def __call__(self, handler: Handler, order: RunTask, instance: str, signal: CancelSignal) -> str:
        """The encoded result; `TimedOut` and `Cancelled` after the child was killed for it."""
        # An empty call only imports: the handler's time begins when there is somebody to run it.
        self._runner.run(handler.reference, b"", timeout_ms=BOOT_MS, signal=signal)
        payload = msgspec.json.encode(_Call(order, instance, handler.context, self._limit_bytes))
        return self._runner.run(handler.reference, payload, timeout_ms=order.timeout_ms, signal=signal).decode()

    def close(self) -> None:
        self._runner.close()


class _Call(msgspec.Struct, frozen=True, array_like=True):
    order: RunTask
    instance: str
    context: str
    limit_bytes: int


# --- in the child -----------------------------------------------------------------------------------------------------


class _Signal:
    """What the context of an isolated handler hears: it is killed rather than asked to stop."""

    cancelled = False

    def beat(self) -> None:
        beat()


_read = msgspec.json.Decoder(_Call).decode


def answer(reference: str, payload: bytes) -> bytes:
    """What the child does with a call: the entry that the runner knows."""
    found = _find(reference)
    if not payload:
        return b""
    call = _read(payload)
    handler = _handler(found, call.context)
    value = handler.function(**arguments(handler, call.order, call.instance, _Signal()))
    if handler.is_async:
        value = asyncio.run(value)
    return encode_result(call.order, value, limit_bytes=call.limit_bytes).encode()


def _find(reference: str) -> Any:
    module, _, name = reference.partition(":")
    return attrgetter(name)(importlib.import_module(module))


def _handler(found: Any, context: str) -> Handler:
    """What stands under an import path, as a handler: a task tells by itself, a plain function is read here."""
    made = found.handler() if hasattr(found, "function") else None
    if isinstance(made, Handler):
        return made
    types = {name: kind for name, kind in typing.get_type_hints(found).items() if name not in (context, "return")}
    return Handler(found.__name__, found, types, context, is_async=asyncio.iscoroutinefunction(found))
