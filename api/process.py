"""A process: steps, what they take and what they give, made into a definition and its handlers.

Everything that is wrong with it is found here, before anything runs, and told at once. The same source always gives the
same node ids, because stored instances stand at them. Nothing here may call a handler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar, overload

import attrs
import msgspec

from understudy.actors.handlers import Handler
from understudy.dataflow import check_signature, flow, title, unreadable
from understudy.model.definition import Definition, Edge, Input, Node
from understudy.model.errors import BadInput, BadValue, InvalidDefinition, Problem
from understudy.model.kinds import End, Start
from understudy.model.validation import near, problems
from understudy.model.values import check_name, decode_as, encode
from understudy.steps import Block, Steps, block
from understudy.tasks import Activity, Task, caller, caller_place, named, refusal, variable

I = TypeVar("I")  # noqa: E741 - what a process takes in
R = TypeVar("R")
Anything: TypeAlias = Mapping[str, Any] | None


class Process(Generic[I, R]):
    """A process by its name and its steps, checked.

    `takes` is a class whose fields are the first variables (attrs, dataclass or msgspec.Struct), a mapping of names to
    types, or `dict` for whatever comes. `gives` is the task whose result is the result of the process, and which every
    way to an end must then have passed; or it names a variable, which is None if it was not given.
    """

    @overload
    def __init__(self: Process[I, R], name: str, *steps: Steps, takes: type[I], gives: Task[..., R]) -> None: ...
    @overload
    def __init__(self: Process[I, Any], name: str, *steps: Steps, takes: type[I], gives: str) -> None: ...
    @overload
    def __init__(self: Process[I, None], name: str, *steps: Steps, takes: type[I]) -> None: ...
    @overload
    def __init__(
        self: Process[Anything, R], name: str, *steps: Steps, takes: Anything = None, gives: Task[..., R]
    ) -> None: ...
    @overload
    def __init__(
        self: Process[Anything, Any], name: str, *steps: Steps, takes: Anything = None, gives: str
    ) -> None: ...
    @overload
    def __init__(self: Process[Anything, None], name: str, *steps: Steps, takes: Anything = None) -> None: ...

    def __init__(self, name: str, *steps: Steps, takes: Any = None, gives: Any = None) -> None:
        self.name = _name(name)
        self.place = caller_place()
        self.takes = takes
        self.gives = gives
        self._inputs = read_inputs(name, takes)
        giver = gives if isinstance(gives, Task) else None
        names = Names(giver)
        body = names.block(block(f"Process({name!r})", steps))
        result = _result(name, gives, names)
        chart = Chart(names)
        _whole(chart, body, self.place)
        self.definition: Definition = chart.definition(name, self._inputs, result)
        self.handlers: dict[str, Handler] = {
            activity.name: activity.handler() for activity in chart.activities.values()
        }
        flowing = flow(
            body,
            self._inputs.types,
            is_open=self._inputs.is_open,
            result=result,
            giver=giver,
            place=self.place,
        )
        found = [*self._inputs.problems, *chart.problems, *problems(self.definition), *flowing.problems]
        if found:
            raise InvalidDefinition(name, [attrs.evolve(each, place=each.place or self.place) for each in found])
        self._result_type = flowing.result if gives is not None else Any

    def encode_input(self, value: I | Anything = None) -> dict[str, str]:
        """The first variables of an instance, encoded; a `BadInput` names every field that does not fit."""
        return self._inputs.encode(self.name, value)

    def decode_result(self, text: str) -> R:
        """The result of an instance from its stored text."""
        result: R = decode_as(text, self._result_type, what=f"the result of {self.name}")  # type: ignore[assignment]
        return result

    def __repr__(self) -> str:
        return f"<process {self.name}, {self.place}>"


def _name(name: object) -> str:
    if not isinstance(name, str):
        shown = name.name if isinstance(name, Activity) else repr(name)
        raise refusal(
            "Process",
            "bad_name",
            f"the first argument is the process's name, not {shown}",
            hint='write Process("checkout", ...)',
        )
    return named("Process", "the name of a process", name)


def _result(process: str, gives: object, names: Names) -> str:
    if gives is None:
        return ""
    if isinstance(gives, Task):
        return names.into(gives)
    if isinstance(gives, str):
        return variable(f"Process({process!r})", "gives", gives)
    hint = 'give a task (gives=ship) or the name of a variable (gives="receipt")'
    raise refusal(f"Process({process!r})", "bad_option", f"gives={gives!r} is neither", hint=hint)


# --- names and the chart ----------------------------------------------------------------------------------------------


class Names:
    """What one process calls its steps: the same for the same source, and readable."""

    def __init__(self, result: Task[..., Any] | None = None) -> None:
        self._result = result
        self._taken = {"start", "end"}
        self._counts: dict[str, int] = {}

    def block(self, given: Block) -> Block:
        return tuple(step.named(self) for step in given)

    def unique(self, name: str) -> str:
        """The name itself, or with a number behind it when it is used again."""
        chosen, number = name, 1
        while chosen in self._taken:
            number += 1
            chosen = f"{name}#{number}"
        self._taken.add(chosen)
        return chosen

    def numbered(self, kind: str, *nodes: str) -> str:
        """A name for a step without one of its own; its nodes of the kinds in `nodes` will have the same number."""
        while True:
            self._counts[kind] = number = self._counts.get(kind, 0) + 1
            wanted = {f"{each}-{number}" for each in (kind, *nodes)}
            if not wanted & self._taken:
                self._taken |= wanted
                return f"{kind}-{number}"

    def into(self, task: Task[..., Any]) -> str:
        """The variable that a task gives. The result of the process needs one, even if the task names none."""
        if task.options.into or task is not self._result:
            return task.options.into
        return task.name if task.name.isidentifier() else task.function.__name__


@attrs.frozen(eq=False)
class Way:
    """A way that leads on from a node; it becomes an edge when it arrives somewhere."""

    source: str
    condition: str = ""
    is_default: bool = False
    is_late: bool = False


Ways: TypeAlias = list[Way]


class Chart:
    """The graph as it is drawn. Edges keep the order in which their ways left: it is the order of their trial."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.problems: list[Problem] = []
        self.activities: dict[str, Activity] = {}
        self._within = ""
        self._nodes: list[Node] = []
        self._places: dict[str, str] = {}
        self._targets: dict[Way, str] = {}
        self._ways: list[Way] = []

    def draw(self, steps: Block, ways: Ways) -> Ways:
        for step in steps:
            ways = step.draw(self, ways)
        return ways

    def add(self, ways: Ways, place: str, kind: type[Node], **fields: Any) -> None:
        node = kind(within=self._within, **fields)
        self._nodes.append(node)
        self._places.setdefault(node.id, place)
        self.arrive(ways, node.id)

    def way(self, source: str, **kind: Any) -> Way:
        self._ways.append(Way(source, **kind))
        return self._ways[-1]

    def arrive(self, ways: Ways, target: str) -> None:
        self._targets |= dict.fromkeys(ways, target)

    @contextlib.contextmanager
    def inside(self, scope: str) -> Iterator[None]:
        around, self._within = self._within, scope
        yield
        self._within = around

    def bind(self, activity: Activity) -> None:
        """Note a handler by its name; two functions of one name could not be told apart in a stored definition."""
        if activity.name not in self.activities:
            self.activities[activity.name] = activity
            self.problems += check_signature(activity)
        bound = self.activities[activity.name]
        if bound.function is not activity.function:
            message = f"two functions are called {activity.name}: {bound.place} and {activity.place}"
            hint = "give one of them another name: @task(name=...)"
            self.problems.append(Problem("handler_twice", message, activity.name, activity.place, hint))

    def definition(self, name: str, inputs: Inputs, gives: str) -> Definition:
        return Definition(
            name=name,
            nodes=tuple(self._nodes),
            edges=tuple(self._edges()),
            inputs=tuple(field.declared() for field in inputs.fields.values()),
            open_inputs=inputs.is_open,
            gives=gives,
            places=self._places,
        )

    def _edges(self) -> Iterator[Edge]:
        names = Names()
        for way in self._ways:
            target = self._targets.get(way)
            if target is not None:
                yield Edge(id=names.unique(f"{way.source}->{target}"), target=target, **attrs.asdict(way))


def _whole(chart: Chart, body: Block, place: str) -> None:
    chart.add([], place, Start, id="start")
    ways = chart.draw(body, [chart.way("start")])
    if ways:
        chart.add(ways, place, End, id="end")


# --- inputs -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Field:
    """One input: its type, and its default if it has one."""

    name: str
    type: Any = Any
    default: str | None = None  # Encoded.
    argument: str = ""  # What the class's own constructor calls it.
    is_made: bool = False  # Whether the class makes a new default for each instance.

    def declared(self) -> Input:
        return Input(name=self.name, type=title(self.type), default=self.default)

    def encode(self, value: object) -> str:
        """The value's text, if a handler could read it back as the field's type."""
        text = encode(value, what=self.name)
        decode_as(text, self.type, what=self.name)
        return text


@attrs.frozen
class Inputs:
    """What a process takes."""

    fields: dict[str, Field] = attrs.field(factory=dict)
    made_by: type | None = None
    is_open: bool = False
    problems: tuple[Problem, ...] = ()

    @property
    def types(self) -> dict[str, Any]:
        return {field.name: field.type for field in self.fields.values()}

    def encode(self, process: str, value: object) -> dict[str, str]:
        given = self._given(process, value)
        texts, wrong = self._texts(given)
        wrong += [self._missing(field) for field in self.fields.values() if self._lacks(field, given)]
        if wrong:
            raise BadInput("\n  ".join([f"{process} cannot start; its input does not fit:", *wrong]))
        if self.made_by is None or isinstance(value, self.made_by):
            return {name: field.default for name, field in self.fields.items() if field.default is not None} | texts
        return self._made(process, texts)

    def _given(self, process: str, value: object) -> Mapping[Any, object]:
        if self.made_by is not None and isinstance(value, self.made_by):
            return {name: getattr(value, name) for name in self.fields}
        if value is None:
            return {}
        if isinstance(value, Mapping):
            return value
        wanted = f"{self.made_by.__name__} or a mapping" if self.made_by else "a mapping"
        raise BadInput(f"{process} takes {wanted}, not {type(value).__name__}: {str(value)[:60]}")

    def _texts(self, given: Mapping[Any, object]) -> tuple[dict[str, str], list[str]]:
        texts: dict[str, str] = {}
        wrong: list[str] = []
        for name, value in given.items():
            field = self.fields.get(name) or (Field(name) if self.is_open else None)
            try:
                if field is None:
                    wrong.append(self._unknown(name))
                else:
                    texts[check_name(name)] = field.encode(value)
            except BadValue as error:
                wrong.append(str(error))
        return texts, wrong

    def _made(self, process: str, texts: dict[str, str]) -> dict[str, str]:
        """Let the class itself look at what a mapping gave: it may convert, refuse, and make defaults."""
        assert self.made_by is not None
        arguments = {
            field.argument: decode_as(texts[name], field.type) for name, field in self.fields.items() if name in texts
        }
        try:
            made = self.made_by(**arguments)
        except Exception as error:  # The class may raise anything.
            raise BadInput(f"{process} cannot start: {self.made_by.__name__} refused its input ({error})") from error
        return {name: field.encode(getattr(made, name)) for name, field in self.fields.items()}

    def _lacks(self, field: Field, given: Mapping[Any, object]) -> bool:
        return field.name not in given and field.default is None and not field.is_made

    def _missing(self, field: Field) -> str:
        return f"{field.name} is missing ({title(field.type)})"

    def _unknown(self, name: object) -> str:
        hint = near(str(name), self.fields) or f"it takes {', '.join(self.fields) or 'nothing'}"
        return f"{name} is unknown: {hint}"


def read_inputs(process: str, takes: Any) -> Inputs:
    """The inputs that `takes=` stands for."""
    if takes is None:
        return Inputs()
    if takes is Any or takes is dict or typing.get_origin(takes) is dict:
        return Inputs(is_open=True)
    if isinstance(takes, Mapping):
        return _checked(process, [_from_pair(process, name, given) for name, given in takes.items()], None)
    if isinstance(takes, type) and (reader := _reader(takes)) is not None:
        return _checked(process, reader(takes, _field_types(process, takes)), takes)
    hint = 'give a class with fields (attrs, dataclass, msgspec.Struct), {"name": type}, or dict for whatever comes'
    raise refusal(f"Process({process!r})", "bad_option", f"takes={takes!r} has no fields", hint=hint)


def _checked(process: str, fields: list[Field], made_by: type | None) -> Inputs:
    place = caller_place()
    bad = [(field, reason) for field in fields if (reason := unreadable(field.type))]
    found = tuple(
        Problem("bad_type", f"{process} takes {field.name} as {reason}", place=place) for field, reason in bad
    )
    return Inputs({field.name: field for field in fields}, made_by, problems=found)


def _from_pair(process: str, name: object, given: object) -> Field:
    variable(f"Process({process!r})", "takes", name)
    kind, default = given if isinstance(given, tuple) and len(given) == 2 else (given, msgspec.NODEFAULT)
    if not (isinstance(kind, type) or kind is Any or typing.get_origin(kind) is not None):
        hint = 'write {"order_id": str, "amount": (int, 5)}'
        raise refusal(
            f"Process({process!r})", "bad_option", f"takes[{name!r}] is {kind!r}, which is not a type", hint=hint
        )
    return _field(process, str(name), kind, default)


def _field(process: str, name: str, kind: Any, default: object, *, argument: str = "", factory: Any = None) -> Field:
    """A field; a default that is made anew each time, other than an empty collection, is no part of the definition."""
    if factory in (list, dict, set, frozenset, tuple):
        default = factory()
    is_made = factory is not None and default is msgspec.NODEFAULT
    made = Field(name, kind, None, argument or name, is_made)
    if default is msgspec.NODEFAULT:
        return made
    try:
        return attrs.evolve(made, default=made.encode(default))
    except BadValue as error:
        raise refusal(f"Process({process!r})", "bad_default", f"the default of {name} does not fit: {error}") from None


def _field_types(process: str, cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except (
        Exception
    ):  # Evaluating an annotation runs the user's module; a class inside a function needs that one's names.
        try:
            return typing.get_type_hints(cls, localns=dict(caller().f_locals), include_extras=True)
        except Exception as error:
            hint = "import what its annotations name, also when the program runs"
            raise refusal(
                f"Process({process!r})", "unread_annotation", f"the fields of {cls.__name__}: {error}", hint=hint
            ) from None


def _reader(cls: type) -> Callable[[Any, dict[str, Any]], list[Field]] | None:
    if attrs.has(cls):
        return _attrs_fields
    if dataclasses.is_dataclass(cls):
        return _dataclass_fields
    return _struct_fields if issubclass(cls, msgspec.Struct) else None


def _attrs_fields(cls: Any, types: dict[str, Any]) -> list[Field]:
    fields = []
    for field in attrs.fields(cls):
        factory = field.default.factory if isinstance(field.default, attrs.Factory) else None  # type: ignore[arg-type]
        default = msgspec.NODEFAULT if field.default is attrs.NOTHING or factory else field.default
        kind = types.get(field.name, Any)
        if field.init:
            fields.append(_field(cls.__name__, field.name, kind, default, argument=field.alias, factory=factory))
    return fields


def _dataclass_fields(cls: Any, types: dict[str, Any]) -> list[Field]:
    fields = []
    for field in dataclasses.fields(cls):
        factory = None if field.default_factory is dataclasses.MISSING else field.default_factory
        default = msgspec.NODEFAULT if field.default is dataclasses.MISSING else field.default
        if field.init:
            fields.append(_field(cls.__name__, field.name, types.get(field.name, Any), default, factory=factory))
    return fields


def _told_fields(cls: Any) -> tuple[msgspec.structs.FieldInfo, ...]:
    try:
        return msgspec.structs.fields(cls)
    except Exception as error:  # It reads the annotations by itself, and knows no names of functions around.
        hint = "define the class, and what its annotations name, at the top of a module"
        raise refusal("Process", "unread_annotation", f"the fields of {cls.__name__}: {error}", hint=hint) from None


def _struct_fields(cls: Any, types: dict[str, Any]) -> list[Field]:
    fields = []
    for field in _told_fields(cls):
        factory = None if field.default_factory is msgspec.NODEFAULT else field.default_factory
        fields.append(_field(cls.__name__, field.name, types.get(field.name, Any), field.default, factory=factory))
    return fields
