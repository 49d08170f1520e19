"""What our actors tell each other.

Only `tell`: an answer is a message of its own, or settles a promise of the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from understudy.actors.promise import Promise
from understudy.model.commands import AnyCommand
from understudy.model.definition import Graph
from understudy.store.commit import Stored
from understudy.store.writer import Change, Operation, Refused


class Order(msgspec.Struct):
    """A command for an instance, and who waits for its answer."""

    command: AnyCommand
    answer: Promise[Any] | None = None
    graph: Graph | None = None  # For `Start`: what the new instance is to run.
    tries: int = 0  # How often an activation has failed on it.
    may_be_done: bool = False  # It was in a commit of which nobody knows whether it landed.


class Wake(msgspec.Struct, frozen=True):
    """Activate the instance, so that it goes on by itself."""


class Committed(msgspec.Struct, frozen=True):
    stored: Stored


class NotCommitted(msgspec.Struct, frozen=True):
    refused: Refused


class Unsure(msgspec.Struct, frozen=True):
    """Whether the commit landed is not known: the activation's memory is worth nothing."""

    reason: str


class Drain(msgspec.Struct, frozen=True):
    """Say when there is nothing to decide and nothing in flight; True if that was so at once."""

    done: Callable[[bool], None]


class Write(msgspec.Struct):
    """A change for the next batch; `ref` is told, or `answer` is settled, once it is durable or refused."""

    change: Change
    ref: Any = None  # The instance actor that waits for it.
    answer: Promise[Any] | None = None


class Run(msgspec.Struct):
    """An operation with a transaction of its own."""

    operation: Operation
    answer: Promise[Any] | None = None


class Flush(msgspec.Struct, frozen=True):
    pass


class Reopen(msgspec.Struct, frozen=True):
    pass


class Forget(msgspec.Struct, frozen=True):
    """The instance of this number has no activation any more."""

    no: int


class Load(msgspec.Struct, frozen=True):
    id: str


class Barrier(msgspec.Struct):
    """Call back once everything told before it has been loaded."""

    passed: Any


class Arm(msgspec.Struct, frozen=True):
    """A timer that is durable now."""

    instance: str
    wait: int
    due_ms: int


class Tick(msgspec.Struct, frozen=True):
    """An alarm of the clock."""

    name: str


class Sweep(msgspec.Struct, frozen=True):
    """Bring back whatever moves by itself, from a page of the store on: the runnable, then those with messages."""

    after: int = 0
    messages: bool = False


class Lend(msgspec.Struct):
    """A transactional task: run it between two batches on the writer's connection."""

    instance: int
    task: int
    attempt: int
    timeout_ms: int
    run: Callable[[Any], str]  # Gets the lent connection, gives the encoded result.
    done: Callable[[str | BaseException], None]  # Called after the commit or the rollback; must only tell.


class Returned(msgspec.Struct, frozen=True):
    """The handler of a loan is through."""

    loan: Any
    outcome: Any
