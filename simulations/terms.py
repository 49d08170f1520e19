"""What a user wants to be simulated, checked at the door.

Whatever is wrong with it (a wrong type, a name that nobody knows, a message that nobody would send) is refused here,
with the likely cause, before any world is made. Nothing here plays anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import attrs

from understudy.actors.handlers import Handler
from understudy.actors.system import Limits
from understudy.model.errors import Rejected
from understudy.model.kinds import Receive, Throw
from understudy.model.validation import is_variable, near
from understudy.opening import bind
from understudy.process import Process
from understudy.simulations.plugins import FAULTS
from understudy.tasks import Activity

MADE: Final = 3  # Instances in each world when inputs are made by a function and nobody says how many.
MOST_INSTANCES: Final = 10_000
SEEN: Final = ("history", "ledger")  # What every invariant may look at.
TOLD: Final = ("id", "given", "random")  # What a function that makes a message's payload may ask for.

AnyProcess = Process[Any, Any]


class ByName:
    """A user's function that takes what it names, of all that is offered to it."""

    def __init__(self, function: object, what: str, offered: Sequence[str]) -> None:
        if not callable(function) or isinstance(function, type):
            raise Rejected(f"{what} is a function, not {_shown(function)}")
        self.function: Callable[..., Any] = function.function if isinstance(function, Activity) else function
        parameters = inspect.signature(self.function).parameters.values()
        self.takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.names = tuple(p.name for p in named)
        for p in parameters:
            if p.default is p.empty and (p.kind is p.POSITIONAL_ONLY or (p in named and p.name not in offered)):
                hint = near(p.name, offered) or f"it may take {', '.join(offered) or 'nothing'}"
                raise Rejected(f"{what} takes {p.name}, which nobody gives it: {hint}")

    def __call__(self, **offered: Any) -> Any:
        if self.takes_all:
            return self.function(**offered)
        return self.function(**{name: offered[name] for name in self.names if name in offered})


@attrs.frozen(kw_only=True)
class Start:
    """The instances of one process in each world."""

    process: AnyProcess
    count: int
    inputs: tuple[object, ...] = ()
    make: ByName | None = None


@attrs.frozen(kw_only=True)
class Terms:
    """All of it."""

    processes: tuple[AnyProcess, ...]
    starts: tuple[Start, ...]
    ids: Callable[[Any], str] | None
    stand_ins: dict[str, ByName]
    messages: dict[str, object]  # Payloads, or a `ByName` that makes one.
    fakes: dict[str, Callable[[], Any]]
    invariants: dict[str, ByName]
    named_faults: tuple[str, ...]  # On in every world.
    drawn_faults: tuple[str, ...]  # Of which every world draws some.
    secrets: tuple[str, ...]
    must_end: bool
    limits: Limits | None
    handlers: dict[str, Handler]

    @property
    def name(self) -> str:
        return " and ".join(process.name for process in self.processes)


def terms_of(
    processes: Sequence[object],
    *,
    start: object,
    instances: int | None,
    ids: object,
    stand_ins: object,
    messages: object,
    fakes: object,
    invariants: object,
    faults: object,
    secrets: object,
    must_end: bool,
    limits: object,
) -> Terms:
    cast = _processes(processes)
    handlers = bind(cast).handlers
    made = _fakes(fakes)
    named, drawn = faults_of(faults)
    if ids is not None and not callable(ids):
        raise Rejected(f"ids is a function that gives an instance's id from its input, not {_shown(ids)}")
    if limits is not None and not isinstance(limits, Limits):
        raise Rejected(f"limits is a Limits, not {_shown(limits)}")
    terms = Terms(
        processes=cast,
        starts=_starts(cast, start, instances),
        ids=ids,
        stand_ins=_stand_ins(stand_ins, handlers, made),
        messages=_messages(messages, cast, made),
        fakes=made,
        invariants=_invariants(invariants, made),
        named_faults=named,
        drawn_faults=drawn,
        secrets=_secrets(secrets),
        must_end=bool(must_end),
        limits=limits,
        handlers=handlers,
    )
    _check_fakes_are_wanted(terms)
    return terms


# --- who plays --------------------------------------------------------------------------------------------------------


def _processes(given: Sequence[object]) -> tuple[AnyProcess, ...]:
    flat = [one for each in given for one in (each if isinstance(each, list | tuple) else (each,))]
    for one in flat:
        if not isinstance(one, Process):
            hint = "; a task is played inside its process" if isinstance(one, Activity) else ""
            raise Rejected(f"simulate takes processes, not {_shown(one)}{hint}")
    if not flat:
        raise Rejected("simulate takes a process, as in simulate(checkout, start=Order(...))")
    return tuple(one for one in flat if isinstance(one, Process))


def _starts(cast: tuple[AnyProcess, ...], start: object, instances: object) -> tuple[Start, ...]:
    if instances is not None and not _is_count(instances, most=MOST_INSTANCES):
        raise Rejected(f"instances is a number from 1 to {MOST_INSTANCES:,}, not {instances!r}")
    by_process = _by_process(cast, start)
    return tuple(_start(process, wanted, instances) for process, wanted in by_process.items())


def _by_process(cast: tuple[AnyProcess, ...], start: object) -> dict[AnyProcess, object]:
    if isinstance(start, Mapping) and start and all(isinstance(key, Process) for key in start):
        for process in start:
            if process not in cast:
                raise Rejected(f"start has inputs for {process.name}, which is not among the processes that are played")
        return dict(start)
    if len(cast) > 1:
        names = ", ".join(f"{process.name}: ..." for process in cast)
        raise Rejected(f"several processes are played: say which one takes what, as in start={{{names}}}")
    return {cast[0]: start}


def _start(process: AnyProcess, wanted: object, instances: Any) -> Start:
    if isinstance(wanted, type):
        raise Rejected(
            f"start is the class {wanted.__name__}; give one or several objects of it, or a function that makes one"
        )
    if callable(wanted):
        make = ByName(wanted, f"the function that makes inputs for {process.name}", ("random", "number"))
        return Start(process=process, count=instances or MADE, make=make)
    inputs = tuple(wanted) if isinstance(wanted, list | tuple) else (wanted,)
    if not inputs:
        raise Rejected(f"start has no inputs for {process.name}; give at least one, or None if it takes nothing")
    for each in inputs:
        process.encode_input(each)  # Raises `BadInput`, which names what does not fit.
    return Start(process=process, count=instances or len(inputs), inputs=inputs)


def _stand_ins(given: object, handlers: dict[str, Handler], fakes: Mapping[str, object]) -> dict[str, ByName]:
    found = {}
    for key, function in _mapping("stand_ins", given, "tasks to functions").items():
        name = key.name if isinstance(key, Activity) else key
        handler = handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            raise Rejected(f"stand_ins: no task is called {name!r}: {_hint(name, handlers, 'the tasks are')}")
        offered = parameters_of(handler)
        for fake in fakes:
            if fake in offered:
                raise Rejected(f"the fake {fake!r} has the name of a parameter of {name}; give it another name")
        found[handler.name] = ByName(function, f"the stand-in for {name}", (*offered, *fakes))
    return found


def parameters_of(handler: Handler) -> tuple[str, ...]:
    return (*handler.types, *filter(None, (handler.context, handler.connection)))


# --- what surrounds them ----------------------------------------------------------------------------------------------


def _messages(given: object, cast: tuple[AnyProcess, ...], fakes: Mapping[str, object]) -> dict[str, object]:
    nodes = [node for process in cast for node in process.definition.nodes]
    awaited = {node.message: node for node in nodes if isinstance(node, Receive)}
    thrown = {node.message for node in nodes if isinstance(node, Throw)}
    messages = _mapping("messages", given, "names of messages to payloads")
    for name in messages:
        if name not in awaited:
            raise Rejected(
                f"messages: nobody waits for {name!r}: {_hint(name, awaited, 'the messages waited for are')}"
            )
    for name, node in awaited.items():
        if name not in messages and name not in thrown and node.timeout_ms is None:
            raise Rejected(
                f"{node.id} waits for message {name!r}, and nobody would ever send it: "
                f"give its payload, as in messages={{{name!r}: None}}"
            )
    return {name: _payload(name, payload, fakes) for name, payload in messages.items()}


def _payload(name: str, payload: object, fakes: Mapping[str, object]) -> object:
    if callable(payload):
        return ByName(payload, f"the function that makes the payload of {name}", (*TOLD, *fakes))
    return payload


def _fakes(given: object) -> dict[str, Callable[[], Any]]:
    made = _mapping("fakes", given, "names to functions that make a fake")
    for name, make in made.items():
        if not is_variable(name) or name in (*SEEN, *TOLD):
            raise Rejected(f"fakes: {name!r} cannot be the name of a parameter that stands for a fake")
        if not callable(make):
            raise Rejected(
                f"fakes: {name} is {_shown(make)}; give the class, or a function that makes a new one for every world, "
                f"as in fakes={{{name!r}: {type(make).__name__}}}"
            )
    return made


def _check_fakes_are_wanted(terms: Terms) -> None:
    users = [*terms.stand_ins.values(), *terms.invariants.values()]
    users += [payload for payload in terms.messages.values() if isinstance(payload, ByName)]
    for name in terms.fakes:
        if not any(name in user.names or user.takes_all for user in users) and not places_of(name, terms.handlers):
            raise Rejected(
                f"fakes: nobody takes {name!r}: it is neither a global of a module with handlers of {terms.name} nor a "
                "parameter of a stand-in or an invariant"
            )


def places_of(fake: str, handlers: Mapping[str, Handler]) -> list[dict[str, Any]]:
    """The namespaces of handlers' modules in which a fake takes the place of the real thing."""
    spaces = [inspect.unwrap(handler.function).__globals__ for handler in handlers.values()]
    return list({id(space): space for space in spaces if fake in space}.values())


# --- what is asked of them --------------------------------------------------------------------------------------------


def _invariants(given: object, fakes: Mapping[str, object]) -> dict[str, ByName]:
    functions = [given] if callable(given) else given
    if not isinstance(functions, Iterable) or isinstance(functions, str):
        raise Rejected(f"invariants are functions, as in invariants=[never_charged_twice], not {_shown(given)}")
    found: dict[str, ByName] = {}
    for number, function in enumerate(functions, 1):
        name = getattr(function, "__name__", "")
        name = name if name.isidentifier() else f"invariant {number}"
        if name in found:
            raise Rejected(f"two invariants are called {name}; a report could not tell them apart")
        found[name] = ByName(function, name, (*SEEN, *fakes))
        if inspect.iscoroutinefunction(function):
            raise Rejected(f"{name} is async; an invariant only looks, so write it with def")
    return found


def faults_of(given: object) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The faults that are on in every world, and those of which each world draws some."""
    if given is None:
        return (), tuple(sorted(FAULTS))
    if isinstance(given, str):
        given = (given,)
    if not isinstance(given, Iterable):
        raise Rejected(f"faults are names or kinds of faults, as in faults=['crash'], not {_shown(given)}")
    kinds = {cls.kind for cls in FAULTS.values()}
    named: set[str] = set()
    drawn: set[str] = set()
    for wanted in given:
        if wanted in kinds:
            drawn |= {name for name, cls in FAULTS.items() if cls.kind == wanted}
        elif wanted in FAULTS:
            named.add(wanted)
        else:
            told = f"the kinds are {', '.join(sorted(kinds))}, and the faults {', '.join(sorted(FAULTS))}"
            raise Rejected(f"there is no fault {wanted!r}: {near(str(wanted), [*FAULTS, *kinds]) or told}")
    return tuple(sorted(named)), tuple(sorted(drawn - named))


def _secrets(given: object) -> tuple[str, ...]:
    texts = (given,) if isinstance(given, str) else given
    if not isinstance(texts, Iterable) or not all(isinstance(text, str) and text for text in texts):
        raise Rejected(f"secrets are texts that must not be stored anywhere, not {_shown(given)}")
    return tuple(texts)


def seeds_of(given: object) -> tuple[int, ...]:
    if isinstance(given, int) and not isinstance(given, bool):
        given = range(given)
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise Rejected(f"seeds is how many to play, or which: 200, or range(200, 400), or [17]; not {_shown(given)}")
    seeds = tuple(given)
    for seed in seeds:
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise Rejected(f"a seed is a whole number, not {seed!r}")
    if not seeds:
        raise Rejected("no seed would be played, and nothing would be shown; give seeds=1 or more")
    return seeds


def check_count(what: str, given: object, *, most: int) -> int:
    if not _is_count(given, most=most):
        raise Rejected(f"{what} is a number from 1 to {most:,}, not {given!r}")
    assert isinstance(given, int)
    return given


# --- helpers ----------------------------------------------------------------------------------------------------------


def _mapping(what: str, given: object, of: str) -> dict[Any, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise Rejected(f"{what} is a mapping of {of}, not {_shown(given)}")
    return dict(given)


def _hint(name: object, known: Iterable[str], them: str) -> str:
    names = sorted(known)
    return near(str(name), names) or f"{them} {', '.join(names) or 'none'}"


def _is_count(value: object, *, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def _shown(value: object) -> str:
    name = type(value).__name__
    text = repr(value)
    return f"{name} {text}" if len(text) <= 60 else name
