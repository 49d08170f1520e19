"""From a user's arguments to a call: everything is checked and encoded here, before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from understudy.model.durations import duration_ms
from understudy.model.errors import Rejected
from understudy.model.values import check_name, encode, key_text
from understudy.process import Process
from understudy.service import Parameters

Duration = str | int | float | timedelta


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
        "ttl_ms": None if ttl is None else duration_ms(ttl),
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


def seconds(timeout: Duration | None) -> float | None:
    """A timeout in seconds; None waits for ever."""
    return None if timeout is None else duration_ms(timeout) / 1_000


def _plain_input(value: object, limit_bytes: int) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise Rejected("a process that is started by name takes a mapping of its inputs")
    return {
        check_name(name, what="input name"): encode(item, what=f"input.{name}", limit_bytes=limit_bytes)
        for name, item in value.items()
    }


def _tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    return {check_name(name, what="tag"): _text(value, f"tag {name}") for name, value in (tags or {}).items()}


def _text(value: object, what: str) -> str:
    if value == "":
        return ""
    return check_name(value, what=what)
