"""What all instance actors of a runtime share, and how one of them leaves memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from understudy.actors.clock import Clock
from understudy.actors.directory import Directory
from understudy.actors.dispatcher import PooledRef
from understudy.actors.messages import Forget
from understudy.model import effects as fx
from understudy.model.errors import UnderstudyError


@attrs.define(eq=False)
class Services:
    """Made once for a system. Its flags and counters may be read on any thread."""

    clock: Clock
    directory: Directory
    persistence: PooledRef[Any]
    supervisor: PooledRef[Any]
    release: Callable[[str, fx.RunTask, int], None]  # Hand an attempt to its handler.
    withdraw: Callable[[str, fx.CancelTask], None]
    epoch: int
    keep_answers_ms: int
    left: frozenset[str] | None = None  # If the former owner left in good order: the attempts that it left running.
    is_draining: bool = False
    is_recovered: bool = False  # Whether everything that a former life has left was brought back.
    lost: UnderstudyError | None = None  # Why nothing can be committed any more.
    is_sure: Callable[[], bool] = lambda: True  # Whether nobody can have replaced us since we last looked.
    troubles: dict[str, int] = attrs.field(factory=dict)  # How many activations in a row have failed.


def dismiss(services: Services, name: str) -> None:
    """Let an instance leave memory, if it still rests."""
    actor = services.directory.leave(name)
    if actor is not None:
        forget(services, actor.stored_no)


def forget(services: Services, no: int) -> None:
    if no:
        services.persistence.tell(Forget(no))
