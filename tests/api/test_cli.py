"""The command line, in this process and as a real command; and the owner for one command, which runs no instance."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy import Context, Process, Rejected, Retry, Runtime, State, choose, parallel, saga, sleep, task, wait
from understudy.cli import main
from understudy.cli.source import opened
from understudy.cli.words import _TELLERS
from understudy.model.events import AnyEvent, AttemptLost, AttemptStarted, TaskOpened
from understudy.model.states import TokenStatus

# --- the cast ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Order:
    order_id: str
    amount: int


class Declined(Exception):
    pass


@task(into="reservation")
def reserve(order_id: str) -> str:
    return f"shelf-{order_id}"


@reserve.undo
def release(reservation: str) -> None:
    assert reservation


@task(into="receipt", retry=Retry(3, first="1ms", never=(Declined,)))
def charge(amount: int, ctx: Context) -> str:
    if amount == 13:
        raise Declined("the card was \x1b[31mdeclined\x1b[0m")
    return f"receipt-{ctx.attempt}"


@charge.undo
def refund(receipt: str) -> None:
    assert receipt


@task
def pack(order_id: str) -> None:
    assert order_id


@task(into="label")
def ship(order_id: str, amount: int, ctx: Context) -> str:
    if amount == 66 and ctx.attempt == 1:
        raise RuntimeError("[bold]the carrier[/bold] does not answer")
    return f"label-{order_id}"


@task
def escalate(order_id: str) -> None:
    assert order_id


checkout = Process(
    "checkout",
    saga(reserve, charge, parallel(pack, sleep("1ms"))),
    wait("delivered", key="order_id", timeout="72h", late=escalate),
    ship,
    takes=Order,
    gives=ship,
)


@task(into="number")
def count(order_id: str) -> int:
    return len(order_id)


sorting = Process(
    "sorting",
    count,
    choose(("number > 5", pack), ("number > 3", escalate)),
    sleep("30d"),
    takes={"order_id": str},
)

WAITING, FAILED, COMPLETED, STUCK, PAUSED = "order-7", "order-8", "order-9", "order-10", "order-11"
CANCELLED, LOST_WAY = "заказ-北京-12", "sorting-1"
EVERYBODY = {WAITING, FAILED, COMPLETED, STUCK, PAUSED, CANCELLED, LOST_WAY}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with an instance in each state, and no owner."""
    folder = tmp_path_factory.mktemp("stock")
    with Runtime(folder / "orders.db", checkout, sorting) as runtime:

        def order(id_: str, amount: int = 40) -> Any:
            title, tags = (f"Order {id_}", {"customer": "acme"}) if id_ == WAITING else ("", None)
            handle = runtime.start(checkout, Order(id_.rpartition("-")[2], amount), id=id_, title=title, tags=tags)
            handle.wait_until(lambda state: state.is_ended or state.is_waiting_for("delivered"))
            return handle

        order(WAITING)
        order(FAILED, amount=13)
        order(COMPLETED).send("delivered", {"at": "door"})
        order(STUCK, amount=66).send("delivered")
        order(PAUSED).pause(by="olga")
        order(CANCELLED).cancel(reason="she changed her mind")
        runtime.start(sorting, {"order_id": "abc"}, id=LOST_WAY).wait_until(lambda state: bool(state.incidents))
        runtime.get(COMPLETED).result()
        runtime.get(STUCK).wait_until(lambda state: bool(state.incidents))
        runtime.get(CANCELLED).wait_until(lambda state: state.is_ended)
    return folder


@pytest.fixture
def db(stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("UNDERSTUDY_DEBUG", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return copied(stock, tmp_path)


def copied(stock: Path, folder: Path) -> str:
    for part in ("orders.db", "orders.db-wal"):
        if (stock / part).exists():
            shutil.copy(stock / part, folder / part)
    return str(folder / "orders.db")


@attrs.frozen
class Said:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Ask = Callable[..., Said]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    def run(*words: str) -> Said:
        code = main(words)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run


COMMAND = [sys.executable, "-c", "import sys; from understudy.cli import main; sys.exit(main())"]


# With paths that hold in any directory.
PATHS = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}


def understudy(*words: str, **options: Any) -> subprocess.Popen[str]:
    options = {"env": ENVIRONMENT, **options}
    return subprocess.Popen([*COMMAND, *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def tokens_of(db: str, ask: Ask, id_: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask("show", db, id_, "--json").document["tokens"]
    return found


def events_of(runtime: Runtime, id_: str) -> list[AnyEvent]:
    return [event for step in runtime.history(id_) for entry in step.entries for event in entry.events]


# --- looking ----------------------------------------------------------------------------------------------------------


def test_a_list_says_of_each_instance_how_it_stands_and_why(db: str, ask: Ask) -> None:
    said = ask("list", db)

    line_of = {id_: next(line for line in said.out.split("\n") if f" {id_} " in f"{line} ") for id_ in EVERYBODY}
    assert said.code == 0
    assert line_of[WAITING].startswith("waiting ")
    assert "waiting for message `delivered` with key 7" in line_of[WAITING]
    assert line_of[FAILED].startswith("failed ")
    assert "the card was" in line_of[FAILED]
    assert line_of[COMPLETED].startswith("completed ")
    assert 'gave "label-9"' in line_of[COMPLETED]
    assert line_of[STUCK].startswith("stuck ")
    assert "[bold]the carrier[/bold] does not answer" in line_of[STUCK]
    assert line_of[PAUSED].startswith("paused ")
    assert line_of[CANCELLED].startswith("cancelled ")
    assert "2 stuck" in said.out
    assert "No service runs" in said.out


@pytest.mark.parametrize("width", [60, 80, 100, 140, 200])
@pytest.mark.parametrize("command", [["list"], ["show", STUCK], ["history", STUCK], ["show", WAITING]])
def test_tables_fit_the_width_and_keep_ids_whole(
    db: str, ask: Ask, monkeypatch: pytest.MonkeyPatch, command: list[str], width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name, *others = command

    said = ask(name, db, *others)

    assert all(len(line) <= width for line in said.out.split("\n") if not line.startswith(("2 stuck", "No service")))
    assert all(id_ in said.out for id_ in (others or EVERYBODY))


def test_lines_that_nobody_looks_at_are_not_broken_or_filled_up(db: str, ask: Ask) -> None:
    said = ask("list", db)

    assert len([line for line in said.out.split("\n") if "order-" in line]) == 6  # The waiting one has a title.
    assert not any(line.endswith(" ") for line in said.out.split("\n"))


def test_pages_of_a_list_hold_every_instance_once(db: str, ask: Ask) -> None:
    seen: list[str] = []
    cursor: list[str] = []
    while True:
        page = ask("list", db, "--limit", "2", "--json", *cursor).document
        seen += [instance["id"] for instance in page["instances"]]
        if page["next"] is None:
            break
        cursor = ["--before", str(page["next"])]

    assert sorted(seen) == sorted(EVERYBODY)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--status", "paused"], {PAUSED}),
        (["--outcome", "failed"], {FAILED}),
        (["--process", "sorting"], {LOST_WAY}),
        (["--open"], {WAITING, STUCK, PAUSED, LOST_WAY}),
        (["--incident"], {STUCK, LOST_WAY}),
        (["--tag", "customer=acme"], {WAITING}),
        (["--text", "北京"], {CANCELLED}),
        (["--text", "nowhere"], set()),
    ],
)
def test_a_list_can_be_narrowed(db: str, ask: Ask, options: list[str], expected: set[str]) -> None:
    said = ask("list", db, *options, "--json")

    assert {instance["id"] for instance in said.document["instances"]} == expected


def test_an_instance_is_shown_with_tokens_waits_variables_and_incidents(db: str, ask: Ask) -> None:
    waiting, stuck = ask("show", db, WAITING), ask("show", db, STUCK)

    assert "message delivered" in waiting.out
    assert "customer=acme" in waiting.out
    assert 'reservation  "shelf-7"' in waiting.out
    assert "INCIDENTS" in stuck.out
    assert "line" in stuck.out  # The trace of the failed attempt.
    assert "in ship" in stuck.out


def test_a_shown_document_has_values_not_texts(db: str, ask: Ask) -> None:
    document = ask("show", db, WAITING, "--json").document

    assert document["variables"]["amount"] == 40
    assert document["state"] == "waiting"
    assert {wait["kind"] for wait in document["waits"]} == {"message", "timer"}


@pytest.mark.parametrize("id_", sorted(EVERYBODY))
def test_every_earlier_commit_can_be_looked_at_and_the_last_one_is_now(db: str, ask: Ask, id_: str) -> None:
    now = ask("show", db, id_, "--json").document

    past = [ask("show", db, id_, "--at", str(n), "--json").document for n in range(1, now["version"] + 1)]

    assert {**past[-1], "at": None} == now
    assert [then["version"] for then in past] == list(range(1, now["version"] + 1))
    assert all(then["outcome"] is None for then in past[:-1])


def test_a_commit_that_never_was_is_refused(db: str, ask: Ask) -> None:
    said = ask("show", db, WAITING, "--at", "99")

    assert said.code == 1
    assert "there is no commit 99" in said.err


def test_a_history_has_one_line_for_each_event(db: str, ask: Ask) -> None:
    events = [
        event["text"]
        for commit in ask("history", db, FAILED, "--json").document["commits"]
        for entry in commit["entries"]
        for event in entry["events"]
    ]

    said = ask("history", db, FAILED)

    lines = said.out.rstrip("\n").split("\n")[4:]  # After the instance, a blank, the header and the day.
    assert len(lines) == len(events)
    assert any("reserve: undone" in line for line in lines)


def test_a_limited_history_shows_the_newest_commits_and_still_knows_the_nodes(db: str, ask: Ask) -> None:
    whole = ask("history", db, COMPLETED, "--json").document["commits"]

    said = ask("history", db, COMPLETED, "--limit", "2", "--json")

    assert said.document["commits"] == whole[-2:]
    assert "ship: done" in ask("history", db, COMPLETED, "--limit", "1").out


def test_every_event_has_words() -> None:
    assert set(_TELLERS) == set(get_args(AnyEvent))


@pytest.mark.parametrize("id_", [STUCK, LOST_WAY, WAITING, PAUSED])
def test_every_command_that_an_explanation_gives_is_understood(db: str, ask: Ask, id_: str, tmp_path: Path) -> None:
    said = ask("explain", db, id_)

    commands = [line.partition("  understudy ")[2] for line in said.out.split("\n") if "  understudy " in line]
    assert len(commands) >= 3
    for number, command in enumerate(commands):
        copy = tmp_path / str(number)
        copy.mkdir()
        words = shlex.split(
            command.replace(db, copied(Path(db).parent, copy)).replace("JSON", "1").replace("pack|escalate", "pack")
        )
        assert ask(*words).code == 0, command


def test_what_is_explained_of_an_ended_instance_is_why_and_what_was_undone(db: str, ask: Ask) -> None:
    said = ask("explain", db, FAILED)

    assert "at charge: Declined" in said.out
    assert "undone   reserve" in said.out
    assert ask("explain", db, FAILED, "--json").document["undone"] == ["reserve"]


def test_nothing_from_the_database_commands_the_terminal(db: str, ask: Ask) -> None:
    for words in (["list", db], ["show", db, FAILED], ["history", db, FAILED], ["explain", db, FAILED]):
        said = ask(*words)

        assert "\x1b" not in said.out
        assert r"the card was \x1b[31mdeclined" in said.out


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def test_colours_are_for_terminals_and_not_for_those_who_refuse_them(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys, "stdout", coloured := Terminal())
    assert main(["list", db]) == 0

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", plain := Terminal())
    assert main(["list", db]) == 0

    assert "\x1b[" in coloured.getvalue()
    assert "\x1b[" not in plain.getvalue()


def test_looking_writes_nothing_and_needs_no_owner(db: str, ask: Ask) -> None:
    for words in (["list", db], ["show", db, WAITING], ["history", db, WAITING], ["explain", db, WAITING]):
        assert ask(*words).code == 0

    assert not Path(f"{db}-owner").exists()
    assert ask("explain", db, WAITING, "--json").document["has_owner"] is False


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["show"], ["history"], ["explain"], ["cancel"], ["pause"], ["resume"], ["retry"], ["skip"], ["fail"]]
)
def test_an_unknown_instance_is_an_error_in_words_or_as_a_document(db: str, ask: Ask, words: list[str]) -> None:
    said, document = ask(*words, db, "nobody"), ask("--json", *words, db, "nobody")

    assert (said.code, said.out) == (1, "")
    assert said.err.startswith("understudy: ")
    assert "nobody" in said.err
    assert document.code == 1
    assert document.document["error"]["kind"] == "UnknownInstance"


@pytest.mark.parametrize("words", [["list"], ["show", "x"], ["cancel", "x"], ["migrate"]])
def test_a_slip_in_the_path_is_an_error_and_makes_no_file(tmp_path: Path, ask: Ask, words: list[str]) -> None:
    name, *others = words
    path = tmp_path / "typo.db"

    said = ask(name, str(path), *others)

    assert said.code == 1
    assert str(path) in said.err
    assert list(tmp_path.iterdir()) == []


def test_another_programs_file_is_refused_and_left_alone(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("Dear Anna, " * 100)

    assert [ask("list", str(path)).code, ask("cancel", str(path), "x").code] == [1, 1]

    assert path.read_text() == "Dear Anna, " * 100


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["lst"],
        ["list"],
        ["list", "a.db", "--limit", "0"],
        ["list", "a.db", "--status", "stuck"],
        ["list", "a.db", "--tag", "customer"],
        ["send", "a.db", "x", "m", "--payload", "{'no': json}"],
        ["send", "a.db", "x", "m", "--payload", "NaN"],
        ["send", "a.db", "x", "m", "--ttl", "soon"],
        ["run", "shop.py"],
        ["show", "a.db", "x", "--at", "-1"],
        ["show", "a.db", "x", "superfluous"],
    ],
)
def test_wrong_usage_has_its_own_exit_code(ask: Ask, words: list[str]) -> None:
    said = ask(*words)

    assert said.code == 2
    assert "usage: understudy" in said.err


def test_a_refused_command_says_why_without_a_traceback_unless_debugging(
    db: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    from understudy import AlreadyEnded

    said = ask("cancel", db, COMPLETED)

    assert said.code == 1
    assert said.err == f"understudy: {COMPLETED} has ended (completed); it takes no further commands\n"
    monkeypatch.setenv("UNDERSTUDY_DEBUG", "1")
    with pytest.raises(AlreadyEnded):
        main(["cancel", db, COMPLETED])


# --- moving, with an owner and without --------------------------------------------------------------------------------


def test_the_live_owner_carries_a_command_out_and_goes_on(db: str, ask: Ask) -> None:
    with Runtime(db, checkout, sorting) as runtime:
        said = ask("send", db, WAITING, "delivered", "--json")

        assert said.document["received"] is True
        assert said.document["has_owner"] is True
        assert runtime.result(WAITING) == "label-7"


def test_without_an_owner_a_message_is_consumed_and_the_next_owner_goes_on(db: str, ask: Ask) -> None:
    said = ask("send", db, WAITING, "delivered", "--payload", '{"at": "door"}')

    assert said.code == 0
    assert "No service runs" in said.out
    assert [(t["node"], t["status"], t["attempt"]) for t in tokens_of(db, ask, WAITING)] == [("ship", "ready", 0)]
    with Runtime(db, checkout, sorting) as runtime:
        assert runtime.result(WAITING) == "label-7"


def test_a_command_touches_no_other_instance(db: str, ask: Ask) -> None:
    def others() -> list[dict[str, Any]]:
        instances = ask("list", db, "--json").document["instances"]
        return [instance for instance in instances if instance["id"] != WAITING]

    before = others()

    ask("send", db, WAITING, "delivered")

    assert others() == before


def test_a_retry_without_an_owner_is_the_next_owners_and_not_a_lost_attempt(db: str, ask: Ask) -> None:
    said = ask("retry", db, STUCK, "--by", "olga", "--json")

    assert said.document["state"]["status"] == "running"
    assert said.document["state"]["waiting"][0]["kind"] == "retry"
    with Runtime(db, checkout, sorting) as runtime:
        assert runtime.result(STUCK) == "label-10"
        attempts = [event for event in events_of(runtime, STUCK) if isinstance(event, AttemptStarted | AttemptLost)]
        assert [(type(event), event.attempt) for event in attempts[-1:]] == [(AttemptStarted, 2)]
        assert attempts[-1] == AttemptStarted(attempts[-1].token, 2, renewed=True)
    assert "retry (olga)" in ask("history", db, STUCK).out


def test_a_retry_of_a_paused_instance_begins_when_it_is_resumed(db: str, ask: Ask) -> None:
    with Runtime(db, checkout, sorting) as runtime:
        runtime.pause(STUCK)
        ask("retry", db, STUCK)

        assert [wait.kind for wait in runtime.state(STUCK).waiting] == ["retry"]
        ask("resume", db, STUCK)
        assert runtime.result(STUCK) == "label-10"


def test_a_step_that_was_never_opened_is_entered_by_the_next_owner(tmp_path: Path, ask: Ask) -> None:
    """Its incident comes from before the first attempt, so there is no attempt to repeat."""
    path = str(tmp_path / "lost.db")
    needy = Process("needy", count, takes={"order_id": str})
    with Runtime(path, needy) as runtime:
        runtime.start(needy, {"order_id": "four"}, id="n-1").result()
    instance, graph = _never_opened(path)

    from understudy.model import commands as c
    from understudy.model.decide import decide

    retried = decide(instance, graph, c.Resolve(at_ms=5, how="retry"), go_on=False)
    wait_id = next(iter(instance.waits))
    fired = decide(instance, graph, c.FireTimer(at_ms=6, wait=wait_id))

    assert retried.effects == []
    assert any(isinstance(event, TaskOpened) for event in fired.entry.events)  # type: ignore[union-attr]
    assert len(fired.effects) == 1


def _never_opened(path: str) -> tuple[Any, Any]:
    from understudy.model import commands as c
    from understudy.model import events as e
    from understudy.model.apply import apply
    from understudy.model.decide import decide
    from understudy.model.instance import Instance

    with opened(path) as source:
        graph = source.graph(1)
    instance = Instance()
    decide(instance, graph, c.Start(at_ms=1, id="n", given_digest="", variables={"order_id": '"x"'}), go_on=False)
    token = next(iter(instance.tokens.values()))
    apply(instance, e.TokenMoved(token.id, "count", ""), 2)
    apply(instance, e.IncidentRaised(9, token.id, "missing_variable", "…"), 3)
    return instance, graph


def test_a_cancelled_instance_ends_at_once_if_nothing_is_to_be_undone(db: str, ask: Ask) -> None:
    said = ask("cancel", db, WAITING, "--reason", "no stock", "--json")

    assert said.document["state"]["outcome"] == "cancelled"
    assert said.document["state"]["error"]["message"] == "no stock"


@attrs.frozen
class Abandoned:
    """A saga whose second step was running when its process died."""

    path: str
    process: Process[Any, Any]
    heal: Callable[[], None]  # From now on the step ends at once.


@pytest.fixture
def abandoned(tmp_path: Path) -> Iterator[Abandoned]:
    begun, may_end = threading.Event(), threading.Event()

    @task(into="parcel")
    def wrap(order_id: str) -> str:
        begun.set()
        may_end.wait(30)
        return f"parcel-{order_id}"

    parcel = Process("parcel", saga(reserve, wrap), takes={"order_id": str}, gives=wrap)
    path = str(tmp_path / "abandoned.db")
    runtime = Runtime(path, parcel)
    runtime.start(parcel, {"order_id": "1"}, id="p-1")
    assert begun.wait(30)
    runtime.node.crash()
    yield Abandoned(path, parcel, may_end.set)
    may_end.set()


def test_an_attempt_of_a_dead_owner_is_counted_as_lost_once_and_by_who_runs_it_again(
    abandoned: Abandoned, ask: Ask
) -> None:
    path = abandoned.path
    for command in ("pause", "resume", "pause", "resume"):
        assert ask(command, path, "p-1").code == 0

    wrapping = next(token for token in tokens_of(path, ask, "p-1") if token["node"] == "wrap")
    explained = ask("explain", path, "p-1").out
    abandoned.heal()
    with Runtime(path, abandoned.process) as runtime:
        result: str = runtime.result("p-1")
        lost = [event for event in events_of(runtime, "p-1") if isinstance(event, AttemptLost)]

    assert (wrapping["status"], wrapping["attempt"], wrapping["lost"]) == ("executing", 1, 0)
    assert "lost with its process" in explained
    assert result == "parcel-1"
    assert len(lost) == 1


def test_a_saga_that_is_cancelled_without_an_owner_is_undone_by_the_next_one(abandoned: Abandoned, ask: Ask) -> None:
    said = ask("cancel", abandoned.path, "p-1", "--json")

    assert said.document["state"]["status"] == "cancelling"
    assert [(t["node"], t["status"], t["mode"]) for t in tokens_of(abandoned.path, ask, "p-1")] == [
        ("saga-1", "waiting", "forward"),
        ("reserve", "ready", "compensation"),
    ]
    with Runtime(abandoned.path, abandoned.process) as runtime:
        runtime.wait_until("p-1", lambda state: state.is_ended)
        assert runtime.get("p-1").undone == ["reserve"]


def test_a_cancel_without_undo_ends_it_at_once(abandoned: Abandoned, ask: Ask) -> None:
    said = ask("cancel", abandoned.path, "p-1", "--no-undo", "--json")

    assert said.document["state"]["outcome"] == "cancelled"


def test_a_failed_incident_undoes_or_fails(db: str, ask: Ask) -> None:
    said = ask("fail", db, STUCK, "--json")

    assert said.document["state"]["outcome"] == "failed"


def test_a_skipped_step_gives_what_the_operator_says(db: str, ask: Ask) -> None:
    ask("skip", db, STUCK, "--result", '"by hand"')

    with Runtime(db, checkout, sorting) as runtime:
        assert runtime.result(STUCK) == "by hand"


def test_a_skipped_choice_needs_a_way(db: str, ask: Ask) -> None:
    refused = ask("skip", db, LOST_WAY)
    sent = ask("skip", db, LOST_WAY, "--to", "escalate", "--json")

    assert refused.code == 1
    assert "one of: pack, escalate" in refused.err
    assert sent.document["state"]["waiting"][0]["node"] == "escalate"


def test_a_published_message_reaches_who_waits_for_its_key(db: str, ask: Ask) -> None:
    assert ask("publish", db, "delivered", "--key", "7", "--payload", "1").code == 0

    with Runtime(db, checkout, sorting) as runtime:
        assert runtime.result(WAITING) == "label-7"


def test_a_repeated_command_under_one_key_is_done_once(db: str, ask: Ask) -> None:
    first = ask("send", db, STUCK, "early", "--request-key", "k", "--json")
    again = ask("send", db, STUCK, "early", "--request-key", "k", "--json")
    other = ask("send", db, STUCK, "later", "--request-key", "k", "--json")

    assert first.document["received"] is again.document["received"] is False
    assert ask("show", db, STUCK, "--json").document["buffered_messages"] == 1
    assert other.document["error"]["kind"] == "Conflict"


def test_ids_may_be_of_any_script(db: str, ask: Ask) -> None:
    said = ask("show", db, CANCELLED)

    assert CANCELLED in said.out


# --- keeping ----------------------------------------------------------------------------------------------------------


def test_migrating_a_database_of_today_does_nothing(db: str, ask: Ask) -> None:
    said = ask("migrate", db, "--json")

    assert said.document["steps"] == []


def test_a_dry_run_migrates_nothing(tmp_path: Path, ask: Ask) -> None:
    path = tmp_path / "empty.db"
    path.touch()

    planned = ask("migrate", str(path), "--dry-run", "--json").document
    size = path.stat().st_size
    done = ask("migrate", str(path), "--json").document

    assert planned["steps"] == done["steps"] != []
    assert size == 0
    assert ask("list", str(path)).code == 0


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize(
    ("command", "module", "function"), [("audit", "audit", "audit"), ("doctor", "doctor", "examine")]
)
def test_a_report_is_shown_and_its_verdict_is_the_exit_code(
    db: str, ask: Ask, monkeypatch: pytest.MonkeyPatch, command: str, module: str, function: str, ok: bool, code: int
) -> None:
    report = SimpleNamespace(ok=ok, lines=["first", "second"], as_dict=lambda: {"ok": ok})
    monkeypatch.setitem(sys.modules, f"understudy.{module}", SimpleNamespace(**{function: lambda _: report}))

    said, document = ask(command, db), ask(command, db, "--json")

    assert (said.code, said.out) == (code, "first\nsecond\n")
    assert (document.code, document.document) == (code, {"ok": ok})


# --- running ----------------------------------------------------------------------------------------------------------

SHOP = """
from understudy import Process, task, wait

@task(into="doubled")
def double(number: int) -> int:
    print("doubling")
    if number == 13:
        raise ValueError("unlucky")
    return 2 * number

@task(on_failure="fail")
def refuse(number: int) -> None:
    raise ValueError("never")

plain = Process("plain", double, takes={"number": int}, gives=double)
waiting = Process("waiting", wait("go"), double, takes={"number": int}, gives=double)
failing = Process("failing", refuse, takes={"number": int})
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory, under a name that no other test has imported."""
    name = f"shop_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(SHOP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield name
    sys.modules.pop(name, None)


def test_a_run_says_what_happens_and_gives_the_result(shop: str, ask: Ask) -> None:
    said = ask("run", f"{shop}:plain", "--input", '{"number": 4}', "--id", "r-1")

    assert said.code == 0
    assert said.out.endswith("8\n")
    assert "double: done, doubled = 8" in said.err
    assert ask("show", "understudy.db", "r-1", "--json").document["outcome"] == "completed"


def test_a_runs_document_is_all_that_is_on_stdout(shop: str, ask: Ask) -> None:
    said = ask("run", f"{shop}:plain", "--input", '{"number": 4}', "--json")

    assert said.document["result"] == 8
    assert "doubling" in said.err


@pytest.mark.parametrize(("process", "number"), [("failing", 1), ("plain", 13)])
def test_a_run_that_does_not_complete_is_not_a_success(shop: str, ask: Ask, process: str, number: int) -> None:
    said = ask("run", f"{shop}:{process}", "--input", json.dumps({"number": number}), "--id", "r-1")

    assert said.code == 1
    assert said.err.rstrip().split("\n")[-1].startswith("understudy: r-1: ")


def test_a_run_that_is_left_is_gone_on_with_by_the_command_it_names(shop: str, ask: Ask) -> None:
    left = ask("run", f"{shop}:waiting", "--input", '{"number": 4}', "--timeout", "200ms")
    again = shlex.split(left.err.rpartition("Go on with: understudy ")[2])
    message = shlex.split(left.err.partition("from another terminal: understudy ")[2].split("\n")[0])

    sent = ask(*message)
    done = ask(*again)

    assert left.code == 1
    assert "nothing is lost" in left.err
    assert sent.code == 0
    assert (done.code, done.out[-2:]) == (0, "8\n")


def test_a_run_does_not_open_a_database_whose_other_instances_it_could_only_break(db: str, shop: str, ask: Ask) -> None:
    said = ask("run", f"{shop}:plain", "--db", db, "--input", '{"number": 4}')

    assert said.code == 1
    assert "open instances of checkout, sorting" in said.err


@pytest.mark.parametrize("target", ["nowhere:plain", "{shop}:plane", "{shop}:double"])
def test_a_process_that_is_not_there_is_refused(shop: str, ask: Ask, target: str) -> None:
    said = ask("run", target.format(shop=shop))

    assert said.code == 1
    assert said.err.startswith("understudy: ")
    assert not Path("understudy.db").exists()


def test_the_demonstration_gets_its_own_arguments(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []

    def play(argv: list[str]) -> int:
        given.append(argv)
        return 0

    monkeypatch.setitem(sys.modules, "understudy.demo.play", SimpleNamespace(main=play))

    codes = [ask("demo").code, ask("demo", "--orders", "3", "--json").code]

    assert codes == [0, 0]
    assert given == [[], ["--orders", "3"]]


# --- as a real command ------------------------------------------------------------------------------------------------


def test_help_is_given_without_the_libraries_that_only_commands_need() -> None:
    script = (
        "import sys; from understudy.cli import main; code = main(['--help']); "
        "sys.exit(code or any(name in sys.modules for name in ('peewee', 'pykka', 'sqlite3', 'msgspec', 'rich')))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=ENVIRONMENT, check=False)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["run", "list", "show", "history", "explain", "send", "skip", "audit", "migrate"])
def test_every_command_explains_itself(ask: Ask, name: str) -> None:
    said = ask(name, "--help")

    assert said.code == 0
    assert said.out.startswith(f"usage: understudy {name}")


def test_a_real_command_on_a_plain_terminal_still_shows_every_id(db: str) -> None:
    plain = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    with understudy("list", db, env=plain) as shown, understudy("list", db, "--json", env=plain) as document:
        text, complaint = shown.communicate(timeout=30)
        instances = json.loads(document.communicate(timeout=30)[0])["instances"]

    assert (shown.returncode, complaint) == (0, "")
    assert ascii(CANCELLED)[1:-1] in text
    assert {instance["id"] for instance in instances} == EVERYBODY


def test_a_reader_who_leaves_early_is_no_error(db: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)

    try:
        done = subprocess.run(
            [*COMMAND, "list", db], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=30, check=False
        )
    finally:
        os.close(writing)

    assert done.stderr == ""
    assert done.returncode == 141


def test_ctrl_c_leaves_a_run_durable_and_says_how_to_go_on(shop: str, tmp_path: Path, ask: Ask) -> None:
    with understudy("run", f"{shop}:waiting", "--input", '{"number": 4}', "--id", "r-1", cwd=tmp_path) as running:
        assert running.stderr is not None
        heard = ""
        while "from another terminal" not in heard:
            heard = running.stderr.readline()
            assert heard
        running.send_signal(signal.SIGINT)
        _, last = running.communicate(timeout=30)

    assert running.returncode == 130
    assert f"Go on with: understudy run {shop}:waiting --db understudy.db --id r-1" in last
    assert "Traceback" not in last
    assert ask("show", "understudy.db", "r-1", "--json").document["state"] == "waiting"


OPEN = [WAITING, STUCK, PAUSED, LOST_WAY]
COMMANDS: dict[str, Callable[[Runtime, str], object]] = {
    "send": lambda runtime, id_: runtime.send(id_, "delivered"),
    "publish": lambda runtime, id_: runtime.publish("delivered", key=id_.rpartition("-")[2]),
    "pause": lambda runtime, id_: runtime.pause(id_),
    "resume": lambda runtime, id_: runtime.resume(id_),
    "retry": lambda runtime, id_: runtime.retry(id_),
    "skip": lambda runtime, id_: runtime.skip(id_, to="pack"),
    "fail": lambda runtime, id_: runtime.fail(id_),
    "cancel": lambda runtime, id_: runtime.cancel(id_),
}


@given(st.lists(st.tuples(st.sampled_from(sorted(COMMANDS)), st.sampled_from(OPEN)), min_size=4, max_size=16))
@settings(max_examples=30)
def test_whatever_is_commanded_without_an_owner_begins_nothing_and_is_gone_on_with(
    stock: Path, tmp_path_factory: pytest.TempPathFactory, commands: list[tuple[str, str]]
) -> None:
    path = copied(stock, tmp_path_factory.mktemp("commanded"))

    with Runtime(path, role="operator") as runtime:
        for command, id_ in commands:
            with contextlib.suppress(Rejected):
                COMMANDS[command](runtime, id_)
    with opened(path) as source:
        before = [source.detail(id_) for id_ in OPEN]
        folded = [source.detail_at(id_, source.detail(id_).summary.version) for id_ in OPEN]
    with Runtime(path, checkout, sorting) as runtime:
        after = [runtime.wait_until(id_, is_still) for id_ in OPEN]

    assert all(detail.tokens or detail.summary.outcome for detail in before)
    assert {token.status for detail in before for token in detail.tokens} <= {TokenStatus.READY, TokenStatus.WAITING}
    assert [attrs.evolve(past, head=now.head) for past, now in zip(folded, before, strict=True)] == before
    assert not any(wait.name in ("lost", "missing_handler") for state in after for wait in state.incidents)


def is_still(state: State) -> bool:
    return state.status == "paused" or not any(wait.kind in ("ready", "task", "retry") for wait in state.waiting)
