"""From the arguments of a runtime to an open node: processes bound, roles and settings checked at the door."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from understudy.actors.handlers import Handler
from understudy.actors.system import Limits, Ports
from understudy.model.definition import decode_definition
from understudy.model.errors import Rejected
from understudy.model.kinds import Task
from understudy.node import Node, Role
from understudy.process import Process
from understudy.store.connection import SYNCHRONOUS, Settings
from understudy.store.reads import Reads


@attrs.frozen
class Processes:
    """The processes that a runtime was given, and the handlers they bind."""

    by_name: dict[str, Process[Any, Any]]
    handlers: dict[str, Handler]

    def missing_handlers(self, reads: Reads) -> list[str]:
        """One line for each stored definition that needs a handler nobody has bound here."""
        lines = []
        for no, name, version, _digest in reads.definitions():
            row = reads.definition(no)
            assert row is not None, no
            needed = {
                handler
                for node in decode_definition(row[0]).nodes
                if isinstance(node, Task)
                for handler in (node.handler, node.undo.handler if node.undo else node.handler)
            }
            missing = sorted(needed - set(self.handlers))
            if missing:
                lines.append(f"{name} v{version} needs {', '.join(missing)}: no handler of that name is bound")
        return lines


@attrs.frozen
class Opened:
    node: Node
    processes: Processes


def open_node(
    path: str | os.PathLike[str],
    processes: Sequence[Process[Any, Any]],
    *,
    role: str,
    durability: str,
    limits: Limits | None,
    ports: Callable[[], Ports] | None = None,
) -> Opened:
    bound = bind(processes)
    if durability not in SYNCHRONOUS:
        raise Rejected(f"durability is one of {', '.join(SYNCHRONOUS)}, not {durability!r}")
    if not isinstance(path, str | os.PathLike):
        raise Rejected(f"the path of the database is a text or a Path, not {type(path).__name__}")
    try:
        wanted = Role(role)
    except ValueError:
        raise Rejected(f"role is one of {', '.join(r.value for r in Role)}, not {role!r}") from None
    node = Node(
        os.fspath(path),
        role=wanted,
        handlers=bound.handlers,
        deployments=[process.definition.body for process in bound.by_name.values()],
        limits=limits or Limits(),
        settings=Settings(durability=durability),
        ports=ports,
    )
    return Opened(node, bound)


def bind(processes: Sequence[Process[Any, Any]]) -> Processes:
    by_name: dict[str, Process[Any, Any]] = {}
    handlers: dict[str, Handler] = {}
    for process in processes:
        if not isinstance(process, Process):
            raise Rejected(f"a Runtime takes processes, not {type(process).__name__}: {process!r}")
        if by_name.get(process.name, process) is not process:
            raise Rejected(f"two processes are named {process.name!r}; give one of them another name")
        by_name[process.name] = process
        for name, handler in process.handlers.items():
            before = handlers.setdefault(name, handler)
            if before.function is not handler.function:
                raise Rejected(f"two functions are bound to the handler name {name!r}; give one task a name=")
    return Processes(by_name, handlers)
