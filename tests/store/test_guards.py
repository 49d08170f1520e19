"""Each guard alone: a culprit among healthy commits is refused with its reason, and changes not a single row.

Where the writer refuses in Python what it can see to be wrong, the guard of the statement is tried a second time with
the writer blindfolded.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.model.errors import Conflict, Fenced, Rejected
from understudy.store.batch import COLD, HOT, Batch
from understudy.store.commit import Answered, Commit, pack
from understudy.store.operations import Beat
from understudy.store.writer import Change, Landed, Publish, Refused, Unknown, Writer

if TYPE_CHECKING:
    from tests.store.conftest import Desk

FIRST = Answered("key", "digest", '{"first":true}', 9_000)


def blindfold(writer: Writer) -> None:
    """Let everything through to the statement."""
    writer._admit = lambda changes, numbers, results: (numbers, [])  # type: ignore[method-assign]


# --- culprits: each is prepared on its own instance, "culprit" --------------------------------------------------------


def stale(desk: Desk) -> Change:
    """Decided by an activation that does not know of the last commit."""
    former = desk.loaded("culprit")
    desk.lands(desk.complete("culprit"))
    desk.instances["culprit"], desk.stored["culprit"] = former.instance, former.stored
    return desk.complete("culprit", '"late"')


def never_stored(desk: Desk) -> Change:
    commit = desk.complete("culprit")
    commit.stored.no = 999
    return commit


def same_id(desk: Desk) -> Change:
    return desk.start("culprit", "steps", other="1")


def same_key(desk: Desk) -> Change:
    desk.lands(Publish("nobody", "", "1", None, [FIRST]))
    return desk.complete("culprit", requests=[Answered("key", "other digest", "{}", 9_000)])


def same_key_published(desk: Desk) -> Change:
    desk.lands(Publish("nobody", "", "1", None, [FIRST]))
    return Publish("nobody", "", "2", None, [FIRST])


def consumes_what_is_gone(desk: Desk) -> Change:
    commit = desk.complete("culprit")
    commit.consumed.append(77)
    return commit


def consumes_what_is_another_s(desk: Desk) -> Change:
    desk.put("waiter", "waiting", about='"k"')
    (delivery,) = desk.publish("k").deliveries
    commit = desk.complete("culprit")
    commit.consumed.append(delivery.message)
    return commit


def takes_work_that_is_not_recorded(desk: Desk) -> Change:
    commit = desk.complete("culprit")
    commit.taken_work.append(3)
    return commit


def unknown_status(desk: Desk) -> Change:
    commit = desk.complete("culprit")
    commit.hot[HOT.index("status")] = "nonsense"
    return commit


def ended_without_outcome(desk: Desk) -> Change:
    commit = desk.complete("culprit")
    commit.hot[HOT.index("status")] = "ended"
    return commit


def unknown_definition(desk: Desk) -> Change:
    commit = desk.start("new one")
    assert commit.cold is not None
    commit.cold[COLD.index("definition") - 1] = 999
    return commit


def nothing_where_something_must_be(desk: Desk) -> Change:
    commit = desk.complete("culprit")
    commit.hot[HOT.index("digest")] = None
    return commit


def text_that_sqlite_would_cut(_desk: Desk) -> Change:
    return Publish("nobody", "", "before\0after")


def text_that_is_no_text(_desk: Desk) -> Change:
    return Publish("nobody", "", "\ud800")


def too_large(desk: Desk) -> Change:
    desk.writer.connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 50_000)
    return Publish("nobody", "", "x" * 60_000)


Culprit = Callable[["Desk"], Change]
VISIBLE: dict[Culprit, str] = {stale: "stale", same_key: "duplicate", same_key_published: "duplicate"}
UNSEEN: dict[Culprit, str] = {
    never_stored: "stale",
    same_id: "duplicate",
    consumes_what_is_gone: "missing",
    consumes_what_is_another_s: "missing",
    takes_work_that_is_not_recorded: "missing",
    unknown_status: "constraint",
    ended_without_outcome: "constraint",
    unknown_definition: "constraint",
    nothing_where_something_must_be: "constraint",
    text_that_sqlite_would_cut: "constraint",
    text_that_is_no_text: "constraint",
    too_large: "constraint",
}
ALL = {**VISIBLE, **UNSEEN}


def prepare(desk: Desk, culprit: Culprit) -> tuple[list[Change], Change]:
    """Healthy changes of several kinds, and the culprit."""
    for name in ("culprit", "one", "two"):
        desk.put(name)
    wrong = culprit(desk)
    healthy: list[Change] = [
        desk.complete("one"),
        desk.start("three", "waiting", about='"k3"'),
        desk.complete("two", requests=[Answered("fresh", "d", "{}", 9_000)]),
        Publish("paid", "k3", "7"),
    ]
    return healthy, wrong


@pytest.mark.parametrize("culprit", ALL, ids=lambda culprit: culprit.__name__)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_only_the_culprit_is_refused_and_it_changes_no_row(
    new_desk: Callable[[], Desk], culprit: Culprit, place: int
) -> None:
    desk, twin = new_desk(), new_desk()
    healthy, wrong = prepare(desk, culprit)
    without, _ = prepare(twin, culprit)

    results = desk.write(*healthy[:place], wrong, *healthy[place:]).results
    twin.lands(*without)

    refused = results.pop(place)
    assert isinstance(refused, Refused)
    assert refused.reason == ALL[culprit]
    assert all(isinstance(result, Landed) for result in results)
    assert desk.dump() == twin.dump()


@pytest.mark.parametrize("culprit", VISIBLE, ids=lambda culprit: culprit.__name__)
def test_the_statement_refuses_by_itself_what_the_writer_did_not_see(
    new_desk: Callable[[], Desk], culprit: Culprit
) -> None:
    desk, twin = new_desk(), new_desk()
    healthy, wrong = prepare(desk, culprit)
    without, _ = prepare(twin, culprit)
    blindfold(desk.writer)

    results = desk.write(*healthy[:2], wrong, *healthy[2:]).results
    twin.lands(*without)

    refused = results.pop(2)
    assert isinstance(refused, Refused)
    assert refused.reason == VISIBLE[culprit]
    assert all(isinstance(result, Landed) for result in results)
    assert desk.dump() == twin.dump()


@pytest.mark.parametrize("culprit", VISIBLE, ids=lambda culprit: culprit.__name__)
def test_what_the_writer_can_see_to_be_wrong_never_reaches_the_statement(desk: Desk, culprit: Culprit) -> None:
    _, wrong = prepare(desk, culprit)
    traced: list[str] = []
    desk.writer.connection.set_trace_callback(traced.append)

    (refused,) = desk.write(wrong).results

    assert isinstance(refused, Refused)
    assert not any(statement.startswith("INSERT") for statement in traced)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_several_culprits_of_several_kinds_leave_all_others_unharmed(
    new_desk: Callable[[], Desk], data: st.DataObject
) -> None:
    desk, twin = new_desk(), new_desk()
    for each in (desk, twin):
        for name in [*(f"h{n}" for n in range(8)), "w"]:
            each.put(name)
    healthy: list[Change] = [desk.complete(f"h{n}") for n in range(8)]
    wrong: list[Change] = [
        desk.start("h0", "steps", other="1"),
        Publish("nobody", "", "a\0b"),
        consumes_what_is_gone_from(desk, "w"),
    ]
    places = data.draw(st.permutations(range(11)))
    batch = [(*healthy, *wrong)[place] for place in places]

    results = desk.write(*batch).results
    twin.lands(*(twin.complete(f"h{place}") for place in places if place < 8))

    assert [isinstance(result, Landed) for result in results] == [place < 8 for place in places]
    assert desk.dump() == twin.dump()


def consumes_what_is_gone_from(desk: Desk, name: str) -> Commit:
    commit = desk.complete(name)
    commit.consumed.append(77)
    return commit


@pytest.mark.parametrize(
    ("culprit", "error"), [(stale, Conflict), (same_id, Conflict), (unknown_status, Rejected), (too_large, Rejected)]
)
def test_a_refusal_carries_an_error_for_whoever_asked(desk: Desk, culprit: Culprit, error: type[Exception]) -> None:
    desk.put("culprit")

    (refused,) = desk.write(culprit(desk)).results

    assert isinstance(refused, Refused)
    assert type(refused.error) is error


# --- fenced -----------------------------------------------------------------------------------------------------------


def test_after_a_newer_owner_has_taken_over_nothing_is_written_at_all(desk: Desk) -> None:
    desk.put("one")
    commits: list[Change] = [desk.complete("one"), desk.start("two"), Publish("paid", "", "1")]
    usurp(desk)
    before = desk.dump()

    with pytest.raises(Fenced):
        desk.write(*commits)

    assert desk.dump() == before


def test_a_takeover_between_two_halves_of_a_batch_leaves_its_outcome_unknown(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever hears "fenced" asks the next owner again; the half that has landed would then be done twice."""
    desk.put("one")
    culprit, healthy = desk.start("one"), desk.start("two")
    execute = desk.writer._execute
    written: list[Batch] = []

    def execute_and_be_replaced(batch: Batch, now_ms: int) -> Refused | None:
        if written:
            usurp(desk)
        result = execute(batch, now_ms)
        if result is None:
            written.append(batch)
        return result

    monkeypatch.setattr(desk.writer, "_execute", execute_and_be_replaced)

    with pytest.raises(Unknown, match="a part of the batch was written"):
        desk.writer.write([healthy, culprit], now_ms=1)

    assert desk.read("SELECT count(*) FROM instance WHERE id = 'two'") == [(1,)]


def test_a_fenced_owner_can_run_no_operation(desk: Desk) -> None:
    usurp(desk)
    before = desk.dump()

    with pytest.raises(Fenced):
        desk.writer.run(Beat())

    assert desk.dump() == before
    assert not desk.writer.connection.in_transaction


def test_reopening_finds_out_that_the_file_has_a_newer_owner(desk: Desk) -> None:
    usurp(desk)

    with pytest.raises(Fenced):
        desk.writer.reopen()


def test_an_older_owner_s_numbers_are_read_again_at_the_takeover(new_desk: Callable[[], Desk]) -> None:
    old = new_desk()
    old.put("one")
    new = Writer(old.path, old.writer.settings)
    old.lands(old.start("two"), Publish("nobody", "", "1"))

    new.take_over("newer")
    old.writer.close()
    old.writer = new

    old.lands(old.start("three"), Publish("nobody", "", "2"))
    assert [no for (no,) in old.read("SELECT no FROM instance ORDER BY no")] == [1, 2, 3]


def usurp(desk: Desk) -> None:
    """As another process does it: on a connection of its own."""
    rival = Writer(desk.path, desk.writer.settings)
    rival.take_over("rival")
    rival.close()


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_that_was_answered_before_brings_the_first_answer_back(desk: Desk) -> None:
    desk.put("one")
    desk.lands(desk.complete("one", requests=[FIRST]))

    (refused,) = desk.write(desk.complete("one", requests=[FIRST])).results

    assert isinstance(refused, Refused)
    assert refused.first == {"key": FIRST}


def test_the_statement_s_own_refusal_brings_the_first_answer_back_too(desk: Desk) -> None:
    desk.lands(Publish("nobody", "", "1", None, [FIRST]))
    blindfold(desk.writer)

    (refused,) = desk.write(Publish("nobody", "", "1", None, [FIRST])).results

    assert isinstance(refused, Refused)
    assert refused.first == {"key": FIRST}


@pytest.mark.parametrize("second", [FIRST, Answered("key", "other", "{}", 9_000)], ids=["same", "other content"])
def test_of_two_commands_of_one_key_in_a_batch_the_first_is_done_and_the_second_hears_of_it(
    desk: Desk, second: Answered
) -> None:
    desk.put("one")
    desk.put("two")

    results = desk.write(
        desk.complete("one", requests=[FIRST]), desk.complete("two", requests=[second]), desk.start("three")
    ).results

    assert isinstance(results[0], Landed)
    assert isinstance(results[1], Refused)
    assert results[1].first == {"key": FIRST}
    assert isinstance(results[2], Landed)
    assert desk.loaded("two").stored.version == 1


def test_a_message_published_five_times_under_one_key_is_there_once(desk: Desk) -> None:
    publish = Publish("paid", "k", "1", None, [FIRST])

    in_one_batch = desk.write(publish, publish, publish).results
    in_another = desk.write(publish, publish).results

    assert [type(result) for result in (*in_one_batch, *in_another)] == [Landed, Refused, Refused, Refused, Refused]
    assert desk.read("SELECT count(*) FROM message") == [(1,)]


def test_a_commit_with_one_new_and_one_used_key_is_refused_whole(desk: Desk) -> None:
    desk.put("one")
    desk.lands(Publish("nobody", "", "1", None, [FIRST]))

    (refused,) = desk.write(desk.complete("one", requests=[Answered("new", "d", "{}", 9_000), FIRST])).results

    assert isinstance(refused, Refused)
    assert refused.first == {"key": FIRST}
    assert desk.read("SELECT key FROM request") == [("key",)]


def test_one_key_twice_in_the_same_commit_is_refused_as_a_duplicate(desk: Desk) -> None:
    """The instance then decides its commands one by one."""
    desk.put("one")
    before = desk.dump()

    (refused,) = desk.write(desk.complete("one", requests=[FIRST, FIRST])).results

    assert isinstance(refused, Refused)
    assert refused.reason == "duplicate"
    assert desk.dump() == before


# --- ids --------------------------------------------------------------------------------------------------------------


def test_of_two_instances_of_one_id_in_a_batch_the_first_is_started(desk: Desk) -> None:
    first, second = desk.start("one", "steps", a="1"), desk.start("one", "steps", a="2")

    results = desk.write(first, second).results

    assert isinstance(results[0], Landed)
    assert isinstance(results[1], Refused)
    assert results[1].reason == "duplicate"
    assert desk.read("SELECT value FROM variable") == [("1",)]


def test_of_two_activations_that_decide_on_the_same_version_one_wins(desk: Desk) -> None:
    desk.put("one")
    rival = desk.loaded("one")
    mine = desk.complete("one", '"mine"')
    token = next(iter(rival.instance.tokens.values()))
    command = c.CompleteTask(at_ms=5, token=token.id, task=token.task, attempt=1, result='"theirs"')
    desk.instances["rival"] = rival.instance
    decision = desk.decide("rival", command)
    assert decision.entry is not None
    theirs = pack(rival.instance, rival.stored, [decision.entry], epoch=1, activation=2, requests=[])

    results = desk.write(mine, theirs).results

    assert isinstance(results[0], Landed)
    assert isinstance(results[1], Refused)
    assert results[1].reason == "stale"
    assert desk.read("SELECT value FROM variable") == [('"mine"',)]
