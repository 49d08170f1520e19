"""Published messages find waits: whichever comes later, oldest to oldest, each consumed once.

The rule is tried against a model of a few lines, and its cost is counted in steps of SQLite's virtual machine, which
are the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.model import commands as c
from understudy.store import recovery
from understudy.store.batch import MATCHED, parts, statements
from understudy.store.operations import Purge
from understudy.store.writer import Change, Delivery, Publish, Refused

if TYPE_CHECKING:
    from tests.store.conftest import Desk


def waiter(desk: Desk, name: str, key: str = "k") -> None:
    desk.put(name, "waiting", about=f'"{key}"')


def deliver(desk: Desk, delivery: Delivery) -> Change:
    command = c.Deliver(at_ms=desk.now_ms, message=delivery.message, wait=delivery.wait, payload=delivery.payload)
    return desk.order(delivery.instance, command)


def assigned(desk: Desk) -> list[tuple[str, str | None]]:
    """Each message's payload, oldest first, and whose it is."""
    return desk.read("SELECT m.payload, i.id FROM message m LEFT JOIN instance i ON i.no = m.instance ORDER BY m.no")


# --- who gets what ----------------------------------------------------------------------------------------------------


def test_a_message_that_comes_after_its_wait_is_assigned_in_its_own_batch(desk: Desk) -> None:
    waiter(desk, "one")

    (delivery,) = desk.publish("k", payload='"hello"').deliveries

    assert (delivery.instance, delivery.payload) == ("one", '"hello"')
    assert assigned(desk) == [('"hello"', "one")]


def test_a_wait_that_comes_after_its_message_takes_it_in_its_own_batch(desk: Desk) -> None:
    assert desk.publish("k").deliveries == []

    written = desk.lands(desk.start("one", "waiting", about='"k"'))

    assert [delivery.instance for delivery in written.deliveries] == ["one"]


def test_a_message_and_its_wait_in_one_batch_find_each_other(desk: Desk) -> None:
    written = desk.lands(Publish("paid", "k", "1"), desk.start("one", "waiting", about='"k"'))

    assert [delivery.instance for delivery in written.deliveries] == ["one"]


def test_the_oldest_message_goes_to_the_oldest_wait(desk: Desk) -> None:
    for moment, name in enumerate(["first", "second", "third"]):
        desk.now_ms = 1_000 + moment
        waiter(desk, name)

    desk.lands(Publish("paid", "k", "1"), Publish("paid", "k", "2"))

    assert assigned(desk) == [("1", "first"), ("2", "second")]


def test_a_name_or_a_key_that_differs_is_no_match(desk: Desk) -> None:
    waiter(desk, "one", "k")

    desk.lands(Publish("paid", "K", "1"), Publish("paid", "", "2"), Publish("Paid", "k", "3"))

    assert [whose for _, whose in assigned(desk)] == [None, None, None]


def test_several_keys_of_one_batch_are_matched_each_by_itself(desk: Desk) -> None:
    for name in ("a1", "a2", "b1"):
        waiter(desk, name, name[0])

    desk.lands(*(Publish("paid", key, str(number)) for number, key in enumerate("baca")))

    assert assigned(desk) == [("0", "b1"), ("1", "a1"), ("2", None), ("3", "a2")]


@pytest.mark.parametrize("keys", ["ab", "aa"], ids=["two keys", "one key"])
def test_an_instance_that_opens_two_waits_in_one_commit_gets_a_message_for_each(desk: Desk, keys: str) -> None:
    desk.lands(*(Publish("paid", key, str(number)) for number, key in enumerate(keys)))

    written = desk.lands(desk.start("both", "twice", one=f'"{keys[0]}"', two=f'"{keys[1]}"'))

    assert sorted(delivery.payload for delivery in written.deliveries) == ["0", "1"]
    assert len({delivery.wait for delivery in written.deliveries}) == 2


def test_an_instance_that_ends_two_waits_in_one_commit_frees_the_message_of_each(desk: Desk) -> None:
    desk.put("both", "twice", one='"a"', two='"a"')
    desk.lands(Publish("paid", "a", "0"), Publish("paid", "a", "1"))
    waiter(desk, "next", "a")
    waiter(desk, "last", "a")

    desk.lands(desk.order("both", c.Cancel(at_ms=2)))

    assert assigned(desk) == [("0", "next"), ("1", "last")]


def test_a_message_is_consumed_once(desk: Desk) -> None:
    waiter(desk, "one")
    (delivery,) = desk.publish("k").deliveries
    copy = desk.loaded("one")

    desk.lands(deliver(desk, delivery))
    desk.instances["one"], desk.stored["one"] = copy.instance, desk.stored["one"]
    (again,) = desk.write(deliver(desk, delivery)).results

    assert isinstance(again, Refused)
    assert again.reason == "missing"
    assert desk.read("SELECT count(*) FROM message") == [(0,)]


def test_what_was_assigned_and_not_consumed_is_reported_once_and_found_by_every_load(desk: Desk) -> None:
    waiter(desk, "one")
    (delivery,) = desk.publish("k", payload='"x"').deliveries

    later = desk.publish("k", payload='"y"').deliveries

    (posted,) = desk.loaded("one").posted
    assert later == []
    assert (posted.no, posted.wait, posted.payload) == (delivery.message, delivery.wait, '"x"')


def test_a_message_whose_wait_has_gone_is_given_to_the_next_who_waits(desk: Desk) -> None:
    waiter(desk, "one")
    waiter(desk, "two")
    desk.publish("k")

    written = desk.lands(desk.order("one", c.Cancel(at_ms=2)))

    assert [delivery.instance for delivery in written.deliveries] == ["two"]
    assert assigned(desk) == [("1", "two")]


def test_a_message_whose_wait_has_gone_waits_for_the_next_one(desk: Desk) -> None:
    waiter(desk, "one")
    desk.publish("k")

    freed = desk.lands(desk.order("one", c.Send(at_ms=2, name="paid", payload='"sent"')))
    written = desk.lands(desk.start("two", "waiting", about='"k"'))

    assert freed.deliveries == []
    assert [delivery.instance for delivery in written.deliveries] == ["two"]


def test_a_freed_message_goes_before_a_younger_one(desk: Desk) -> None:
    waiter(desk, "one")
    desk.publish("k", payload='"old"')
    desk.publish("k", payload='"young"')
    desk.lands(desk.order("one", c.Cancel(at_ms=2)))

    desk.lands(desk.start("two", "waiting", about='"k"'))

    assert assigned(desk) == [('"old"', "two"), ('"young"', None)]


@pytest.mark.parametrize(("expires_ms", "is_found"), [(999, False), (1_000, False), (1_001, True), (None, True)])
def test_a_message_is_there_until_the_moment_it_expires(desk: Desk, expires_ms: int | None, is_found: bool) -> None:
    desk.publish("k", expires_ms=expires_ms)

    desk.now_ms = 1_000
    written = desk.lands(desk.start("one", "waiting", about='"k"'))

    assert bool(written.deliveries) == is_found


def test_an_expired_message_does_not_stand_in_the_way_of_a_younger_one(desk: Desk) -> None:
    desk.publish("k", payload='"old"', expires_ms=1_000)
    desk.publish("k", payload='"young"')

    waiter(desk, "one")

    assert assigned(desk) == [('"old"', None), ('"young"', "one")]


def test_what_was_assigned_in_time_may_be_consumed_later(desk: Desk) -> None:
    waiter(desk, "one")
    (delivery,) = desk.publish("k", expires_ms=2_000).deliveries

    desk.now_ms = 5_000
    desk.writer.run(Purge(desk.now_ms))
    desk.lands(deliver(desk, delivery))

    assert desk.loaded("one").instance.is_ended


def test_a_message_sent_to_one_instance_is_for_nobody_else(desk: Desk) -> None:
    desk.put("one")
    desk.lands(desk.order("one", c.Send(at_ms=1, name="paid", about="k", payload='"mine"')))

    waiter(desk, "two")

    assert desk.read("SELECT name, key, payload FROM buffered") == [("paid", "k", '"mine"')]
    assert assigned(desk) == []


def test_a_message_thrown_by_a_step_is_published_in_the_step_s_own_commit(desk: Desk) -> None:
    waiter(desk, "one")

    written = desk.lands(desk.start("thrower", "throwing", about='"k"'))

    assert [(delivery.instance, delivery.payload) for delivery in written.deliveries] == [("one", '"k"')]
    assert desk.read("SELECT expires_ms FROM message") == [(desk.now_ms + 500,)]


def test_a_refused_commit_throws_nothing(desk: Desk) -> None:
    waiter(desk, "one")
    desk.put("thrower")

    written = desk.write(desk.start("thrower", "throwing", about='"k"'))

    assert isinstance(written.results[0], Refused)
    assert written.deliveries == []
    assert assigned(desk) == []


# --- against a model --------------------------------------------------------------------------------------------------


@attrs.define
class Model:
    """All of the rule: each batch changes both lists, then their oldest members go together, key by key."""

    waits: dict[str, tuple[str, int, int]] = attrs.field(factory=dict)  # By instance: key, since, number of instance.
    messages: dict[str, tuple[str, int | None]] = attrs.field(factory=dict)  # By payload, oldest first: key, expiry.
    assigned: dict[str, str] = attrs.field(factory=dict)  # Payloads to instances.

    def drop(self, name: str) -> None:
        self.waits.pop(name, None)
        self.assigned = {payload: whose for payload, whose in self.assigned.items() if whose != name}

    def consume(self, payload: str) -> None:
        del self.messages[payload]
        self.drop(self.assigned.pop(payload))

    def match(self, now_ms: int) -> list[tuple[str, str]]:
        pairs = []
        for payload, (key, expires_ms) in self.messages.items():
            taken = set(self.assigned.values())
            free = [(w[1:], name) for name, w in self.waits.items() if w[0] == key and name not in taken]
            if payload not in self.assigned and free and (expires_ms is None or expires_ms > now_ms):
                self.assigned[payload] = min(free)[1]
                pairs.append((payload, self.assigned[payload]))
        return pairs


KEYS = st.sampled_from(["a", "b"])
OPERATIONS = st.one_of(
    st.tuples(st.just("wait"), KEYS),
    st.tuples(st.just("publish"), KEYS, st.sampled_from([None, None, 5, 20])),
    st.tuples(st.sampled_from(["cancel", "send", "consume"]), st.integers(0, 5)),
)
BATCHES = st.lists(st.tuples(st.integers(0, 10), st.lists(OPERATIONS, min_size=1, max_size=6)), max_size=12)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=BATCHES)
def test_matching_follows_the_model_whatever_comes_in_whatever_order(
    new_desk: Callable[[], Desk], batches: list[tuple[int, list[tuple[Any, ...]]]]
) -> None:
    desk, model = new_desk(), Model()
    reported: dict[str, Delivery] = {}
    started = published = 0
    for wait_ms, operations in batches:
        desk.now_ms += wait_ms
        changes: list[Change] = []
        busy: set[str] = set()
        for operation in operations:
            if operation[0] == "wait":
                started += 1
                name = f"i{started}"
                changes.append(desk.start(name, "waiting", about=f'"{operation[1]}"'))
                model.waits[name] = (operation[1], desk.now_ms, started)
                busy.add(name)
            elif operation[0] == "publish":
                published += 1
                expires_ms = None if operation[2] is None else desk.now_ms + operation[2]
                changes.append(Publish("paid", operation[1], str(published), expires_ms))
                model.messages[str(published)] = (operation[1], expires_ms)
            elif (found := _chosen(model, operation, busy)) is not None:
                busy.add(found)
                changes.append(_moved(desk, model, operation[0], found, reported))
        expected = model.match(desk.now_ms)

        written = desk.lands(*changes) if changes else None

        deliveries = [] if written is None else written.deliveries
        assert sorted((d.payload, d.instance) for d in deliveries) == sorted(expected)
        assert dict(assigned(desk)) == {payload: model.assigned.get(payload) for payload in model.messages}
        reported.update({delivery.payload: delivery for delivery in deliveries})
    desk.close()


def _chosen(model: Model, operation: tuple[Any, ...], busy: set[str]) -> str | None:
    """Some instance that still waits, and has no commit in this batch; to consume, one that has a message."""
    names = [name for name in model.waits if name not in busy]
    if operation[0] == "consume":
        names = [name for name in names if name in model.assigned.values()]
    return names[operation[1] % len(names)] if names else None


def _moved(desk: Desk, model: Model, what: str, name: str, reported: dict[str, Delivery]) -> Change:
    if what == "consume":
        payload = next(payload for payload, whose in model.assigned.items() if whose == name)
        model.consume(payload)
        return deliver(desk, reported[payload])
    model.drop(name)
    if what == "cancel":
        return desk.order(name, c.Cancel(at_ms=desk.now_ms))
    return desk.order(name, c.Send(at_ms=desk.now_ms, name="paid", payload='"sent"'))


# --- what it costs ----------------------------------------------------------------------------------------------------


def steps_of(desk: Desk, action: Callable[[], Any]) -> int:
    """Steps of the virtual machine, in hundreds."""
    counted = 0

    def count() -> int:
        nonlocal counted
        counted += 1
        return 0

    desk.writer.connection.set_progress_handler(count, 100)
    action()
    desk.writer.connection.set_progress_handler(None, 0)
    return counted


def crowd(desk: Desk, size: int, key: str) -> None:
    """Many who wait, without the cost of deciding for each. `key` is an SQL expression of the number `n`."""
    waiter(desk, "one", "the first")
    columns = [row[1] for row in desk.read("PRAGMA table_info(instance)")]
    copied = {"no": "n + 1", "id": "'copy-' || n"}
    selected = ", ".join(copied.get(column, f'i."{column}"') for column in columns)
    numbers = f"WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < {size})"
    desk.read(f"{numbers} INSERT INTO instance SELECT {selected} FROM numbers, (SELECT * FROM instance LIMIT 1) i")
    desk.read(
        f"{numbers} INSERT INTO wait SELECT n + 1, 1, 1, 0, 1, 'paid', 'message', 'paid', {key}, NULL, n FROM numbers"
    )
    desk.writer.reopen()


@pytest.mark.slow
def test_publishing_costs_the_same_however_many_wait_for_other_keys(new_desk: Callable[[], Desk]) -> None:
    few, many = new_desk(), new_desk()
    crowd(few, 100, "'key-' || n")
    crowd(many, 100_000, "'key-' || n")

    costs = [steps_of(desk, lambda desk=desk: desk.publish("key-50")) for desk in (few, many)]  # type: ignore[misc]

    assert costs[1] <= costs[0] + 1


@pytest.mark.slow
def test_publishing_costs_the_same_however_many_wait_for_that_very_key(new_desk: Callable[[], Desk]) -> None:
    few, many = new_desk(), new_desk()
    crowd(few, 100, "'k'")
    crowd(many, 10_000, "'k'")

    costs = [steps_of(desk, lambda desk=desk: desk.publish("k")) for desk in (few, many)]  # type: ignore[misc]

    assert costs[1] <= costs[0] + 1


def test_publishing_costs_the_same_however_many_messages_nobody_has_taken(desk: Desk) -> None:
    first = steps_of(desk, lambda: desk.publish("k"))
    desk.lands(*(Publish("paid", "k", "1") for _ in range(1_000)))

    assert steps_of(desk, lambda: desk.publish("k")) <= first + 1


def test_consuming_costs_the_same_however_many_messages_there_are(desk: Desk) -> None:
    waiter(desk, "one")
    waiter(desk, "two")
    first, second = (desk.publish("k").deliveries[0] for _ in range(2))
    quiet = steps_of(desk, lambda: desk.lands(deliver(desk, first)))
    desk.lands(*(Publish("paid", "other", "1") for _ in range(1_000)))

    assert steps_of(desk, lambda: desk.lands(deliver(desk, second))) <= quiet + 1


def plan(desk: Desk, statement: str) -> list[str]:
    """How SQLite would go about it. What is given to a trigger, or as a parameter, counts as unknown."""
    plain = re.sub(r'NEW\."?(\w+)"?|\?', "(SELECT NULL)", statement)
    return [row[3] for row in desk.read(f"EXPLAIN QUERY PLAN {plain}")]


def scans(steps: list[str]) -> list[str]:
    """What is read from end to end, other than what was given or was just made."""
    made = {step.split()[1] for step in steps if step.startswith(("MATERIALIZE", "CO-ROUTINE"))}
    scanned = [step.split()[1] for step in steps if step.startswith("SCAN")]
    return [name for name in scanned if name not in made | {"j", "p", "CONSTANT"}]


def test_no_statement_of_a_batch_reads_a_table_from_end_to_end(desk: Desk) -> None:
    every = [statement for part in parts() for statement in part.statements if "RAISE" not in statement]
    (pairing,) = [s.partition("BEGIN ")[2].removesuffix("; END") for s in statements() if "pair_insert" in s]
    planned = [s for s in [*every, pairing, MATCHED] if "INTO understudy_pair" not in s]

    assert len(planned) > 20
    assert [(statement, scans(plan(desk, statement))) for statement in planned if scans(plan(desk, statement))] == []


def test_waits_and_messages_are_found_by_their_partial_indexes(desk: Desk) -> None:
    (pairing,) = [s.partition("BEGIN ")[2].removesuffix("; END") for s in statements() if "pair_insert" in s]

    steps = plan(desk, pairing)

    assert "SEARCH w USING INDEX wait_message (name=? AND key=?)" in steps
    assert "SEARCH message USING INDEX message_free (name=? AND key=?)" in steps
    assert "SEARCH t USING COVERING INDEX message_assigned (instance=? AND wait=?)" in steps


@pytest.mark.parametrize(
    ("statement", "index"),
    [
        (recovery.DUE, "wait_due"),
        (recovery.NEXT, "wait_due"),
        (recovery.RUNNABLE, "instance_runnable"),
        (recovery.POSTED, "message_assigned"),
        (recovery.EXPIRED, "message_expiry"),
    ],
    ids=["due", "next", "runnable", "with messages", "expired"],
)
def test_the_supervisor_s_questions_are_answered_by_an_index(desk: Desk, statement: str, index: str) -> None:
    steps = plan(desk, statement)

    assert any(index in step for step in steps)
    assert scans(steps) == []
