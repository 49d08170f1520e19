"""The calls that change something, as the owner answers them: names and JSON in, a promise of JSON out.

The runtime in the owner's process and every other process use the same calls; only the way differs. Values arrive
encoded: they have passed the door where the user's objects were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from understudy.actors.promise import Promise
from understudy.actors.system import System
from understudy.model import commands as c
from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import BadInput, Rejected, UnknownProcess
from understudy.model.values import canonical, digest
from understudy.store.commit import Answered
from understudy.store.operations import Deploy, MoveCursor, RetryHeld
from understudy.store.reads import Reads
from understudy.store.writer import Publish

Parameters = dict[str, Any]


class Service:
    """Answers calls for one system."""

    def __init__(self, system: System, reads: Reads) -> None:
        self._system = system
        self._reads = reads
        self._by_no: dict[int, Graph] = {}
        self._by_content: dict[tuple[str, str], Graph] = {}  # By name and digest.
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
            "subscribe": self._subscribe,
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
            self._know(Graph(definition, version=version, no=no))
            answer.resolve({"no": no, "version": version})

        Graph(definition)  # Whatever cannot be compiled is refused here, before it is stored.
        self._system.run(Deploy(definition, parameters.get("version"))).add_done_callback(landed)
        return answer

    def _know(self, graph: Graph) -> Graph:
        self._system.definitions.add(graph)
        self._by_content[graph.definition.name, graph.definition.digest] = graph
        return self._by_no.setdefault(graph.no, graph)

    def _graph(self, process: str, content: str) -> Graph:
        """A process with this content, or the newest of its name; it may have been deployed by an owner before us."""
        known = self._by_content.get((process, content))
        if known is not None:
            return known
        stored = self._reads.definitions()
        numbers = [(version, no) for no, name, version, held in stored if name == process and content in ("", held)]
        if not numbers:
            names = ", ".join(sorted({name for _, name, _, _ in stored})) or "none"
            what = f"{process!r} with this content" if content else repr(process)
            raise UnknownProcess(f"no process {what} is deployed here (deployed: {names}); pass it to the Runtime")
        _version, no = max(numbers)
        return self._by_no.get(no) or self._read(no)

    def _read(self, no: int) -> Graph:
        row = self._reads.definition(no)
        assert row is not None, f"definition {no}"
        body, version = row
        return self._know(Graph(decode_definition(body), version=version, no=no))

    # --- commands ---

    def _start(self, p: Parameters) -> Promise[Any]:
        graph = self._graph(p["process"], p.get("digest", ""))
        variables = _complete(graph, p["variables"])
        command = c.Start(
            at_ms=self._now(),
            by=p.get("by", ""),
            id=p["id"],
            given_digest=digest(p["process"], canonical(variables)),
            variables=variables,
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

    def _subscribe(self, p: Parameters) -> Promise[Any]:
        """Fix where a subscriber that is new begins; one that is known goes on from where it has come to."""
        cursor = self._reads.cursor(p["subscriber"])
        if cursor is None:
            cursor = 0 if p.get("from_start") else self._reads.last_seq()
        return self._system.run(MoveCursor(p["subscriber"], cursor))

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


def _complete(graph: Graph, given: dict[str, str]) -> dict[str, str]:
    """The first variables: what was given, and the definition's defaults for the rest."""
    definition = graph.definition
    known = {each.name: each.default for each in definition.inputs}
    complete = {**{name: default for name, default in known.items() if default is not None}, **given}
    missing = [name for name in known if name not in complete]
    unknown = [] if definition.open_inputs else [name for name in given if name not in known]
    if missing:
        raise BadInput(f"{definition.name} needs {', '.join(missing)}; nothing was started")
    if unknown:
        takes = ", ".join(known) or "nothing"
        raise BadInput(f"{definition.name} takes {takes}, not {', '.join(unknown)}; nothing was started")
    return complete


def _keyed(call: str, p: Parameters) -> dict[str, str]:
    key = p.get("key", "")
    return {"by": p.get("by", ""), "key": key, "digest": _digest(call, p) if key else ""}


def _digest(call: str, p: Parameters) -> str:
    content = {name: value for name, value in p.items() if name not in ("key", "by")}
    return digest(call, canonical(content))
