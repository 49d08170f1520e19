"""The runtime for asyncio: the same names and signatures as `Runtime`, to be awaited.

Calls that change something await their commit without a thread. Reads go to a thread, because SQLite blocks. `async
def` handlers run on the loop that opened the runtime.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from understudy.actors.promise import Promise
from understudy.actors.system import Limits, Ports, threaded_ports
from understudy.explain import Explanation, explain
from understudy.model.errors import Closed, Rejected, TimedOut
from understudy.model.values import encode
from understudy.opening import open_node
from understudy.process import Process
from understudy.requests import (
    Duration,
    filter_request,
    instance_request,
    message_request,
    page_request,
    seconds,
    start_request,
    subscriber_request,
)
from understudy.runtime import CALL_TIMEOUT, Place
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
)

I = TypeVar("I")  # noqa: E741 - As in `Runtime`.
R = TypeVar("R")


class AsyncRuntime:
    """A database of process instances, for a service on asyncio:

    `async with AsyncRuntime(path, process) as runtime`.
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
        self._timeout_s = seconds(call_timeout)
        self._place = Place(path, role=role, durability=durability)
        self._arguments = (processes, limits or Limits(), ports)
        self.path = self._place.name
        self._node: Any = None
        self._subscriptions: list[Subscription] = []

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Open the database; `async with` does it by itself."""
        if self._node is not None:
            raise Rejected("this AsyncRuntime was opened before; make a new one")
        processes, limits, ports = self._arguments
        place = self._place
        loop = asyncio.get_running_loop()
        make = ports or (lambda: threaded_ports(limits, loop=loop))
        opened = await asyncio.to_thread(
            open_node,
            place.path,
            processes,
            role=place.role,
            durability=place.durability,
            limits=limits,
            ports=make,
        )
        self._node = opened.node
        self._processes = opened.processes
        self._graphs = Graphs(opened.node)

    async def close(self, *, timeout: Duration = "10s") -> bool:
        timeout_s = seconds(timeout) or 0
        if self._node is None:
            self._place.leave()
            return True
        for subscription in self._subscriptions:
            await asyncio.to_thread(subscription.close)
        finished: bool = await asyncio.to_thread(self._node.close, timeout_s=timeout_s)
        self._place.leave()
        return finished

    @property
    def node(self) -> Any:
        if self._node is None:
            raise Closed("this AsyncRuntime is not open; use `async with`, or await open()")
        return self._node

    @property
    def is_owner(self) -> bool:
        return bool(self.node.is_owner)

    async def report(self) -> list[str]:
        self.node.check()
        return await asyncio.to_thread(self._processes.missing_handlers, self.node.reads)

    # --- starting and finding ---

    async def start(
        self,
        process: Process[I, R] | str,
        input: I | Mapping[str, Any] | None = None,
        *,
        id: str | None = None,
        title: str = "",
        tags: Mapping[str, str] | None = None,
        by: str = "",
        caused_by: str = "",
    ) -> AsyncHandle[R]:
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
        answer = await self._call("start", request)
        return AsyncHandle(self, answer["id"], bound)

    async def get(self, id: str, process: Process[I, R] | None = None) -> AsyncHandle[R]:
        self.node.check()
        summary = await asyncio.to_thread(self.node.reads.summary, id)
        return AsyncHandle(self, id, process or self._processes.by_name.get(summary.process))

    async def list(
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
        page = page_request(limit, before)
        found: list[Summary] = await asyncio.to_thread(self.node.reads.page, which, **page)
        return found

    # --- messages ---

    async def send(
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
        request = message_request(
            message,
            payload,
            about=key,
            ttl=ttl,
            request_key=request_key,
            by=by,
            limit_bytes=self.node.limits.value_bytes,
        )
        answer = await self._call("send", {**instance_request(id), **request})
        return bool(answer["received"])

    async def publish(
        self,
        message: str,
        payload: object = None,
        *,
        key: str | int | None = None,
        ttl: Duration | None = None,
        request_key: str = "",
        by: str = "",
    ) -> None:
        request = message_request(
            message,
            payload,
            about=key,
            ttl=ttl,
            request_key=request_key,
            by=by,
            limit_bytes=self.node.limits.value_bytes,
        )
        await self._call("publish", request)

    # --- looking ---

    async def state(self, id: str) -> State:
        self.node.check()
        return await asyncio.to_thread(lambda: self._graphs.state(self.node.reads.detail(id)))

    async def variables(self, id: str) -> dict[str, Any]:
        return (await self.state(id)).variables

    async def history(self, id: str) -> Steps:
        self.node.check()
        await asyncio.to_thread(self.node.reads.summary, id)
        return steps_of(await asyncio.to_thread(self.node.reads.history, id))

    async def explain(self, id: str) -> Explanation:
        state = await self.state(id)
        failures = await asyncio.to_thread(last_failures, self.node, state)
        return explain(state, now_ms=now_ms(self.node), failures=failures)

    # --- waiting ---

    async def wait_until(self, id: str, predicate: Predicate, *, timeout: Duration | None = "30s") -> State:
        timeout_s = seconds(timeout)
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    state = await self.state(id)
                    if predicate(state):
                        return state
                    changed = self.node.submit("watch", {"id": id, "version": state.version})
                    try:
                        await _awaited(changed)
                    finally:
                        changed.resolve(False)  # As in `Runtime`.
        except TimeoutError:
            raise late(await self.state(id), timeout_s) from None

    async def result(self, id: str, *, timeout: Duration | None = "30s", process: Process[Any, R] | None = None) -> R:
        state = await self.wait_until(id, lambda s: s.is_ended or bool(s.incidents), timeout=timeout)
        if not state.is_ended:
            raise stuck(state)
        steps = [] if state.error is None else await self.history(id)
        bound: Process[Any, R] | None = process or self._processes.by_name.get(state.process)
        return outcome_of(state, bound, lambda: steps)

    # --- moving ---

    async def cancel(
        self, id: str, *, reason: str = "", undo: bool = True, request_key: str = "", by: str = ""
    ) -> None:
        await self._call("cancel", instance_request(id, request_key=request_key, by=by, reason=reason, undo=undo))

    async def pause(self, id: str, *, request_key: str = "", by: str = "") -> None:
        await self._call("pause", instance_request(id, request_key=request_key, by=by))

    async def resume(self, id: str, *, request_key: str = "", by: str = "") -> None:
        await self._call("resume", instance_request(id, request_key=request_key, by=by))

    async def retry(self, id: str, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        await self._call(
            "resolve", instance_request(id, request_key=request_key, by=by, how="retry", incident=incident)
        )

    async def skip(
        self, id: str, incident: int = 0, *, result: object = None, to: str = "", request_key: str = "", by: str = ""
    ) -> None:
        text = encode(result, what="result", limit_bytes=self.node.limits.value_bytes)
        request = instance_request(
            id, request_key=request_key, by=by, how="skip", incident=incident, result=text, to=to
        )
        await self._call("resolve", request)

    async def fail(self, id: str, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        await self._call("resolve", instance_request(id, request_key=request_key, by=by, how="fail", incident=incident))

    # --- following ---

    async def subscribe(
        self,
        name: str,
        receive: Callable[[Change], Any],
        *,
        from_start: bool = False,
        tries: int = 5,
        backoff: Duration = "1s",
    ) -> Subscription:
        """As in `Runtime`; `receive` is an ordinary function and is called on the subscriber's own thread."""
        request = subscriber_request(receive, tries, backoff)
        subscription = await asyncio.to_thread(follow, self.node, name, from_start=from_start, **request)
        self._subscriptions.append(subscription)
        return subscription

    async def redeliver(self, subscriber: str, id: str) -> None:
        await self._call("redeliver", {"subscriber": subscriber, "id": id})

    # --- helpers ---

    async def _call(self, name: str, request: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                system = self.node.system
                if system is not None and system.is_full:  # Waiting at the door blocks: not on the loop.
                    return await _awaited(await asyncio.to_thread(self.node.submit, name, request))
                return await _awaited(self.node.submit(name, request))
        except TimeoutError:
            raise TimedOut(
                f"{name} was not answered within {self._timeout_s:g} s; it may still happen, look again"
            ) from None


class AsyncHandle(Generic[R]):
    """One instance in its user's hands, to be awaited. What is a property of `Handle` is a method here."""

    __slots__ = ("id", "process", "runtime")

    def __init__(self, runtime: AsyncRuntime, id: str, process: Process[Any, R] | None = None) -> None:
        self.runtime = runtime
        self.id = id
        self.process = process

    def __repr__(self) -> str:
        return f"AsyncHandle({self.id!r})"

    async def result(self, *, timeout: Duration | None = "30s") -> R:
        return await self.runtime.result(self.id, timeout=timeout, process=self.process)

    async def send(
        self,
        message: str,
        payload: object = None,
        *,
        key: str | int | None = None,
        ttl: Duration | None = None,
        request_key: str = "",
        by: str = "",
    ) -> bool:
        return await self.runtime.send(self.id, message, payload, key=key, ttl=ttl, request_key=request_key, by=by)

    async def state(self) -> State:
        return await self.runtime.state(self.id)

    async def variables(self) -> dict[str, Any]:
        return await self.runtime.variables(self.id)

    async def history(self) -> Steps:
        return await self.runtime.history(self.id)

    async def path(self) -> list[str]:
        return path_of(await self.history())

    async def undone(self) -> list[str]:
        return undone_of(await self.history())

    async def explain(self) -> Explanation:
        return await self.runtime.explain(self.id)

    async def wait_until(self, predicate: Predicate, *, timeout: Duration | None = "30s") -> State:
        return await self.runtime.wait_until(self.id, predicate, timeout=timeout)

    async def cancel(self, *, reason: str = "", undo: bool = True, request_key: str = "", by: str = "") -> None:
        await self.runtime.cancel(self.id, reason=reason, undo=undo, request_key=request_key, by=by)

    async def pause(self, *, request_key: str = "", by: str = "") -> None:
        await self.runtime.pause(self.id, request_key=request_key, by=by)

    async def resume(self, *, request_key: str = "", by: str = "") -> None:
        await self.runtime.resume(self.id, request_key=request_key, by=by)

    async def retry(self, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        await self.runtime.retry(self.id, incident, request_key=request_key, by=by)

    async def skip(
        self, incident: int = 0, *, result: object = None, to: str = "", request_key: str = "", by: str = ""
    ) -> None:
        await self.runtime.skip(self.id, incident, result=result, to=to, request_key=request_key, by=by)

    async def fail(self, incident: int = 0, *, request_key: str = "", by: str = "") -> None:
        await self.runtime.fail(self.id, incident, request_key=request_key, by=by)


async def _awaited(promise: Promise[Any]) -> Any:
    """A promise of ours on the running loop; whoever settles it never waits for the loop."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle() -> None:
        if future.done():
            return
        if promise.error is not None:
            future.set_exception(promise.error)
        else:
            future.set_result(promise.get())

    def settled(_promise: Promise[Any]) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle)

    promise.add_done_callback(settled)
    return await future
