"""I8: whatever a client was told is done is there at the end, and was there when it was told.

Each kind of call leaves its own trace: a start its instance, a command under a key an entry with that key and the
answer that was given, a message its row or the wait that has used it. The commit that a client was told of was written
before it was told.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from understudy.model import events as e
from understudy.model.events import Entry
from understudy.model.invariants import Violation
from understudy.model.states import Outcome
from understudy.simulations.checkers.evidence import Evidence, Row
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import Checker, checker
from understudy.store.operations import Purge

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World

_HOW: Final = {"retry": "retried", "skip": "skipped", "fail": "failed"}
Place = tuple[str, str]  # The name and the key by which a message finds its wait.


class _Index:
    """Where to find the traces."""

    def __init__(self, evidence: Evidence) -> None:
        self.started: dict[str, tuple[Row, e.InstanceStarted]] = {}
        self.keyed: dict[tuple[str, str], list[tuple[Row, Entry]]] = {}
        self.paused: dict[str, Row] = {}  # The first time.
        self.cancelled: dict[str, Row] = {}
        self.resolved: dict[tuple[str, int], tuple[Row, str]] = {}
        self.sends: Counter[tuple[str, str]] = Counter()  # Without a key, by instance and cause.
        self.consumed: Counter[int] = Counter()  # Published messages by number.
        self.used: Counter[Place] = Counter()  # Likewise by place.
        self.thrown: Counter[Place] = Counter()  # Those that never expire.
        self.throws = 0
        self._places: dict[tuple[str, int], Place] = {}  # Of waits, by instance and wait.
        for row, entry, events in evidence.turns():
            if entry.key:
                self.keyed.setdefault((row.instance, entry.key), []).append((row, entry))
            elif entry.cause.startswith("send "):
                self.sends[row.instance, entry.cause] += 1
            for event in events:
                self._note(row, event)

    def _note(self, row: Row, event: Any) -> None:
        kind = type(event)
        if kind is e.WaitOpened:
            self._places[row.instance, event.wait] = (event.name, event.key)
        elif kind is e.WaitConsumed and event.message:
            self.consumed[event.message] += 1
            self.used[self._places[row.instance, event.wait]] += 1
        elif kind is e.MessageThrown:
            self.throws += 1
            self.thrown[event.name, event.key] += event.expires_ms is None
        elif kind is e.InstanceStarted:
            self.started.setdefault(row.instance, (row, event))
        elif kind is e.InstancePaused:
            self.paused.setdefault(row.instance, row)
        elif kind is e.EndingBegun and event.outcome is Outcome.CANCELLED:
            self.cancelled.setdefault(row.instance, row)
        elif kind is e.IncidentClosed:
            self.resolved[row.instance, event.incident] = (row, event.how)


@checker
class Acknowledged(Checker):
    id = "I8"
    statement = "no acknowledged start, message, approval or result is lost"

    def __init__(self) -> None:
        self._found: list[str] = []
        self._kept: set[int] = set()

    def watch(self, world: World) -> None:
        Evidence.of(world)
        world.on_writing.append(lambda _life, changes: self._purging(world, changes))
        world.on_ran.append(lambda life, operation: self._purged(world, life, operation))

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        index = _Index(evidence)
        yield from self._found
        for operation in world.operations:
            if operation.is_acknowledged and operation.call in _TRACES:
                for words in _TRACES[operation.call](operation, index, evidence):
                    named = f"{operation.call} #{operation.number}, acknowledged at step {operation.returned}"
                    yield Violation(self.id, f"{named}: {words}", operation.instance)
        yield from _answers(world, index, evidence)
        yield from _counts(world, index)
        yield from _conserved(world, index, evidence)

    # --- purging ---

    def _purging(self, world: World, changes: Iterable[Any]) -> None:
        for change in changes:
            if type(change) is Purge:
                self._kept = _to_keep(world, change)

    def _purged(self, world: World, life: Life, operation: Any) -> None:
        if type(operation) is Purge:
            missing = sorted(self._kept.difference(_to_keep(world, operation)))
            if missing:
                self._found.append(f"{life.name} has purged messages {missing}, which were assigned or not expired")


def _to_keep(world: World, purge: Purge) -> set[int]:
    expires = f"expires_ms IS NULL OR expires_ms > {purge.now_ms}"
    return {no for (no,) in world.peek(f"SELECT no FROM message WHERE instance IS NOT NULL OR {expires}")}


# --- the traces of one operation --------------------------------------------------------------------------------------


def _start(operation: Operation, index: _Index, _evidence: Evidence) -> Iterator[str]:
    found = index.started.get(operation.instance)
    if found is None:
        yield "there is no such instance"
        return
    row, started = found
    given = operation.parameters.get("variables", {})
    if started.process != operation.parameters.get("process"):
        yield f"it runs {started.process}"
    elif any(started.variables.get(name) != value for name, value in given.items()):
        yield f"it was started with {started.variables}, not with {given}"
    yield from _too_early(operation, row)


def _send(operation: Operation, index: _Index, _evidence: Evidence) -> Iterator[str]:
    if operation.key:
        yield from _under_key(operation, index)


def _pause(operation: Operation, index: _Index, _evidence: Evidence) -> Iterator[str]:
    yield from _once(operation, index.paused.get(operation.instance), "was never paused")


def _cancel(operation: Operation, index: _Index, _evidence: Evidence) -> Iterator[str]:
    yield from _once(operation, index.cancelled.get(operation.instance), "was never cancelled")


def _once(operation: Operation, row: Row | None, words: str) -> Iterator[str]:
    """A command that changes nothing leaves no entry: what counts is that it was so once, by then."""
    if row is None:
        yield f"it {words}"
    else:
        yield from _too_early(operation, row)


def _resolve(operation: Operation, index: _Index, _evidence: Evidence) -> Iterator[str]:
    incident = operation.answer["incident"]
    row, how = index.resolved.get((operation.instance, incident), (None, ""))
    if row is None or how != _HOW.get(operation.answer["how"]):
        yield f"incident {incident} was {how or 'not settled'}, not {_HOW.get(operation.answer['how'])}"
    else:
        yield from _too_early(operation, row)
    if operation.key:
        yield from _under_key(operation, index)


def _publish(operation: Operation, index: _Index, evidence: Evidence) -> Iterator[str]:
    number = operation.answer["message"]  # 0: an earlier call under its key was told the number, or should have been.
    is_lasting = operation.parameters.get("ttl_ms") is None
    is_there = not number or index.consumed[number] or any(message.no == number for message in evidence.messages)
    if is_lasting and not is_there:
        yield f"message {number} is neither there nor was it used"
    if operation.key:
        tried = [landing for publish, landing in evidence.publishes if _has_key(publish, operation.key)]
        if not any(landing.step <= (operation.returned or 0) for landing in tried):
            yield "it was not written by then"


def _has_key(publish: Any, key: str) -> bool:
    return any(request.key == key for request in publish.requests)


def _deploy(operation: Operation, _index: _Index, evidence: Evidence) -> Iterator[str]:
    if operation.answer["no"] not in evidence.reading.definitions:
        yield f"definition {operation.answer['no']} is not there"


def _subscribe(operation: Operation, _index: _Index, evidence: Evidence) -> Iterator[str]:
    if operation.parameters["subscriber"] not in evidence.cursors:
        yield "it has no cursor"


def _read(operation: Operation, _index: _Index, evidence: Evidence) -> Iterator[str]:
    if operation.answer is None:
        return
    now, version, outcome = evidence.instances.get(operation.instance), *_read_of(operation)
    if now is None:
        yield f"version {version} was read, and now there is no such instance"
    elif now.version < version:
        yield f"version {version} was read, and now it is at {now.version}"
    elif outcome and now.outcome != outcome:
        yield f"it had ended as {outcome}, and now it is {now.outcome or now.status}"


def _read_of(operation: Operation) -> tuple[int, str]:
    return operation.answer["version"], operation.answer["outcome"] or ""


def _under_key(operation: Operation, index: _Index) -> Iterator[str]:
    found = index.keyed.get((operation.instance, operation.key))
    if found is None:
        yield f"no entry of its history has the key {operation.key!r}"
    else:
        yield from _too_early(operation, found[0][0])


def _too_early(operation: Operation, row: Row) -> Iterator[str]:
    if row.step > (operation.returned or 0):
        yield f"commit {row.version} was not written before step {row.step}"


_TRACES: Final[dict[str, Callable[[Operation, _Index, Evidence], Iterator[str]]]] = {
    "start": _start,
    "send": _send,
    "pause": _pause,
    "cancel": _cancel,
    "resolve": _resolve,
    "publish": _publish,
    "deploy": _deploy,
    "subscribe": _subscribe,
    "read": _read,
}


# --- what they have in common -----------------------------------------------------------------------------------------


def _answers(world: World, index: _Index, evidence: Evidence) -> Iterator[Violation]:
    """An answer stays under its key for as long as it is kept; all who asked under it were told the same."""
    kept_ms = world.limits.keep_answers_ms
    for (instance, key), found in index.keyed.items():
        entry = found[-1][1]
        if key not in evidence.requests and entry.at_ms + kept_ms > evidence.purged_ms:
            yield Violation("I8", f"the answer to {entry.cause} under the key {key!r} is not kept", instance)
    for operation in world.operations:
        if not operation.key or not operation.is_acknowledged or operation.key not in evidence.requests:
            continue
        # A key that was used again, after its time, has had two answers.
        kept = evidence.requests[operation.key].answer
        is_its_own = len(index.keyed.get((operation.instance, operation.key), ())) == 1
        if is_its_own and msgspec.json.decode(kept) != operation.answer:
            words = f"#{operation.number} was told {operation.answer}, but under its key stands {kept}"
            yield Violation("I8", words, operation.instance)


def _counts(world: World, index: _Index) -> Iterator[Violation]:
    """Sends without a key: as many as were acknowledged at least, as were asked for at most."""
    asked: Counter[tuple[str, str]] = Counter()
    acknowledged: Counter[tuple[str, str]] = Counter()
    news: Counter[str] = Counter()
    for operation in world.operations:
        if operation.call == "send" and not operation.key:
            place = (operation.instance, f"send {operation.parameters['name']}")
            asked[place] += 1
            acknowledged[place] += operation.is_acknowledged
        elif operation.call == "start" and operation.is_acknowledged:
            news[operation.instance] += bool(operation.answer["new"])
    for place, count in acknowledged.items():
        if index.sends[place] < count:
            words = f"{count} times {place[1]} was acknowledged, and {index.sends[place]} are in its history"
            yield Violation("I8", words, place[0])
    for place, count in index.sends.items():
        if count > asked[place]:
            words = f"{asked[place]} times {place[1]} was asked for, and {count} are in its history"
            yield Violation("I2", words, place[0])
    for instance, count in news.items():
        if count > 1:
            yield Violation("I2", f"{count} starts were told that they are the first", instance)


def _conserved(world: World, index: _Index, evidence: Evidence) -> Iterator[Violation]:
    """Published messages: each is used once or still there, and there are no more than were published or thrown."""
    for number, times in index.consumed.items():
        if times > 1:
            yield Violation("I2", f"message {number} was used {times} times")
    for message in evidence.messages:
        if index.consumed[message.no]:
            yield Violation("I2", f"message {message.no} was used, and is still there")
    most = index.throws + _published(evidence)
    there = len(index.consumed) + len(evidence.messages)
    if there > most:
        yield Violation("I2", f"{there} messages are there or were used, but only {most} were published")
    yield from _at_least(world, index, evidence)


def _published(evidence: Evidence) -> int:
    """How many messages clients may have published: under one key one, for as long as the key is known."""
    unkeyed = 0
    known: set[str] = set()
    for publish, _landing in evidence.publishes:
        lasting = [request.key for request in publish.requests if request.expires_ms > evidence.purged_ms]
        known.update(lasting)
        unkeyed += not lasting
    return len(known) + unkeyed


def _at_least(world: World, index: _Index, evidence: Evidence) -> Iterator[Violation]:
    """Of each name and key: what was thrown or acknowledged, and never expires, is there or was used."""
    least = Counter(index.thrown)
    known: set[str] = set()
    for operation in world.operations:
        is_lasting = operation.call == "publish" and operation.parameters.get("ttl_ms") is None
        if is_lasting and operation.is_acknowledged and operation.key not in known:
            known.update((operation.key,) if operation.key else ())
            least[operation.parameters["name"], operation.parameters.get("about", "")] += 1
    there = index.used + Counter((message.name, message.key) for message in evidence.messages)
    for place, count in least.items():
        if there[place] < count:
            words = f"{count} messages {place[0]} for {place[1]!r} were published, and {there[place]} are there or used"
            yield Violation("I8", words)
