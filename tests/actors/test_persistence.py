"""The actors at the file, step by step: the one that writes in its four states, and the one that reads.

Everything runs on a stage, and time passes only when a test says so. The database is real.
"""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy import Process, Runtime, task
from understudy.actors import persistence as module
from understudy.actors.clock import VirtualClock
from understudy.actors.directory import Directory
from understudy.actors.loader import Hold, LoaderActor, Resume
from understudy.actors.messages import (
    Barrier,
    Committed,
    Forget,
    Lend,
    NotCommitted,
    Order,
    Returned,
    Run,
    Unsure,
    Wake,
    Write,
)
from understudy.actors.persistence import Health, PersistenceActor
from understudy.actors.pool import HANG, SteppingPool
from understudy.actors.pool import Returned as Gave
from understudy.actors.promise import Promise
from understudy.actors.stepping import Stage
from understudy.model import commands as c
from understudy.model.apply import fold
from understudy.model.decide import decide
from understudy.model.definition import Definition, Edge, Graph
from understudy.model.errors import Conflict, Damaged, Fenced, OutcomeUnknown, Rejected, TimedOut, Unavailable
from understudy.model.instance import Instance, facts
from understudy.model.kinds import End, Start, Task
from understudy.store.batch import WRITE
from understudy.store.commit import Answered, Commit, Stored, pack
from understudy.store.connection import Settings, open_reader
from understudy.store.loading import Loaded, load
from understudy.store.operations import Beat, Deploy
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Delivery, Publish, Writer

DEFINITION = Definition(
    name="work",
    nodes=(Start(id="start"), Task(id="task", handler="task"), End(id="end")),
    edges=(Edge(id="a", source="start", target="task"), Edge(id="b", source="task", target="end")),
    open_inputs=True,
)
_TASKS = tuple(Task(id=f"task_{n}", handler="task") for n in range(20))
LONG = Definition(
    name="long",
    nodes=(Start(id="start"), *_TASKS),
    edges=tuple(
        Edge(id=f"to {target.id}", source=source.id, target=target.id)
        for source, target in pairwise((Start(id="start"), *_TASKS))
    ),
)
TASK = 2  # The number of the first opening in an instance of it.


class Faulty:
    """A connection that raises at a statement: before it is executed, or after it has done its work."""

    def __init__(self, connection: Any, error: Exception, at: str, landed: bool) -> None:
        self._connection = connection
        self._error = error
        self._at = at
        self._landed = landed

    def execute(self, statement: str, *parameters: Any) -> Any:
        if statement == self._at and not self._landed:
            raise self._error
        answer = self._connection.execute(statement, *parameters)
        if statement == self._at:
            raise self._error
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Sender:
    """Whoever waits for a commit, and what it was told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def tell(self, message: Any) -> None:
        self.told.append(message)

    @property
    def kinds(self) -> list[type]:
        return [type(message) for message in self.told]


class Office:
    """A persistence actor on a stage, and everything around it."""

    def __init__(self, path: str) -> None:
        self.stage = Stage()
        self.clock = VirtualClock(1_000)
        self.pool = SteppingPool(self.stage, self.clock)
        self.writer = Writer(path, Settings(durability="relaxed"))
        self.writer.take_over("test")
        no, version = self.writer.run(Deploy(DEFINITION))
        self.graph = Graph(DEFINITION, version=version, no=no)
        no, version = self.writer.run(Deploy(LONG))
        self.long = Graph(LONG, version=version, no=no)
        self.healths: list[Health] = []
        self.landed: list[str] = []
        self.deliveries: list[Delivery] = []
        self.actor = PersistenceActor(
            self.writer,
            clock=self.clock,
            pool=self.pool,
            committed=self._committed,
            changed=lambda health, _reason: self.healths.append(health),
            dispatcher=self.stage.dispatcher("persistence"),
        )
        self.ref = self.actor.actor_ref
        self.actor._start_actor_loop()

    def _committed(self, landed: list[str], deliveries: list[Delivery]) -> None:
        self.landed += landed
        self.deliveries += deliveries

    # --- what is written ---

    def start(self, id: str, **variables: str) -> Commit:
        command = c.Start(at_ms=1, id=id, given_digest="d", variables=variables)
        instance = Instance()
        decision = decide(instance, self.graph, command)
        assert decision.entry is not None
        return pack(instance, Stored(), [decision.entry], epoch=self.writer.epoch, activation=1, requests=[])

    def commit(self, commit: Commit) -> Sender:
        sender = Sender()
        self.ref.tell(Write(commit, sender))
        return sender

    def publish(self, payload: str = "1", *, requests: list[Answered] | None = None) -> Promise[Any]:
        answer: Promise[Any] = Promise(driver=self.stage)
        self.ref.tell(Write(Publish("paid", "", payload, None, requests or []), answer=answer))
        return answer

    def run(self, operation: Any) -> Promise[Any]:
        answer: Promise[Any] = Promise(driver=self.stage)
        self.ref.tell(Run(operation, answer))
        return answer

    def lend(self, handler: Callable[[Any], Any], *, attempt: int = 1, timeout_ms: int = 1_000) -> list[Any]:
        done: list[Any] = []
        self.ref.tell(Lend(1, TASK, attempt, timeout_ms, handler, done.append))
        return done

    # --- what happens ---

    def play(self) -> None:
        self.stage.run_until_idle()

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.play()

    def break_down(self, error: Exception | None = None, *, at: str = WRITE, landed: bool = False) -> None:
        """Until the next connection."""
        error = error or sqlite3.OperationalError("disk I/O error")
        self.writer._connection = Faulty(self.writer.connection, error, at, landed)

    def usurp(self) -> None:
        self.read("UPDATE owner SET epoch = epoch + 1")

    def read(self, statement: str) -> list[Any]:
        connection = sqlite3.connect(self.writer.path, isolation_level=None)
        try:
            return connection.execute(statement).fetchall()
        finally:
            connection.close()

    def ids(self) -> list[str]:
        return [id for (id,) in self.read("SELECT id FROM instance ORDER BY no")]


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    office = Office(str(tmp_path / "a.db"))
    yield office
    office.writer.close()


# --- open -------------------------------------------------------------------------------------------------------------


def test_everything_that_waits_is_written_as_one_batch(office: Office) -> None:
    senders = [office.commit(office.start(f"i{n}")) for n in range(20)]
    answer = office.publish()

    office.play()

    assert office.actor.batches == 1
    assert [sender.kinds for sender in senders] == [[Committed]] * 20
    assert answer.get()["message"] > 0
    assert office.landed == [f"i{n}" for n in range(20)]


def test_a_sender_is_told_what_is_stored_of_its_instance(office: Office) -> None:
    sender = office.commit(office.start("one"))

    office.play()

    (committed,) = sender.told
    assert (committed.stored.no, committed.stored.version, committed.stored.head) == (1, 1, 1)


def test_nobody_is_told_before_the_file_has_it(office: Office) -> None:
    sender = Sender()
    seen: list[list[str]] = []
    sender.tell = lambda message: seen.append(office.ids())  # type: ignore[method-assign]
    office.ref.tell(Write(office.start("one"), sender))

    office.play()

    assert seen == [["one"]]


def test_a_batch_has_a_limit_in_number_and_in_size(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TOGETHER", 3)
    for n in range(7):
        office.commit(office.start(f"i{n}"))
    office.play()
    by_number = office.actor.batches

    monkeypatch.setattr(module, "MOST_CHARACTERS", 25_000)
    for _ in range(3):
        office.publish("x" * 10_000)
    large = office.publish("x" * 90_000)
    office.play()

    assert by_number == 3
    assert office.actor.batches - by_number == 3  # Two, one, and the one that is too large for company.
    assert large.get()["message"] > 0


def test_a_refused_commit_is_told_why_and_the_others_land(office: Office) -> None:
    first, again, other = (office.commit(office.start(id)) for id in ("one", "one", "two"))

    office.play()

    assert first.kinds == other.kinds == [Committed]
    (refused,) = again.told
    assert type(refused) is NotCommitted
    assert refused.refused.reason == "duplicate"
    assert office.landed == ["one", "two"]


def test_a_publication_repeated_under_its_key_is_answered_and_not_repeated(office: Office) -> None:
    keyed = [Answered("key", "digest", "{}", 9_000)]

    first, again = office.publish(requests=keyed), office.publish(requests=keyed)
    other = office.publish(requests=[Answered("key", "other", "{}", 9_000)])
    office.play()

    assert first.get()["message"] > 0
    assert again.get() == {"message": 0, "repeated": True}
    assert isinstance(other.error, Conflict)
    assert office.read("SELECT count(*) FROM message") == [(1,)]


def test_a_refused_publication_is_an_error_for_its_publisher(office: Office) -> None:
    answer = office.publish("a\0b")

    office.play()

    assert isinstance(answer.error, Rejected)


def test_operations_have_their_turn_between_batches(office: Office) -> None:
    sender = office.commit(office.start("one"))
    answer = office.run(Beat())
    broken = office.run(Misfit())

    office.play()

    assert sender.kinds == [Committed]
    assert answer.get() is None
    assert isinstance(broken.error, Rejected)
    assert office.read("SELECT beat FROM owner") == [(1,)]
    assert office.actor.health is Health.OPEN


class Misfit:
    def run(self, connection: Any) -> None:
        connection.execute("INSERT INTO token (instance, id) VALUES (999, 1)")


def test_an_instance_that_has_left_is_forgotten(office: Office) -> None:
    office.commit(office.start("one"))
    office.play()
    known = dict(office.writer._versions)

    office.ref.tell(Forget(1))
    office.play()

    assert (known, office.writer._versions) == ({1: 1}, {})


# --- degraded ---------------------------------------------------------------------------------------------------------


def test_after_a_failure_of_the_machine_every_activation_of_the_batch_is_unsure(office: Office) -> None:
    office.break_down()
    senders = [office.commit(office.start(f"i{n}")) for n in range(3)]
    answer = office.publish()

    office.play()

    assert [sender.kinds for sender in senders] == [[Unsure]] * 3
    assert isinstance(answer.error, OutcomeUnknown)
    assert office.healths == [Health.DEGRADED]
    assert "disk I/O error" in office.actor.reason


def test_what_waits_meanwhile_is_written_once_the_file_is_open_again(office: Office) -> None:
    office.break_down()
    office.commit(office.start("lost"))
    office.play()

    sender, answer, done = office.commit(office.start("one")), office.publish(), office.run(Beat())
    office.play()
    while_degraded = (sender.kinds, answer.done, done.done, office.ids())
    office.advance(module.FIRST_BACKOFF_MS)

    assert while_degraded == ([], False, False, [])
    assert sender.kinds == [Committed]
    assert answer.get()["message"] > 0
    assert done.done
    assert office.ids() == ["one"]
    assert office.healths == [Health.DEGRADED, Health.OPEN]


def test_a_commit_that_landed_and_raised_is_not_applied_twice(office: Office) -> None:
    commit = office.start("one")
    office.break_down(landed=True)
    sender = office.commit(commit)
    office.play()
    office.advance(module.FIRST_BACKOFF_MS)

    again = office.commit(commit)
    office.play()

    assert sender.kinds == [Unsure]
    assert again.kinds == [NotCommitted]
    assert office.read("SELECT version FROM instance") == [(1,)]
    assert office.read("SELECT count(*) FROM history") == [(1,)]


def test_who_watches_an_instance_of_unknown_outcome_is_told_to_look_once_it_can_be_read(office: Office) -> None:
    office.break_down(landed=True)
    office.commit(office.start("one"))
    office.play()
    early = list(office.landed)

    office.advance(module.FIRST_BACKOFF_MS)

    assert early == []
    assert office.landed == ["one"]


def test_whoever_waits_for_a_result_has_it_although_its_commit_raised(tmp_path: Path) -> None:
    """The last commit of the instance: no other one will wake the caller."""
    finish = threading.Event()

    @task
    def last(x: int) -> int:
        assert finish.wait(30)
        return x

    process = Process("process", last, takes={"x": int}, gives=last)
    results: list[int] = []
    with Runtime(str(tmp_path / "a.db"), process, role="owner") as runtime:
        handle = runtime.start(process, {"x": 7})
        caller = threading.Thread(target=lambda: results.append(handle.result(timeout=None)), daemon=True)
        caller.start()
        system = runtime.node.system
        assert system is not None
        error = sqlite3.OperationalError("disk I/O error")
        system.writer._connection = Faulty(system.writer.connection, error, WRITE, landed=True)

        finish.set()
        caller.join(30)

    assert results == [7]


def test_it_tries_again_and_again_with_growing_patience(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []

    def unreachable() -> None:
        tried.append(office.clock.now_ms())
        raise Unavailable("the disk is gone")

    monkeypatch.setattr(office.writer, "reopen", unreachable)
    office.break_down()
    office.publish()
    office.play()

    office_advance_by_alarms(office, 10)

    pauses = [after - before for before, after in zip([1_000, *tried], tried, strict=False)]
    assert pauses[:4] == [50, 100, 200, 400]
    assert pauses[-1] == module.LONGEST_BACKOFF_MS
    assert office.healths == [Health.DEGRADED]
    assert office.actor.reason == "the disk is gone"


def office_advance_by_alarms(office: Office, number: int) -> None:
    for _ in range(number):
        due_ms = office.clock.next_due_ms()
        assert due_ms is not None
        office.advance(due_ms - office.clock.now_ms())


def test_a_connection_that_opens_and_cannot_write_is_no_recovery(office: Office) -> None:
    office.break_down()
    office.publish()
    office.play()
    holder = sqlite3.connect(office.writer.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    probe = office.writer.probe

    def impatient() -> None:
        office.writer.connection.execute("PRAGMA busy_timeout = 0")
        probe()

    office.writer.probe = impatient  # type: ignore[method-assign]

    office.advance(module.FIRST_BACKOFF_MS)
    still = office.actor.health
    holder.close()
    office.advance(2 * module.FIRST_BACKOFF_MS)

    assert still is Health.DEGRADED
    assert office.actor.health is Health.OPEN


def test_patience_is_short_again_after_a_recovery(office: Office) -> None:
    for _ in range(3):
        office.break_down()
        office.publish()
        office.play()

        office.advance(module.FIRST_BACKOFF_MS)

        assert office.actor.health is Health.OPEN


@pytest.mark.parametrize("landed", [False, True], ids=["before", "after"])
def test_an_operation_of_unknown_outcome_is_run_again(office: Office, landed: bool) -> None:
    office.break_down(at="COMMIT", landed=landed)
    answer = office.run(Deploy(Definition(name="other", nodes=(Start(id="start"),), edges=())))
    office.play()
    early = answer.done

    office.advance(module.FIRST_BACKOFF_MS)

    assert not early
    assert answer.get()[1] == 1
    assert office.read("SELECT count(*) FROM definition WHERE name = 'other'") == [(1,)]


def test_messages_matched_by_a_batch_of_unknown_outcome_are_found_in_the_store(office: Office) -> None:
    """Nothing was delivered: that is the sweep's work, which reads them from there."""
    office.break_down(landed=True)
    office.publish()
    office.play()

    office.advance(module.FIRST_BACKOFF_MS)

    assert office.deliveries == []
    assert office.read("SELECT count(*) FROM message") == [(1,)]


class Owner:
    """What an instance's actor does with its commits, as far as the writer is concerned."""

    def __init__(self, office: Office, id: str) -> None:
        self.office = office
        self.id = id
        self.instance, self.stored = Instance(), Stored()
        self.in_flight: Commit | None = None
        self.acknowledged = 0

    def step(self) -> None:
        if self.in_flight is not None or self.instance.is_ended:
            return
        command: c.AnyCommand = c.Start(at_ms=1, id=self.id, given_digest="d", variables={})
        if self.instance.exists:
            token = next(iter(self.instance.tokens.values()))
            command = c.CompleteTask(at_ms=1, token=token.id, task=token.task, attempt=token.attempt)
        decision = decide(self.instance, self.office.long, command)
        assert decision.entry is not None
        self.in_flight = pack(
            self.instance, self.stored, [decision.entry], epoch=self.office.writer.epoch, activation=1, requests=[]
        )
        self.office.ref.tell(Write(self.in_flight, self))

    def tell(self, message: Any) -> None:
        assert self.in_flight is not None
        if isinstance(message, Committed):
            self.stored = message.stored
            self.acknowledged = message.stored.version
            self.in_flight = None
        else:
            assert isinstance(message, Unsure), message
            self.in_flight = None
            self.instance = Instance()  # Until the store can be read.

    def read(self) -> None:
        """The successor begins with what the store holds."""
        found = load(self.office.writer.connection, [self.id], lambda _no: self.office.long).get(self.id)
        assert not isinstance(found, Damaged), found
        self.instance, self.stored = (Instance(), Stored()) if found is None else (found.instance, found.stored)


FAULTS = st.sampled_from(["", "", "before", "after", "locked", "full"])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds=st.lists(st.tuples(FAULTS, st.lists(st.integers(0, 4), min_size=1, max_size=5)), max_size=15))
def test_whatever_fails_whenever_every_step_is_taken_once_and_nothing_acknowledged_is_lost(
    tmp_path: Path, rounds: list[tuple[str, list[int]]]
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
        office = Office(f"{folder}/a.db")
        owners = [Owner(office, f"i{n}") for n in range(5)]
        for fault, chosen in rounds:
            if fault == "full":
                (pages,) = office.read("PRAGMA page_count")[0]
                office.writer.connection.execute(f"PRAGMA max_page_count = {pages}")
            elif fault:
                text = "database is locked" if fault == "locked" else "disk I/O error"
                office.break_down(sqlite3.OperationalError(text), landed=fault == "after")
            for number in chosen:
                owners[number].step()
            office.play()
            office.advance(module.LONGEST_BACKOFF_MS)
            for owner in owners:
                owner.read()
                assert owner.stored.version >= owner.acknowledged
        for owner in owners:
            _examine(office, owner)
        office.writer.close()


def _examine(office: Office, owner: Owner) -> None:
    """Its history is dense, chained, and leads to what it is: each step once."""
    readers = Readers(office.writer.path, lambda: open_reader(office.writer.path))
    history = Reads(readers).check_chain(owner.id)
    readers.close()
    state = fold(entry for record in history for entry in record.entries)
    state.settle()
    assert len(history) == owner.stored.version
    assert facts(state) == facts(owner.instance)
    assert sum(len(record.entries) for record in history) == len(history)


# --- fenced and damaged -----------------------------------------------------------------------------------------------

FINAL = [
    pytest.param(lambda office: office.usurp(), Health.FENCED, Fenced, id="fenced"),
    pytest.param(
        lambda office: office.break_down(sqlite3.DatabaseError("database disk image is malformed")),
        Health.DAMAGED,
        Damaged,
        id="damaged",
    ),
]


@pytest.mark.parametrize(("trouble", "health", "error"), FINAL)
def test_fenced_and_damaged_are_final_and_told_to_everybody(
    office: Office, trouble: Callable[[Office], None], health: Health, error: type[Exception]
) -> None:
    trouble(office)
    sender, answer = office.commit(office.start("one")), office.publish()
    operation = office.run(Beat())
    office.play()
    later, later_answer = office.commit(office.start("two")), office.publish()
    later_operation = office.run(Beat())
    office.play()
    office.advance(100_000)

    assert office.healths == [health]
    assert sender.kinds == later.kinds == [Unsure]
    for promise in (answer, operation, later_answer, later_operation):
        assert isinstance(promise.error, error)
    assert office.ids() == []


def test_a_lost_epoch_is_noticed_when_the_file_is_opened_again(office: Office) -> None:
    office.break_down()
    office.publish()
    office.play()
    waiting = office.commit(office.start("one"))
    office.usurp()

    office.advance(module.FIRST_BACKOFF_MS)

    assert office.healths == [Health.DEGRADED, Health.FENCED]
    assert waiting.kinds == [Unsure]
    assert office.ids() == []


def test_a_file_that_is_damaged_is_noticed_when_it_is_opened_again(office: Office) -> None:
    office.break_down()
    office.publish()
    office.play()
    office.writer.close()
    Path(office.writer.path).write_bytes(b"garbage" * 1_000)

    office.advance(module.FIRST_BACKOFF_MS)

    assert office.healths == [Health.DEGRADED, Health.DAMAGED]


@pytest.mark.parametrize("at", ["BEGIN IMMEDIATE", "COMMIT"])
def test_an_operation_that_finds_the_file_damaged_is_final_too(office: Office, at: str) -> None:
    office.break_down(sqlite3.DatabaseError("database disk image is malformed"), at=at)

    answer = office.run(Beat())
    office.play()

    assert office.healths == [Health.DAMAGED]
    assert isinstance(answer.error, Damaged)


# --- the end ----------------------------------------------------------------------------------------------------------


def test_whoever_waits_is_told_when_the_runtime_stops(office: Office) -> None:
    office.break_down()
    office.publish()
    office.play()
    sender, answer, operation = office.commit(office.start("one")), office.publish(), office.run(Beat())

    office.ref.stop()

    assert sender.kinds == [Unsure]
    assert isinstance(answer.error, Unavailable)
    assert isinstance(operation.error, Unavailable)


def test_stopping_empties_the_log_into_the_file(office: Office) -> None:
    office.commit(office.start("one"))
    office.play()

    office.ref.stop()

    assert not Path(f"{office.writer.path}-wal").exists()
    assert office.ids() == ["one"]


def test_a_mistake_of_ours_leaves_nobody_waiting(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    office.break_down(ZeroDivisionError("a bug"))
    senders = [office.commit(office.start(f"i{n}")) for n in range(2)]
    answer = office.publish()

    office.play()

    assert [sender.kinds for sender in senders] == [[Unsure]] * 2
    assert "please report it" in str(answer.error)
    assert office.healths == [Health.DAMAGED]


# --- loans ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def lender(office: Office) -> Office:
    """With an instance whose first attempt is out, and a table of the user's."""
    office.commit(office.start("one"))
    office.play()
    office.read("CREATE TABLE mine (text TEXT)")
    return office


def insert(text: str, result: Any = "1") -> Callable[[Any], Any]:
    def handler(connection: Any) -> Any:
        connection.execute("INSERT INTO mine VALUES (?)", (text,))
        if isinstance(result, Exception):
            raise result
        return result

    return handler


def test_a_loan_is_one_commit_of_the_user_s_rows_and_the_record(lender: Office) -> None:
    done = lender.lend(insert("x", '"result"'))

    lender.play()

    assert done == ['"result"']
    assert lender.read("SELECT text FROM mine") == [("x",)]
    assert lender.read("SELECT instance, task, attempt, result FROM work") == [(1, TASK, 1, '"result"')]


def test_commits_wait_while_the_connection_is_lent_and_go_on_after(lender: Office) -> None:
    done = lender.lend(lambda _connection: HANG)
    lender.play()
    sender, operation = lender.commit(lender.start("two")), lender.run(Beat())
    lender.play()
    lender.advance(400)
    meanwhile = (sender.kinds, operation.done)

    lender.advance(600)

    assert meanwhile == ([], False)
    assert sender.kinds == [Committed]
    assert operation.done
    assert [type(result) for result in done] == [TimedOut]
    assert lender.actor.lent_ms == 1_000


def test_a_handler_that_raises_is_rolled_back(lender: Office) -> None:
    error = OSError("no")

    done = lender.lend(insert("x", error))
    lender.play()

    assert done == [error]
    assert lender.read("SELECT count(*) FROM mine") == [(0,)]
    assert lender.read("SELECT count(*) FROM work") == [(0,)]


def test_a_handler_beyond_its_limit_is_rolled_back_and_loses_its_connection(lender: Office) -> None:
    kept: list[Any] = []

    def handler(connection: Any) -> Any:
        connection.execute("INSERT INTO mine VALUES ('x')")
        kept.append(connection)
        return HANG

    done = lender.lend(handler)
    lender.play()
    lender.advance(1_000)

    assert [type(result) for result in done] == [TimedOut]
    with pytest.raises(Rejected, match="over"):
        kept[0].execute("INSERT INTO mine VALUES ('late')")
    assert lender.read("SELECT count(*) FROM mine") == [(0,)]


def test_what_a_handler_says_after_its_limit_is_not_heard(lender: Office) -> None:
    done = lender.lend(lambda _connection: HANG)
    lender.play()
    assert lender.actor._loan is not None
    loan = lender.actor._loan[0]
    lender.advance(1_000)

    lender.ref.tell(Returned(loan, Gave("late")))
    lender.play()

    assert [type(result) for result in done] == [TimedOut]
    assert lender.read("SELECT count(*) FROM work") == [(0,)]


@pytest.mark.parametrize("landed", [False, True], ids=["before", "after"])
def test_a_loan_of_unknown_outcome_is_settled_by_its_record(lender: Office, landed: bool) -> None:
    """If it has landed the handler must not run again; if it has not, it must."""
    ran: list[bool] = []

    def handler(connection: Any) -> str:
        ran.append(True)
        connection.execute("INSERT INTO mine VALUES ('x')")
        return str(len(ran))

    lender.break_down(at="COMMIT", landed=landed)
    done = lender.lend(handler)
    lender.play()
    early = list(done)

    lender.advance(module.FIRST_BACKOFF_MS)

    assert early == []
    assert done == (["1"] if landed else ["2"])
    assert lender.read("SELECT text FROM mine") == [("x",)]
    assert lender.read("SELECT count(*) FROM work") == [(1,)]


def test_a_loan_that_the_file_does_not_survive_is_answered_with_the_rest(lender: Office) -> None:
    lender.break_down(sqlite3.DatabaseError("database disk image is malformed"), at="COMMIT")

    done = lender.lend(insert("x"))
    lender.play()

    assert lender.healths == [Health.DAMAGED]
    assert [type(result) for result in done] == [Damaged]


def test_an_attempt_that_nobody_awaits_is_not_made(lender: Office) -> None:
    done = lender.lend(insert("x"), attempt=2)

    lender.play()

    assert [type(result) for result in done] == [Conflict]
    assert lender.read("SELECT count(*) FROM mine") == [(0,)]


def test_an_attempt_that_was_made_in_another_life_is_answered_from_its_record(lender: Office) -> None:
    lender.lend(insert("x", '"first"'))
    lender.play()

    done = lender.lend(insert("again", '"second"'))
    lender.play()

    assert done == ['"first"']
    assert lender.read("SELECT text FROM mine") == [("x",)]


def test_a_failure_at_the_start_of_a_loan_only_delays_it(lender: Office) -> None:
    lender.break_down(at="BEGIN IMMEDIATE")

    done = lender.lend(insert("x"))
    lender.play()
    early = list(done)
    lender.advance(module.FIRST_BACKOFF_MS)

    assert early == []
    assert done == ["1"]


def test_a_fenced_owner_lends_nothing(lender: Office) -> None:
    lender.usurp()

    done = lender.lend(insert("x"))
    lender.play()

    assert lender.healths == [Health.FENCED]
    assert [type(result) for result in done] == [Fenced]


def test_when_the_pool_has_stopped_an_attempt_stays_outstanding_and_the_writer_free(lender: Office) -> None:
    lender.pool.stop(0)

    done = lender.lend(insert("x"))
    sender = lender.commit(lender.start("two"))
    lender.play()

    assert done == []
    assert sender.kinds == [Committed]


def test_stopping_takes_the_connection_back(lender: Office) -> None:
    kept: list[Any] = []

    def handler(connection: Any) -> Any:
        connection.execute("INSERT INTO mine VALUES ('x')")
        kept.append(connection)
        return HANG

    done = lender.lend(handler)
    lender.play()

    lender.ref.stop()

    assert done == []
    with pytest.raises(Rejected, match="over"):
        kept[0].execute("INSERT INTO mine VALUES ('late')")
    assert lender.read("SELECT count(*) FROM mine") == [(0,)]


# --- reading ----------------------------------------------------------------------------------------------------------


class Library:
    """A loader on a stage, with a directory in which activations are only noted."""

    def __init__(self, office: Office, *, patient: bool = True) -> None:
        self.office = office
        self.database = Exchangeable(office.writer)
        self.directory = Directory(resident_limit=100)
        self.activated: dict[str, Loaded | None] = {}
        self.told: list[tuple[str, Any]] = []
        self.loader = LoaderActor(
            self.database,
            Definitions(office.graph),  # type: ignore[arg-type]  # Only `graph` is used.
            self.directory,
            clock=office.clock if patient else None,
            dispatcher=office.stage.dispatcher("reading"),
        )
        self.ref = self.loader.actor_ref
        self.loader._start_actor_loop()
        self.directory.connect(self._activate, self.ref.tell, lambda: None)

    def _activate(self, name: str, loaded: Loaded | None, *_others: Any) -> Any:
        self.activated[name] = loaded
        told = self.told

        class Ref:
            actor_stopped = type("Flag", (), {"is_set": staticmethod(lambda: False)})

            def tell(self, message: Any) -> None:
                told.append((name, message))

        return Ref()

    def order(self, name: str) -> Promise[Any]:
        answer: Promise[Any] = Promise(driver=self.office.stage)
        self.directory.tell(name, Order(c.Pause(at_ms=1), answer))
        return answer


class Exchangeable:
    """The loader's database, which a test may break."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.database = "library"
        self.error: Exception | None = None
        self.statements = 0

    def connection(self) -> Any:
        self.statements += 1
        if self.error is not None:
            raise self.error
        return self._writer.connection


class Definitions:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def graph(self, _no: int) -> Graph:
        return self._graph


@pytest.fixture
def library(office: Office) -> Library:
    for name in ("one", "two"):
        office.commit(office.start(name))
    office.play()
    return Library(office)


def test_all_who_wait_to_be_activated_are_read_together(library: Library) -> None:
    for name in ("one", "two", "nobody"):
        library.directory.tell(name, Wake())

    library.office.play()

    assert library.database.statements == 1
    assert library.activated["nobody"] is None
    assert isinstance(library.activated["one"], Loaded)
    assert isinstance(library.activated["two"], Loaded)


def test_while_the_writer_is_degraded_nothing_is_read(library: Library) -> None:
    passed: list[bool] = []
    library.ref.tell(Hold())
    library.directory.tell("one", Wake())
    library.ref.tell(Barrier(lambda: passed.append(True)))
    library.office.play()
    held = (dict(library.activated), list(passed))

    library.ref.tell(Resume())
    library.office.play()

    assert held == ({}, [])
    assert set(library.activated) == {"one"}
    assert passed == [True]


def test_a_damaged_instance_is_set_aside_and_the_others_are_read(
    library: Library, caplog: pytest.LogCaptureFixture
) -> None:
    library.office.read("UPDATE token SET tries = 7 WHERE instance = 1")

    damaged, whole = library.order("one"), library.order("two")
    library.office.play()

    assert isinstance(damaged.error, Damaged)
    assert not whole.done
    assert set(library.activated) == {"two"}
    assert "one is set aside" in caplog.text


def test_when_reading_fails_callers_are_told_and_what_has_no_caller_is_tried_again(library: Library) -> None:
    library.database.error = sqlite3.OperationalError("disk I/O error")
    answer = library.order("one")
    library.directory.tell("one", Order(c.FireTimer(at_ms=1, wait=3)))
    library.directory.tell("two", Wake())
    library.office.play()
    failed = answer.error

    library.office.advance(50)
    library.database.error = None
    library.office.advance(100)

    assert isinstance(failed, Unavailable)
    assert set(library.activated) == {"one", "two"}
    assert [(name, type(message)) for name, message in library.told] == [("one", Order), ("two", Wake)]


def test_a_loader_without_a_clock_does_not_try_again(office: Office) -> None:
    library = Library(office, patient=False)
    library.database.error = sqlite3.OperationalError("disk I/O error")
    library.directory.tell("one", Wake())

    office.play()
    library.database.error = None
    office.advance(100_000)

    assert library.activated == {}
