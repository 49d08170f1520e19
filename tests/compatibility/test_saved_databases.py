"""Databases that earlier versions have written: today's code reads them, folds them, and carries on.

A file here is never made again once its schema is released; `make.py` makes that of the next one.
"""

from __future__ import annotations

import gzip
import importlib.util
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from understudy import Context, Process, Runtime, saga, task
from understudy.model import events as e
from understudy.model.apply import fold
from understudy.model.definition import Graph, decode_definition
from understudy.rehearsal import Rehearsal
from understudy.store.connection import Settings, open_reader
from understudy.store.loading import Loaded, load
from understudy.store.migrations import LATEST
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Writer

HERE = Path(__file__).parent
SAVED = sorted(HERE.glob("schema-*.db.gz"))


def _make() -> Any:
    """`make.py` as a module; its `plain` is how the recorded facts were written down."""
    spec = importlib.util.spec_from_file_location("make", HERE / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = _make()


@pytest.fixture(params=SAVED, ids=lambda path: path.name.partition(".")[0])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy, at the place where a rehearsal looks for its file."""
    copy = tmp_path / "rehearsal.db"
    copy.write_bytes(gzip.decompress(request.param.read_bytes()))
    copy.with_suffix(".json").write_bytes((HERE / request.param.name.replace(".db.gz", ".json")).read_bytes())
    return copy


def recorded(saved: Path) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(saved.with_suffix(".json").read_bytes())
    return found


@pytest.fixture
def writer(saved: Path) -> Iterator[Writer]:
    """Migrated, if need be."""
    writer = Writer(str(saved), Settings())
    yield writer
    writer.close()


@pytest.fixture
def reads(writer: Writer) -> Iterator[Reads]:
    readers = Readers(writer.path, lambda: open_reader(writer.path))
    yield Reads(readers)
    readers.close()


def graph_of(writer: Writer, no: int) -> Graph:
    body, version = writer.connection.execute("SELECT body, version FROM definition WHERE no = ?", (no,)).fetchone()
    return Graph(decode_definition(body), version=version, no=no)


def test_the_latest_schema_has_its_saved_database() -> None:
    assert f"schema-{LATEST}.db.gz" in [path.name for path in SAVED]


def test_every_type_of_event_has_a_saved_history() -> None:
    found = {event["event"] for path in SAVED for entry in entries(path) for event in entry["events"]}

    assert found >= {kind.__struct_config__.tag for kind in get_args(e.AnyEvent)}


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """As they stand in the file, whatever today's code makes of them."""
    content = gzip.decompress(path.read_bytes())
    with closing(sqlite3.connect(":memory:")) as connection:
        # A file in WAL mode cannot be opened in memory: two bytes of its header are made to say rollback journal.
        connection.deserialize(content[:18] + b"\1\1" + content[20:])
        for (text,) in connection.execute("SELECT events FROM history"):
            yield from msgspec.json.decode(text)


def test_every_history_folds_to_the_recorded_facts_and_digest(saved: Path, reads: Reads) -> None:
    for id, expected in recorded(saved).items():
        history = reads.check_chain(id)

        state = fold(entry for record in history for entry in record.entries)

        assert make.plain(state) == expected["facts"], id
        assert history[-1].digest == expected["digest"]
        assert len(history) == expected["version"]


def test_every_instance_is_loaded_as_it_was_recorded(saved: Path, writer: Writer) -> None:
    expected = recorded(saved)

    found = load(writer.connection, list(expected), lambda no: graph_of(writer, no))

    assert set(found) == set(expected)
    for id, loaded in found.items():
        assert isinstance(loaded, Loaded), loaded
        assert make.plain(loaded.instance) == expected[id]["facts"]
        assert loaded.stored.digest == expected[id]["digest"]


# --- carrying on ------------------------------------------------------------------------------------------------------


@task
def approve(amount: int) -> None:
    pass


@task(into="receipt")
def charge(order_id: str, amount: int) -> str:
    return f"receipt of {order_id}"


@charge.undo
def refund(receipt: str) -> None:
    pass


@task
def pack() -> None:
    pass


@task(into="entry", transactional=True)
def book(receipt: str, connection: sqlite3.Connection, ctx: Context) -> str:
    connection.execute("CREATE TABLE IF NOT EXISTS entry (receipt TEXT)")
    connection.execute("INSERT INTO entry VALUES (?)", (receipt,))
    return "booked"


@task
def escalate() -> None:
    pass


@task(into="shipment")
def ship(order_id: str) -> str:
    return f"shipment of {order_id}"


# Not the saved definition: instances stay on theirs, and only the handlers' names must be known.
HANDLERS = Process(
    "handlers", approve, saga(charge), pack, book, escalate, ship, takes={"order_id": str, "amount": int}
)

OUTCOMES = {
    "failed": "failed",
    "compensating": "failed",
    "stuck_in_undo": "failed",
    "cancelled": "cancelled",
}


def test_a_runtime_carries_on_with_every_instance(saved: Path) -> None:
    """Whatever a crash has left: attempts, timers, messages, recorded results, incidents, pauses."""
    expected = recorded(saved)
    stage = Rehearsal(saved.parent, HANDLERS)

    for id in ("stuck", "stuck_in_undo"):
        stage.retry(id)
    stage.resume("paused")
    stage.publish("delivered", key="waiting")
    stage.advance("30d")

    outcomes = {id: stage.state(id).outcome for id in expected}
    histories = {id: stage.node.reads.check_chain(id) for id in expected}
    results: dict[str, Any] = {id: stage.result(id) for id, outcome in outcomes.items() if outcome == "completed"}
    stage.close()
    assert outcomes == {id: OUTCOMES.get(id, "completed") for id in expected}
    for id, history in histories.items():
        assert history[expected[id]["version"] - 1].digest == expected[id]["digest"]
    assert results.pop("completed") == "ok"
    assert results == {id: f"shipment of {id}" for id in results}


def test_a_result_that_was_recorded_is_used_and_its_handler_not_called(saved: Path) -> None:
    stage = Rehearsal(saved.parent, HANDLERS)

    entry = stage.variables("recorded")["entry"]
    booked = {call.key.partition("/")[0] for call in stage.calls if call.handler == "book"}
    stage.close()

    assert entry == "booked"
    assert "joining" in booked
    assert "recorded" not in booked


def test_a_message_that_was_assigned_is_delivered(saved: Path) -> None:
    stage = Rehearsal(saved.parent, HANDLERS)

    parcel = stage.variables("assigned")["parcel"]
    stage.close()

    assert parcel == {"at": "door"}


def test_a_runtime_in_real_time_carries_on_too(saved: Path) -> None:
    with Runtime(str(saved), HANDLERS, role="owner") as runtime:
        state = runtime.wait_until("executing", lambda state: state.is_waiting_for("delivered"))
        runtime.send("executing", "delivered")

        assert state.version > recorded(saved)["executing"]["version"]
