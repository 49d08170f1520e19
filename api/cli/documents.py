"""Instances, states and histories as JSON documents: for programs, whose names in them do not change lightly."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec

from understudy.cli.standing import Remedies, held_by, urgent_first, word_of
from understudy.cli.words import Narrator
from understudy.model.durations import show_moment
from understudy.state import State, Waiting
from understudy.store.reads import Detail, Record

Document = dict[str, Any]


def state_document(state: State) -> Document:
    return {
        "id": state.id,
        "process": state.process,
        "process_version": state.process_version,
        "state": word_of(state),
        "status": state.status,
        "outcome": state.outcome,
        "version": state.version,
        "title": state.title,
        "tags": state.tags,
        "trigger": state.trigger,
        "by": state.by,
        "caused_by": state.caused_by,
        "created_ms": state.created_ms,
        "changed_ms": state.changed_ms,
        "ended_ms": state.ended_ms,
        "error": None if state.error is None else msgspec.to_builtins(state.error),
        "result": state.result,
        "waiting": [waiting_document(wait) for wait in state.waiting],
    }


def waiting_document(wait: Waiting) -> Document:
    return {**attrs.asdict(wait), "text": wait.what}


def detail_document(detail: Detail, state: State) -> Document:
    return {
        **state_document(state),
        "tokens": [_fields(token) for token in detail.tokens],
        "scopes": [_fields(scope) for scope in detail.scopes],
        "waits": [_fields(wait) for wait in detail.waits],
        "incidents": [_fields(incident) for incident in detail.incidents],
        "undoable": list(state.undoable),
        "buffered_messages": detail.buffered,
        "variables": state.variables,
    }


def explanation_document(state: State, remedies: Remedies, *, undone: list[str], now_ms: int) -> Document:
    return {
        **state_document(state),
        "has_owner": remedies.has_owner,
        "undoable": list(state.undoable),
        "undone": undone,
        "moved_by": [
            {"node": w.node, "text": held_by(w), "by": [attrs.asdict(r) for r in remedies.of(w, now_ms=now_ms)]}
            for w in urgent_first(state)
        ],
    }


def history_document(id_: str, records: list[Record], *, limit: int | None) -> Document:
    narrator = Narrator()
    commits = [_commit(record, narrator) for record in records]
    return {"id": id_, "commits": commits if limit is None else commits[-limit:]}


def _commit(record: Record, narrator: Narrator) -> Document:
    return {
        "n": record.n,
        "seq": record.seq,
        "at_ms": record.at_ms,
        "at": show_moment(record.at_ms),
        "epoch": record.epoch,
        "digest": record.digest,
        "entries": [
            {
                "at_ms": entry.at_ms,
                "cause": entry.cause,
                "by": entry.by,
                "key": entry.key,
                "events": [{**msgspec.to_builtins(event), "text": narrator.tell(event).text} for event in entry.events],
            }
            for entry in record.entries
        ],
    }


def _fields(row: msgspec.Struct) -> Document:
    """A row by the names of its columns; in the store it is a list."""
    return {name: msgspec.to_builtins(getattr(row, name)) for name in row.__struct_fields__}
