"""The commands that look: list, show, history, explain."""

from __future__ import annotations

from argparse import Namespace

from understudy.cli import documents, show
from understudy.cli.output import Output, styled
from understudy.cli.source import opened
from understudy.cli.standing import STUCK, Remedies, present_ms, shell, word_of
from understudy.cli.words import Narrator
from understudy.model.durations import show_moment
from understudy.state import State
from understudy.store.reads import Filter


def show_list(arguments: Namespace, output: Output) -> int:
    which = Filter(
        process=arguments.process,
        status=arguments.status,
        outcome=arguments.outcome,
        with_incident=arguments.incident,
        tag=arguments.tag,
        text=arguments.text,
        open_only=arguments.open,
    )
    with opened(arguments.db) as source:
        page = source.reads.page(which, limit=arguments.limit + 1, before=arguments.before)
        states = [source.state(source.reads.detail(summary.id)) for summary in page[: arguments.limit]]
        has_owner = source.has_owner()
    cursor = page[arguments.limit - 1].no if len(page) > arguments.limit else None
    if output.as_json:
        output.document({"instances": [documents.state_document(state) for state in states], "next": cursor})
        return 0
    _say_list(arguments.db, states, cursor, has_owner=has_owner, output=output)
    return 0


def _say_list(db: str, states: list[State], cursor: int | None, *, has_owner: bool | None, output: Output) -> None:
    if not states:
        output.say("No such instance is here.")
        return
    output.say(show.listing(states, width=output.width, now_ms=present_ms()))
    if cursor is not None:
        output.say(styled(f"\nOlder ones: add --before {cursor}", "dim"))
    stuck = [state for state in states if word_of(state) == STUCK]
    if stuck:
        output.say(styled(f"\n{len(stuck)} stuck; why, and what moves it: {shell('understudy', 'explain', db)} ID"))
    if has_owner is False and any(not state.is_ended for state in states):
        output.say("\n", show.ownerless(db))


def show_one(arguments: Namespace, output: Output) -> int:
    with opened(arguments.db) as source:
        past = ""
        if arguments.at is None:
            detail = source.detail(arguments.id)
        else:
            detail = source.detail_at(arguments.id, arguments.at)
            now = source.reads.summary(arguments.id).version
            past = f"as it was after commit {arguments.at} of {now}, at {show_moment(detail.summary.changed_ms)}"
        state = source.state(detail)
        traces = source.traces(detail)
    if output.as_json:
        output.document({**documents.detail_document(detail, state), "at": arguments.at})
    else:
        output.say(show.one(detail, state, traces, now_ms=present_ms(), past=past))
    return 0


def show_explanation(arguments: Namespace, output: Output) -> int:
    now_ms = present_ms()
    with opened(arguments.db) as source:
        detail = source.detail(arguments.id)
        state = source.state(detail)
        traces = source.traces(detail)
        undone = source.undone(arguments.id)
        remedies = Remedies(arguments.db, state.id, source.graph(detail.definition), source.has_owner())
    if output.as_json:
        output.document(documents.explanation_document(state, remedies, undone=undone, now_ms=now_ms))
    else:
        output.say(show.explanation(state, remedies, traces, undone=undone, now_ms=now_ms))
    return 0


def show_history(arguments: Namespace, output: Output) -> int:
    with opened(arguments.db) as source:
        state = source.state(source.detail(arguments.id))
        records = source.reads.history(arguments.id)
    if output.as_json:
        output.document(documents.history_document(arguments.id, records, limit=arguments.limit))
        return 0
    first = 0 if arguments.limit is None else len(records) - arguments.limit
    events = [event for event in show.told(records, Narrator()) if event.n > first]
    output.say(show.heading(state), "\n")
    output.say(show.history(events, width=output.width))
    return 0
