"""Which variables a step can count on, found by walking the steps as the author wrote them.

Each step is looked at with what has surely been given before it, and by whom; a variable that only some ways give is
known as a doubt, with the reason in words. Types are compared as far as annotations say: what cannot be judged fits.
Nothing here looks at the graph, or runs anything of the user's.
"""

from __future__ import annotations

import sqlite3
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import EllipsisType, NoneType, UnionType
from typing import Any

import attrs
import msgspec

from understudy.model.errors import BadExpression, Problem
from understudy.model.expressions import compile_expression
from understudy.model.validation import near
from understudy.steps import (
    Block,
    ChooseStep,
    EndStep,
    ParallelStep,
    RepeatStep,
    SagaStep,
    SleepStep,
    Step,
    TaskStep,
    TerminateStep,
    ThrowStep,
    WaitStep,
)
from understudy.tasks import Activity, Task, Undo


@attrs.frozen
class Origin:
    """Where a value comes from, and as what."""

    type: Any
    giver: str


Origins = tuple[Origin, ...]  # The alternatives, where several ways lead to one place.


@attrs.frozen
class Flowing:
    """What the walk found: problems, and the type of the result as far as it is known."""

    problems: list[Problem]
    result: Any


def flow(
    body: Block, inputs: Mapping[str, Any], *, is_open: bool, result: str, giver: Task[..., Any] | None, place: str
) -> Flowing:
    """Walk the steps of a process. With open inputs every name may be one, so that only types are compared.

    If a task was named as the giver of the result, its type is a promise: then every way must give it.
    """
    given = {name: (Origin(kind, "the input"),) for name, kind in inputs.items()}
    walk = _Walk(given, body, is_open=is_open)
    last = walk.scope(body, State(given), "only some ways to an end give") or State({})
    types = [origin.type for origin in walk.origins.get(result, ())]
    kind = types[0] if types and all(each == types[0] for each in types) else Any
    if giver is not None:
        kind = giver.signature.returns
        walk.problems += _broken_promise(last, result, kind, place)
    elif result not in last.known:
        kind = Any if unreadable(kind) else typing.Optional[kind]  # noqa: UP045 - it is made here, not written
    return Flowing(walk.problems, kind)


def check_signature(activity: Activity) -> Iterator[Problem]:
    """What is wrong with a function's own annotations, whatever the process is."""
    read = activity.signature

    def problem(code: str, message: str, hint: str) -> Problem:
        return Problem(code, f"`{activity.name}` {message}", activity.name, activity.place, hint)

    for name, text in read.unread.items():
        what = "gives" if name == "return" else f"takes {name} as"
        hint = "import it also when the program runs, not only for type checkers"
        yield problem("unread_annotation", f"{what} {text}, which cannot be found", hint)
    for name, kind in read.types.items():
        if reason := unreadable(kind):
            hint = "@task(transactional=True) lends it the connection" if kind is sqlite3.Connection else _STORABLE
            yield problem("bad_type", f"takes {name} as {reason}", hint)
    if _is_custom(read.returns) or read.returns in (bytes, bytearray, memoryview):
        yield problem("bad_type", f"gives {title(read.returns)}, which cannot be stored as JSON", _STORABLE)
    if activity.transactional and not read.connection:
        yield problem(
            "no_connection",
            "is transactional, but takes no connection",
            "add the parameter connection: sqlite3.Connection",
        )


# --- the walk ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class State:
    """What is known at one place in the process."""

    known: Mapping[str, Origins]
    doubts: Mapping[str, str] = attrs.field(factory=dict)  # Variables that may be there, and why that is not sure.
    coming: Mapping[str, Origins] = attrs.field(
        factory=dict
    )  # Surely given before the scope ends, by ways not awaited.

    def give(self, name: str, *origins: Origin) -> State:
        if not name:
            return self
        doubts = {other: why for other, why in self.doubts.items() if other != name}
        return attrs.evolve(self, known={**self.known, name: origins}, doubts=doubts)

    def doubt(self, names: Iterable[str], why: str) -> State:
        unsure = {name: why for name in names if name not in self.known and name not in self.doubts}
        return attrs.evolve(self, doubts={**self.doubts, **unsure})

    def changed_from(self, before: State) -> dict[str, Origins]:
        return {name: origins for name, origins in self.known.items() if before.known.get(name) != origins}


def meet(states: list[State], why: Callable[[int], str]) -> State | None:
    """What is known where any of the states may hold; `why` says why a variable that only so many give is not sure."""
    if not states:
        return None
    known: dict[str, Origins] = {}
    doubts: dict[str, str] = {}
    for state in states:
        doubts |= state.doubts
    for name in dict.fromkeys(name for state in states for name in state.known):
        givers = [state.known[name] for state in states if name in state.known]
        if len(givers) == len(states):
            known[name] = tuple(dict.fromkeys(origin for origins in givers for origin in origins))
        else:
            doubts[name] = why(len(givers))
    coming = {name: origins for name, origins in states[0].coming.items() if all(name in s.coming for s in states)}
    return State(known, {name: reason for name, reason in doubts.items() if name not in known}, coming)


class _Walk:
    """The problems found on the way, and the places where ways ended."""

    def __init__(self, given: Mapping[str, Origins], body: Block, *, is_open: bool) -> None:
        self.problems: list[Problem] = []
        self.is_open = is_open
        self.origins: dict[str, Origins] = dict(given)  # All that is ever given, by whomever.
        for step in _all(body):
            if step.into:
                self.origins[step.into] = (*self.origins.get(step.into, ()), _origin(step))
        self.ends: list[State] = []  # Of the branch that is walked.
        self.stops: list[State] = []  # Of the scope that is walked: terminate ends all its branches.

    def block(self, steps: Block, state: State) -> State | None:
        """Walk a sequence; None if no way leads out of it. The graph's rules report what stands behind an end."""
        after: State | None = state
        for step in steps:
            if after is None:
                break
            after = _RULES[type(step)](self, step, after)
        return after

    def scope(self, steps: Block, state: State, why: str) -> State | None:
        """Walk a scope: it is over when all its ways have ended, or one has terminated it."""
        ends, stops, self.ends, self.stops = self.ends, self.stops, [], []
        after = self.block(steps, attrs.evolve(state, coming={}))
        finals = [attrs.evolve(s, known={**s.known, **s.coming}) for s in (*self.ends, *([after] if after else []))]
        met = meet(finals + self.stops, lambda _: why)
        self.ends, self.stops = ends, stops
        return met and attrs.evolve(met, coming=state.coming)

    def branch(self, steps: Block, state: State) -> tuple[State | None, list[State]]:
        """Walk a branch; also where it ended on its own."""
        ends, self.ends = self.ends, []
        after = self.block(steps, state)
        own, self.ends = self.ends, ends
        return after, own

    def silently(self, steps: Block, state: State) -> State | None:
        reported, stopped = len(self.problems), len(self.stops)
        after, _ = self.branch(steps, state)
        del self.problems[reported:], self.stops[stopped:]
        return after

    def report(self, step: Step, code: str, message: str, hint: str = "") -> None:
        self.problems.append(Problem(code, message, step.node, step.place, hint))

    def need(self, state: State, name: str, wanted: Any, step: Step, subject: str) -> None:
        if name in state.known:
            self.fit(state, name, wanted, step, subject)
        elif self.is_open:
            return
        elif name in state.doubts:
            hint = "a parameter with a default is passed only when it is there" if isinstance(step, TaskStep) else _ASK
            self.report(step, "uncertain_variable", f"{subject} needs {name}, which {state.doubts[name]}", hint)
        else:
            self.report(
                step,
                "missing_variable",
                f"{subject} needs {name}: nothing before it gives one",
                self._lead(state, name),
            )

    def fit(self, state: State, name: str, wanted: Any, step: Step, subject: str) -> None:
        for origin in state.known.get(name, ()):
            if not fits(origin.type, wanted):
                message = f"{subject} takes {name} as {title(wanted)}, but {origin.giver} gives {title(origin.type)}"
                self.report(step, "type_clash", message)

    def expression(self, state: State, source: str, step: Step, subject: str) -> None:
        if not source:
            return
        try:
            compiled = compile_expression(source)
        except BadExpression:
            return  # The graph's rules report it.
        for name in sorted(compiled.names - compiled.probed):
            self.need(state, name, Any, step, subject)
        for name in sorted(compiled.probed - set(self.origins)):
            if not self.is_open:
                message = f"{subject} asks about {name}, which nothing in this process gives"
                self.report(step, "missing_variable", message, near(name, self.origins))

    def _lead(self, state: State, name: str) -> str:
        if name in self.origins:
            return f"{self.origins[name][0].giver} gives it, but only later"
        return (
            near(name, [*state.known, *state.doubts])
            or f'an earlier @task(into="{name}") or a field in takes would give it'
        )


def _all(steps: Block) -> Iterator[Step]:
    for step in steps:
        yield step
        for inner in step.blocks:
            yield from _all(inner)


def _origin(step: Step) -> Origin:
    kind = step.task.signature.returns if isinstance(step, TaskStep) else getattr(step, "gives", Any)
    return Origin(kind, f"`{step.id}`")


def _broken_promise(last: State, result: str, kind: Any, place: str) -> Iterator[Problem]:
    if reason := unreadable(kind):
        yield Problem("bad_type", f"the result is {reason}", place=place, hint=_STORABLE)
    for origin in last.known.get(result, ()):
        if not fits(origin.type, kind):
            message = f"the result is {result} as {title(kind)}, but {origin.giver} gives {title(origin.type)}"
            yield Problem("type_clash", message, place=place)
    if result in last.doubts and not fits(None, kind):
        hint = f"give it on every way, let its task return {title(kind)} | None, or name it as text: gives={result!r}"
        yield Problem(
            "uncertain_result", f"the result is {result}, which {last.doubts[result]}", place=place, hint=hint
        )


# --- one rule for each kind of step -----------------------------------------------------------------------------------


def _task(walk: _Walk, step: TaskStep, state: State) -> State:
    _call(walk, state, step, step.task, f"`{step.id}`")
    after = state.give(step.into, _origin(step))
    if step.task.undone_by is not None:
        undo: Undo[..., Any] = step.task.undone_by
        _call(walk, after.give("result", _origin(step)), step, undo, f"`{undo.name}`, the undo of `{step.id}`,")
    return after


def _call(walk: _Walk, state: State, step: Step, activity: Activity, subject: str) -> None:
    read = activity.signature
    for name in read.needs:
        walk.need(state, name, read.types[name], step, subject)
    for name in read.may:
        walk.fit(state, name, read.types[name], step, subject)


def _choose(walk: _Walk, step: ChooseStep, state: State) -> State | None:
    for condition, _ in step.branches:
        walk.expression(state, condition, step, f"the condition {condition!r} of {step.id}")
    after = [walk.block(inner, state) for inner in step.blocks]
    return meet([exit_ for exit_ in after if exit_], lambda count: f"{_branches(count)} of {step.id} give{_s(count)}")


def _parallel(walk: _Walk, step: ParallelStep, state: State) -> State | None:
    written = [{inner.into: inner for inner in _all(branch) if inner.into} for branch in step.branches]
    _check_writes(walk, step, written)
    joined: dict[str, Origins] = {}
    alone: dict[str, Origins] = {}
    is_joined = is_over = False
    for number, branch in enumerate(step.branches):
        others = [name for index, names in enumerate(written) if index != number for name in names]
        after, ends = walk.branch(branch, state.doubt(others, f"only another branch of {step.id} gives"))
        if after is not None:
            is_joined = True
            joined |= after.changed_from(state)
            _check_end(walk, step, ends)
        elif over := meet(ends, lambda _: f"only some ways through {step.id} give"):
            is_over = True
            alone |= over.changed_from(state)
    known = {**state.known, **joined}
    if not is_joined:
        walk.ends += [State({**known, **alone}, _without(state.doubts, alone), state.coming)] if is_over else []
        return None
    after = State(known, _without(state.doubts, known), {**state.coming, **alone})
    return after.doubt([n for names in written for n in names], f"{step.id} gives on a way that nobody waits for")


def _check_writes(walk: _Walk, step: ParallelStep, written: list[dict[str, Step]]) -> None:
    for name in dict.fromkeys(name for names in written for name in names):
        writers = [names[name].id for names in written if name in names]
        if len(writers) > 1:
            both = " and ".join(f"`{writer}`" for writer in writers)
            hint = f"{both} give it, and whichever is last would win; use different names"
            count = "two" if len(writers) == 2 else str(len(writers))
            walk.report(step, "parallel_writes", f"{count} branches of {step.id} write {name}", hint)


def _check_end(walk: _Walk, step: ParallelStep, ends: list[State]) -> None:
    if ends:
        message = (
            f"a branch of {step.id} ends on some ways and not on others: the other branches would wait for it for ever"
        )
        walk.report(step, "end_in_parallel", message, "let each way of the branch end, or none; or use terminate()")


def _saga(walk: _Walk, step: SagaStep, state: State) -> State | None:
    return walk.scope(step.body, state, f"only some ways through {step.id} give")


def _repeat(walk: _Walk, step: RepeatStep, state: State) -> State | None:
    """The first round knows only what was before; in later rounds a variable may come from the round before."""
    subject = f"the condition {step.condition!r} of {step.id}"
    round_ = walk.silently(step.body, state)
    again = meet([state, round_], lambda _: f"{step.id} gives only later in the same round") if round_ else state
    assert again is not None, step
    if step.tests_first:
        walk.expression(again, step.condition, step, subject)
    after = walk.block(step.body, again)
    if step.tests_first:
        return meet([state, after], lambda _: f"{step.id} gives only if it runs a round") if after else state
    if after is not None:
        walk.expression(after, step.condition, step, subject)
    return after


def _sleep(walk: _Walk, step: SleepStep, state: State) -> State:
    walk.expression(state, step.after, step, f"after={step.after!r} of {step.id}")
    walk.expression(state, step.until, step, f"until={step.until!r} of {step.id}")
    return state


def _wait(walk: _Walk, step: WaitStep, state: State) -> State | None:
    walk.expression(state, step.key, step, f"the key {step.key!r} of {step.id}")
    came = state.give(step.into, _origin(step))
    if step.late is None:
        return came
    late = walk.block(step.late, state)
    return meet([came, late], lambda _: f"only one outcome of {step.id} gives") if late else came


def _throw(walk: _Walk, step: ThrowStep, state: State) -> State:
    walk.expression(state, step.key, step, f"the key {step.key!r} of {step.id}")
    walk.expression(state, step.payload, step, f"the payload {step.payload!r} of {step.id}")
    return state


def _end(walk: _Walk, _step: EndStep, state: State) -> None:
    walk.ends.append(state)


def _terminate(walk: _Walk, _step: TerminateStep, state: State) -> None:
    walk.stops.append(state)


_RULES: dict[type[Step], Callable[[_Walk, Any, State], State | None]] = {
    TaskStep: _task,
    ChooseStep: _choose,
    ParallelStep: _parallel,
    SagaStep: _saga,
    RepeatStep: _repeat,
    SleepStep: _sleep,
    WaitStep: _wait,
    ThrowStep: _throw,
    EndStep: _end,
    TerminateStep: _terminate,
}
_ASK = "default(name, value) and exists(name) may ask for what is not there"
_STORABLE = "use JSON types, or an attrs class, dataclass, msgspec Struct or enum made of them"


def _branches(count: int) -> str:
    return "only one branch" if count == 1 else f"only {count} branches"


def _s(count: int) -> str:
    return "s" if count == 1 else ""


def _without(doubts: Mapping[str, str], known: Mapping[str, Origins]) -> dict[str, str]:
    return {name: why for name, why in doubts.items() if name not in known}


# --- types ------------------------------------------------------------------------------------------------------------


def fits(given: Any, wanted: Any) -> bool:
    """Whether a value given as one type can be taken as another, after its way through JSON."""
    given, wanted = _plain(given), _plain(wanted)
    if given == wanted or Any in (given, wanted) or wanted is object:
        return True
    if _is_union(given):
        return all(fits(member, wanted) for member in typing.get_args(given))
    if _is_union(wanted):
        return any(fits(given, member) for member in typing.get_args(wanted))
    if typing.Literal in (typing.get_origin(given), typing.get_origin(wanted)):
        return _literal_fits(given, wanted)
    if isinstance(given, typing.NewType):
        return fits(given.__supertype__, wanted)
    return not isinstance(wanted, typing.NewType) and _class_fits(given, wanted)


def title(kind: Any) -> str:
    """What a type is called, as its author would write it."""
    if kind in (None, NoneType):
        return "None"
    if _is_union(kind):
        return " | ".join(title(member) for member in typing.get_args(kind))
    arguments = typing.get_args(kind)
    if arguments and typing.get_origin(kind) not in (typing.Literal, typing.Annotated):
        inner = ", ".join("..." if isinstance(each, EllipsisType) else title(each) for each in arguments)
        return f"{title(typing.get_origin(kind))}[{inner}]"
    return kind.__name__ if isinstance(kind, type | typing.NewType) else str(kind).replace("typing.", "")


def unreadable(kind: Any) -> str:
    """Why no variable can be read as this type; empty if one can."""
    if any(_is_custom(each) for each in (kind, *typing.get_args(kind))):
        return f"{title(kind)}, which cannot be made from JSON"
    try:
        msgspec.json.Decoder(kind)
    except Exception as error:  # A user's class may raise anything when its annotations are read.
        return f"{title(kind)}, which cannot be made from JSON ({error})"
    return ""


def _is_custom(kind: Any) -> bool:
    if kind in (Any, object) or not (isinstance(kind, type) or typing.get_origin(kind) is not None):
        return False
    try:
        return isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
    except Exception:  # Told by `unreadable`, where it matters.
        return False


def _plain(kind: Any) -> Any:
    if kind is None:
        return NoneType
    return _plain(typing.get_args(kind)[0]) if typing.get_origin(kind) is typing.Annotated else kind


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (typing.Union, UnionType)


def _literal_fits(given: Any, wanted: Any) -> bool:
    if typing.get_origin(given) is not typing.Literal:
        return False
    if typing.get_origin(wanted) is typing.Literal:
        return set(typing.get_args(given)) <= set(typing.get_args(wanted))
    return all(fits(type(value), wanted) for value in typing.get_args(given))


def _class_fits(given: Any, wanted: Any) -> bool:
    have, want = typing.get_origin(given) or given, typing.get_origin(wanted) or wanted
    if bool in (have, want) and {have, want} & {int, float}:
        return False  # JSON knows true from 1.
    if have is int and want is float:
        return True
    try:
        if not issubclass(have, want):
            return False
    except TypeError:  # Type variables, protocols, typed dictionaries: nothing to compare by.
        return True
    inner, outer = typing.get_args(given), typing.get_args(wanted)
    return not inner or not outer or len(inner) != len(outer) or all(map(fits, inner, outer))
