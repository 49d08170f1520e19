"""What is to be done after a commit, and only then. Each can be derived again from the stored state."""

from __future__ import annotations

import msgspec


class RunTask(msgspec.Struct, frozen=True):
    """Release an attempt of a task to its handler."""

    token: int
    task: int
    attempt: int
    node: str
    handler: str
    given: dict[str, str]
    is_undo: bool = False
    timeout_ms: int | None = None
    lane: str = "local"
    transactional: bool = False
    isolation: str = ""


class CancelTask(msgspec.Struct, frozen=True):
    """Tell the handler of an attempt that its result is no longer wanted, or that its step is being taken back."""

    token: int
    task: int
    attempt: int


class ArmTimer(msgspec.Struct, frozen=True):
    wait: int
    due_ms: int


AnyEffect = RunTask | CancelTask | ArmTimer
