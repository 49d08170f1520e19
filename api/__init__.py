"""Understudy: durable process instances as actors, embedded in a Python service.

Everything public is here. Names are loaded when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.actors.handlers import Context as Context
    from understudy.actors.system import Limits as Limits
    from understudy.aio import AsyncHandle as AsyncHandle
    from understudy.aio import AsyncRuntime as AsyncRuntime
    from understudy.model.errors import AlreadyEnded as AlreadyEnded
    from understudy.model.errors import AlreadyOpen as AlreadyOpen
    from understudy.model.errors import BadExpression as BadExpression
    from understudy.model.errors import BadInput as BadInput
    from understudy.model.errors import BadValue as BadValue
    from understudy.model.errors import Cancelled as Cancelled
    from understudy.model.errors import Closed as Closed
    from understudy.model.errors import Conflict as Conflict
    from understudy.model.errors import Damaged as Damaged
    from understudy.model.errors import Failed as Failed
    from understudy.model.errors import Fenced as Fenced
    from understudy.model.errors import InvalidDefinition as InvalidDefinition
    from understudy.model.errors import NewerSchema as NewerSchema
    from understudy.model.errors import NotOurs as NotOurs
    from understudy.model.errors import OlderSchema as OlderSchema
    from understudy.model.errors import OutcomeUnknown as OutcomeUnknown
    from understudy.model.errors import Problem as Problem
    from understudy.model.errors import Rejected as Rejected
    from understudy.model.errors import Stuck as Stuck
    from understudy.model.errors import TimedOut as TimedOut
    from understudy.model.errors import Unavailable as Unavailable
    from understudy.model.errors import UnderstudyError as UnderstudyError
    from understudy.model.errors import UnknownIncident as UnknownIncident
    from understudy.model.errors import UnknownInstance as UnknownInstance
    from understudy.model.errors import UnknownProcess as UnknownProcess
    from understudy.model.errors import Unsuccessful as Unsuccessful
    from understudy.model.errors import UsedAfterFork as UsedAfterFork
    from understudy.process import Process as Process
    from understudy.rehearsal import Rehearsal as Rehearsal
    from understudy.runtime import Handle as Handle
    from understudy.runtime import Runtime as Runtime
    from understudy.runtime import connect as connect
    from understudy.state import State as State
    from understudy.steps import choose as choose
    from understudy.steps import end as end
    from understudy.steps import parallel as parallel
    from understudy.steps import repeat as repeat
    from understudy.steps import saga as saga
    from understudy.steps import sequence as sequence
    from understudy.steps import sleep as sleep
    from understudy.steps import terminate as terminate
    from understudy.steps import throw as throw
    from understudy.steps import wait as wait
    from understudy.steps import when as when
    from understudy.subscriptions import Change as Change
    from understudy.subscriptions import Subscription as Subscription
    from understudy.tasks import Retry as Retry
    from understudy.tasks import task as task

_ERRORS = (
    "AlreadyEnded AlreadyOpen BadExpression BadInput BadValue Cancelled Closed Conflict Damaged Failed Fenced "
    "InvalidDefinition NewerSchema NotOurs OlderSchema OutcomeUnknown Problem Rejected Stuck TimedOut "
    "Unavailable UnderstudyError UnknownIncident UnknownInstance UnknownProcess Unsuccessful UsedAfterFork"
)
_HOMES = {
    "understudy.actors.handlers": "Context",
    "understudy.actors.system": "Limits",
    "understudy.aio": "AsyncHandle AsyncRuntime",
    "understudy.model.errors": _ERRORS,
    "understudy.process": "Process",
    "understudy.rehearsal": "Rehearsal",
    "understudy.runtime": "Handle Runtime connect",
    "understudy.state": "State",
    "understudy.steps": "choose end parallel repeat saga sequence sleep terminate throw wait when",
    "understudy.subscriptions": "Change Subscription",
    "understudy.tasks": "Retry task",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__version__ = "0.1.0"
__all__ = sorted(_HOME)  # noqa: PLE0605 - A sorted list of the names above.


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"understudy has no {name!r}; its public names are in understudy.__all__")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
