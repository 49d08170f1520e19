"""A subscriber gets every commit at least once, in order for each instance, wherever the database is owned."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy import Change, Process, Rejected, Runtime, Unavailable, connect, wait
from understudy.store.writer import Unknown, Writer

if TYPE_CHECKING:
    from tests.process.conftest import World

Eventually = Callable[..., Any]

talk = Process("talk", wait("a"), wait("b"), wait("c"))


class Listener:
    """Writes down what it gets, and raises for the instances that it refuses."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int]] = []
        self.refused: set[str] = set()
        self.refusals = 0

    def __call__(self, change: Change) -> None:
        if change.instance in self.refused:
            self.refusals += 1
            raise ConnectionError(f"no line for {change.instance}")
        self.got.append((change.instance, change.n))

    def of(self, instance: str) -> list[int]:
        return [n for id, n in self.got if id == instance]


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    with Runtime(tmp_path / "a.db", talk) as opened:
        yield opened


def _say(runtime: Runtime, id: str, *messages: str) -> None:
    for message in messages:
        runtime.send(id, message)


# --- across processes -------------------------------------------------------------------------------------------------


def test_a_killed_subscriber_goes_on_from_its_cursor_and_misses_nothing(world: World) -> None:
    chance = random.Random(3)

    for life in range(8):
        child = world.publisher(seed=life)
        time.sleep(chance.uniform(0.01, 0.08))
        child.kill()
    assert world.publisher(seed=99, is_last=True).wait() == 0

    told = world.told()
    first = list(dict.fromkeys(told))
    with world.reads() as reads:
        commits = {id: [record.n for record in reads.history(id)] for id in reads.ids()}
    assert {id: [n for instance, n in first if instance == id] for id in commits} == commits
    # Whatever is told again is told in order again, from where the cursor was.
    for id in commits:
        times = [n for instance, n in told if instance == id]
        assert all(later <= earlier + 1 for earlier, later in pairwise(times)), times


def test_one_of_several_workers_delivers_and_when_it_goes_another_goes_on(
    tmp_path: Path, eventually: Eventually
) -> None:
    first, second = Runtime(tmp_path / "a.db", talk), Runtime(tmp_path / "a.db", talk)
    heard_by_first, heard_by_second = Listener(), Listener()
    with second:
        waiting = second.subscribe("name", heard_by_second)
        delivering = first.subscribe("name", heard_by_first)
        second.start(talk, id="one")
        eventually(lambda: heard_by_first.got == [("one", 1)])

        first.close()
        _say(second, "one", "a", "b")

        eventually(lambda: len(heard_by_second.got) == 2)
        assert second.is_owner
        assert heard_by_second.got == [("one", 2), ("one", 3)]
        eventually(lambda: waiting.cursor == 3)
        assert delivering.cursor == 1


def test_a_new_name_begins_where_it_was_made_also_in_a_client(tmp_path: Path, eventually: Eventually) -> None:
    first, second = Runtime(tmp_path / "a.db", talk), Runtime(tmp_path / "a.db", talk)
    listener = Listener()
    with second:
        first.start(talk, id="before")
        second.subscribe("name", listener)
        first.start(talk, id="after")

        first.close()

        eventually(lambda: listener.got == [("after", 1)])


def test_who_never_owns_the_database_cannot_subscribe(runtime: Runtime) -> None:
    with connect(runtime.path) as client, pytest.raises(Rejected, match="auto"):
        client.subscribe("name", print)


# --- in order, at least once ------------------------------------------------------------------------------------------


def test_a_subscriber_gets_the_commits_of_each_instance_in_their_order(
    runtime: Runtime, eventually: Eventually
) -> None:
    listener = Listener()
    runtime.subscribe("name", listener)

    for number in range(50):
        runtime.start(talk, id=f"{number}")
    for message in ("a", "b", "c"):
        for number in range(50):
            runtime.send(f"{number}", message)

    eventually(lambda: len(listener.got) == 200)
    assert all(listener.of(f"{number}") == [1, 2, 3, 4] for number in range(50))


def test_a_name_goes_on_where_it_has_come_to_and_a_new_one_begins_now_or_at_the_start(
    tmp_path: Path, eventually: Eventually
) -> None:
    old, late, early = Listener(), Listener(), Listener()
    with Runtime(tmp_path / "a.db", talk) as runtime:
        runtime.subscribe("old", old)
        runtime.start(talk, id="one")
        eventually(lambda: old.got == [("one", 1)])
        old.got.clear()

    with Runtime(tmp_path / "a.db", talk) as runtime:
        runtime.subscribe("late", late)
        runtime.subscribe("early", early, from_start=True)
        runtime.subscribe("old", old)
        runtime.send("one", "a")

        eventually(lambda: early.got == [("one", 1), ("one", 2)])
        eventually(lambda: late.got == old.got == [("one", 2)])


def test_what_was_delivered_and_not_noted_is_delivered_again_in_order(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    listener = Listener()
    failures = iter([True, True])

    def fail_twice(self: Writer, operation: Any) -> Any:
        if type(operation).__name__ == "MoveCursor" and next(failures, False):
            raise Unknown("the disk is away")
        return run(self, operation)

    run = Writer.run
    subscription = runtime.subscribe("name", listener, backoff="1ms")
    monkeypatch.setattr(Writer, "run", fail_twice)
    runtime.start(talk, id="one")
    _eventually_say(runtime, "one", "a", "b")

    eventually(lambda: subscription.cursor == 3)
    assert list(dict.fromkeys(listener.got)) == [("one", 1), ("one", 2), ("one", 3)]


# --- deliveries that fail ---------------------------------------------------------------------------------------------


def test_a_failing_delivery_holds_back_its_own_instance_only(runtime: Runtime, eventually: Eventually) -> None:
    listener = Listener()
    listener.refused.add("bad")
    runtime.subscribe("name", listener, tries=1_000, backoff="1ms")

    for id in ("bad", "good"):
        runtime.start(talk, id=id)
    _say(runtime, "bad", "a", "b")
    _say(runtime, "good", "a", "b")

    eventually(lambda: listener.of("good") == [1, 2, 3])
    assert listener.of("bad") == []
    listener.refused.clear()
    eventually(lambda: listener.of("bad") == [1, 2, 3])


def test_after_so_many_tries_it_waits_for_an_operator_and_goes_on_when_told_to(
    runtime: Runtime, eventually: Eventually
) -> None:
    listener = Listener()
    listener.refused.add("bad")
    runtime.subscribe("name", listener, tries=3, backoff="1ms")
    runtime.start(talk, id="bad")
    eventually(lambda: [hold[4:6] for hold in runtime.node.reads.held("name")] == [(3, None)])
    _say(runtime, "bad", "a", "b", "c")

    assert listener.refusals == 3
    assert "ConnectionError: no line for bad" in runtime.node.reads.held("name")[0][6]
    listener.refused.clear()
    runtime.redeliver("name", "bad")

    eventually(lambda: listener.of("bad") == [1, 2, 3, 4])
    eventually(lambda: runtime.node.reads.held("name") == [])
    with pytest.raises(Rejected, match="nothing"):
        runtime.redeliver("name", "bad")


def test_a_held_delivery_is_held_in_the_next_life_too(tmp_path: Path, eventually: Eventually) -> None:
    listener = Listener()
    listener.refused.add("bad")
    with Runtime(tmp_path / "a.db", talk) as runtime:
        runtime.subscribe("name", listener, tries=2, backoff="1ms")
        runtime.start(talk, id="bad")
        eventually(lambda: listener.refusals == 2)
        runtime.start(talk, id="good")
        eventually(lambda: listener.of("good") == [1])

    listener.refused.clear()
    with Runtime(tmp_path / "a.db", talk) as runtime:
        runtime.subscribe("name", listener, tries=2, backoff="1ms")
        runtime.send("bad", "a")
        runtime.send("good", "a")
        eventually(lambda: listener.of("good") == [1, 2])
        assert listener.of("bad") == []

        runtime.redeliver("name", "bad")
        eventually(lambda: listener.of("bad") == [1, 2])


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), ValueError("\ud800\0 is no text")])
def test_whatever_a_subscriber_raises_is_a_failed_delivery(
    runtime: Runtime, error: BaseException, eventually: Eventually
) -> None:
    got: list[int] = []

    def receive(change: Change) -> None:
        got.append(change.n)
        if len(got) == 1:
            raise error

    runtime.subscribe("name", receive, backoff="1ms")
    runtime.start(talk, id="one")
    runtime.send("one", "a")

    eventually(lambda: got == [1, 1, 2])


def _eventually_say(runtime: Runtime, id: str, *messages: str) -> None:
    for message in messages:
        while True:
            try:
                runtime.send(id, message, request_key=f"{id}/{message}")
                break
            except Unavailable:
                time.sleep(0.005)
