"""Random processes under random schedules: whatever arrives, in whatever order, every invariant holds after each step.

A world plays everything around the rules: handlers that answer in any order, twice, late or never, timers that come
early or again, senders, operators, shutdowns and crashes. A crash keeps nothing but the history.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import event, given, note, settings
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.model import effects as fx
from understudy.model import events as e
from understudy.model.apply import fold
from understudy.model.decide import Decision, decide, outstanding
from understudy.model.definition import Definition, Edge, Graph, Node
from understudy.model.instance import Fault, Instance, Token, facts
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
from understudy.model.states import Status, TokenStatus
from understudy.model.validation import problems

ROUNDS = 2  # Of each loop.
MESSAGES = ("paid", "sent")

# --- processes --------------------------------------------------------------------------------------------------------

Block = tuple[Any, ...]  # What it is, and what it is made of.

RETRIES = st.sampled_from(
    [Backoff(), Backoff(attempts=2, first_ms=0, jitter=0), Backoff(attempts=3, first_ms=1_000, never=("m:Final",))]
)
TASKS = st.tuples(
    st.just("task"),
    st.sampled_from([True, True, False]),
    st.one_of(st.just(Backoff()), RETRIES),
    st.sampled_from(["", "", "", "", "incident", "fail"]),
)
LEAVES = st.one_of(
    TASKS,
    TASKS,
    TASKS,
    TASKS,
    st.tuples(st.just("timer"), st.sampled_from(["0s", "3s", "1h"])),
    st.tuples(st.just("receive"), st.sampled_from(MESSAGES), st.sampled_from([None, 5_000]), st.none()),
    st.tuples(st.sampled_from(["throw", "throw", "terminate"])),
)


def _blocks(depth: int) -> st.SearchStrategy[Block]:
    """Not `st.recursive`: that prefers the small, and what is to be found here needs sagas in branches in sagas."""
    if depth == 0:
        return LEAVES
    inner = st.deferred(lambda: _blocks(depth - 1))
    several = st.lists(inner, min_size=2, max_size=3).map(tuple)
    return st.one_of(
        LEAVES,
        st.tuples(st.just("sequence"), several),
        st.tuples(st.just("parallel"), several),
        st.tuples(st.just("saga"), inner),
        st.tuples(st.just("saga"), st.tuples(st.just("sequence"), several)),
        st.tuples(st.just("saga"), st.tuples(st.just("parallel"), several)),
        st.tuples(st.just("choice"), several, st.booleans()),
        st.tuples(st.just("loop"), inner),
        st.tuples(st.just("receive"), st.sampled_from(MESSAGES), st.just(5_000), inner),
    )


PROCESSES = st.lists(_blocks(3), min_size=1, max_size=3).map(lambda blocks: ("sequence", tuple(blocks)))


class Draft:
    """A definition under construction. Each part is drawn between an entry and an exit; one that terminates has none."""

    def __init__(self, block: Block) -> None:
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.counters: list[str] = []
        self._enclose(block, "")
        self.definition = Definition(name="p", nodes=tuple(self.nodes), edges=tuple(self.edges), open_inputs=True)

    def _enclose(self, block: Block, within: str) -> None:
        start = self._add(Start, "start", within)
        first, last = self._draw(block, within)
        self._link(start, first)
        if last:
            self._link(last, self._add(End, "end", within))

    def _add(self, kind: type[Node], name: str, within: str, **fields: Any) -> str:
        node = kind(id=f"{name}{len(self.nodes)}", within=within, **fields)
        self.nodes.append(node)
        return node.id

    def _link(self, source: str, target: str, **fields: Any) -> None:
        self.edges.append(Edge(id=f"e{len(self.edges)}", source=source, target=target, **fields))

    def _draw(self, block: Block, within: str) -> tuple[str, str]:
        kind, *parts = block
        both: tuple[str, str] = getattr(self, f"_{kind}")(within, *parts)
        return both

    def _task(self, within: str, can_undo: bool, retry: Backoff, on_failure: str) -> tuple[str, str]:
        undo = UndoTask(handler="undo", may=("x", "result")) if can_undo and within else None
        name = self._add(Task, "task", within, handler="do", retry=retry, on_failure=on_failure, undo=undo)
        return name, name

    def _timer(self, within: str, after: str) -> tuple[str, str]:
        name = self._add(Timer, "timer", within, after=repr(after))
        return name, name

    def _throw(self, within: str) -> tuple[str, str]:
        name = self._add(Throw, "throw", within, message="thrown", payload="x")
        return name, name

    def _terminate(self, within: str) -> tuple[str, str]:
        return self._add(Terminate, "terminate", within), ""

    def _receive(self, within: str, message: str, timeout_ms: int | None, late: Block | None) -> tuple[str, str]:
        first = self._add(Receive, "receive", within, message=message, into="got", timeout_ms=timeout_ms)
        if late is None:
            return first, first
        merge = self._add(Merge, "merge", within)
        self._link(first, merge)
        late_first, late_last = self._draw(late, within)
        self._link(first, late_first, is_late=True)
        if late_last:
            self._link(late_last, merge)
        return first, merge

    def _sequence(self, within: str, blocks: tuple[Block, ...]) -> tuple[str, str]:
        first, last = self._draw(blocks[0], within)
        for block in blocks[1:]:
            if not last:
                break
            then, after = self._draw(block, within)
            self._link(last, then)
            last = after
        return first, last

    def _choice(self, within: str, blocks: tuple[Block, ...], has_default: bool) -> tuple[str, str]:
        first = self._add(Choice, "choice", within)
        lasts = []
        for value, block in enumerate(blocks):
            then, last = self._draw(block, within)
            is_default = has_default and value == len(blocks) - 1
            self._link(first, then, **({"is_default": True} if is_default else {"condition": f"x == {value}"}))
            lasts.append(last)
        return first, self._together(Merge, "merge", within, lasts)

    def _parallel(self, within: str, blocks: tuple[Block, ...]) -> tuple[str, str]:
        first = self._add(Fork, "fork", within)
        lasts = []
        for block in blocks:
            then, last = self._draw(block, within)
            self._link(first, then)
            lasts.append(last)
        return first, self._together(Join, "join", within, lasts)

    def _together(self, kind: type[Node], name: str, within: str, lasts: list[str]) -> str:
        open_ends = [last for last in lasts if last]
        if len(open_ends) < 2:
            return "".join(open_ends)
        node = self._add(kind, name, within)
        for last in open_ends:
            self._link(last, node)
        return node

    def _saga(self, within: str, block: Block) -> tuple[str, str]:
        name = self._add(Saga, "saga", within)
        self._enclose(block, name)
        return name, name

    def _loop(self, within: str, block: Block) -> tuple[str, str]:
        merge = self._add(Merge, "loop", within)
        first, last = self._draw(block, within)
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


class World:
    """One instance and everything around it. Every command goes through `tell`, which checks what must hold."""

    def __init__(self, draft: Draft, x: int) -> None:
        self.graph = Graph(draft.definition)
        self.instance = Instance()
        self.history: list[e.Entry] = []
        self.now_ms = 1_000
        self.out: dict[Attempt, fx.RunTask] = {}  # With a handler, whether its result is still wanted or not.
        self.gone: list[Attempt] = []  # Answered, or lost with a former life.
        self.armed: dict[int, int] = {}
        self.fired: list[int] = []
        self.is_draining = False
        self.published = 0
        variables = {"x": str(x), **dict.fromkeys(draft.counters, "0")}
        self.tell(c.Start(at_ms=self.now_ms, id="i", given_digest="", variables=variables))

    def tell(self, command: c.AnyCommand) -> Decision:
        before = facts(self.instance)

        decision = decide(self.instance, self.graph, command, go_on=not self.is_draining)

        note(f"{command} -> {decision.refusal or decision.answer}")
        if decision.entry is None:
            assert facts(self.instance) == before
        else:
            assert decision.refusal is None
            self.history.append(decision.entry)
            note("\n".join(f"    {each}" for each in decision.entry.events))
        self._carry_out(decision)
        self._check()
        return decision

    def _carry_out(self, decision: Decision) -> None:
        for effect in decision.effects:
            if isinstance(effect, fx.RunTask):
                assert not self.is_draining
                assert self.instance.status is not Status.PAUSED
                self.out[(effect.token, effect.task, effect.attempt)] = effect
            elif isinstance(effect, fx.ArmTimer):
                self.armed[effect.wait] = effect.due_ms
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
                assert self.out.get((effect.token, effect.task, effect.attempt)) == effect, "nobody runs it"
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
        if self.gone:
            attempt = self.gone[which % len(self.gone)]
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

    def crash(self, _which: int, how: int) -> None:
        """All memory is lost; the next life has the history and what it can derive from it."""
        stored = msgspec.json.decode(msgspec.json.encode(self.history), type=list[e.Entry])
        assert stored == self.history
        self.instance = fold(stored)
        self.instance.settle()
        self.is_draining = False
        self.gone += self.out
        self.out.clear()
        self.armed = {wait.id: wait.due_ms for wait in self.instance.waits.values() if wait.due_ms is not None}
        if self.instance.moving or how == 0:
            self.tell(c.Recover(at_ms=self.now_ms))

    def clock(self, which: int, how: int) -> None:
        self.now_ms += (1, 3_000, 7_200_000, -2_000)[how] * which

    # --- the end ---

    def play_out(self) -> None:
        """Answer everything that is outstanding, operators included: it must come to an end."""
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
    *(["clock"] * 1),
    *(["complete"] * 12),
    *(["fail"] * 4),
    *(["fire"] * 3),
    *(["send", "deliver", "resolve", "crash"] * 2),
    *("repeat", "cancel", "pause", "resume", "drain"),
)
SCHEDULES = st.lists(
    st.tuples(st.sampled_from(ACTIONS), st.integers(0, 5), st.integers(0, 3)), min_size=20, max_size=40
)


@settings(max_examples=int(__import__("os").environ.get("N","150")))
@given(PROCESSES, st.integers(0, 3), SCHEDULES)
def test_every_invariant_holds_after_every_command_and_every_instance_can_be_brought_to_an_end(
    block: Block, x: int, schedule: list[tuple[str, int, int]]
) -> None:
    draft = Draft(block)
    assert problems(draft.definition) == []
    world = World(draft, x)

    for action, which, how in schedule:
        getattr(world, action)(which, how)
    world.play_out()

    assert world.instance.outcome is not None
    event(f"outcome {world.instance.outcome.value}")
    for kind in {type(each).__name__ for entry in world.history for each in entry.events}:
        event(kind)
