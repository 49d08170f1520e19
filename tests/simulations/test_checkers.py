"""Each checker is silent about a world in which all is well, and names what was forged in one where it is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
import pytest

import understudy.simulations.checkers  # noqa: F401  # Fills the table.
from understudy.actors.messages import Order
from understudy.actors.persistence import Health
from understudy.model import events as e
from understudy.model.commands import FireTimer
from understudy.model.invariants import Violation
from understudy.process import Process
from understudy.simulations.checkers import effects, poison
from understudy.simulations.checkers.evidence import Evidence, Executing, Held, Landing, Report, Row, Wait
from understudy.simulations.keeping import Keeper
from understudy.simulations.ledger import Line
from understudy.simulations.memory import Died
from understudy.simulations.operations import Operation
from understudy.simulations.plugins import CHECKERS, Checker
from understudy.simulations.subscriber import Delivery, Subscriber
from understudy.simulations.world import World
from understudy.steps import sleep, wait
from understudy.store.operations import Purge
from understudy.store.writer import Delivery as Matched
from understudy.store.writer import Written
from understudy.subscriptions import Change
from understudy.tasks import Retry, task

SECRET = "open-sesame"


@task(into="receipt", retry=Retry(2, first="100ms"))
def charge(n: int) -> str:
    if n == 13:
        raise ValueError("bad luck")
    return f"receipt-{n}"


@task
def ship(receipt: str) -> str:
    return receipt


ORDER = Process("order", charge, wait("paid", key="n", timeout="2h"), sleep("1s"), ship, takes={"n": int, "note": str})


@attrs.frozen
class Lived:
    """A world that has come to rest, and who has looked on."""

    world: World
    checkers: dict[str, Checker]

    @property
    def evidence(self) -> Evidence:
        return Evidence.of(self.world)

    def found(self, checker: str) -> list[Violation]:
        one = self.checkers[checker]
        told = one.find(self.world)
        return [each if isinstance(each, Violation) else Violation(one.id, each) for each in told]

    def forge(self, statement: str) -> None:
        """Change the database from outside."""
        self.world.peek(statement)
        self.evidence.forget()

    def operation(self, call: str, instance: str) -> Operation:
        """The one that was acknowledged."""
        of_kind = (each for each in self.world.operations if (each.call, each.instance) == (call, instance))
        return next(each for each in of_kind if each.is_acknowledged)

    def pretend(self, call: str, instance: str, answer: Any, **fields: Any) -> Operation:
        """An operation that there never was."""
        steps, number = self.world.steps, len(self.world.operations) + 1
        given: dict[str, Any] = {"parameters": {}, "invoked": steps, "returned": steps, "client": "ann", **fields}
        operation = Operation(number=number, call=call, instance=instance, answer=answer, **given)
        self.world.operations.append(operation)
        return operation


def begun() -> Lived:
    world = World("checkers")
    checkers = {name: checker() for name, checker in CHECKERS.items()}
    for checker in checkers.values():
        checker.watch(world)
    world.play(ORDER)
    world.secrets.append(SECRET)
    return Lived(world, checkers)


def started(world: World, name: str, n: int) -> None:
    world.clients[0].start("order", name, {"n": str(n), "note": f'"{SECRET}"'})
    world.rest()


@pytest.fixture
def lived() -> Iterator[Lived]:
    """Something of everything: messages of both kinds, orders of operators, a crash, reads, and a subscriber."""
    lived = begun()
    world = lived.world
    keeper = Keeper(world)
    node = world.node("a")
    keeper.keep(node)
    Subscriber(world, "mail")
    ann = world.client("ann")
    for number, name in enumerate(("done", "sent", "waits", "cancelled"), 1):
        started(world, name, number)
    started(world, "stuck", 13)
    ann.call("publish", "", {"name": "paid", "about": "1", "key": "p1"})
    ann.call("publish", "", {"name": "nobody", "about": "", "key": "p2"})
    ann.call("send", "sent", {"id": "sent", "name": "paid", "key": "s1"})
    ann.call("send", "waits", {"id": "waits", "name": "news"})
    ann.call("pause", "waits", {"id": "waits", "key": "o1"})
    ann.call("cancel", "cancelled", {"id": "cancelled", "key": "o2"})
    world.rest()
    node.kill("crash")
    world.rest()
    ann.call("resume", "waits", {"id": "waits", "key": "o3"})
    ann.call("resolve", "stuck", {"id": "stuck", "how": "skip", "result": '"r"', "key": "o4"})
    world.rest()
    for name in ("done", "waits", "nowhere"):
        ann.call("read", name, {})
    world.settle()
    try:
        yield lived
    finally:
        world.close()


def test_a_world_in_which_all_is_well_is_found_to_be_so(lived: Lived) -> None:
    found = {name: lived.found(name) for name in lived.checkers}

    assert found == {name: [] for name in CHECKERS}
    assert lived.evidence.instances["done"].outcome == "completed"
    assert all(operation.returned is not None for operation in lived.world.operations)


# --- what was forged, and who must see it -----------------------------------------------------------------------------


def line_of(lived: Lived, handler: str) -> Line:
    return next(line for line in lived.world.ledger if line.handler == handler)


def relined(lived: Lived, old: Line, *new: Line) -> None:
    lines = lived.world.ledger.lines
    place = lines.index(old)
    lines[place : place + 1] = new


def change_line(handler: str, **changes: Any) -> Callable[[Lived], None]:
    def forge(lived: Lived) -> None:
        line = line_of(lived, handler)
        relined(lived, line, msgspec.structs.replace(line, **changes))

    return forge


def add_row(lived: Lived, instance: str, *events: e.AnyEvent, epoch: int = 2, **fields: Any) -> None:
    """A commit that was never made, behind all others."""
    rows = lived.evidence.histories[instance]
    last, step = rows[-1], lived.world.steps
    landing = Landing(step, 0, 0, "a.2", epoch, 2)
    given = {"seq": 1_000, "version": last.version + 1, "epoch": epoch, "landing": landing, **fields}
    entries = [e.Entry(last.at_ms, given.pop("cause", "forged"), list(events), key=given.pop("key", ""))]
    row = msgspec.structs.replace(last, entries=entries, digest="forged", **given)
    rows.append(row)
    lived.evidence.rows.append(row)


def change_row(lived: Lived, place: int, **changes: Any) -> Row:
    rows = lived.evidence.rows
    rows[place] = msgspec.structs.replace(rows[place], **changes)
    return rows[place]


def lose_in_life(lived: Lived) -> None:
    line = line_of(lived, "charge")
    add_row(lived, line.instance, e.AttemptLost(effects_token(lived, line), line.attempt), epoch=line.epoch)


def effects_token(lived: Lived, line: Line) -> int:
    opened = (event for _, _, event in lived.evidence.events(line.instance) if type(event) is e.TaskOpened)
    return next(event.token for event in opened if f"{line.instance}/{event.task}" == line.key)


def given_to_another(lived: Lived) -> None:
    checker: Any = lived.checkers["Effects"]
    checker._given = {((key, attempt + 1), value): step for ((key, attempt), value), step in checker._given.items()}


def give_too_late(lived: Lived) -> None:
    checker: Any = lived.checkers["Effects"]
    checker._given = dict.fromkeys(checker._given, lived.world.steps)


EFFECTS = {
    "is done by commit 2, but was never made": lambda lived: relined(lived, line_of(lived, "charge")),
    "but was never made": change_line("ship", had_effect=False),
    "before commit 1 of step": change_line("charge", step=0),
    "was called at step 3, and no commit has ordered it": change_line("charge", key="nobody/9", step=3),
    "but was made at step 99999": change_line("charge", step=99_999),
    "with a result that it had not given by then": given_to_another,
    "that it had not given by then": give_too_late,
    "was called at steps": lambda lived: relined(lived, line_of(lived, "ship"), *[line_of(lived, "ship")] * 2),
    "in the life that has called it": lose_in_life,
    "is out, but was never made": lambda lived: lived.evidence.executing.append(Executing("waits", 1, 77, 1)),
}


def fire_ahead(lived: Lived) -> None:
    owner = lived.world.owner
    assert owner is not None
    owner.system.directory.tell("waits", Order(FireTimer(at_ms=owner.clock.now_ms() + 5, wait=1)))


def hand_over_late(lived: Lived) -> None:
    lived.world.peek("INSERT INTO message VALUES (999, 'paid', '3', 'null', 1, NULL, NULL)")
    for listener in lived.world.on_written:
        listener(lived.world.owner, [], Written([], [Matched("waits", 999, 3, "null")]))  # type: ignore[arg-type]


def unfire(lived: Lived) -> None:
    timers: Any = lived.checkers["Timers"]
    timers._fired.clear()


TIMERS = {
    "is still open": lambda lived: lived.evidence.waits.append(Wait("waits", 9, 1, "timer", "", "", 1)),
    "which nobody has fired": unfire,
    "was fired 5 ms ahead of its node's clock": fire_ahead,
    "message 999 was given to wait 3 after its time": hand_over_late,
}


def deliveries(lived: Lived) -> list[Delivery]:
    found: list[Delivery] = lived.world.subscribers[0].deliveries
    return found


def swap(lived: Lived) -> None:
    """Tell of the second commit of an instance before the first."""
    told = deliveries(lived)
    first, second = (
        next(place for place, one in enumerate(told) if (one.instance, one.n) == ("done", n)) for n in (1, 2)
    )
    told[first], told[second] = told[second], told[first]


def hold_back(lived: Lived, tries: int, due_ms: int | None) -> None:
    """One delivery is missing, and held as the subscriber's failure would have left it."""
    gone = deliveries(lived).pop()
    lived.evidence.held.append(Held("mail", gone.instance, gone.seq, tries, due_ms))


DELIVERIES = {
    "has never taken commit": lambda lived: deliveries(lived).pop(),
    "and had taken 0 of it before": swap,
    "which is not in history": lambda lived: change_delivery(lived, seq=999),
    "which was committed at step": lambda lived: change_delivery(lived, step=0),
    "has never begun": lambda lived: setattr(lived.world.subscribers[0], "begin", None),
    "; its cursor is at": lambda lived: change_delivery(lived, is_taken=False, place=-1),
    "never taken": lambda lived: hold_back(lived, tries=1, due_ms=None),
    "taken commit": lambda lived: hold_back(lived, tries=1, due_ms=1),
}


def change_delivery(lived: Lived, *, place: int = 0, **changes: Any) -> None:
    told = deliveries(lived)
    told[place] = msgspec.structs.replace(told[place], **changes)


def change_operation(call: str, instance: str, **changes: Any) -> Callable[[Lived], None]:
    def forge(lived: Lived) -> None:
        operation = lived.operation(call, instance)
        for name, value in changes.items():
            setattr(operation, name, value)

    return forge


def purge_too_much(lived: Lived) -> None:
    purge = Purge(1)
    for writing in lived.world.on_writing:
        writing(lived.world.owner, (purge,))  # type: ignore[arg-type]
    lived.forge("DELETE FROM message")
    for ran in lived.world.on_ran:
        ran(lived.world.owner, purge)  # type: ignore[arg-type]


def use_again(lived: Lived) -> None:
    used = next(event for _, _, event in lived.evidence.events("done") if type(event) is e.WaitConsumed)
    add_row(lived, "done", used)


def keep_used(lived: Lived) -> None:
    used = next(event for _, _, event in lived.evidence.events("done") if type(event) is e.WaitConsumed)
    lived.forge(f"INSERT INTO message VALUES ({used.message}, 'paid', '1', 'null', NULL, NULL, NULL)")


ACKNOWLEDGED = {
    "there is no such instance": lambda lived: lived.pretend("start", "gone", {"new": True}),
    "it runs order": change_operation("start", "done", parameters={"process": "other", "variables": {}}),
    "not with {'n': '7'}": change_operation("start", "done", parameters={"process": "order", "variables": {"n": "7"}}),
    "commit 1 was not written before step": change_operation("start", "done", returned=0),
    "no entry of its history has the key 'nope'": change_operation("send", "sent", key="nope"),
    "it was never paused": lambda lived: lived.pretend("pause", "done", {}),
    "it was never cancelled": lambda lived: lived.pretend("cancel", "done", {}),
    "incident 7 was not settled, not retried": lambda lived: lived.pretend(
        "resolve", "stuck", {"incident": 7, "how": "retry"}
    ),
    "is neither there nor was it used": lambda lived: lived.forge("DELETE FROM message WHERE name = 'nobody'"),
    "it was not written by then": change_operation("publish", "", returned=0),
    "1 messages lost for '' were published, and": lambda lived: lived.pretend(
        "publish", "", {"message": 0}, parameters={"name": "lost"}
    ),
    "definition 9 is not there": lambda lived: lived.pretend("deploy", "", {"no": 9}),
    "it has no cursor": lambda lived: lived.pretend("subscribe", "", None, parameters={"subscriber": "nobody"}),
    "and now there is no such instance": lambda lived: lived.pretend(
        "read", "gone", {"version": 3, "status": "running", "outcome": None}
    ),
    "version 99 was read, and now it is at": lambda lived: lived.pretend(
        "read", "done", {"version": 99, "status": "running", "outcome": None}
    ),
    "it had ended as failed, and now it is completed": lambda lived: lived.pretend(
        "read", "done", {"version": 1, "status": "ended", "outcome": "failed"}
    ),
    "under the key 's1' is not kept": lambda lived: lived.forge("DELETE FROM request WHERE key = 's1'"),
    "but under its key stands": lambda lived: lived.forge("UPDATE request SET answer = '{}' WHERE key = 's1'"),
    "2 times send news was acknowledged, and 1 are": lambda lived: lived.pretend(
        "send", "waits", {}, parameters={"name": "news"}
    ),
    "1 times send news was asked for, and 2 are": lambda lived: add_row(
        lived, "waits", e.MessageBuffered(99, "news", "", "null"), cause="send news"
    ),
    "2 starts were told that they are the first": lambda lived: lived.pretend(
        "start", "done", {"new": True}, parameters={"process": "order", "variables": {}}
    ),
    "was used 2 times": use_again,
    "was used, and is still there": keep_used,
    "3 messages are there or were used, but only 2": lambda lived: lived.forge(
        "INSERT INTO message VALUES (999, 'x', '', 'null', NULL, NULL, NULL)"
    ),
    "1 messages lost for '' were published, and 0 are": lambda lived: add_row(
        lived, "waits", e.MessageThrown(1, "lost", "", "null")
    ),
    "has purged messages": purge_too_much,
}


def read(version: int, outcome: str | None = None) -> dict[str, Any]:
    return {"version": version, "status": "ended" if outcome else "running", "outcome": outcome}


def read_backwards(lived: Lived) -> None:
    lived.pretend("read", "waits", read(2))
    lived.pretend("read", "waits", read(1), client="bob")


def end_otherwise(lived: Lived) -> None:
    version = lived.evidence.instances["done"].version
    lived.pretend("read", "done", read(version, "failed"))


def read_too_early(lived: Lived) -> None:
    lived.pretend("read", "waits", read(lived.evidence.instances["waits"].version), invoked=1, returned=2)


def miss_own_order(lived: Lived) -> None:
    lived.pretend("read", "waits", read(2))


FORWARD = {
    "has found version 1, after version": read_backwards,
    "has found it failed, after it was known to have ended as completed": end_otherwise,
    "before it was committed": read_too_early,
    "has found version 2, after version": miss_own_order,
}


def report(lived: Lived, version: int, digest: str) -> None:
    lived.evidence.reports.append(Report("done", version, digest, 1, 1))


COMMITTERS = {
    "version 1 was committed at step 1, after version": lambda lived: report(
        lived, 1, lived.evidence.histories["done"][0].digest
    ),
    "version 99, committed at step 1, is gone": lambda lived: report(lived, 99, "x"),
    "is gone or another one now": lambda lived: change_row(lived, 0, digest="another"),
    "nobody in this world has written version 1": lambda lived: change_row(lived, 0, landing=None),
    "epoch 1 has committed version 1 after 2 began": lambda lived: change_row(
        lived, 0, landing=Landing(1, 0, 0, "a.1", 1, 2)
    ),
    "version 7 follows version": lambda lived: change_row(lived, 0, version=7),
    "comes before commit": lambda lived: change_row(lived, 0, epoch=9),
}


def order_nonsense(lived: Lived) -> None:
    lived.pretend("read", "waits", read(0))


def leave_work(lived: Lived) -> None:
    owner = lived.world.owner
    assert owner is not None
    owner.post(lambda: None, label="left over")


def run_on(lived: Lived) -> None:
    owner = lived.world.owner
    assert owner is not None
    owner.pool._begun["waits/1/1"] = None  # type: ignore[assignment]


def degrade(lived: Lived) -> None:
    owner = lived.world.owner
    assert owner is not None
    owner.system.health, owner.system.reason = Health.DEGRADED, "disk full"


def forget_to_recover(lived: Lived) -> None:
    owner = lived.world.owner
    assert owner is not None
    owner.system.services.is_recovered = False


REST = {
    "the first is left over": leave_work,
    "1 handlers run": run_on,
    "is degraded: disk full": degrade,
    "has not finished its recovery": forget_to_recover,
    "no node is up at the end": lambda lived: lived.world.nodes[0].pause(),
    "could go on by itself, and stands still": lambda lived: lived.forge(
        "UPDATE instance SET runnable = 1 WHERE id = 'waits'"
    ),
    "was given to wait 3, and is not used": lambda lived: lived.forge(
        "UPDATE message SET wait = 3, instance = (SELECT no FROM instance WHERE id = 'waits')"
    ),
    "was never answered": lambda lived: lived.pretend("send", "waits", None, returned=None),
    "has got no answer but Unavailable, and was not repeated": lambda lived: lived.pretend(
        "start", "gone", None, error="Unavailable"
    ),
    "has got no answer but Died": lambda lived: lived.pretend(
        "start", "gone", None, error="Died", returned=None, is_unknown=True
    ),
}


def raise_incident(lived: Lived) -> None:
    add_row(lived, "waits", e.IncidentRaised(99, 1, "error", f"it said {SECRET}"))


def log_it(lived: Lived) -> None:
    logging.getLogger("understudy.actors").debug("all is %s", SECRET)


def title_it(lived: Lived) -> None:
    lived.forge(f"UPDATE instance SET title = '{SECRET}' WHERE id = 'waits'")


SECRETS = {
    "beside the users' values": raise_incident,
    "a secret stands in instance.title": title_it,
    "a secret stands in request.answer": lambda lived: lived.forge(f"UPDATE request SET answer = '{SECRET}'"),
    "has logged a secret: 'all is %s'": log_it,
    "was told (Rejected)": change_operation("read", "nowhere", error="Rejected", reason=f"no {SECRET}"),
}

FORGERIES: dict[str, dict[str, Any]] = {
    "Effects": EFFECTS,
    "Timers": TIMERS,
    "Deliveries": DELIVERIES,
    "Acknowledged": ACKNOWLEDGED,
    "Forward": FORWARD,
    "OneCommitter": COMMITTERS,
    "Linear": {"no order explains": order_nonsense},
    "AtRest": REST,
    "Secrets": SECRETS,
    "Audited": {"1 commits belong to no instance": lambda lived: lived.forge(
        "INSERT INTO history SELECT 999, 0, 999, 1, 0, at_ms, epoch, events, digest FROM history WHERE seq = 1"
    )},
}  # fmt: skip


ELSEWHERE = {"Probed", "Typed"}  # Those have tests of their own.


def test_every_checker_is_seen_to_fail() -> None:
    assert set(FORGERIES) == set(CHECKERS) - ELSEWHERE


@pytest.mark.parametrize(("checker", "words"), [(name, words) for name, each in FORGERIES.items() for words in each])
def test_each_checker_names_what_was_forged(lived: Lived, checker: str, words: str) -> None:
    assert lived.found(checker) == []

    FORGERIES[checker][words](lived)

    assert [found for found in lived.found(checker) if words in found.message] != []


def test_a_delivery_may_be_missing_while_it_is_held_for_an_operator_or_for_its_time(lived: Lived) -> None:
    hold_back(lived, tries=5, due_ms=None)
    assert lived.found("Deliveries") == []

    hold_back(lived, tries=1, due_ms=lived.world.time.now_ms + 1)
    assert lived.found("Deliveries") == []


# --- what the world shows ---------------------------------------------------------------------------------------------


def test_a_commit_that_landed_and_was_never_reported_is_dated_all_the_same() -> None:
    lived = begun()
    world = lived.world
    keeper = Keeper(world)
    keeper.keep(world.node("a"))
    ann = world.client("ann")
    world.rest()

    def lands_and_dies(statement: str, run: Callable[[], Any]) -> Any:
        if not statement.startswith("INSERT INTO temp.") or world.lives > 1:
            return run()
        run()
        assert world.owner is not None
        world.doom(world.owner, "crash")
        raise Died

    world.tap(lands_and_dies)
    ann.start("order", "done", {"n": "1", "note": '""'})
    world.settle()

    first = lived.evidence.histories["done"][0]
    assert (first.version, first.epoch) == (1, 1)
    assert first.landing is not None
    assert first.landing.life == "a.1"
    assert (1, "done") not in [(each.version, each.instance) for each in lived.evidence.reports]
    assert {name: lived.found(name) for name in lived.checkers} == {name: [] for name in CHECKERS}
    world.close()


def test_an_operation_of_a_replaced_owner_is_seen_at_once(lived: Lived) -> None:
    world = lived.world
    assert world.owner is not None
    world.highest_epoch += 1

    world.ran(world.owner, Purge(1))

    assert [str(violation) for violation in world.violations] == [
        "I10: epoch 2 has carried out Purge after 3 was granted"
    ]


def test_evidence_is_read_anew_when_the_world_goes_on(lived: Lived) -> None:
    before = len(lived.evidence.rows)

    lived.world.clients[0].start("order", "more", {"n": "6", "note": '""'})
    lived.world.rest()

    assert len(lived.evidence.rows) > before
    assert "more" in lived.evidence.instances


def test_what_was_ordered_is_told_by_history_alone(lived: Lived) -> None:
    orders = effects.Orders(lived.evidence)

    assert sorted(orders.ordered) == sorted({(line.key, line.attempt) for line in lived.world.ledger})
    assert {key.split("/")[0] for (_, (key, _), _, _) in orders.results} == {"done", "sent", "waits", "cancelled"}


def test_a_logger_is_given_back_as_it_was(lived: Lived) -> None:
    logger = logging.getLogger("understudy")
    assert not logger.propagate

    for job in lived.world.on_close:
        job()

    assert logger.propagate
    assert logger.level == logging.NOTSET
    lived.world.on_close.clear()


# --- poison -----------------------------------------------------------------------------------------------------------


def test_poison_that_shows_and_delays_nobody_is_well(lived: Lived) -> None:
    lived.world.clients[0].call("cancel", "waits", {"id": "waits"})
    lived.world.rest()

    assert list(poison.poisoned(lived.evidence, {"stuck"}, usual_ms=60_000, timeout_ms=0)) == []


def test_poison_that_nobody_sees_or_that_delays_others_is_named(lived: Lived) -> None:
    found = list(poison.poisoned(lived.evidence, {"done", "nowhere"}, usual_ms=0, timeout_ms=900))

    assert "I15 done: it is poison, and no incident shows it" in found
    assert "I15 nowhere: the poison was never started" in found
    assert "I15 waits: it is healthy, and has not ended" in found
    assert any(words.startswith("I15 sent: it took ") for words in found)


# --- subscribers ------------------------------------------------------------------------------------------------------


def followed(*, failing: float = 0.0, tries: int = 5, receive: Callable[[Change], object] | None = None) -> Lived:
    lived = begun()
    world = lived.world
    Subscriber(world, "mail", receive, tries=tries, failing=failing)
    Keeper(world).keep(world.node("a"))
    world.client("ann")
    return lived


def fates(lived: Lived) -> list[tuple[int, bool, bool]]:
    return [(each.seq, each.is_first, each.is_taken) for each in deliveries(lived)]


def test_a_subscriber_hears_of_every_commit_once_when_nothing_fails() -> None:
    lived = followed()

    started(lived.world, "one", 1)
    lived.world.settle()

    assert fates(lived) == [(row.seq, True, True) for row in lived.evidence.rows]
    assert lived.evidence.cursors["mail"] == lived.evidence.rows[-1].seq
    lived.world.close()


def test_a_crash_between_delivery_and_cursor_delivers_again() -> None:
    lived = followed()
    world = lived.world
    world.client("ann").start("order", "one", {"n": "1", "note": '""'})

    while not deliveries(lived):
        world.step()
    world.nodes[0].kill("crash")
    world.settle()

    assert fates(lived)[:2] == [(1, True, True), (1, False, True)]
    assert [each.life for each in deliveries(lived)[:2]] == ["a.1", "a.2"]
    assert lived.found("Deliveries") == []
    world.close()


def test_what_a_subscriber_does_not_take_waits_and_comes_again_in_order() -> None:
    failures = iter((True, True, False))

    def receive(change: Change) -> None:
        if change.n == 2 and next(failures, False):
            raise ValueError("mailbox full")

    lived = followed(receive=receive)
    started(lived.world, "one", 1)
    lived.world.settle()

    assert [(each.n, each.is_taken) for each in deliveries(lived)] == [(1, True), (2, False), (2, False), (2, True)]
    assert lived.evidence.held == []
    assert lived.found("Deliveries") == []
    lived.world.close()


def test_after_its_tries_a_delivery_waits_for_an_operator_and_other_instances_go_on() -> None:
    is_full = True

    def receive(change: Change) -> None:
        if is_full and change.instance == "one":
            raise ValueError("mailbox full")

    lived = followed(receive=receive, tries=2)
    world = lived.world
    started(world, "one", 1)
    started(world, "two", 2)
    world.rest()

    assert [(held.instance, held.tries, held.due_ms) for held in lived.evidence.held] == [("one", 2, None)]
    assert {each.instance for each in deliveries(lived) if each.is_taken} == {"two"}
    assert lived.found("Deliveries") == []

    is_full = False
    assert world.owner is not None
    world.owner.service.call("redeliver", {"subscriber": "mail", "id": "one"})
    world.settle()

    assert {each.instance for each in deliveries(lived) if each.is_taken} == {"one", "two"}
    assert lived.evidence.held == []
    world.close()


def test_one_seed_gives_a_subscriber_the_same_failures() -> None:
    told = []
    for _ in range(2):
        lived = followed(failing=0.4)
        for number in range(4):
            started(lived.world, f"i{number}", number)
        lived.world.settle()
        assert lived.found("Deliveries") == []
        told.append((deliveries(lived), lived.world.trace.digest()))
        lived.world.close()

    assert told[0] == told[1]
    assert any(not each.is_taken for each in told[0][0])
