"""From a user's arguments to a call: everything is checked and encoded here, before anything is sent."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from understudy.model.durations import duration_ms
from understudy.model.errors import BadInput, BadValue, Rejected
from understudy.model.states import Outcome, Status
from understudy.model.values import check_name, encode, key_text
from understudy.process import Process
from understudy.service import Parameters
from understudy.store.reads import Filter

Duration = str | int | float | timedelta
MOST_LISTED: Final = 10_000


MEMORY: Final = ":memory:"


def database_place(path: str | os.PathLike[str]) -> str:
    """The path of a database that can be there; what can never be is refused before anything is made beside it."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise Rejected(f"the path of a database is a text or a Path, not {path!r}")
    place = Path(text).absolute()
    if place.is_dir():
        raise Rejected(f"{text} is a folder; give the path of a file, such as {place / 'understudy.db'}")
    if not place.parent.is_dir():
        raise Rejected(f"there is no folder {place.parent}; make it first, or choose another path")
    return text


def start_request(
    process: Process[Any, Any] | str,
    input_: object,
    *,
    id: str,
    is_new: bool,
    title: str,
    tags: Mapping[str, str] | None,
    by: str,
    caused_by: str,
    limit_bytes: int,
) -> Parameters:
    if isinstance(process, str):
        name, content = check_name(process, what="process"), ""
        variables = _plain_input(input_, limit_bytes)
    elif isinstance(process, Process):
        name, content = process.name, process.definition.digest
        variables = process.encode_input(input_)
        _check_sizes(name, variables, limit_bytes)
    else:
        raise Rejected(f"start takes a Process or the name of one, not {type(process).__name__}")
    return {
        "process": name,
        "digest": content,
        "id": check_name(id, what="id"),
        "is_new": is_new,
        "variables": variables,
        "title": _text(title, "title"),
        "tags": _tags(tags),
        "by": _text(by, "by"),
        "caused_by": _text(caused_by, "caused_by"),
    }


def message_request(
    name: str,
    payload: object,
    *,
    about: str | int | None,
    ttl: Duration | None,
    request_key: str,
    by: str,
    limit_bytes: int,
) -> Parameters:
    return {
        "name": check_name(name, what="message"),
        "payload": encode(payload, what="payload", limit_bytes=limit_bytes),
        "about": "" if about is None else key_text(about),
        "ttl_ms": None if ttl is None else _lifetime_ms(ttl),
        "key": check_name(request_key, what="request key") if request_key else "",
        "by": _text(by, "by"),
    }


def instance_request(id: str, *, request_key: str = "", by: str = "", **others: Any) -> Parameters:
    return {
        "id": check_name(id, what="id"),
        "key": check_name(request_key, what="request key") if request_key else "",
        "by": _text(by, "by"),
        **others,
    }


def filter_request(
    *,
    process: str,
    status: str,
    outcome: str,
    with_incident: bool,
    open_only: bool,
    tag: tuple[str, str] | None,
    text: str,
) -> Filter:
    _one_of("status", status, Status)
    _one_of("outcome", outcome, Outcome)
    is_pair = isinstance(tag, tuple) and len(tag) == 2 and all(isinstance(part, str) for part in tag)
    if tag is not None and not is_pair:
        raise Rejected(f'tag is a pair of name and value, such as ("customer", "17"), not {tag!r}')
    return Filter(
        process=_text(process, "process"),
        status=status,
        outcome=outcome,
        with_incident=with_incident,
        open_only=open_only,
        tag=tag,
        text=_text(text, "text"),
    )


def page_request(limit: int, before: int | None) -> dict[str, Any]:
    if not _is_count(limit) or not 1 <= limit <= MOST_LISTED:
        raise Rejected(f"limit is a number from 1 to {MOST_LISTED:,}, not {limit!r}; `before` gives the next page")
    if before is not None and not _is_count(before):
        raise Rejected(f"before is the `no` of the last instance of the page before, not {before!r}")
    return {"limit": limit, "before": before}


def subscriber_request(receive: object, tries: int, backoff: Duration) -> dict[str, Any]:
    if not callable(receive):
        raise Rejected(f"a subscriber is a function that takes a Change, not {type(receive).__name__}")
    if inspect.iscoroutinefunction(receive):
        name = getattr(receive, "__name__", "it")
        raise Rejected(f"{name} is async; a subscriber is an ordinary function, on a thread of its own")
    if not _is_count(tries) or tries < 1:
        raise Rejected(f"tries is 1 or more, not {tries!r}")
    return {"receive": receive, "tries": tries, "backoff_s": seconds(backoff) or 0}


def seconds(timeout: Duration | None) -> float | None:
    """A timeout in seconds; None waits for ever."""
    return None if timeout is None else duration_ms(timeout) / 1_000


# --- helpers ----------------------------------------------------------------------------------------------------------


def _plain_input(value: object, limit_bytes: int) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(f"a process that is started by its name takes a mapping of inputs, not {type(value).__name__}")
    return {
        check_name(name, what="input name"): encode(item, what=f"input.{name}", limit_bytes=limit_bytes)
        for name, item in value.items()
    }


def _check_sizes(process: str, variables: dict[str, str], limit_bytes: int) -> None:
    """A runtime may allow less than what a process can take."""
    for name, text in variables.items():
        size = len(text.encode()) if 4 * len(text) > limit_bytes else 0
        if size > limit_bytes:
            raise BadInput(
                f"{process} cannot start: {name} has {size:,} bytes, over the limit of {limit_bytes:,}; "
                "store large data elsewhere and keep a reference, or raise Limits.value_bytes"
            )


def _lifetime_ms(ttl: Duration) -> int:
    lifetime_ms = duration_ms(ttl)
    if lifetime_ms == 0:
        raise Rejected("a message with ttl=0 could reach nobody; leave ttl out, or give it some time")
    return lifetime_ms


def _tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    if tags is None:
        return {}
    if not isinstance(tags, Mapping):
        raise BadValue(f'tags are a mapping of names to texts, such as {{"customer": "17"}}, not {tags!r}')
    return {check_name(name, what="tag"): _text(value, f"tag {name}") for name, value in tags.items()}


def _text(value: object, what: str) -> str:
    if value == "":
        return ""
    return check_name(value, what=what)


def _one_of(what: str, value: str, kind: type[Status | Outcome]) -> None:
    names = [state.value for state in kind]
    if value != "" and value not in names:
        raise Rejected(f"{what} is one of {', '.join(names)}, not {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
