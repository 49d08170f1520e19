"""Users' functions, and how a released attempt becomes a call of one.

A handler is an ordinary function: its parameters are variables by name, its annotations say what they are decoded to,
and one parameter of type `Context` tells it who is calling. Calls happen on pool threads; nothing here may touch an
instance.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Protocol

import attrs

from understudy.model.effects import RunTask
from understudy.model.errors import BadValue
from understudy.model.instance import Fault
from understudy.model.values import Encoded, decode_as, encode

TRACE_LIMIT = 4_000  # Characters of a traceback that are worth keeping for ever.
TEXT_LIMIT = 2_000  # Characters of an exception's own text, likewise.


class Signal(Protocol):
    """How a running handler hears from the runtime, and is heard."""

    @property
    def cancelled(self) -> bool: ...

    def beat(self) -> None: ...


@attrs.frozen
class Handler:
    """A function bound to a name in definitions."""

    name: str
    function: Callable[..., Any]
    types: dict[str, Any] = attrs.field(factory=dict)  # Parameter names to annotations; `Any` where there is none.
    context: str = ""  # The parameter that takes the `Context`, if there is one.
    connection: str = ""  # The parameter that takes the database connection of a transactional task.
    is_async: bool = False
    reference: str = ""  # "module:qualname", for isolation in a process of its own.


@attrs.define
class Context:
    """What a handler may know of its attempt.

    `key` is the same for all attempts: hand it to whatever must not happen twice.
    """

    key: str
    instance: str
    node: str
    attempt: int
    is_undo: bool = False
    _signal: Signal | None = attrs.field(default=None, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer wanted: stop early if you can."""
        return self._signal is not None and self._signal.cancelled

    def heartbeat(self) -> None:
        """Say that the handler is alive: its timeout counts from now."""
        if self._signal is not None:
            self._signal.beat()


def key_of(instance: str, task: int) -> str:
    return f"{instance}/{task}"


def attempt_key(instance: str, task: int, attempt: int) -> str:
    return f"{instance}/{task}/{attempt}"


def arguments(
    handler: Handler, order: RunTask, instance: str, signal: Signal | None, connection: object = None
) -> dict[str, Any]:
    """What the handler is called with."""
    values: dict[str, Any] = {}
    for name, text in order.given.items():
        if name in handler.types:
            try:
                values[name] = decode_as(text, handler.types[name])
            except BadValue as error:
                raise BadValue(f"{order.node}: parameter {name}: {error}") from error
    if handler.context:
        values[handler.context] = Context(
            key_of(instance, order.task), instance, order.node, order.attempt, order.is_undo, signal
        )
    if handler.connection:
        values[handler.connection] = connection
    return values


def encode_result(order: RunTask, value: object, *, limit_bytes: int) -> Encoded:
    return encode(value, what=f"the result of {order.node}", limit_bytes=limit_bytes)


def fault_of(error: BaseException, node: str) -> Fault:
    """An exception as words that can be stored: no pickle, and no reference to the user's classes."""
    name = type(error).__name__
    types = tuple(f"{cls.__module__}:{cls.__qualname__}" for cls in type(error).__mro__[:-1])
    text = _storable(_text_of(error), TEXT_LIMIT)
    trace = _storable("".join(traceback.format_exception(error))[-TRACE_LIMIT:], TRACE_LIMIT)
    return Fault("error", f"{name}: {text}" if text else name, node, types, trace)


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except BaseException as second:  # A user's `__str__` may raise anything; the attempt must end all the same.
        return f"(its text could not be made: {type(second).__name__})"


def _storable(text: str, limit: int) -> str:
    cut = text if len(text) <= limit else f"{text[:limit]}... ({len(text):,} characters)"
    return cut.encode("utf-8", "replace").decode().replace("\0", "\N{SYMBOL FOR NULL}")
