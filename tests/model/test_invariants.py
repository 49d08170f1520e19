"""Random processes under random schedules: whatever arrives, in whatever order, every invariant holds after each step.

A world plays everything around the rules: handlers that answer in any order, twice, late or never, timers that come
early or again, senders, operators, shutdowns and crashes. A crash keeps nothing but the history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import attrs
import msgspec
import pytest
from hypothesis import currently_in_test_context, event, given, note, settings
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model import events as e
from understudy.model.apply import fold
from understudy.model.decide import Decision, decide, outstanding
from understudy.model.definition import Definition, Edge, Graph, Node
from understudy.model.instance import Buffered, Fault, Instance, Token, Wait, facts
from understudy.model.invariants import INVARIANTS, Mark, Subject, examine
from understudy.model.kinds import (
    Choice,
    End,
    Fork,
    Join,
    Merge,
    Receive,
    Saga,
    Start,
    Task,
    Terminate,
    Throw,
    Timer,
    UndoTask,
)
from understudy.model.retry import Backoff
from understudy.model.states import Mode, Outcome, Status, TokenStatus
from understudy.model.validation import problems

ROUNDS = 2  # Of each loop.
MESSAGES = ("paid", "sent")

T = TypeVar("T")
BEGINNINGS = (e.TaskOpened, e.AttemptStarted)
Part = tuple[str, str]  # The node where it is entered, and the one where it is left.

# --- processes --------------------------------------------------------------------------------------------------------


class Tape:
    """Choices, one byte each: Hypothesis draws and shrinks it far better than trees of choices. Behind its end is 0."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def pick(self, options: Sequence[T]) -> T:
        return options[next(self._bytes, 0) % len(options)]


RETRIES = (
    Backoff(),
    Backoff(attempts=2, first_ms=0, jitter=0),
    Backoff(attempts=3, first_ms=1_000, never=("m:Final",)),
)
LEAVES = (*(["task"] * 10), "receive", "receive", "timer", "timer", "throw", "terminate")
BLOCKS = (
    *(["task"] * 6),
    *(["sequence", "parallel", "saga", "undoable"] * 3),
    *("undoable", "choice", "loop", "late", "pairs", "receive", "timer", "throw", "terminate"),
)


class Draft:
    """A definition drawn from a tape. Each part is drawn between an entry and an exit, and one that terminates has no
    exit."""

    def __init__(self, tape: Tape) -> None:
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.counters: list[str] = []
        self._tape = tape
        self._enclose(lambda: self._sequence("", 4), "")
        self.definition = Definition(name="p", nodes=tuple(self.nodes), edges=tuple(self.edges), open_inputs=True)

    def _draw(self, within: str, depth: int) -> Part:
        kind = self._tape.pick(BLOCKS if depth else LEAVES)
        part: Part = getattr(self, f"_{kind}")(within, depth - 1)
        return part

    def _enclose(self, draw: Callable[[], Part], within: str) -> None:
        start = self._add(Start, "start", within)
        first, last = draw()
        self._link(start, first)
        if last:
            self._link(last, self._add(End, "end", within))

    def _add(self, kind: type[Node], name: str, within: str, **fields: Any) -> str:
        node = kind(id=f"{name}{len(self.nodes)}", within=within, **fields)
        self.nodes.append(node)
        return node.id

    def _link(self, source: str, target: str, **fields: Any) -> None:
        self.edges.append(Edge(id=f"e{len(self.edges)}", source=source, target=target, **fields))

    # --- leaves ---

    def _task(self, within: str, _depth: int) -> Part:
        undo = (
            UndoTask(handler="undo", may=("x", "result")) if self._tape.pick((True, True, False)) and within else None
        )
        retry = self._tape.pick(RETRIES)
        policy = self._tape.pick(("", "", "", "", "incident", "fail"))
        name = self._add(Task, "task", within, handler="do", retry=retry, on_failure=policy, undo=undo)
        return name, name

    def _timer(self, within: str, _depth: int) -> Part:
        name = self._add(Timer, "timer", within, after=repr(self._tape.pick(("0s", "3s", "1h"))))
        return name, name

    def _throw(self, within: str, _depth: int) -> Part:
        name = self._add(Throw, "throw", within, message="thrown", payload="x")
        return name, name

    def _terminate(self, within: str, _depth: int) -> Part:
        return self._add(Terminate, "terminate", within), ""

    def _receive(self, within: str, _depth: int) -> Part:
        message, timeout_ms = self._tape.pick(MESSAGES), self._tape.pick((None, 5_000))
        name = self._add(Receive, "receive", within, message=message, into="got", timeout_ms=timeout_ms)
        return name, name

    # --- what is made of others ---

    def _several(self, within: str, depth: int, least: int) -> list[Part]:
        return [self._draw(within, depth) for _ in range(least + self._tape.pick((0, 0, 1)))]

    def _sequence(self, within: str, depth: int) -> Part:
        first, last = self._draw(within, depth)
        for _ in range(1 + self._tape.pick((0, 0, 1))):
            if last:
                then, after = self._draw(within, depth)
                self._link(last, then)
                last = after
        return first, last

    def _choice(self, within: str, depth: int) -> Part:
        first = self._add(Choice, "choice", within)
        parts = self._several(within, depth, 2)
        has_default = self._tape.pick((True, False))
        for value, (then, _last) in enumerate(parts):
            is_default = has_default and value == len(parts) - 1
            self._link(first, then, **({"is_default": True} if is_default else {"condition": f"x == {value}"}))
        return first, self._together(Merge, within, [last for _, last in parts])

    def _parallel(self, within: str, depth: int) -> Part:
        first = self._add(Fork, "fork", within)
        parts = self._several(within, depth, 2)
        for then, _last in parts:
            self._link(first, then)
        return first, self._together(Join, within, [last for _, last in parts])

    def _pairs(self, within: str, depth: int) -> Part:
        """Two tokens come by each of a join's edges: it fires twice, and the saga around it ends with the second."""
        name = self._add(Saga, "saga", within)
        self._enclose(lambda: self._two_pairs(name, min(depth, 0)), name)
        return name, name

    def _two_pairs(self, within: str, depth: int) -> Part:
        first = self._add(Fork, "fork", within)
        sides = []
        for _ in range(2):
            parts = [self._draw(within, depth) for _ in range(2)]
            for then, _last in parts:
                self._link(first, then)
            sides.append(self._together(Merge, within, [last for _, last in parts]))
        return first, self._together(Join, within, sides)

    def _together(self, kind: type[Node], within: str, lasts: list[str]) -> str:
        open_ends = [last for last in lasts if last]
        if len(open_ends) < 2:
            return "".join(open_ends)
        node = self._add(kind, kind.__name__.lower(), within)
        for last in open_ends:
            self._link(last, node)
        return node

    def _saga(self, within: str, depth: int) -> Part:
        name = self._add(Saga, "saga", within)
        self._enclose(lambda: self._draw(name, depth), name)
        return name, name

    def _undoable(self, within: str, depth: int) -> Part:
        """What a saga is for: something that was done, beside or before something that may fail."""
        name = self._add(Saga, "saga", within)
        several = self._tape.pick((self._parallel, self._sequence))
        self._enclose(lambda: several(name, depth), name)
        return name, name

    def _late(self, within: str, depth: int) -> Part:
        first, _ = self._receive(within, depth)
        then, last = self._draw(within, depth)
        node = self.nodes[[node.id for node in self.nodes].index(first)]
        if getattr(node, "timeout_ms", None) is not None:
            self._link(first, then, is_late=True)
            merge = self._add(Merge, "merge", within)
            self._link(first, merge)
            if last:
                self._link(last, merge)
            return first, merge
        self._link(first, then)
        return first, last

    def _loop(self, within: str, depth: int) -> Part:
        merge = self._add(Merge, "loop", within)
        first, last = self._draw(within, depth)
        self._link(merge, first)
        if not last:
            return merge, ""
        counter = f"rounds{len(self.counters)}"
        self.counters.append(counter)
        count = self._add(Task, "count", within, handler="count", needs=(counter,), into=counter)
        choice = self._add(Choice, "again", within)
        out = self._add(Merge, "out", within)
        self._link(last, count)
        self._link(count, choice)
        self._link(choice, merge, condition=f"{counter} < {ROUNDS}")
        self._link(choice, out, is_default=True)
        return merge, out


# --- the world --------------------------------------------------------------------------------------------------------

Attempt = tuple[int, int, int]  # Token, task, attempt.


def read_back(instance: Instance, graph: Graph) -> Instance:
    """The same instance as the store would give it back: its rows in the order of their keys, and all else derived."""
    tables = instance.tables()
    plain: dict[str, Any] = {name: value for name, value in facts(instance).items() if name not in tables}
    copy = Instance(**plain)
    for name in ("scope", "variable", "undo", "buffered"):
        for key, row in sorted(tables[name].items()):
            copy.tables()[name].put(key, row)
    for _, wait in sorted(instance.waits.items()):
        copy.put_wait(wait)
    for _, incident in sorted(instance.incidents.items()):
        copy.put_incident(incident)
    for _, token in sorted(instance.tokens.items()):
        copy.put_token(token)
        is_at_join = graph[token.node].rules.name == "join" and token.id not in copy.incident_of
        if is_at_join and token.status is TokenStatus.WAITING:
            copy.rest_at_join(token)
    copy.settle()
    return copy


class World:
    """One instance and everything around it. Every command goes through `tell`, which checks what must hold."""

    def __init__(self, definition: Definition, *, x: int = 0, counters: Sequence[str] = ()) -> None:
        self.graph = Graph(definition)
        self.instance = Instance()
        self.history: list[e.Entry] = []
        self.now_ms = 1_000
        self.out: dict[Attempt, fx.RunTask] = {}  # With a handler, whether its result is still wanted or not.
        self.gone: list[Attempt] = []  # Answered, or lost with a former life.
        self.armed: dict[int, int] = {}
        self.fired: list[int] = []
        self.is_draining = False
        self.published = 0
        variables = {"x": str(x), **dict.fromkeys(counters, "0")}
        self.tell(c.Start(at_ms=self.now_ms, id="i", given_digest="", variables=variables))

    def tell(self, command: c.AnyCommand) -> Decision:
        before = facts(self.instance)
        twin = read_back(self.instance, self.graph)

        decision = decide(self.instance, self.graph, command, go_on=not self.is_draining)

        again = decide(twin, self.graph, command, go_on=not self.is_draining)
        assert (again.entry, again.effects, again.answer) == (decision.entry, decision.effects, decision.answer)
        assert facts(twin) == facts(self.instance)
        self._note(f"{command} -> {decision.refusal or decision.answer}")
        if decision.entry is None:
            assert facts(self.instance) == before
        else:
            assert decision.refusal is None
            assert not (self.is_draining and any(isinstance(each, BEGINNINGS) for each in decision.entry.events))
            self.history.append(decision.entry)
            self._note("\n".join(f"    {each}" for each in decision.entry.events))
        self._carry_out(decision)
        self._check()
        return decision

    def _note(self, text: str) -> None:
        if currently_in_test_context():
            note(text)

    def _carry_out(self, decision: Decision) -> None:
        for effect in decision.effects:
            if isinstance(effect, fx.RunTask):
                assert not self.is_draining
                assert self.instance.status is not Status.PAUSED
                self.out[(effect.token, effect.task, effect.attempt)] = effect
            elif isinstance(effect, fx.ArmTimer):
                self.armed[effect.wait] = effect.due_ms
            else:
                attempt = (effect.token, effect.task, effect.attempt)
                assert self.is_draining or attempt in self.out or attempt in self.gone, "it was never out"
        self.instance.settle()

    def _check(self) -> None:
        marks = tuple(Mark(n, 1) for n in range(1, len(self.history) + 1))
        subject = Subject(
            instance=self.instance,
            graph=self.graph,
            history=tuple(self.history),
            marks=marks,
            version=len(marks),
        )
        assert examine(subject) == []
        if self.is_draining:
            return
        for effect in outstanding(self.instance, self.graph):
            if isinstance(effect, fx.RunTask):
                assert (effect.token, effect.task, effect.attempt) in self.out, "nobody runs it"
            elif isinstance(effect, fx.ArmTimer) and self.instance.status is not Status.PAUSED:
                assert self.armed.get(effect.wait) == effect.due_ms, "nobody will fire it"

    # --- what happens to it: each takes two numbers that say which and how ---

    def complete(self, which: int, _how: int) -> None:
        if self.out:
            attempt = list(self.out)[which % len(self.out)]
            effect = self.out.pop(attempt)
            self.gone.append(attempt)
            self._answer(attempt, result=self._result(effect))

    def fail(self, which: int, how: int) -> None:
        if self.out:
            attempt = list(self.out)[which % len(self.out)]
            del self.out[attempt]
            self.gone.append(attempt)
            code = "missing_handler" if how == 0 else "error"
            self._answer(attempt, fault=Fault(code, "no", types=("m:Final",) if how == 1 else ("m:Usual",)))

    def repeat(self, which: int, how: int) -> None:
        """A result comes again, or comes out of a former life."""
        gone = [attempt for attempt in self.gone if not self._is_awaited(attempt)]
        if gone:
            attempt = gone[which % len(gone)]
            decision = self._answer(attempt, **({"result": "7"} if how else {"fault": Fault("error", "late")}))
            assert decision.refusal is not None

    def _answer(self, attempt: Attempt, *, result: str = "", fault: Fault | None = None) -> Decision:
        token, task, number = attempt
        if fault is not None:
            return self.tell(c.FailTask(at_ms=self.now_ms, token=token, task=task, attempt=number, fault=fault))
        return self.tell(c.CompleteTask(at_ms=self.now_ms, token=token, task=task, attempt=number, result=result))

    def _result(self, effect: fx.RunTask) -> str:
        return str(int(next(iter(effect.given.values()))) + 1) if effect.handler == "count" else "1"

    def fire(self, which: int, how: int) -> None:
        """A timer comes when it is due, late, early, or once more."""
        if self.armed and how != 3:
            wait, due_ms = list(self.armed.items())[which % len(self.armed)]
            del self.armed[wait]
            self.fired.append(wait)
            self.now_ms = max(self.now_ms, due_ms + (0, 10, -1)[how])
            self.tell(c.FireTimer(at_ms=self.now_ms, wait=wait))
        elif self.fired:
            wait = self.fired[which % len(self.fired)]
            if wait not in self.armed:
                self.tell(c.FireTimer(at_ms=self.now_ms, wait=wait))

    def send(self, which: int, how: int) -> None:
        expires_ms = self.now_ms + 2_000 if how == 1 else None
        about = "nobody" if how == 2 else ""
        name = MESSAGES[which % len(MESSAGES)]
        self.tell(c.Send(at_ms=self.now_ms, name=name, payload="5", about=about, expires_ms=expires_ms))

    def deliver(self, which: int, how: int) -> None:
        """A published message was matched to a wait, and possibly comes twice."""
        waits = [wait.id for wait in self.instance.waits.values() if wait.kind == "message"]
        if waits:
            self.published += 1
            wait = waits[which % len(waits)]
            for _ in range(1 + how % 2):
                self.tell(c.Deliver(at_ms=self.now_ms, message=self.published, wait=wait, payload="6"))

    def start_again(self, _which: int, how: int) -> None:
        given = "" if how else "another"
        self.tell(c.Start(at_ms=self.now_ms, id="i", given_digest=given, variables={}))

    def cancel(self, _which: int, how: int) -> None:
        self.tell(c.Cancel(at_ms=self.now_ms, undo=how != 0))

    def pause(self, _which: int, _how: int) -> None:
        self.tell(c.Pause(at_ms=self.now_ms))

    def resume(self, _which: int, _how: int) -> None:
        self.tell(c.Resume(at_ms=self.now_ms))

    def resolve(self, which: int, how: int) -> None:
        incidents = list(self.instance.incidents.values())
        incident = incidents[which % len(incidents)] if incidents else None
        verb = ("retry", "skip", "fail", "forget")[how]
        to = self._way_on(self.instance.tokens[incident.token]) if incident else ""
        self.tell(c.Resolve(at_ms=self.now_ms, how=verb, incident=incident.id if incident else 77, result="9", to=to))

    def _way_on(self, token: Token) -> str:
        return self.graph[token.node].outgoing[-1].target if self.graph[token.node].outgoing else ""

    def drain(self, _which: int, _how: int) -> None:
        """The runtime is shut down: what comes in is recorded, and nothing begins."""
        self.is_draining = True

    def crash(self, which: int, how: int) -> None:
        """All memory is lost; the next life has the history, and perhaps the recorded result of a transaction."""
        recorded = {}
        if how == 1 and self.out:
            _token, task, _attempt = list(self.out)[which % len(self.out)]
            recorded[task] = "4"
        self.gone += self.out
        self.out.clear()
        self.is_draining = False
        self._read_again()
        self.armed = {wait.id: wait.due_ms for wait in self.instance.waits.values() if wait.due_ms is not None}
        if self.instance.moving or how == 0:
            self.tell(c.Recover(at_ms=self.now_ms, recorded=recorded))

    def operate(self, _which: int, _how: int) -> None:
        """The next life is only for an operator's command: it begins nothing, and what it finds it leaves as it is."""
        self.gone += self.out
        self.out.clear()
        self.armed.clear()
        self.is_draining = True
        self._read_again()
        self.tell(c.Recover(at_ms=self.now_ms))

    def replace(self, _which: int, _how: int) -> None:
        """A commit's outcome was unknown: the actor is replaced by one that reads the store; handlers run on."""
        self._read_again()
        spared = frozenset(token for token, task, attempt in self.out if self._is_awaited((token, task, attempt)))
        if self.instance.moving:
            self.tell(c.Recover(at_ms=self.now_ms, spared=spared))

    def _read_again(self) -> None:
        stored = msgspec.json.decode(msgspec.json.encode(self.history), type=list[e.Entry])
        assert stored == self.history
        self.instance = fold(stored)
        self.instance.settle()

    def _is_awaited(self, attempt: Attempt) -> bool:
        token = self.instance.tokens.get(attempt[0])
        return (
            token is not None and token.status is TokenStatus.EXECUTING and attempt[1:] == (token.task, token.attempt)
        )

    def clock(self, which: int, how: int) -> None:
        self.now_ms += (1, 3_000, 7_200_000, -2_000)[how] * which

    # --- the end ---

    def play_out(self) -> None:
        """Answer everything that is outstanding, operators included: it must come to an end."""
        if self.is_draining:
            self.crash(0, 0)
        for _ in range(500):
            if self.instance.is_ended:
                return
            self._next_step()
        raise AssertionError(f"no end after 500 answers: {list(self.instance.tokens.values())}")

    def _next_step(self) -> None:
        if self.instance.status is Status.PAUSED:
            self.resume(0, 0)
        elif self.out:
            self.complete(0, 0)
        elif self.armed:
            self.fire(0, 0)
        elif waits := [wait for wait in self.instance.waits.values() if wait.kind == "message"]:
            self.tell(c.Send(at_ms=self.now_ms, name=waits[0].name))
        else:
            assert self.instance.incidents, f"it stands still: {list(self.instance.tokens.values())}"
            self.resolve(0, 1)


# The first is what an action shrinks to; how often one stands here is how often it happens.
ACTIONS = (
    *(["clock"] * 2),
    *(["complete"] * 20),
    *(["fail"] * 8),
    *(["fire"] * 5),
    *(["resolve"] * 4),
    *(["send", "deliver", "crash"] * 3),
    *(["repeat", "replace", "resume"] * 2),
    *("pause", "cancel", "drain", "operate", "start_again"),
)


@settings(max_examples=max(400, settings().max_examples))
@given(st.binary(min_size=60, max_size=60), st.integers(0, 3), st.binary(min_size=80, max_size=120))
def test_every_invariant_holds_after_every_command_and_every_instance_can_be_brought_to_an_end(
    process: bytes, x: int, schedule: bytes
) -> None:
    draft = Draft(Tape(process))
    assert problems(draft.definition) == []
    world = World(draft.definition, x=x, counters=draft.counters)

    for action, numbers in zip(schedule[::2], schedule[1::2], strict=False):
        getattr(world, ACTIONS[action % len(ACTIONS)])(numbers // 4 % 6, numbers % 4)
    world.play_out()

    assert world.instance.outcome is not None
    event(f"outcome {world.instance.outcome.value}")
    for kind in {type(each).__name__ for entry in world.history for each in entry.events}:
        event(kind)


# --- the invariants notice what they are for --------------------------------------------------------------------------


def _sample() -> Definition:
    """A saga with two branches, a timer and a step that may fail: everything that can break exists in it."""
    nodes = (
        Start(id="start"),
        Saga(id="saga"),
        Start(id="in", within="saga"),
        Fork(id="fork", within="saga"),
        Task(id="a", within="saga", handler="a", undo=UndoTask(handler="undo")),
        Task(id="b", within="saga", handler="b", undo=UndoTask(handler="undo")),
        Join(id="join", within="saga"),
        Timer(id="timer", within="saga", after="'3s'"),
        Task(id="c", within="saga", handler="c"),
        End(id="out", within="saga"),
        End(id="end"),
    )
    ways = (
        "start saga",
        "in fork",
        "fork a",
        "fork b",
        "a join",
        "b join",
        "join timer",
        "timer c",
        "c out",
        "saga end",
    )
    edges = tuple(Edge(id=way, source=way.split()[0], target=way.split()[1]) for way in ways)
    return Definition(name="p", nodes=nodes, edges=edges, open_inputs=True)


def _played(*, until: int) -> Subject:
    """The saga fails at its last step and is undone; `until` is the number of entries to keep."""
    world = World(_sample())
    world.complete(0, 0)
    world.complete(0, 0)
    world.fire(0, 0)
    world.fail(0, 1)
    world.complete(0, 0)
    world.complete(0, 0)
    assert world.instance.outcome is Outcome.FAILED
    history = tuple(world.history[:until])
    marks = tuple(Mark(n, 1) for n in range(1, until + 1))
    return Subject(instance=fold(history), graph=world.graph, history=history, marks=marks, version=until)


def _without(history: tuple[e.Entry, ...], kind: type[e.Event], *, nth: int = 0) -> tuple[e.Entry, ...]:
    """The history as it would be if one event had not happened."""
    places = [(n, event) for n, entry in enumerate(history) for event in entry.events if type(event) is kind]
    number, gone = places[nth]
    kept = [event for event in history[number].events if event is not gone]
    return (*history[:number], msgspec.structs.replace(history[number], events=kept), *history[number + 1 :])


def _twice(history: tuple[e.Entry, ...], kind: type[e.Event], **changes: Any) -> tuple[e.Entry, ...]:
    """The history as it would be if the last event of a kind had happened twice, the second time a little otherwise."""
    places = [(n, event) for n, entry in enumerate(history) for event in entry.events if type(event) is kind]
    number, again = places[-1]
    events = [*history[number].events, msgspec.structs.replace(again, **changes)]
    return (*history[:number], msgspec.structs.replace(history[number], events=events), *history[number + 1 :])


def _instead(history: tuple[e.Entry, ...], kind: type[e.Event], **changes: Any) -> tuple[e.Entry, ...]:
    """The history as it would be if all events of a kind had been others."""

    def changed(event: e.AnyEvent) -> e.AnyEvent:
        return msgspec.structs.replace(event, **changes) if type(event) is kind else event

    return tuple(msgspec.structs.replace(entry, events=[changed(each) for each in entry.events]) for entry in history)


def _earlier(history: tuple[e.Entry, ...]) -> tuple[e.Entry, ...]:
    return tuple(msgspec.structs.replace(entry, at_ms=min(entry.at_ms, 3_999)) for entry in history)


def _changed(subject: Subject, act: Callable[[Instance], object]) -> Subject:
    act(subject.instance)
    return subject


def _with(subject: Subject, change: Callable[[tuple[e.Entry, ...]], tuple[e.Entry, ...]]) -> Subject:
    return attrs.evolve(subject, history=change(subject.history))


def _and(subject: Subject, *entries: Sequence[e.AnyEvent]) -> Subject:
    """The history as it would be if more had happened, long after everything else."""
    more = tuple(e.Entry(1_000_000_000 + n, "forged", list(events)) for n, events in enumerate(entries))
    return attrs.evolve(subject, history=(*subject.history, *more))


def _lay_unused(instance: Instance) -> None:
    instance.put_wait(Wait(98, 98, 0, 1, "saga", "message", "paid", "7"))
    instance.buffer.put(99, Buffered(99, "paid", "", "null"))


def _undo_marks(instance: Instance) -> None:
    first, second = instance.undos.values()
    instance.undos.put(first.id, msgspec.structs.replace(second, id=first.id))


BRANCH, WAIT = 4, 9  # In the sample: a token whose attempt is out at first, and the timer after the join.

WRONG: dict[str, tuple[str, Callable[[], Subject]]] = {
    "a token ends twice": ("I1", lambda: _with(_played(until=7), lambda h: _twice(h, e.TokenEnded))),
    "a token is forgotten": ("I1", lambda: _changed(_played(until=2), lambda i: i.drop_token(3))),
    "a scope closes too early": ("I1", lambda: _with(_played(until=7), lambda h: _without(h, e.TokenEnded, nth=2))),
    "a commit is missing": ("I2", lambda: attrs.evolve(_played(until=3), marks=(Mark(1, 1), Mark(3, 1)))),
    "the version is another": ("I2", lambda: attrs.evolve(_played(until=3), version=2)),
    "a key is used twice": (
        "I2",
        lambda: _with(_played(until=3), lambda h: tuple(msgspec.structs.replace(entry, key="k") for entry in h)),
    ),
    "a result stands beside its order": ("I3", lambda: attrs.evolve(_played(until=2), sizes=(2,))),
    "a result of nobody's attempt": (
        "I3",
        lambda: _with(_played(until=2), lambda h: _instead(h, e.TaskCompleted, attempt=9)),
    ),
    "a join does not wait": ("I4", lambda: _with(_played(until=4), lambda h: _without(h, e.TokenRested, nth=2))),
    "a join takes only one": ("I4", lambda: _with(_played(until=4), lambda h: _without(h, e.TokenEnded))),
    "a join forgets": ("I4", lambda: _changed(_played(until=2), lambda i: i.arrived.clear())),
    "a success without an undo": ("I5", lambda: _with(_played(until=3), lambda h: _without(h, e.UndoRecorded))),
    "an undo without a success": (
        "I5",
        lambda: _with(_played(until=3), lambda h: _twice(h, e.UndoRecorded, undo=99)),
    ),
    "undone in the wrong order": ("I5", lambda: _with(_played(until=5), lambda h: _instead(h, e.UndoStarted, undo=7))),
    "an undo is left out": ("I5", lambda: _with(_played(until=7), lambda h: _without(h, e.UndoFinished))),
    "a timer is early": ("I6", lambda: _with(_played(until=4), _earlier)),
    "a wait is consumed twice": ("I6", lambda: _with(_played(until=4), lambda h: _twice(h, e.WaitConsumed))),
    "a wait is left out": ("I6", lambda: _changed(_played(until=3), lambda i: i.waits.clear())),
    "a timer fires after a cancel": (
        "I6",
        lambda: _and(_played(until=3), [e.EndingBegun(Outcome.CANCELLED)], [e.WaitConsumed(WAIT)]),
    ),
    "a message lies beside its wait": ("I8", lambda: _changed(_played(until=3), _lay_unused)),
    "an epoch goes back": ("I9", lambda: attrs.evolve(_played(until=2), marks=(Mark(1, 2), Mark(2, 1)))),
    "an id is given twice": ("I9", lambda: _with(_played(until=1), lambda h: _twice(h, e.TokenCreated))),
    "a row is changed": ("I11", lambda: _changed(_played(until=3), _undo_marks)),
    "an event is lost": ("I11", lambda: _with(_played(until=4), lambda h: _without(h, e.WaitOpened))),
    "a token waits for nothing": ("I14", lambda: _changed(_played(until=3), lambda i: i.drop_waits(3))),
    "a scope has nothing to come": ("I14", lambda: _changed(_played(until=3), lambda i: i.drop_token(3))),
    "attempts are lost again and again": (
        "I15",
        lambda: _and(_played(until=1), *([e.AttemptLost(BRANCH, n)] for n in (1, 2, 3))),
    ),
    "an attempt too many": (
        "I15",
        lambda: _and(
            _played(until=1), [e.AttemptFailed(BRANCH, 1, "error", "no paper")], [e.AttemptStarted(BRANCH, 2)]
        ),
    ),
    "an end without an outcome": ("S1", lambda: _changed(_played(until=7), lambda i: setattr(i, "outcome", None))),
    "an end of another kind": ("S1", lambda: _with(_played(until=7), lambda h: _without(h, e.EndingBegun))),
    "an end as if nothing had failed": (
        "S1",
        lambda: _with(
            _played(until=7),
            lambda h: _instead(_without(h, e.EndingBegun), e.InstanceEnded, outcome=Outcome.COMPLETED),
        ),
    ),
    "an attempt ends twice": ("S2", lambda: _with(_played(until=2), lambda h: _twice(h, e.TaskCompleted))),
    "something begins during a pause": (
        "S2",
        lambda: _with(
            _played(until=1),
            lambda h: (msgspec.structs.replace(h[0], events=[h[0].events[0], e.InstancePaused(), *h[0].events[1:]]),),
        ),
    ),
}


def test_a_wait_that_a_cancel_had_to_end_is_named_when_it_is_consumed_all_the_same() -> None:
    found = INVARIANTS["I6"].check(WRONG["a timer fires after a cancel"][1]())

    assert f"wait {WAIT} was consumed after its instance had been cancelled" in [each.message for each in found]


def test_an_undo_goes_on_to_wait_and_to_be_tried_after_a_cancel() -> None:
    subject = _played(until=5)
    token = next(token for token in subject.instance.tokens.values() if token.mode is Mode.COMPENSATION)

    waiting = _and(
        subject,
        [e.WaitOpened(50, 50, token.id, "retry", due_ms=1)],
        [e.EndingBegun(Outcome.CANCELLED)],
        [e.WaitConsumed(50)],
    )

    messages = [violation.message for violation in INVARIANTS["I6"].check(waiting)]
    assert not [message for message in messages if "cancelled" in message]


def test_an_attempt_that_an_operator_has_ordered_counts_from_one_again() -> None:
    failed = e.AttemptFailed(BRANCH, 1, "error", "no paper")
    renewed = e.AttemptStarted(BRANCH, 2, renewed=True)
    lost = [e.AttemptLost(BRANCH, 2), e.AttemptLost(BRANCH, 3)]
    incident = e.IncidentRaised(90, BRANCH, "error", "no paper")

    subject = _and(_played(until=1), [failed, incident], [renewed], lost)

    assert INVARIANTS["I15"].check(subject) == []


@pytest.mark.parametrize("wrong", WRONG)
def test_each_invariant_notices_what_it_is_for(wrong: str) -> None:
    id_, subject = WRONG[wrong]

    found = INVARIANTS[id_].check(subject())

    assert [violation.id for violation in found] != []
    assert all(violation.message and violation.instance == "i" for violation in found)


def test_every_invariant_is_seen_to_fail_and_none_fails_without_a_reason() -> None:
    assert {id_ for id_, _ in WRONG.values()} == set(INVARIANTS)
    for until in range(1, 8):
        assert examine(_played(until=until)) == []
