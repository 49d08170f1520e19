"""The demonstration and the example, as their users run them: real processes, real SIGKILL."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.demo.orders import Call, Ledger
from understudy.store.connection import open_reader
from understudy.store.reads import Readers, Reads

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "orders.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def ran(folder: Path) -> subprocess.CompletedProcess[str]:
    """One demonstration, looked at from several sides."""
    return demo("--db", str(folder / "orders.db"), "--orders", "3", "--seed", "4")


@pytest.mark.slow
def test_the_demonstration_kills_its_service_again_and_again(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(re.findall(r"^ *\d+\.\d\d s  SIGKILL to process", ran.stdout, re.MULTILINE)) >= 2
    assert re.search(r"recovered in \d+ ms by process \d, which stood by", ran.stdout)
    assert re.search(r"recovered in \d+ ms by process \d, started after the kill", ran.stdout)
    assert "charged, not yet committed" in ran.stdout
    assert "refunded, not yet committed" in ran.stdout
    assert "\x1b" not in ran.stdout


@pytest.mark.slow
def test_every_order_that_the_demonstration_accepted_is_in_its_database_and_has_ended(
    ran: subprocess.CompletedProcess[str], folder: Path
) -> None:
    database = folder / "orders.db"

    outcomes = stored(database)

    assert outcomes == {"order-1": "completed", "order-2": "completed", "order-3": "failed"}
    assert set(re.findall(r"(order-\d) \(.*\) accepted", ran.stdout)) == set(outcomes)
    assert "Nothing acknowledged was lost" in ran.stdout
    assert "undone  invoice, then charge, then reserve" in ran.stdout
    assert f"understudy audit {database}" in ran.stdout


@pytest.mark.slow
def test_a_call_before_a_kill_and_the_one_after_it_are_the_same_order_to_the_bank(
    ran: subprocess.CompletedProcess[str], folder: Path
) -> None:
    calls = Ledger(folder / "orders-ledger.jsonl").calls()

    charges = [call for call in calls if call.order == "order-1" and call.what == "charge"]
    assert "ran twice, same key, counted once" in ran.stdout
    assert [call.attempt for call in charges] == [1, 2]
    assert len({call.key for call in charges}) == len({call.number for call in charges}) == 1
    assert len({call.process for call in charges}) == 2
    assert [call.is_first for call in charges] == [True, False]


def test_it_makes_no_demonstration_of_a_database_that_is_there_already(tmp_path: Path) -> None:
    database = tmp_path / "orders.db"
    database.write_bytes(b"precious")

    ran = demo("--db", str(database))

    assert ran.returncode == 1
    assert "is there already" in ran.stderr
    assert database.read_bytes() == b"precious"


def test_it_says_what_its_service_said_when_that_cannot_start(tmp_path: Path) -> None:
    database = tmp_path / "orders.db"
    owner = tmp_path / "orders.db-owner"
    owner.mkdir()

    ran = demo("--db", str(database))

    assert ran.returncode == 1
    assert "process 1 ended by itself with status 1" in ran.stderr
    assert str(owner) in ran.stderr


@pytest.mark.slow
def test_an_interrupt_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "understudy.demo", "--db", str(tmp_path / "orders.db")]
    with subprocess.Popen(command, env=plain(), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        line = next(line for line in running.stdout if "order-2" in line)

        running.send_signal(signal.SIGINT)
        rest = running.stdout.read()  # Ends when the last process that inherited the pipe has ended.

    assert line
    assert running.returncode == 130
    assert "no process of the demonstration is left" in rest
    assert not processes_about(tmp_path)


@pytest.mark.slow
def test_the_example_dies_in_its_first_run_and_finishes_in_its_second(tmp_path: Path) -> None:
    first, second, third = (run(str(EXAMPLE), cwd=tmp_path) for _ in range(3))

    assert first.returncode == -signal.SIGKILL
    assert "charge: receipt 1 (attempt 1)" in first.stdout
    assert "charge: receipt 1 (attempt 2)" in second.stdout
    assert second.returncode == third.returncode == 0
    assert "order-7 has arrived, receipt 1" in second.stdout
    assert "order-7 has arrived, receipt 1" in third.stdout
    assert "charge:" not in third.stdout
    assert len((tmp_path / "orders.db-bank").read_text().splitlines()) == 1


def test_the_ledger_gives_a_number_to_a_key_and_not_to_a_call(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")

    noted = [ledger.note(Call(key, "order-1", "charge", 100, 1, 1, "")) for key in ("a", "b", "a")]

    assert [call.number for call in noted] == ["no. 1", "no. 2", "no. 1"]
    assert [call.is_first for call in noted] == [True, True, False]
    assert ledger.calls() == noted


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "understudy.demo", *arguments)


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=plain(), capture_output=True, text=True, timeout=120, check=False)


def plain() -> dict[str, str]:
    """Where children find the package too, whatever folder they run in."""
    paths = [str(Path(path).absolute()) for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return os.environ | {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONPATH": os.pathsep.join(paths)}


def stored(database: Path) -> dict[str, str | None]:
    """The outcomes of all instances, after their chains of digests were checked."""
    readers = Readers(str(database), lambda: open_reader(str(database)))
    try:
        reads = Reads(readers)
        for id_ in reads.ids():
            reads.check_chain(id_)
        return {id_: reads.summary(id_).outcome for id_ in reads.ids()}
    finally:
        readers.close()


def processes_about(folder: Path) -> list[str]:
    """The command lines of living processes that name the folder."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(entry.read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # It has ended in between.
    return [line for line in lines if str(folder) in line]
