"""The calls that change something, as the owner answers them: names and JSON in, a promise of JSON out.

The runtime in the owner's process and every other process use the same calls; only the way differs. Values arrive
encoded: they have passed the door where the user's objects were.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from understudy.actors.promise import Promise
from understudy.actors.system import System
from understudy.model import commands as c
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import BadInput, Rejected, UnknownProcess
from understudy.model.values import canonical, digest
from understudy.store.commit import Answered
from understudy.store.operations import Deploy, RetryHeld
from understudy.store.reads import Reads
from understudy.store.writer import Publish

Parameters = dict[str, Any]


class Service:
    """Answers calls for one system."""

    def __init__(self, system: System, reads: Reads) -> None:
        self._system = system
        self._reads = reads
        self._deployed: dict[str, Graph] = {}  # By digest.
        self._newest: dict[str, Graph] = {}  # By name: what a start without a digest means.
        self._lock = threading.Lock()
        self._calls: dict[str, Callable[[Parameters], Any]] = {
            "ping": self._ping,
            "deploy": self._deploy,
            "start": self._start,
            "send": self._send,
            "publish": self._publish,
            "cancel": self._cancel,
            "pause": self._pause,
            "resume": self._resume,
            "resolve": self._resolve,
            "watch": self._watch,
            "redeliver": self._redeliver,
        }

    def call(self, name: str, parameters: Parameters) -> Any:
        """A promise of the answer, or the answer itself."""
        answer = self._calls.get(name)
        if answer is None:
            raise Rejected(f"the owner knows no call {name!r}; is it an older Understudy?")
        return answer(parameters)

    def _ping(self, _parameters: Parameters) -> Any:
        return {"epoch": self._system.writer.epoch, "health": self._system.health.value}

    # --- definitions ---

    def _deploy(self, parameters: Parameters) -> Promise[Any]:
        definition = decode_definition(parameters["body"])
        answer = self._system.promise()

        def landed(promise: Promise[Any]) -> None:
            if promise.error is not None:
                answer.reject(promise.error)
                return
            no, version = promise.get()
            self.know(Graph(definition, version=version, no=no))
            answer.resolve({"no": no, "version": version})

        self._system.run(Deploy(definition, parameters.get("version"))).add_done_callback(landed)
        return answer

    def know(self, graph: Graph) -> None:
        self._system.definitions.add(graph)
        with self._lock:
            self._deployed[graph.definition.digest] = graph
            newest = self._newest.get(graph.definition.name)
            if newest is None or newest.version < graph.version:
                self._newest[graph.definition.name] = graph

    def _graph(self, process: str, content: str) -> Graph:
        if content:
            found = self._deployed.get(content)
            if found is None:
                raise UnknownProcess(f"{process!r} is not deployed with this content; deploy it first")
            return found
        known = self._newest.get(process)
        if known is not None:
            return known
        row = self._reads.newest(process)
        if row is None:
            names = ", ".join(sorted({name for _, name, _, _ in self._reads.definitions()})) or "none"
            raise UnknownProcess(f"no process {process!r} is deployed here; deployed: {names}")
        no, version, body = row
        self.know(Graph(decode_definition(body), version=version, no=no))
        return self._newest[process]

    # --- commands ---

    def _start(self, p: Parameters) -> Promise[Any]:
        graph = self._graph(p["process"], p.get("digest", ""))
        variables = p["variables"]
        missing = [
            given.name for given in graph.definition.inputs if given.default is None and given.name not in variables
        ]
        if missing:
            raise BadInput(f"{p['process']} needs {', '.join(missing)}; nothing was started")
        command = c.Start(
            at_ms=self._now(),
            by=p.get("by", ""),
            id=p["id"],
            given_digest=digest(p["process"], canonical(variables)),
            variables={**_defaults(graph), **variables},
            title=p.get("title", ""),
            tags=p.get("tags", {}),
            trigger=p.get("trigger", "api"),
            caused_by=p.get("caused_by", ""),
        )
        return self._system.order(p["id"], command, graph=graph, is_new=bool(p.get("is_new")))

    def _send(self, p: Parameters) -> Promise[Any]:
        ttl_ms = p.get("ttl_ms")
        now_ms = self._now()
        command = c.Send(
            at_ms=now_ms,
            **_keyed("send", p),
            name=p["name"],
            payload=p.get("payload", "null"),
            about=p.get("about", ""),
            expires_ms=None if ttl_ms is None else now_ms + ttl_ms,
        )
        return self._system.order(p["id"], command)

    def _publish(self, p: Parameters) -> Promise[Any]:
        now_ms = self._now()
        ttl_ms = p.get("ttl_ms")
        requests = []
        if p.get("key"):
            keep_ms = now_ms + self._system.limits.keep_answers_ms
            requests = [Answered(p["key"], _digest("publish", p), "{}", keep_ms)]
        message = Publish(
            p["name"],
            p.get("about", ""),
            p.get("payload", "null"),
            None if ttl_ms is None else now_ms + ttl_ms,
            requests,
        )
        return self._system.publish(message)

    def _cancel(self, p: Parameters) -> Promise[Any]:
        command = c.Cancel(
            at_ms=self._now(), **_keyed("cancel", p), reason=p.get("reason", ""), undo=p.get("undo", True)
        )
        return self._system.order(p["id"], command)

    def _pause(self, p: Parameters) -> Promise[Any]:
        return self._system.order(p["id"], c.Pause(at_ms=self._now(), **_keyed("pause", p)))

    def _resume(self, p: Parameters) -> Promise[Any]:
        return self._system.order(p["id"], c.Resume(at_ms=self._now(), **_keyed("resume", p)))

    def _resolve(self, p: Parameters) -> Promise[Any]:
        command = c.Resolve(
            at_ms=self._now(),
            **_keyed("resolve", p),
            how=p["how"],
            incident=p.get("incident", 0),
            result=p.get("result", "null"),
            to=p.get("to", ""),
        )
        return self._system.order(p["id"], command)

    def _redeliver(self, p: Parameters) -> Promise[Any]:
        answer = self._system.run(RetryHeld(p["subscriber"], p["id"], self._now()))
        answer.add_done_callback(lambda _: self._system.watch.committed([]))
        return answer

    def _now(self) -> int:
        return self._system.ports.clock.now_ms()

    # --- waiting ---

    def _watch(self, p: Parameters) -> Promise[Any]:
        """Settled at the next commit of the instance that is newer than what the caller has seen."""
        promise = self._system.promise()

        def changed() -> None:
            promise.resolve(True)

        remove = self._system.watch.add(p["id"], changed)
        promise.add_done_callback(lambda _: remove())
        summary = self._reads.find(p["id"])
        if summary is None or summary.version != p["version"]:
            promise.resolve(True)
        return promise


def _defaults(graph: Graph) -> dict[str, str]:
    return {given.name: given.default for given in graph.definition.inputs if given.default is not None}


def _keyed(call: str, p: Parameters) -> dict[str, str]:
    key = p.get("key", "")
    return {"by": p.get("by", ""), "key": key, "digest": _digest(call, p) if key else ""}


def _digest(call: str, p: Parameters) -> str:
    content = {name: value for name, value in p.items() if name not in ("key", "by")}
    return digest(call, canonical(content))
