"""Several runtimes on one file, in one process or in several: who owns it, who finds whom, and who takes over."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from understudy import (
    AlreadyOpen,
    Closed,
    Conflict,
    Limits,
    NotOurs,
    Process,
    Runtime,
    Unavailable,
    connect,
    sleep,
    task,
    wait,
)
from understudy.store.ownership import Address, OwnerFile

if TYPE_CHECKING:
    from tests.process.conftest import World

Eventually = Callable[..., Any]


@task(into="word")
def greet() -> str:
    return "hello"


@task
def repeat(word: str) -> str:
    return f"{word} again"


greeting = Process("greeting", greet, wait("go"), repeat, gives=repeat)


def test_a_second_owner_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", greeting, role="owner") as first:
        with pytest.raises(AlreadyOpen, match="auto"):
            Runtime(tmp_path / "a.db", greeting, role="owner")

        assert first.start(greeting, id="one").id == "one"


def test_a_second_runtime_in_the_same_process_is_a_client_of_the_first(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", greeting) as first, Runtime(tmp_path / "a.db", greeting) as second:
        assert (first.is_owner, second.is_owner) == (True, False)

        one = second.start(greeting, id="one")
        first.wait_until("one", lambda state: state.is_waiting_for("go"))
        second.send("one", "go")

        assert one.result() == first.result("one") == "hello again"


def test_when_the_first_closes_the_second_takes_over_with_all_that_was_done(
    tmp_path: Path, eventually: Eventually
) -> None:
    first = Runtime(tmp_path / "a.db", greeting)
    with Runtime(tmp_path / "a.db", greeting) as second:
        one = first.start(greeting, id="one")

        first.close()

        second.send("one", "go")
        assert second.result("one") == "hello again"
        assert second.is_owner
        with pytest.raises(Closed):
            one.send("go")


def test_calls_that_wait_for_the_next_owner_are_answered_by_it(tmp_path: Path, eventually: Eventually) -> None:
    @task
    def linger() -> None:
        begun.set()
        go_on.wait(30)

    begun, go_on = threading.Event(), threading.Event()
    first = Runtime(tmp_path / "a.db", Process("lingering", linger))
    with Runtime(tmp_path / "a.db", greeting) as second:
        first.start("lingering")
        begun.wait(30)
        closing = threading.Thread(target=first.close)
        closing.start()
        eventually(lambda: not second.is_owner and first.node.is_closed, "the first runtime closes")
        answered: list[str] = []
        calls = [
            threading.Thread(target=lambda n=n: answered.append(second.start(greeting, id=f"{n}").id)) for n in "abc"
        ]
        for call in calls:
            call.start()

        go_on.set()

        for thread in (*calls, closing):
            thread.join(30)
        assert sorted(answered) == ["a", "b", "c"]


def test_a_client_needs_an_owner(tmp_path: Path) -> None:
    Runtime(tmp_path / "a.db", greeting).close()

    with pytest.raises(Unavailable, match="nobody owns"):
        connect(tmp_path / "a.db")
    with pytest.raises(Unavailable, match="no database"):
        connect(tmp_path / "other.db")
    assert not (tmp_path / "other.db-owner").exists()


def test_a_client_finds_the_next_owner_by_itself(tmp_path: Path) -> None:
    first = Runtime(tmp_path / "a.db", greeting)
    with connect(tmp_path / "a.db", greeting) as client:
        client.start(greeting, id="one")
        first.close()

        with pytest.raises(Unavailable, match="nobody owns"):
            client.send("one", "go")
        with Runtime(tmp_path / "a.db", greeting):
            client.send("one", "go")

            assert client.result("one") == "hello again"


def test_whoever_waits_for_a_result_hears_of_it_from_the_next_owner(tmp_path: Path, eventually: Eventually) -> None:
    first = Runtime(tmp_path / "a.db", greeting)
    with Runtime(tmp_path / "a.db", greeting) as second, Runtime(tmp_path / "a.db", greeting) as third:
        first.start(greeting, id="one")
        results: list[str] = []
        waiting = threading.Thread(target=lambda: results.append(third.result("one", timeout="50s")))
        waiting.start()

        first.close()
        second.send("one", "go")

        waiting.join(50)
        assert results == ["hello again"]


@pytest.mark.parametrize("name", ["plain.db", "späß ☂ %41.db", "a b?c#d.db"])
def test_the_file_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)

    with Runtime(name, greeting) as first, Runtime(tmp_path / name, greeting) as second:
        second.start(greeting, id="one")

        assert (first.is_owner, second.is_owner) == (True, False)
        assert first.get("one").id == "one"
    assert (tmp_path / name).exists()


def test_a_symbolic_link_leads_to_the_same_database(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "real.db")

    with Runtime(tmp_path / "real.db", greeting) as first, Runtime(tmp_path / "link.db", greeting) as second:
        assert (first.is_owner, second.is_owner) == (True, False)
        with pytest.raises(AlreadyOpen):
            Runtime(tmp_path / "link.db", greeting, role="owner")


def test_what_a_dead_owner_left_in_the_owner_file_stops_nobody(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", greeting) as first:
        first.start(greeting, id="one")
    with OwnerFile.of(tmp_path / "a.db") as owner_file:
        owner_file.hold(9)
        owner_file.publish(Address(port=1, secret="x", pid=os.getpid(), epoch=9))

    with Runtime(tmp_path / "a.db", greeting, role="owner") as second:
        assert second.get("one").id == "one"


def test_an_owner_file_full_of_rubbish_stops_nobody(tmp_path: Path) -> None:
    Runtime(tmp_path / "a.db", greeting).close()
    (tmp_path / "a.db-owner").write_bytes(os.urandom(700))

    with Runtime(tmp_path / "a.db", greeting) as first, Runtime(tmp_path / "a.db", greeting) as second:
        assert (first.is_owner, second.is_owner) == (True, False)


def test_an_owner_whose_file_was_deleted_is_found_again_after_its_next_beat(
    tmp_path: Path, eventually: Eventually
) -> None:
    with Runtime(tmp_path / "a.db", greeting, limits=Limits(lease_ms=200)) as first:
        (tmp_path / "a.db-owner").unlink()
        eventually((tmp_path / "a.db-owner").exists, "the owner file")

        with connect(tmp_path / "a.db", greeting) as client:
            client.start(greeting, id="one")

        assert first.get("one").id == "one"


def test_an_owner_whose_file_was_deleted_gives_way_to_who_has_taken_over_meanwhile(
    world: World, eventually: Eventually
) -> None:
    old = world.worker(lease_ms=60_000)
    old.ask("start", id="one", process="parcel", number=1)
    Path(f"{world.path}-owner").unlink()
    new = world.worker(lease_ms=60_000)

    assert new.ask("is_owner")
    assert old.ask("send", id="one", message="paid") is True
    assert old.ask("result", id="one") == new.ask("result", id="one") == "shipped with receipt 1"
    assert not old.ask("is_owner")
    world.audit()


def test_of_many_who_come_at_once_one_owns_and_all_serve(tmp_path: Path) -> None:
    opened: list[Runtime] = []
    barrier = threading.Barrier(8)

    def come() -> None:
        barrier.wait()
        opened.append(Runtime(tmp_path / "a.db", greeting))

    threads = [threading.Thread(target=come) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sum(runtime.is_owner for runtime in opened) == 1
    for number, runtime in enumerate(opened):
        assert runtime.start(greeting, id=f"{number}").id == f"{number}"
    for runtime in opened:  # The owner may go first: whoever is left takes over.
        assert len(runtime.list()) == 8
        runtime.close()


def test_whoever_closes_while_it_takes_over_leaves_nothing_behind(tmp_path: Path, eventually: Eventually) -> None:
    before = threading.active_count()

    for number in range(10):
        runtimes = [Runtime(tmp_path / "a.db", greeting) for _ in range(3)]
        closing = [threading.Thread(target=runtime.close) for runtime in runtimes]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(60)
        with Runtime(tmp_path / "a.db", greeting, role="owner") as last:
            last.start(greeting, id=f"{number}")

    with Runtime(tmp_path / "a.db", greeting) as runtime:
        assert len(runtime.list()) == 10
    eventually(lambda: threading.active_count() <= before, "all threads have ended")


def test_another_programs_database_is_left_as_it_is(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute("CREATE TABLE theirs (x)")
    database.close()

    for role in ("auto", "owner"):
        with pytest.raises(NotOurs):
            Runtime(tmp_path / "a.db", greeting, role=role)


def test_a_definition_that_cannot_be_deployed_leaves_nothing_open(tmp_path: Path, monkeypatch: Any) -> None:
    before = threading.active_count()

    def refuse(_deploy: object, _connection: object) -> None:
        raise Conflict("version 1 has other content")

    monkeypatch.setattr("understudy.store.operations.Deploy.run", refuse)
    with pytest.raises(Conflict):
        Runtime(tmp_path / "a.db", greeting)
    monkeypatch.undo()

    with Runtime(tmp_path / "a.db", greeting, role="owner"):
        pass
    assert threading.active_count() <= before + 1


def test_a_takeover_does_not_wait_for_deployments(tmp_path: Path, monkeypatch: Any) -> None:
    """What was deployed once is in the store: a start finds it there, whoever owns the file by then."""
    first = Runtime(tmp_path / "a.db", greeting)
    with Runtime(tmp_path / "a.db", greeting) as second:

        def hang(_deploy: object, _connection: object) -> None:
            raise AssertionError("deployed again")

        monkeypatch.setattr("understudy.store.operations.Deploy.run", hang)
        first.close()

        assert second.start(greeting, id="one").id == "one"
        assert second.start("greeting", id="two").id == "two"


def test_the_newest_of_a_name_is_the_same_for_every_owner(tmp_path: Path) -> None:
    older, newer = Process("clock", sleep("1h")), Process("clock", sleep("2h"))
    Runtime(tmp_path / "a.db", older).close()
    Runtime(tmp_path / "a.db", newer).close()

    with Runtime(tmp_path / "a.db", older):  # Back to the older one, with two versions in the store.
        with connect(tmp_path / "a.db") as client:
            by_name = client.start("clock").id
        with connect(tmp_path / "a.db", older) as client:
            by_content = client.start(older).id
            summaries = {summary.id: summary.process_version for summary in client.list()}

    assert (summaries[by_name], summaries[by_content]) == (2, 1)
