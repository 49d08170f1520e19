"""What users may rely on, pinned: whoever changes a line here changes a promise, and says so in the changelog."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
from typing import Any

import pytest

import understudy
from understudy import Handle, Process, Rehearsal, Retry, Runtime
from understudy.model import errors

NAMES = """
    Process task Retry Context
    choose end parallel repeat saga sequence sleep terminate throw wait when

    Runtime Handle connect AsyncRuntime AsyncHandle Limits
    State Change Subscription
    Rehearsal

    UnderstudyError
    Rejected BadValue BadInput BadExpression UnknownProcess UnknownInstance UnknownIncident AlreadyEnded
    AlreadyOpen Closed UsedAfterFork
    Conflict Fenced
    Unavailable OutcomeUnknown TimedOut
    Damaged NotOurs NewerSchema OlderSchema
    InvalidDefinition Problem
    Unsuccessful Failed Cancelled Stuck
"""

RUNTIME = """
    __init__(path, *processes, role='auto', durability='full', limits=None, call_timeout='30s', ports=None)
    cancel(id, *, reason='', undo=True, request_key='', by='')
    close(*, timeout='10s')
    explain(id)
    fail(id, incident=0, *, request_key='', by='')
    get(id, process=None)
    history(id)
    is_owner
    list(*, process='', status='', outcome='', with_incident=False, open_only=False, tag=None, text='', \
         limit=50, before=None)
    pause(id, *, request_key='', by='')
    publish(message, payload=None, *, key=None, ttl=None, request_key='', by='')
    redeliver(subscriber, id)
    report()
    result(id, *, timeout='30s', process=None)
    resume(id, *, request_key='', by='')
    retry(id, incident=0, *, request_key='', by='')
    send(id, message, payload=None, *, key=None, ttl=None, request_key='', by='')
    skip(id, incident=0, *, result=None, to='', request_key='', by='')
    start(process, input=None, *, id=None, title='', tags=None, by='', caused_by='')
    state(id)
    subscribe(name, receive, *, from_start=False, tries=5, backoff='1s')
    variables(id)
    wait_until(id, predicate, *, timeout='30s')
"""

HANDLE = """
    __init__(runtime, id, process=None)
    cancel(*, reason='', undo=True, request_key='', by='')
    explain()
    fail(incident=0, *, request_key='', by='')
    history
    path
    pause(*, request_key='', by='')
    result(*, timeout='30s')
    resume(*, request_key='', by='')
    retry(incident=0, *, request_key='', by='')
    send(message, payload=None, *, key=None, ttl=None, request_key='', by='')
    skip(incident=0, *, result=None, to='', request_key='', by='')
    state
    undone
    variables
    wait_until(predicate, *, timeout='30s')
"""

REHEARSAL = """
    __init__(folder, *processes, start_ms=1767225600000, limits=None)
    add(process)
    advance(duration)
    calls_of(task)
    close(*, timeout='10s')
    crash()
    crash_after(task)
    hang(task)
    stand_in(task, function)
    start(process, input=None, *, id=None, title='', tags=None, by='', caused_by='')
    subscribe(name, receive, *, from_start=False, tries=5, backoff='1s')
    wait_until(id, predicate, *, timeout='30s')
"""

PROCESS = """
    __init__(name, *steps, takes=None, gives=None)
    decode_result(text)
    encode_input(value=None)
"""

RETRY = """
    __init__(attempts, *, first='1s', factor=2, maximum='1h', jitter=0.1, never=())
"""

FUNCTIONS = """
    choose(*branches, otherwise=None)
    connect(path, *processes, call_timeout='30s')
    end()
    parallel(*branches)
    repeat(*sequence, until='', whilst='')
    saga(*sequence)
    sequence(*given)
    sleep(duration=None, *, after='', until='')
    task(function=None, /, *, name='', into='', retry=None, timeout=None, on_failure='', transactional=False, \
         isolation='', lane='local')
    terminate()
    throw(message, *, key='', payload='', ttl=None)
    wait(message, *, key='', into='', gives=typing.Any, timeout=None, late=None)
    when(condition, *then)
"""


def lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]


def shown(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values() if p.name != "self"]
    return f"{name}{signature.replace(parameters=plain, return_annotation=signature.empty)}"


def members(cls: type) -> list[str]:
    found = []
    for name, member in vars(cls).items():
        if name.startswith("_") and name != "__init__":
            continue
        if inspect.isfunction(member):
            found.append(shown(name, member))
        elif isinstance(member, property):
            found.append(name)
    return sorted(found, key=lambda line: line.split("(")[0])


def test_the_public_names_are_these() -> None:
    assert sorted(understudy.__all__) == sorted(NAMES.split())


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(Runtime, RUNTIME), (Handle, HANDLE), (Rehearsal, REHEARSAL), (Process, PROCESS), (Retry, RETRY)],
    ids=lambda part: part.__name__ if isinstance(part, type) else "",
)
def test_the_signatures_of_a_class_are_these(cls: type, expected: str) -> None:
    assert members(cls) == lines(expected)


def test_the_signatures_of_the_functions_are_these() -> None:
    functions = [name for name in understudy.__all__ if name[0].islower()]

    assert [shown(name, getattr(understudy, name)) for name in functions] == lines(FUNCTIONS)


def test_every_public_name_is_there_and_says_what_it_is() -> None:
    for name in understudy.__all__:
        found = getattr(understudy, name)
        assert found.__doc__, name
        assert name in dir(understudy)


def test_every_error_is_public() -> None:
    classes = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    ours = {kind.__name__ for kind in classes if kind.__module__ == errors.__name__}

    assert ours <= set(understudy.__all__)


def test_a_name_that_is_not_public_is_refused_with_where_to_look() -> None:
    with pytest.raises(
        AttributeError, match=r"understudy has no 'Runtimme'; its public names are in understudy.__all__"
    ):
        importlib.import_module("understudy").Runtimme  # noqa: B018


def test_importing_the_package_and_the_plugin_costs_nothing() -> None:
    ours, theirs = loaded_by("understudy, understudy.pytest_plugin"), loaded_by("pytest")

    assert ours == theirs  # What pytest itself imports is its own affair.


def loaded_by(modules: str) -> str:
    """Which of the heavy ones a fresh interpreter has after importing these."""
    heavy = {"asyncio", "attrs", "msgspec", "peewee", "pykka", "sqlite3"}
    source = f"import sys; sys.path[:] = {sys.path!r}; import {modules}; print(sorted({heavy!r} & set(sys.modules)))"
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout
