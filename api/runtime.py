"""The runtime as a service uses it: start instances, send them messages, look at them, move them.

Every call that changes something returns after its commit. Every call that reads sees committed rows. `AsyncRuntime`
has the same names and signatures.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from understudy.actors.system import Limits, Ports
from understudy.explain import Explanation, explain
from understudy.model.errors import Rejected, TimedOut, Unavailable
from understudy.model.values import encode
from understudy.opening import Opened, open_node
from understudy.process import Process
from understudy.requests import (
    MEMORY,
    Duration,
    database_place,
    filter_request,
    instance_request,
    message_request,
    page_request,
    seconds,
    start_request,
    subscriber_request,
)
from understudy.state import State
from understudy.store.reads import Summary
from understudy.subscriptions import Change, Subscription, follow
from understudy.views import (
    Graphs,
    Predicate,
    Steps,
    last_failures,
    late,
    now_ms,
    outcome_of,
    path_of,
    steps_of,
    stuck,
    undone_of,
    waited,
)

logger = logging.getLogger("understudy")

I = TypeVar("I")  # noqa: E741 - What a process takes; the name is as short as the idea.
R = TypeVar("R")
CALL_TIMEOUT = "30s"  # How long a call waits for its commit before it says that it does not know.


class Runtime:
    """A database of process instances, open in this process.

    `path` is a file, or ":memory:" for tests (nothing survives there). With role="auto" this process owns the file if
    nobody does, and otherwise talks to the owner and takes over when it dies. role="operator" is for one command: if
    nobody owns the file this process does, but it runs no instance; the next owner goes on from what was commanded.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *processes: Process[Any, Any],
        role: str = "auto",
        durability: str = "full",
        limits: Limits | None = None,
        call_timeout: Duration = CALL_TIMEOUT,
        ports: Callable[[], Ports] | None = None,
    ) -> None:
        timeout_s = seconds(call_timeout)
        place = Place(path, role=role, durability=durability)
        opened = open_node(
            place.path, processes, role=place.role, durability=place.durability, limits=limits, ports=ports
        )
        self._begin(opened, place, timeout_s)

    def _begin(self, opened: Opened, place: Place, timeout_s: float | None) -> None:
        self.path = place.name
        self._place = place
        self.node = opened.node
        self._processes = opened.processes
        self._graphs = Graphs(opened.node)
        self._timeout_s = timeout_s
        self._subscriptions: list[Subscription] = []

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self, *, timeout: Duration = "10s") -> bool:
        """Begin nothing new, let running handlers finish within the limit, and close. Nothing acknowledged is lost."""
        timeout_s = seconds(timeout) or 0
        for subscription in self._subscriptions:
            subscription.close()
        finished = self.node.close(timeout_s=timeout_s)
        self._place.leave()
        return finished

    @property
    def is_owner(self) -> bool:
        return self.node.is_owner

    def report(self) -> list[str]:
        """What a start-up should know: handlers that stored definitions need and nobody has bound."""
        self.node.check()
        return self._processes.missing_handlers(self.node.reads)

    # --- starting and finding ---

    def start(
        self,
        process: Process[I, R] | str,
        input: I | Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        title: str = "",
        tags: Mapping[str, str] | None = None,
        by: str = "",
        caused_by: str = "",
    ) -> Handle[R]:
        """Start an instance, once for each id: the same id with the same input gives the same instance again.

        A name means the process of that name that this runtime was given, or else the newest that is deployed.
        """
        self.node.check()
        bound = self._processes.by_name.get(process) if isinstance(process, str) else process
        request = start_request(
            bound or process,
            input,
            id=self.node.new_id() if id is None else id,
            is_new=id is None,
            title=title,
            tags=tags,
            by=by,
            caused_by=caused_by,
            limit_bytes=self.node.limits.value_bytes,
        )
        answer = self._call("start", request)
        return Handle(self, answer["id"], bound)

    def get(self, id: str, process: Process[I, R] | None = None) -> Handle[R]:
        """The handle of an instance that exists."""
        self.node.check()
        summary = self.node.reads.summary(id)
        return Handle(self, id, process or self._processes.by_name.get(summary.process))

    def list(
        self,
        *,
        process: str = "",
        status: str = "",
        outcome: str = "",
        with_incident: bool = False,
        open_only: bool = False,
        tag: tuple[str, str] | None = None,
        text: str = "",
        limit: int = 50,
        before: int | None = None,
    ) -> list[Summary]:
        """Instances, newest first; `before` is the `no` of the last one of the page before."""
        self.node.check()
        which = filter_request(
            process=process,
            status=status,
            outcome=outcome,
            with_incident=with_incident,
            open_only=open_only,
            tag=tag,
            text=text,
        )
        return self.node.reads.page(which, **page_request(limit, before))

    # --- messages ---

    def send(
        self,
        id: str,
        message: str,
        payload: object = None,
        *,
        key: str | int | None = None,
        ttl: Duration | None = None,
        request_key: str = "",
        by: str = "",
    ) -> bool:
        """Send a message to an instance; True when something there waited for it, False when it is kept until then."""
        request = message_request(
            message,
            payload,
            about=key,
            ttl=ttl,
            request_key=request_key,
            by=by,
            limit_bytes=self.node.limits.value_bytes,
        )
        answer = self._call("send", {**instance_request(id), **request})
        return bool(answer["received"])

    def publish(
        self,
        message: str,
        payload: object = None,
        *,
        key: str | int | None = None,
        ttl: Duration | None = None,
        request_key: str = "",
        by: str = "",
    ) -> None:
        """Publish a message for whichever instance waits for it, now or within `ttl`. Returns when it is durable."""
        request = message_request(
            message,
            payload,
            about=key,
            ttl=ttl,
            request_key=request_key,
            by=by,
            limit_bytes=self.node.limits.value_bytes,
        )
        self._call("publish", request)

    # --- looking ---

    def state(self, id: str) -> State:
        self.node.check()
        return self._graphs.state(self.node.reads.detail(id))

    def variables(self, id: str) -> dict[str, Any]:
        return self.state(id).variables

    def history(self, id: str) -> Steps:
        self.node.check()
        self.node.reads.summary(id)
        return steps_of(self.node.reads.history(id))

    def explain(self, id: str) -> Explanation:
        """Why the instance is where it is, and what would move it."""
        state = self.state(id)
        return explain(state, now_ms=now_ms(self.node), failures=last_failures(self.node, state))

    # --- waiting ---

    def wait_until(self, id: str, predicate: Predicate, *, timeout: Duration | None = "30s") -> State:
        """Wait until the instance's state fits; looked at after each of its commits."""
        timeout_s = seconds(timeout)
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            state = self.state(id)
            if predicate(state):
                return state
            changed = self.node.submit("watch", {"id": id, "version": state.version})
            try:
                waited(changed, None if end_s is None else max(0.0, end_s - time.monotonic()), f"a commit of {id}")
            except TimedOut:
                changed.resolve(False)  # Nobody waits any more: a watch that is never called would be kept for ever.
                state = self.state(id)
                if predicate(state):
                    return state
                raise late(state, timeout_s) from None

    def result(self, id: str, *, timeout: Duration | None = "30s", process: Process[Any, R] | None = None) -> R:
        """The result, as soon as there is one.

        Raises Failed, Cancelled, Stuck (an incident waits for an operator) or TimedOut.
        """
        state = self.wait_until(id, lambda s: s.is_ended or bool(s.incidents), timeout=timeout)
        if not state.is_ended:
            raise stuck(state)
        bound: Process[Any, R] | None = process or self._processes.by_name.get(state.process)
        return outcome_of(state, bound, lambda: self.history(id))

    # --- moving ---

    def cancel(self, id: str, *, reason: str = "", undo: bool = True, request_key: str = "", by: str = "") -> None:
        """Cancel the instance. What its open sagas have done is undone first, unless `undo` is False."""
        self._call("cancel", instance_request(id, request_key=request_key, by=by, reason=reason, undo=undo))

    def pause(self, id: str, *, request_key: str = "", by: str = "") -> None:
        """Let running handlers finish, and begin nothing new until `resume`."""
        self._call("pause", instance_request(id, request_key=request_key, by=by))

    def resume(self, id: str, *, request_key: str = "", by: str = "") -> None:
        self._call("resume", instance_request(id, request_key=request_key, by=by))

    def retry(self, id: str, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        """Try again what an incident has stopped; without a number, the only one."""
        self._call("resolve", instance_request(id, request_key=request_key, by=by, how="retry", incident=incident))

    def skip(
        self, id: str, incident: int = 0, *, result: object = None, to: str = "", request_key: str = "", by: str = ""
    ) -> None:
        """Go on as if the stopped step had given `result`; a choice needs `to`, the node to go to."""
        text = encode(result, what="result", limit_bytes=self.node.limits.value_bytes)
        self._call(
            "resolve",
            instance_request(id, request_key=request_key, by=by, how="skip", incident=incident, result=text, to=to),
        )

    def fail(self, id: str, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        """Give the stopped step up: the saga around it is undone, and the instance fails."""
        self._call("resolve", instance_request(id, request_key=request_key, by=by, how="fail", incident=incident))

    # --- following ---

    def subscribe(
        self,
        name: str,
        receive: Callable[[Change], Any],
        *,
        from_start: bool = False,
        tries: int = 5,
        backoff: Duration = "1s",
    ) -> Subscription:
        """Hand every commit to `receive`, from where this name has come to; a new name begins now, or at the start.

        In order for each instance, and at least once. What raises is tried again, then held for `redeliver`.
        """
        request = subscriber_request(receive, tries, backoff)
        subscription = follow(self.node, name, from_start=from_start, **request)
        self._subscriptions.append(subscription)
        return subscription

    def redeliver(self, subscriber: str, id: str) -> None:
        """Try again what a subscriber could not take of an instance."""
        self._call("redeliver", {"subscriber": subscriber, "id": id})

    # --- helpers ---

    def _call(self, name: str, request: dict[str, Any]) -> Any:
        return waited(self.node.submit(name, request), self._timeout_s, name)


class Handle(Generic[R]):
    """One instance in its user's hands.

    It holds nothing but the id: it costs nothing and can be made again anywhere.
    """

    __slots__ = ("id", "process", "runtime")

    def __init__(self, runtime: Runtime, id: str, process: Process[Any, R] | None = None) -> None:
        self.runtime = runtime
        self.id = id
        self.process = process

    def __repr__(self) -> str:
        return f"Handle({self.id!r})"

    def result(self, *, timeout: Duration | None = "30s") -> R:
        return self.runtime.result(self.id, timeout=timeout, process=self.process)

    def send(
        self,
        message: str,
        payload: object = None,
        *,
        key: str | int | None = None,
        ttl: Duration | None = None,
        request_key: str = "",
        by: str = "",
    ) -> bool:
        return self.runtime.send(self.id, message, payload, key=key, ttl=ttl, request_key=request_key, by=by)

    @property
    def state(self) -> State:
        return self.runtime.state(self.id)

    @property
    def variables(self) -> dict[str, Any]:
        return self.runtime.variables(self.id)

    @property
    def history(self) -> Steps:
        return self.runtime.history(self.id)

    @property
    def path(self) -> list[str]:
        """The steps that were done, in their order."""
        return path_of(self.history)

    @property
    def undone(self) -> list[str]:
        """The steps that were undone, in the order of undoing."""
        return undone_of(self.history)

    def explain(self) -> Explanation:
        return self.runtime.explain(self.id)

    def wait_until(self, predicate: Predicate, *, timeout: Duration | None = "30s") -> State:
        return self.runtime.wait_until(self.id, predicate, timeout=timeout)

    def cancel(self, *, reason: str = "", undo: bool = True, request_key: str = "", by: str = "") -> None:
        self.runtime.cancel(self.id, reason=reason, undo=undo, request_key=request_key, by=by)

    def pause(self, *, request_key: str = "", by: str = "") -> None:
        self.runtime.pause(self.id, request_key=request_key, by=by)

    def resume(self, *, request_key: str = "", by: str = "") -> None:
        self.runtime.resume(self.id, request_key=request_key, by=by)

    def retry(self, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        self.runtime.retry(self.id, incident, request_key=request_key, by=by)

    def skip(
        self, incident: int = 0, *, result: object = None, to: str = "", request_key: str = "", by: str = ""
    ) -> None:
        self.runtime.skip(self.id, incident, result=result, to=to, request_key=request_key, by=by)

    def fail(self, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        self.runtime.fail(self.id, incident, request_key=request_key, by=by)


def connect(
    path: str | os.PathLike[str], *processes: Process[Any, Any], call_timeout: Duration = CALL_TIMEOUT
) -> Runtime:
    """A Runtime that talks to whoever owns the database, and never owns it itself."""
    if not Path(database_place(path)).exists():
        raise Unavailable(f"there is no database at {path}; open a Runtime on it first")
    return Runtime(path, *processes, role="client", call_timeout=call_timeout)


def _remove(folder: str, maker: int) -> None:
    """Remove a folder, in the process that has made it: a forked child leaves it to its parent."""
    if os.getpid() == maker:
        shutil.rmtree(folder, ignore_errors=True)


class Place:
    """Where a runtime's database is, and how it is kept there.

    ":memory:" is a file too, in a private folder that goes with the runtime: SQLite's own memory has one connection for
    all, on which readers would see, and roll back, half of what the writer does.
    """

    def __init__(self, path: str | os.PathLike[str], *, role: str, durability: str) -> None:
        self.role = role
        self.durability = durability
        if path != MEMORY:
            self.path = self.name = database_place(path)
            return
        if role not in ("auto", "owner"):
            raise Rejected(f'":memory:" is new and has no owner whom role={role!r} could meet; give the path of a file')
        folder = tempfile.mkdtemp(prefix="understudy-")
        self._remove = weakref.finalize(self, _remove, folder, os.getpid())
        self.name = MEMORY
        self.path = str(Path(folder) / "memory.db")
        self.role = "owner"
        self.durability = "relaxed"
        logger.warning('nothing survives a Runtime on ":memory:"; give it the path of a file to keep its instances')

    def leave(self) -> None:
        if self.name == MEMORY:
            self._remove()
