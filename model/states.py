"""The life of an instance and of a token, as data.

The rules move along these tables and nothing else does; the state diagrams in `docs/` are drawn from them. A
transition that is not listed here cannot happen: `apply` asserts it.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Status(Enum):
    """Where an instance stands."""

    PENDING = "pending"  # Known, nothing has moved yet.
    RUNNING = "running"
    PAUSED = "paused"  # By an operator: what runs may finish, nothing new begins.
    COMPENSATING = "compensating"  # It will fail; what was done is being undone.
    CANCELLING = "cancelling"  # It will be cancelled; what was done is being undone.
    ENDED = "ended"


class Outcome(Enum):
    """How an instance ended; written once."""

    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TERMINATED = "terminated"  # It reached a terminate end.
    EXPIRED = "expired"
    SKIPPED = "skipped"
    ABANDONED = "abandoned"


class TokenStatus(Enum):
    """Where a token stands; the last two are seen only in history, because ended tokens have no row."""

    CREATED = "created"
    READY = "ready"  # Arrived at its node, which has not been entered yet.
    EXECUTING = "executing"  # An attempt of its task is out.
    WAITING = "waiting"  # For a wait, for the rest of a join, for its inner scope, or for an operator.
    SUSPENDED = "suspended"
    COMPLETED = "completed"
    TERMINATED = "terminated"


class Mode(Enum):
    """Which way a token goes."""

    FORWARD = "forward"
    COMPENSATION = "compensation"


class ScopeKind(Enum):
    """What a scope is for; only the root owns variables so far."""

    ROOT = "root"
    SAGA = "saga"


class ScopeStatus(Enum):
    """Where a scope stands."""

    OPEN = "open"
    FAILING = "failing"  # Attempts that may still succeed are awaited; nothing new begins.
    COMPENSATING = "compensating"


INSTANCE_TRANSITIONS: Final[dict[Status, frozenset[Status]]] = {
    Status.PENDING: frozenset({Status.RUNNING}),
    Status.RUNNING: frozenset({Status.PAUSED, Status.COMPENSATING, Status.CANCELLING, Status.ENDED}),
    Status.PAUSED: frozenset({Status.RUNNING, Status.COMPENSATING, Status.CANCELLING, Status.ENDED}),
    Status.COMPENSATING: frozenset({Status.CANCELLING, Status.ENDED}),
    Status.CANCELLING: frozenset({Status.ENDED}),
    Status.ENDED: frozenset(),
}

TOKEN_TRANSITIONS: Final[dict[TokenStatus, frozenset[TokenStatus]]] = {
    TokenStatus.CREATED: frozenset({TokenStatus.READY}),
    TokenStatus.READY: frozenset(
        {
            TokenStatus.READY,  # Straight through a gateway to the next node.
            TokenStatus.EXECUTING,
            TokenStatus.WAITING,
            TokenStatus.COMPLETED,
            TokenStatus.TERMINATED,
        }
    ),
    TokenStatus.EXECUTING: frozenset(
        {
            TokenStatus.EXECUTING,  # A further attempt.
            TokenStatus.READY,
            TokenStatus.WAITING,
            TokenStatus.COMPLETED,
            TokenStatus.TERMINATED,
        }
    ),
    TokenStatus.WAITING: frozenset(
        {
            TokenStatus.WAITING,
            TokenStatus.READY,
            TokenStatus.EXECUTING,
            TokenStatus.COMPLETED,
            TokenStatus.TERMINATED,
        }
    ),
    TokenStatus.SUSPENDED: frozenset({TokenStatus.READY, TokenStatus.TERMINATED}),
    TokenStatus.COMPLETED: frozenset(),
    TokenStatus.TERMINATED: frozenset(),
}

# A token in one of these moves by itself after a restart; an instance that has one is runnable.
MOVING: Final[frozenset[TokenStatus]] = frozenset({TokenStatus.READY, TokenStatus.EXECUTING})
