"""A service that is killed, or stopped and replaced, loses nothing it has acknowledged; and what is lost is found."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from understudy.rehearsal import Rehearsal
from understudy.simulations.book import Book
from understudy.simulations.child import PROCESSES, SUBSCRIBER, Given, Line, Order, entry, journey, nap, parcel
from understudy.simulations.kills import LATEST_KILL_S, LOOPS_OF_A_BOOK, KillReport, draw_loop, kill_loops
from understudy.simulations.lives import Lives
from understudy.subscriptions import Change


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_however_a_service_ends(tmp_path: Path) -> None:
    report = kill_loops(tmp_path, loops=20, seed=1)

    assert report.violations == ()
    assert (report.loops, report.kills + report.stops, report.lost) == (20, 20, 0)
    assert (report.stops, report.acknowledgements > 20) == (4, True)
    assert not (tmp_path / "kills").exists()


@pytest.mark.slow
def test_one_loop_is_run_again_with_those_before_it_on_the_same_file(tmp_path: Path) -> None:
    report = kill_loops(tmp_path, loops=10_000, seed=3, stop_share=0, only=LOOPS_OF_A_BOOK + 1)

    assert (report.loops, report.kills, report.violations) == (2, 2, ())


@pytest.mark.slow
def test_no_life_survives_the_one_who_has_begun_it(tmp_path: Path) -> None:
    with Lives() as lives:
        life = lives.begin(Order("serve", path=str(tmp_path / "a.db")))
        assert lives.listen(lambda: life.has_acknowledged)
        lives.stop(life)

    with pytest.raises(ProcessLookupError):
        os.kill(life.pid, 0)


def test_a_loop_is_drawn_from_the_seed_and_its_number_alone() -> None:
    draws = [draw_loop(7, loop, stop_share=0.2) for loop in range(400)]

    assert draws == [draw_loop(7, loop, stop_share=0.2) for loop in range(400)]
    assert 50 < sum(draw.is_stop for draw in draws) < 110
    assert all(0 <= draw.after_s <= LATEST_KILL_S for draw in draws)
    assert {(draw.role, draw.is_standby) for draw in draws if draw.is_stop} == {
        (role, is_standby) for role in ("owner", "auto") for is_standby in (True, False)
    }
    assert any(draw.is_early for draw in draws)
    assert not any(draw.is_early for draw in draws[::LOOPS_OF_A_BOOK])


def test_a_report_becomes_a_table() -> None:
    numbers = {field.name: 0 for field in attrs.fields(KillReport)}
    report = KillReport(**{**numbers, "loops": 1_200, "seconds": 100.0, "violations": ("seed 1, loop 2: lost",)})  # type: ignore[arg-type]  # All numbers.

    assert not report.ok
    assert dict(report.rows())["kill loops"] == "1,200"
    assert dict(report.rows())["loops/s"] == "12.0"


# --- the book finds what is wrong -------------------------------------------------------------------------------------


class Service:
    """A rehearsal that says what a life says."""

    def __init__(self, folder: Path) -> None:
        self.lines: list[Line] = []
        self.play = Rehearsal(folder, *PROCESSES)
        self.play.subscribe(SUBSCRIBER, self._hear, from_start=True)
        self.path = Path(self.play.path)

    def _hear(self, change: Change) -> None:
        self.lines.append(Line("told", change.instance, number=change.n))

    def said(self) -> list[Line]:
        """Everything since it was last asked for."""
        lines = [*self.lines, *(Line("call", one.instance, one.key, one.attempt) for one in self.play.calls)]
        self.lines.clear()
        return lines


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "service")
    play = made.play
    for process in (journey, nap, entry):
        play.start(process, Given(1), id=f"{process.name}-1")
    for number in (2, 3):
        play.start(parcel, Given(number), id=f"parcel-{number}")
    play.send("parcel-2", "paid", key=2, request_key="parcel-2/paid")
    play.publish("paid", key=3, request_key="parcel-3/paid")
    play.advance("1s")
    yield made
    play.close()


TRUE = (
    Line("start", "journey-1"),
    Line("send", "parcel-2", "parcel-2/paid"),
    Line("publish", "parcel-3", "parcel-3/paid"),
    Line("result", "nap-1", text="completed shipped 1"),
)


def book_of(service: Service, *lines: Line) -> Book:
    book = Book(service.path)
    book.hear([*service.said(), *lines])
    return book


def test_a_book_finds_nothing_where_nothing_is_wrong(service: Service) -> None:
    book = book_of(service, *TRUE)

    assert book.check() == []
    assert book.check_end() == []
    assert (book.lost, book.instances, book.unacknowledged()) == (set(), 5, 4)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (Line("start", "journey-7"), "I8: the acknowledged start of journey-7 is lost"),
        (Line("send", "parcel-2", "other key"), "I8: the acknowledged send of other key is lost"),
        (Line("publish", "parcel-2", "parcel-3/paid"), "I8: the acknowledged publish of parcel-3/paid is lost"),
        (Line("result", "nap-1", text="completed shipped 2"), "I8: the acknowledged result of nap-1 is lost"),
        (Line("call", "nap-1", "nap-1/2", 2), "I3: attempt 2 of nap-1/2 was made, but is not in history"),
        (Line("told", "nap-1", number=9), "I7: of nap-1 the subscriber was told [1, 2, 3, 4, 9], with gaps"),
        (Line("told", "nap-1", number=5), "I7: of nap-1 the subscriber was told 5 commits, more than there are"),
    ],
)
def test_what_was_said_and_is_not_there_is_found(service: Service, line: Line, found: str) -> None:
    book = book_of(service, line)

    assert book.check() == [found]


def test_a_result_whose_handler_was_never_called_is_found(service: Service) -> None:
    book = Book(service.path)
    book.hear([line for line in service.said() if line.key != "nap-1/2"])

    assert book.check() == ["I3: nap-1/2 is completed, but its handler was never called"]


def test_a_file_that_has_gone_back_is_found(service: Service, tmp_path: Path) -> None:
    for suffix in ("", "-wal"):
        shutil.copy(f"{service.path}{suffix}", f"{tmp_path}/older.db{suffix}")
    service.play.start(nap, Given(4), id="nap-4")
    service.play.send("nap-4", "hello")
    book = book_of(service)
    assert book.check() == []

    book.path = tmp_path / "older.db"

    assert "I9: the history of nap-4 had 3 commits, and is no longer what it was" in book.check()


def test_a_commit_of_an_owner_that_was_replaced_is_found(service: Service) -> None:
    book = book_of(service)
    book.fence(2)
    service.play.publish("paid", key=9)
    assert book.check() == ["I10: message 10000000002 was published after epoch 2 had taken over"]

    service.play.start(parcel, Given(4), id="parcel-4")
    book.hear(service.said())

    assert [line for line in book.check() if "committed by epoch 1" in line][:1] == [
        "I10: parcel-4 (seq 19) was committed by epoch 1 after 2 had taken over"
    ]


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("INSERT INTO journal SELECT * FROM journal", "the transaction of entry-1/2 counts 2 times"),
        ("DELETE FROM journal", "the transaction of entry-1/2 is lost"),
        ("INSERT INTO journal VALUES ('entry-9/2', 9)", "the transaction of entry-9/2 counts, its result does not"),
    ],
)
def test_a_transaction_that_does_not_count_once_is_found(service: Service, statement: str, found: str) -> None:
    book = book_of(service)
    system = service.play.node.system
    assert system is not None

    system.writer.connection.execute(statement)

    assert book.check() == [found]


def test_what_the_audit_finds_is_found(service: Service) -> None:
    system = service.play.node.system
    assert system is not None
    system.writer.connection.execute("UPDATE instance SET title = 'another' WHERE id = 'nap-1'")

    found = book_of(service).check()

    assert len(found) == 1
    assert found[0].startswith("the audit says rows nap-1: ")
