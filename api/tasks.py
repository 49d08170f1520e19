"""Tasks: ordinary functions that a process may call, each with its options and its undo.

A task stays callable as the function it was made from; what it is in a definition is decided when a process is made
of it. Bad options are refused where they are written. Nothing here may call a user's function, or know of graphs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
import sqlite3
import sys
import typing
from collections.abc import Callable, Coroutine, Iterable
from datetime import timedelta
from pathlib import Path
from types import FrameType, NoneType, SimpleNamespace
from typing import Any, Generic, Literal, ParamSpec, Protocol, TypeAlias, TypeVar, cast, overload

import attrs

from understudy.actors.handlers import Context, Handler
from understudy.model.durations import duration_ms
from understudy.model.errors import BadValue, InvalidDefinition, Problem, Rejected
from understudy.model.retry import ONCE, Backoff
from understudy.model.validation import is_variable
from understudy.model.values import check_name

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")
S = TypeVar("S")

Duration: TypeAlias = str | timedelta | float  # "3d", "1h30m", or a number of seconds.

_OURS = ("understudy.tasks", "understudy.steps", "understudy.process")
_NAMED = "a handler gets its variables by name: write each as a parameter of its own"


class Retry:
    """How often a task is tried, and how long to wait in between: `Retry(5, first="1s", never=(Declined,))`.

    `attempts` counts the first one. After the first failure the wait is `first`, then `factor` times as long each time,
    up to `maximum`; `jitter` is the share of it that is added or taken off. An exception of a class in `never` is not
    tried again.
    """

    def __init__(
        self,
        attempts: int,
        *,
        first: Duration = "1s",
        factor: float = 2,
        maximum: Duration = "1h",
        jitter: float = 0.1,
        never: type[BaseException] | Iterable[type[BaseException]] = (),
    ) -> None:
        if not isinstance(attempts, int) or isinstance(attempts, bool) or attempts < 1:
            raise refusal(
                "Retry", "bad_retry", f"attempts must be 1 or more, not {attempts!r}", hint="it counts the first one"
            )
        if not _is_number(factor) or factor < 1:
            raise refusal("Retry", "bad_retry", f"factor must be 1 or more, not {factor!r}")
        if not _is_number(jitter) or not 0 <= jitter <= 1:
            raise refusal("Retry", "bad_retry", f"jitter must be a share from 0 to 1, not {jitter!r}")
        first_ms, maximum_ms = milliseconds("Retry", "first", first), milliseconds("Retry", "maximum", maximum)
        if first_ms > maximum_ms:
            message = f"the first wait ({first}) is longer than the longest ({maximum})"
            raise refusal("Retry", "bad_retry", message, hint="raise maximum")
        self.backoff = Backoff(attempts, first_ms, float(factor), maximum_ms, float(jitter), _classes(never))

    def __repr__(self) -> str:
        return f"Retry({self.backoff})"


@attrs.frozen
class Signature:
    """What a function takes and gives, as far as its annotations can be read."""

    needs: tuple[str, ...]
    may: tuple[str, ...]  # Parameters with a default: passed when the variable is there.
    types: dict[str, Any]
    returns: Any
    context: str
    connection: str
    unread: dict[str, str]  # Annotations that name what cannot be found, by parameter.


class Activity:
    """What tasks and undos have in common: a function under a name."""

    __name__: str

    def __init__(self, function: Callable[..., Any], name: str, *, transactional: bool = False) -> None:
        self.function = function
        self.name = name
        self.place = caller_place()
        self.transactional = transactional
        self._local_names = _local_names(function)
        functools.update_wrapper(cast(Any, self), function, updated=())

    @functools.cached_property
    def signature(self) -> Signature:
        """Read late, when a process is made: an annotation may name a class that stands further down in its module."""
        return _signature(self.function, self._local_names, transactional=self.transactional)

    def handler(self) -> Handler:
        function, read = self.function, self.signature
        reference = f"{function.__module__}:{function.__qualname__}"
        is_async = inspect.iscoroutinefunction(function)
        return Handler(self.name, function, dict(read.types), read.context, read.connection, is_async, reference)

    def __repr__(self) -> str:
        return f"<{type(self).__name__.lower()} {self.name}, {self.place}>"


class Task(Activity, Generic[P, R]):
    """A function that processes may call. Called directly, it is the plain function."""

    function: Callable[P, Any]

    def __init__(self, function: Callable[P, Any], options: Options) -> None:
        super().__init__(function, options.name or function.__name__, transactional=options.transactional)
        self.options = options
        self.undone_by: Undo[..., Any] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = self.function(*args, **kwargs)
        return result

    @overload
    def undo(self, function: Callable[Q, S], /) -> Undo[Q, S]: ...

    @overload
    def undo(
        self, /, *, name: str = "", retry: Retry | None = None, timeout: Duration | None = None
    ) -> Callable[[Callable[Q, S]], Undo[Q, S]]: ...

    def undo(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str = "",
        retry: Retry | None = None,
        timeout: Duration | None = None,
    ) -> Any:
        """Say how a success of this task is taken back, when its saga fails: `@charge.undo` above the function.

        The undo is recorded with the success. It may take the variables as they were then, and the task's result under
        the name of its `into` or as `result`.
        """
        options = _options(f"{self.name}.undo", name=name, retry=retry, timeout=timeout)
        return self._undo(function, options) if function is not None else lambda late: self._undo(late, options)

    def _undo(self, function: Callable[Q, S], options: Options) -> Undo[Q, S]:
        if self.undone_by is not None:
            message = f"{self.name} has an undo already: {self.undone_by.name} ({self.undone_by.place})"
            raise refusal(self.name, "undo_twice", message, hint="one undo takes back the whole step")
        _check_function(f"{self.name}.undo", function)
        self.undone_by = undo = Undo(function, options, self.name)
        return undo


class AsyncTask(Task[P, R]):
    """A task made from `async def`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:  # type: ignore[override]  # As its function is called.
        coroutine: Coroutine[Any, Any, R] = self.function(*args, **kwargs)
        return coroutine


class Undo(Activity, Generic[P, R]):
    """A function that takes back what its task has done. Called directly, it is the plain function."""

    function: Callable[P, R]

    def __init__(self, function: Callable[P, R], options: Options, undoes: str) -> None:
        super().__init__(function, options.name or function.__name__)
        self.options = options
        self.undoes = undoes

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


class TaskMaker(Protocol):
    """What `@task(...)` with options is: it makes a task from the function below it."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


@overload
def task(function: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...


@overload
def task(function: Callable[P, R], /) -> Task[P, R]: ...


@overload
def task(
    *,
    name: str = "",
    into: str = "",
    retry: Retry | None = None,
    timeout: Duration | None = None,
    on_failure: Literal["", "incident", "fail"] = "",
    transactional: bool = False,
    isolation: Literal["", "process"] = "",
    lane: str = "local",
) -> TaskMaker: ...


def task(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str = "",
    into: str = "",
    retry: Retry | None = None,
    timeout: Duration | None = None,
    on_failure: Literal["", "incident", "fail"] = "",
    transactional: bool = False,
    isolation: Literal["", "process"] = "",
    lane: str = "local",
) -> Any:
    """Make a task from a function: `@task`, or `@task(into="receipt", timeout="30s")`.

    The function's parameters are variables, by name; a parameter of type `Context` tells it who is calling. `into`
    names the variable that its result becomes. When it fails for good, the saga around it is undone; outside of any, an
    operator is asked. `on_failure="incident"` asks in a saga too, `"fail"` fails the instance outside of one.
    `transactional` lends it the database's own connection, in the parameter `connection`; `isolation="process"` runs it
    in a process that can be killed.
    """
    options = _options(
        "@task",
        name=name,
        into=into,
        retry=retry,
        timeout=timeout,
        on_failure=on_failure,
        transactional=transactional,
        isolation=isolation,
        lane=lane,
    )
    return _task(function, options) if function is not None else lambda late: _task(late, options)


def _task(function: Any, options: Options) -> Task[..., Any]:
    _check_function("@task", function)
    is_async = inspect.iscoroutinefunction(function)
    if options.transactional and is_async:
        message = f"{function.__name__} is transactional and async: the connection is lent to one thread"
        raise refusal("@task", "bad_option", message, hint="write it with def")
    if options.isolation and "<locals>" in function.__qualname__:
        message = f"{function.__name__} is defined inside a function, so that no other process can import it"
        raise refusal("@task", "bad_option", message, hint="move it to the top of its module, or leave isolation out")
    return AsyncTask(function, options) if is_async else Task(function, options)


# --- options at the door ----------------------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Options:
    """The options of a task or an undo, checked, as the definition holds them."""

    name: str = ""
    into: str = ""
    retry: Backoff = ONCE
    timeout_ms: int | None = None
    on_failure: str = ""
    transactional: bool = False
    isolation: str = ""
    lane: str = "local"


def _options(what: str, *, retry: Retry | None, timeout: Duration | None, **others: Any) -> Options:
    if retry is not None and not isinstance(retry, Retry):
        raise refusal(what, "bad_option", f"retry must be a Retry, not {retry!r}", hint=f"write retry=Retry({retry!r})")
    if others["name"] != "":
        named(what, "name", others["name"])
    named(what, "lane", others.get("lane", "local"))
    if others.get("into", "") != "":
        variable(what, "into", others["into"])
    for option, allowed in (("on_failure", ("", "incident", "fail")), ("isolation", ("", "process"))):
        if others.get(option, "") not in allowed:
            message = f"{option} is {' or '.join(map(repr, allowed[1:]))}, not {others[option]!r}"
            raise refusal(what, "bad_option", message)
    if others.get("transactional") and (others["isolation"] or others["lane"] != "local"):
        message = "a transactional task runs here, on the database's own connection"
        raise refusal(what, "bad_option", message, hint="leave out isolation and lane, or transactional")
    timeout_ms = None if timeout is None else milliseconds(what, "timeout", timeout, least=1)
    return Options(retry=ONCE if retry is None else retry.backoff, timeout_ms=timeout_ms, **others)


def refusal(what: str, code: str, message: str, *, hint: str = "") -> InvalidDefinition:
    """The refusal of an argument, where the author wrote it."""
    return InvalidDefinition(what, [Problem(code, message, place=caller_place(), hint=hint)])


def named(what: str, option: str, name: object) -> str:
    try:
        return check_name(name, what=option)
    except BadValue as error:
        raise refusal(what, "bad_name", str(error)) from None


def variable(what: str, option: str, name: object) -> str:
    if not is_variable(name):
        hint = "it names a variable, like a Python parameter: letters, digits and _, and no keyword"
        raise refusal(what, "bad_variable", f"{option}={name!r} is no name", hint=hint)
    return str(name)


def milliseconds(what: str, option: str, duration: Duration, *, least: int = 0) -> int:
    try:
        length_ms = duration_ms(duration)
    except Rejected as error:
        raise refusal(what, "bad_duration", f"{option}: {error}") from None
    if length_ms < least:
        raise refusal(what, "bad_duration", f"{option} is {duration!r}; it must be at least {least} ms")
    return length_ms


def caller() -> FrameType:
    """The frame of whoever called into the builder."""
    frame: FrameType = sys._getframe(1)
    while frame.f_globals.get("__name__") in _OURS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def caller_place() -> str:
    """The author's own "file:line", relative to the working directory if it is below that."""
    frame = caller()
    path = Path(frame.f_code.co_filename)
    with contextlib.suppress(OSError, ValueError):  # No working directory any more, or the file is elsewhere.
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.f_lineno}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _classes(never: object) -> tuple[str, ...]:
    classes = tuple(never) if isinstance(never, Iterable) else (never,)
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, BaseException)):
            hint = "give the classes themselves: never=(Declined, ValueError)"
            raise refusal("Retry", "bad_retry", f"never holds {cls!r}, which is not an exception class", hint=hint)
    return tuple(f"{cls.__module__}:{cls.__qualname__}" for cls in classes)


# --- functions and their signatures -----------------------------------------------------------------------------------


def _check_function(what: str, function: Any) -> None:
    if isinstance(function, Activity):
        raise refusal(
            what, "bad_task", f"{function.name} is a task already", hint="one @task or @….undo for each function"
        )
    if isinstance(function, staticmethod | classmethod) or _is_method(function):
        raise refusal(
            what,
            "bad_task",
            "a method cannot be a task: nothing would be its self",
            hint="use a function outside the class",
        )
    if not inspect.isfunction(function):
        hint = f"did you mean name={function!r}?" if isinstance(function, str) else "put it above a def or async def"
        raise refusal(what, "bad_task", f"{function!r} is not a function", hint=hint)
    if function.__name__ == "<lambda>":
        hint = "write it as a def; its name is how stored instances find it again"
        raise refusal(what, "bad_task", "a lambda has no name", hint=hint)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise refusal(what, "bad_task", f"{function.__name__} is a generator", hint="return the result as a whole")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise refusal(what, "bad_task", f"{function.__name__} takes `{parameter}`", hint=_NAMED)


def _is_method(function: Any) -> bool:
    if not inspect.isfunction(function):
        return inspect.ismethod(function)
    owner = function.__qualname__.rpartition(".")[0]
    return (
        bool(owner)
        and not owner.endswith("<locals>")
        and next(iter(inspect.signature(function).parameters), "") == "self"
    )


def _signature(function: Callable[..., Any], local_names: dict[str, Any], *, transactional: bool) -> Signature:
    read = inspect.signature(function)
    annotations = {name: p.annotation for name, p in read.parameters.items() if p.annotation is not p.empty}
    if read.return_annotation is not read.empty:
        annotations["return"] = read.return_annotation
    types, unread = _resolved(annotations, inspect.unwrap(function).__globals__, local_names)
    context = _parameter(read, types, unread, Context) or (
        "ctx" if "ctx" in read.parameters and "ctx" not in types else ""
    )
    connection = ""
    if transactional:
        connection = (
            "connection" if "connection" in read.parameters else _parameter(read, types, unread, sqlite3.Connection)
        )
    variables = [p for p in read.parameters.values() if p.name not in (context, connection)]
    return Signature(
        needs=tuple(p.name for p in variables if p.default is p.empty),
        may=tuple(p.name for p in variables if p.default is not p.empty),
        types={p.name: types.get(p.name, Any) for p in variables},
        returns=types.get("return", Any),
        context=context,
        connection=connection,
        unread={name: text for name, text in unread.items() if name not in (context, connection)},
    )


def _local_names(function: Callable[..., Any]) -> dict[str, Any]:
    """What the annotations of a function inside a function may mean, as it stands where that is decorated."""
    if "<locals>" not in function.__qualname__:
        return {}
    words = set(re.findall(r"\w+", " ".join(map(str, function.__annotations__.values()))))
    return {name: value for name, value in caller().f_locals.items() if name in words}


def _resolved(
    annotations: dict[str, Any], global_names: dict[str, Any], local_names: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Each annotation for itself, because one that cannot be read must not hide the others."""
    types: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for name, annotation in annotations.items():
        holder = SimpleNamespace(__annotations__={name: annotation})
        try:
            types[name] = typing.get_type_hints(holder, global_names, local_names, include_extras=True)[name]
        except Exception:  # Evaluating an annotation runs the user's module; it may raise anything.
            unread[name] = str(annotation)
    return types, unread


def _parameter(read: inspect.Signature, types: dict[str, Any], unread: dict[str, str], wanted: type) -> str:
    """The parameter of a type that no variable has; if it is imported only for type checkers, its last word decides."""
    for name in read.parameters:
        annotated = types.get(name)
        if annotated is wanted or {wanted, NoneType} == set(typing.get_args(annotated)):
            return name
        if name in unread and unread[name].rpartition(".")[2] == wanted.__name__:
            return name
    return ""
