"""The commands that move something: they return after the commit, and run no instance.

The live owner carries them out; when there is none, this process owns the database for the one command, and whoever
opens it next goes on from there.
"""

from __future__ import annotations

import contextlib
import getpass
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from understudy.cli import documents, show
from understudy.cli.output import Output, styled
from understudy.cli.source import opened
from understudy.runtime import Runtime


def send(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        received = runtime.send(
            arguments.id,
            arguments.message,
            arguments.payload,
            key=arguments.key,
            ttl=arguments.ttl,
            request_key=arguments.request_key,
            by=_by(arguments),
        )
        text = "has it" if received else "does not wait for it yet: it is kept until then"
        return _done(arguments, output, runtime, f"{arguments.id} {text}.", received=received)


def publish(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        runtime.publish(
            arguments.message,
            arguments.payload,
            key=arguments.key,
            ttl=arguments.ttl,
            request_key=arguments.request_key,
            by=_by(arguments),
        )
        has_owner = not runtime.is_owner
    if output.as_json:
        output.document({"message": arguments.message, "key": arguments.key, "has_owner": has_owner})
        return 0
    output.say(styled(f"{arguments.message} is published: the first that waits for it gets it."))
    if not has_owner:
        output.say(show.ownerless(arguments.db))
    return 0


def cancel(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        runtime.cancel(arguments.id, reason=arguments.reason, undo=not arguments.no_undo, **_signed(arguments))
        return _done(arguments, output, runtime, f"{arguments.id} is cancelled.")


def pause(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        runtime.pause(arguments.id, **_signed(arguments))
        return _done(arguments, output, runtime, f"{arguments.id} is paused: what runs may finish, nothing new begins.")


def resume(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        runtime.resume(arguments.id, **_signed(arguments))
        return _done(arguments, output, runtime, f"{arguments.id} may go on.")


def retry(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        runtime.retry(arguments.id, arguments.incident, **_signed(arguments))
        return _done(arguments, output, runtime, f"{arguments.id} tries it again.")


def skip(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        signed = _signed(arguments)
        runtime.skip(arguments.id, arguments.incident, result=arguments.result, to=arguments.to, **signed)
        return _done(arguments, output, runtime, f"{arguments.id} goes on without it.")


def fail(arguments: Namespace, output: Output) -> int:
    with _operator(arguments.db) as runtime:
        runtime.fail(arguments.id, arguments.incident, **_signed(arguments))
        return _done(arguments, output, runtime, f"{arguments.id} gives it up.")


@contextlib.contextmanager
def _operator(db: str) -> Iterator[Runtime]:
    with opened(db) as source:
        source.reads.owner()  # Refuses what is no database, or of another schema, before anybody could own it.
    with Runtime(db, role="operator") as runtime:
        yield runtime


def _done(arguments: Namespace, output: Output, runtime: Runtime, text: str, **facts: Any) -> int:
    state = runtime.state(arguments.id)
    has_owner = not runtime.is_owner
    if output.as_json:
        output.document({"id": state.id, **facts, "has_owner": has_owner, "state": documents.state_document(state)})
        return 0
    output.say(styled(text))
    output.say(styled(f"Now {state}"))
    if not has_owner and not state.is_ended:
        output.say(show.ownerless(arguments.db))
    return 0


def _signed(arguments: Namespace) -> dict[str, str]:
    return {"request_key": arguments.request_key, "by": _by(arguments)}


def _by(arguments: Namespace) -> str:
    if arguments.by is not None:
        return str(arguments.by)
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container's user need not have a name.
        return ""
