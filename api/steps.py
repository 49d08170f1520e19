"""The words that a process is written in, and the steps that they make.

A step is a value that knows the line it was written on. What is plainly no step or no option is refused there and
then; what only the whole process can tell is found when the process is made. Drawing a step adds its nodes to a chart:
it takes the ways that lead to it and gives those that lead on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import attrs

from understudy.model.durations import duration_ms, moment_ms
from understudy.model.errors import Rejected
from understudy.model.kinds import (
    Choice,
    End,
    Fork,
    Join,
    Merge,
    Receive,
    Saga,
    Start,
    Terminate,
    Throw,
    Timer,
    UndoTask,
)
from understudy.model.kinds import Task as TaskNode
from understudy.tasks import Activity, Duration, Task, Undo, caller_place, milliseconds, named, refusal, variable

if TYPE_CHECKING:
    from understudy.process import Chart, Names, Ways

CALLED = "did you call a task? Pass the task itself: charge, not charge(...)"


@attrs.frozen(kw_only=True)
class Step:
    """A part of a process. Steps are made by the functions below."""

    place: str
    id: str = ""  # What a process calls it; empty until it is part of one.
    into: str = ""  # The variable that it gives.

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The sequences inside it."""
        return ()

    @property
    def node(self) -> str:
        """The node that stands for it in the graph."""
        return self.id

    def named(self, names: Names) -> Self:
        """The same step under its own name in a process."""
        raise NotImplementedError

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        raise NotImplementedError


Block: TypeAlias = tuple[Step, ...]
Steps: TypeAlias = Task[..., Any] | Step | Sequence[Task[..., Any] | Step]


# --- the words --------------------------------------------------------------------------------------------------------


def sequence(*given: Steps) -> list[Step]:
    """Several steps, one after the other: a branch of `choose` or `parallel` that is more than one step."""
    return list(block("sequence", given))


def when(condition: str, *then: Steps) -> Step:
    """Take these steps if the condition is true; else go straight on."""
    return ChooseStep(
        place=caller_place(),
        branches=((_expression("when", "condition", condition), block("when", then)),),
        otherwise=(),
    )


def choose(*branches: tuple[str, Steps], otherwise: Steps | None = None) -> Step:
    """Take the first branch whose condition is true: `choose(("amount > 500", a), ("vip", b), otherwise=c)`.

    If none is true and there is no `otherwise`, the instance stops with an incident; `otherwise=()` goes straight on.
    """
    for branch in branches:
        if not isinstance(branch, tuple) or len(branch) != 2 or not isinstance(branch[0], str):
            hint = 'write each branch as a pair: ("amount > 500", step), or ("amount > 500", [step, step])'
            raise refusal("choose", "bad_step", f"{_shown(branch)} is not a condition with its steps", hint=hint)
    pairs = tuple((_expression("choose", "condition", text), block("choose", then)) for text, then in branches)
    return ChooseStep(
        place=caller_place(), branches=pairs, otherwise=None if otherwise is None else block("choose", otherwise)
    )


def parallel(*branches: Steps) -> Step:
    """Take all branches at once, and go on when all are through; one that always ends with `end()` is not awaited."""
    return ParallelStep(place=caller_place(), branches=tuple(block("parallel", branch) for branch in branches))


def saga(*sequence: Steps) -> Step:
    """Take these steps; if one fails for good, undo those that were done, last one first, and fail."""
    return SagaStep(place=caller_place(), body=block("saga", sequence))


def repeat(*sequence: Steps, until: str = "", whilst: str = "") -> Step:
    """Take these steps again and again: `until` is asked after each round, `whilst` before each."""
    if bool(until) == bool(whilst):
        hint = 'until="ok" is asked after each round, whilst="not ok" before it'
        raise refusal("repeat", "bad_step", "it needs either until= or whilst=", hint=hint)
    body = block("repeat", sequence)
    if not body:
        raise refusal("repeat", "bad_step", "there is nothing to repeat", hint="give it at least one step")
    condition = _expression("repeat", "until" if until else "whilst", until or whilst)
    return RepeatStep(place=caller_place(), body=body, condition=condition, tests_first=bool(whilst))


def sleep(duration: Duration | None = None, *, after: str = "", until: str | datetime = "") -> Step:
    """Wait for some time: `sleep("3d")`; or as variables say: `sleep(after="patience")`, `sleep(until="due_date")`.

    The first argument is a duration as it stands. `after` and `until` are expressions, whose values are a duration or a
    moment as text; a moment that is known now is given as a `datetime`.
    """
    if sum((duration is not None, bool(after), bool(until))) != 1:
        raise refusal(
            "sleep", "bad_step", "it needs one of: a duration, after=, until=", hint='for example sleep("3d")'
        )
    if duration is not None:
        return SleepStep(place=caller_place(), after=_literal(duration, duration_ms), until="")
    if isinstance(until, datetime):
        return SleepStep(place=caller_place(), after="", until=_literal(until, moment_ms))
    return SleepStep(place=caller_place(), after=_timing("after", after), until=_timing("until", until))


def wait(
    message: str,
    *,
    key: str = "",
    into: str = "",
    gives: Any = Any,
    timeout: Duration | None = None,
    late: Steps | None = None,
) -> Step:
    """Wait for a message by its name, and by the value of `key` if that is given.

    What the message brings becomes the variable `into`, of type `gives`. After `timeout` the steps of `late` are taken
    instead, and then what follows; without `late` the step fails.
    """
    if isinstance(gives, str | Activity):
        hint = "give the class itself: gives=Delivery"
        raise refusal("wait", "bad_option", f"gives={_shown(gives)} is not a type", hint=hint)
    return WaitStep(
        place=caller_place(),
        message=named("wait", "the message", message),
        key=_expression("wait", "key", key) if key != "" else "",
        into=variable("wait", "into", into) if into != "" else "",
        gives=gives,
        timeout_ms=None if timeout is None else milliseconds("wait", "timeout", timeout, least=1),
        late=None if late is None else block("wait", late),
    )


def throw(message: str, *, key: str = "", payload: str = "", ttl: Duration | None = None) -> Step:
    """Publish a message for whoever waits for it, now or within `ttl`. `key` and `payload` are expressions."""
    return ThrowStep(
        place=caller_place(),
        message=named("throw", "the message", message),
        key=_expression("throw", "key", key) if key != "" else "",
        payload=_expression("throw", "payload", payload) if payload != "" else "",
        ttl_ms=None if ttl is None else milliseconds("throw", "ttl", ttl, least=1),
    )


def end() -> Step:
    """End this way. The process, or the saga around, ends when all its ways have."""
    return EndStep(place=caller_place())


def terminate() -> Step:
    """End all ways of the process, or of the saga around, at once."""
    return TerminateStep(place=caller_place())


# --- steps at the door ------------------------------------------------------------------------------------------------


def block(what: str, given: object) -> Block:
    """A sequence of steps from what the author gave, or a refusal that says what it probably was."""
    if isinstance(given, list | tuple):
        return tuple(step for part in given for step in block(what, part))
    if isinstance(given, Step):
        return (given,)
    if isinstance(given, Task):
        return (TaskStep(place=given.place, task=given),)
    message, hint = _mistake(given)
    raise refusal(what, "bad_step", message, hint=hint)


def _mistake(given: object) -> tuple[str, str]:
    if isinstance(given, Undo):
        return f"{given.name} is the undo of {given.undoes}, not a step", "it runs by itself when its saga fails"
    if isinstance(given, str):
        return f"the string {given!r} is not a step", f"a condition belongs into when({given!r}, ...); or {CALLED}"
    if hasattr(given, "definition"):
        return f"{_shown(given)} is not a step", "a process starts another from a task, through the runtime"
    if inspect.iscoroutine(given):
        given.close()  # Nobody will await it, and Python would say so long after this.
        return f"{_shown(given)} is not a step", CALLED
    if getattr(given, "__module__", "") == __name__:
        return f"{_shown(given)} is not a step", "call it"
    if inspect.isfunction(given):
        return f"the function {given.__name__} is not a task", "put @task above it"
    return f"{_shown(given)} is not a step", CALLED


def _shown(value: object) -> str:
    text = value.name if isinstance(value, Activity) else getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _expression(what: str, option: str, text: object) -> str:
    if not isinstance(text, str) or not text.strip():
        hint = 'for example "amount > 1000"'
        raise refusal(what, "bad_expression", f"{option} must be an expression as text, not {_shown(text)}", hint=hint)
    return text


def _literal(value: Any, read: Callable[[Any], int]) -> str:
    """An expression that is just this value, as the author wrote it where that was text."""
    try:
        length_ms = read(value)
    except Rejected as error:
        hint = f"for the value of a variable write sleep(after={value!r})" if isinstance(value, str) else ""
        raise refusal("sleep", "bad_duration", str(error), hint=hint) from None
    if isinstance(value, datetime):
        return repr(value.isoformat())
    return repr(value if isinstance(value, str) else f"{length_ms}ms")


def _timing(option: str, text: Any) -> str:
    """An expression, unless it is a literal that stands in the wrong place."""
    if text == "":
        return ""
    read: Callable[[str], int] = duration_ms if option == "after" else moment_ms
    try:
        read(_expression("sleep", option, text))
    except Rejected:
        return str(text)
    right = f"sleep({text!r})" if option == "after" else f"sleep(until=datetime.fromisoformat({text!r}))"
    raise refusal("sleep", "bad_expression", f"{option}={text!r} is no expression but a value", hint=f"write {right}")


# --- the steps --------------------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class TaskStep(Step):
    """One use of a task."""

    task: Task[..., Any]

    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.unique(self.task.name), into=names.into(self.task))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        options, reads, undo = self.task.options, self.task.signature, self.task.undone_by
        chart.bind(self.task)
        chart.add(
            ways,
            self.place,
            TaskNode,
            id=self.id,
            handler=self.task.name,
            needs=reads.needs,
            may=reads.may,
            into=self.into,
            retry=options.retry,
            timeout_ms=options.timeout_ms,
            on_failure=options.on_failure,
            undo=None if undo is None else self._undo(chart, undo),
            lane=options.lane,
            transactional=options.transactional,
            isolation=options.isolation,
        )
        return [chart.way(self.id)]

    def _undo(self, chart: Chart, undo: Undo[..., Any]) -> UndoTask:
        chart.bind(undo)
        return UndoTask(
            handler=undo.name,
            needs=undo.signature.needs,
            may=undo.signature.may,
            retry=undo.options.retry,
            timeout_ms=undo.options.timeout_ms,
        )


@attrs.frozen(kw_only=True)
class ChooseStep(Step):
    branches: tuple[tuple[str, Block], ...]
    otherwise: Block | None

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (*(then for _, then in self.branches), *(() if self.otherwise is None else (self.otherwise,)))

    def named(self, names: Names) -> Self:
        return attrs.evolve(
            self,
            id=names.numbered("choice"),
            branches=tuple((condition, names.block(then)) for condition, then in self.branches),
            otherwise=None if self.otherwise is None else names.block(self.otherwise),
        )

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(ways, self.place, Choice, id=self.id)
        on: Ways = []
        for condition, then in self.branches:
            on += chart.draw(then, [chart.way(self.id, condition=condition)])
        if self.otherwise is not None:
            on += chart.draw(self.otherwise, [chart.way(self.id, is_default=True)])
        return on


@attrs.frozen(kw_only=True)
class ParallelStep(Step):
    branches: tuple[Block, ...]

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.branches

    def named(self, names: Names) -> Self:
        name = names.numbered("parallel", "fork", "join")
        return attrs.evolve(self, id=name, branches=tuple(map(names.block, self.branches)))

    @property
    def node(self) -> str:
        return self.id.replace("parallel", "fork")

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(ways, self.place, Fork, id=self.node)
        on: Ways = []
        for branch in self.branches:
            on += self._one_way(chart, chart.draw(branch, [chart.way(self.node)]))
        if len(on) < 2:
            return on
        join = self.id.replace("parallel", "join")
        chart.add(on, self.place, Join, id=join)
        return [chart.way(join)]

    def _one_way(self, chart: Chart, ways: Ways) -> Ways:
        """A join counts its edges, so a branch may have only one to it."""
        if len(ways) < 2:
            return ways
        merge = chart.names.numbered("merge")
        chart.add(ways, self.place, Merge, id=merge)
        return [chart.way(merge)]


@attrs.frozen(kw_only=True)
class SagaStep(Step):
    body: Block

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.body,)

    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.numbered("saga"), body=names.block(self.body))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(ways, self.place, Saga, id=self.id)
        with chart.inside(self.id):
            chart.add([], self.place, Start, id=f"{self.id}/start")
            on = chart.draw(self.body, [chart.way(f"{self.id}/start")])
            if on:
                chart.add(on, self.place, End, id=f"{self.id}/end")
        return [chart.way(self.id)]


@attrs.frozen(kw_only=True)
class RepeatStep(Step):
    body: Block
    condition: str
    tests_first: bool

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.body,)

    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.numbered("repeat", "until"), body=names.block(self.body))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        if self.tests_first:
            chart.add(ways, self.place, Choice, id=self.id)
            chart.arrive(chart.draw(self.body, [chart.way(self.id, condition=self.condition)]), self.id)
            return [chart.way(self.id, is_default=True)]
        test = self.id.replace("repeat", "until")
        chart.add(ways, self.place, Merge, id=self.id)
        chart.add(chart.draw(self.body, [chart.way(self.id)]), self.place, Choice, id=test)
        on = [chart.way(test, condition=self.condition)]
        chart.arrive([chart.way(test, is_default=True)], self.id)
        return on


@attrs.frozen(kw_only=True)
class SleepStep(Step):
    after: str
    until: str

    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.numbered("sleep"))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(ways, self.place, Timer, id=self.id, after=self.after, until=self.until)
        return [chart.way(self.id)]


@attrs.frozen(kw_only=True)
class WaitStep(Step):
    message: str
    key: str
    gives: Any
    timeout_ms: int | None
    late: Block | None

    @property
    def blocks(self) -> tuple[Block, ...]:
        return () if self.late is None else (self.late,)

    def named(self, names: Names) -> Self:
        late = None if self.late is None else names.block(self.late)
        return attrs.evolve(self, id=names.unique(self.message), late=late)

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(
            ways,
            self.place,
            Receive,
            id=self.id,
            message=self.message,
            key=self.key,
            into=self.into,
            timeout_ms=self.timeout_ms,
        )
        on = [chart.way(self.id)]
        return on if self.late is None else on + chart.draw(self.late, [chart.way(self.id, is_late=True)])


@attrs.frozen(kw_only=True)
class ThrowStep(Step):
    message: str
    key: str
    payload: str
    ttl_ms: int | None

    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.unique(f"throw {self.message}"))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(
            ways,
            self.place,
            Throw,
            id=self.id,
            message=self.message,
            key=self.key,
            payload=self.payload,
            ttl_ms=self.ttl_ms,
        )
        return [chart.way(self.id)]


@attrs.frozen(kw_only=True)
class EndStep(Step):
    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.numbered("end"))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(ways, self.place, End, id=self.id)
        return []


@attrs.frozen(kw_only=True)
class TerminateStep(Step):
    def named(self, names: Names) -> Self:
        return attrs.evolve(self, id=names.numbered("terminate"))

    def draw(self, chart: Chart, ways: Ways) -> Ways:
        chart.add(ways, self.place, Terminate, id=self.id)
        return []
