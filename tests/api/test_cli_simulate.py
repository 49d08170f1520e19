"""`understudy simulate`: what it plays, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs
import pytest

from understudy.cli import main

SHOP = """
from attrs import frozen
from understudy import Context, Process, task, wait
from understudy.simulations import Simulation

class Bank:
    def __init__(self):
        self.charged = []

    def charge(self, order_id):
        self.charged.append(order_id)
        return "receipt"

bank = Bank()

@frozen
class Order:
    order_id: str

@task(into="receipt")
def charge(order_id: str) -> str:
    return bank.charge(order_id)

@task
def ship(order_id: str) -> None:
    print("shipping", order_id)

checkout = Process("checkout", charge, ship, takes=Order)
parcel = Process("parcel", wait("delivered"), ship, takes=Order)

def never_charged_twice(bank):
    for order_id in bank.charged:
        assert bank.charged.count(order_id) == 1, f"order {order_id} was charged twice"

def called_once(ledger):
    for line in ledger:
        assert len(ledger.under(line.key)) == 1, f"{line.handler} was called {len(ledger.under(line.key))} times"

whole = Simulation(checkout, start=[Order("7"), Order("8")], fakes={"bank": Bank}, invariants=[never_charged_twice])
number = 3
"""
STAND_INS = """
def charge(order_id):
    return f"no money for {order_id}"
"""
START = '{"order_id": "7"}'


@attrs.frozen
class Said:
    code: int
    out: str
    err: str


@pytest.fixture
def ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Said]]:
    (tmp_path / "a_shop.py").write_text(SHOP, encoding="utf-8")
    (tmp_path / "a_cast.py").write_text(STAND_INS, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("NO_COLOR", "1")

    def run(*words: str) -> Said:
        code = main(["simulate", *words])
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    yield run
    for name in ("a_shop", "a_cast"):
        sys.modules.pop(name, None)


def test_a_process_that_holds_is_told_in_a_few_lines(ask: Callable[..., Said]) -> None:
    said = ask("a_shop:checkout", "--start", START, "--seeds", "20")

    assert said.code == 0
    assert said.out.startswith("checkout: ok, 20 worlds played\n")
    assert "steps (" in said.out
    assert "lives of the process" in said.out
    assert "  faults: " in said.out
    assert "shipping" not in said.out
    assert "20 of 20 worlds" in said.err
    assert "\x1b" not in said.out + said.err


def test_a_failure_is_told_drawn_and_can_be_replayed(ask: Callable[..., Said], tmp_path: Path) -> None:
    said = ask("a_shop:whole", "--faults", "crash after effect")

    assert said.code == 1
    assert re.search(r"never_charged_twice: order [78] was charged twice", said.out)
    assert "CRASH: crash after effect" in said.out
    picture = re.search(r"^picture: (simulation-\d+\.html)$", said.out, re.MULTILINE)
    assert picture is not None
    assert "<svg" in (tmp_path / picture[1]).read_text(encoding="utf-8")
    replay = re.search(r"^replay:  understudy simulate (.*)$", said.out, re.MULTILINE)
    assert replay is not None

    again = ask(*shlex.split(replay[1]))

    assert again.code == 1
    assert again.out.split("\n\n")[1] == said.out.split("\n\n")[1]
    assert f"replay:  understudy simulate {replay[1]}" in again.out


def test_a_world_that_is_replayed_shows_what_its_handlers_print(ask: Callable[..., Said]) -> None:
    said = ask("a_shop:checkout", "--start", START, "--seed", "3", "--faults", "none")

    assert said.out.count("shipping 7\n") == 1


def test_stand_ins_invariants_and_messages_are_given_by_name(ask: Callable[..., Said]) -> None:
    given = ("--start", START, "--faults", "crash after effect", "--invariants", "a_shop:called_once")
    said = ask("a_shop:checkout", *given, "--stand-ins", "a_cast", "--html", "here.html")

    assert said.code == 1
    assert "called_once: " in said.out
    assert "picture: here.html" in said.out
    assert "--invariants a_shop:called_once" in said.out
    assert "--stand-ins a_cast" in said.out
    assert ask("a_shop:parcel", "--start", START, "--messages", '{"delivered": null}', "--seeds", "3").code == 0


def test_several_jobs_and_several_instances_are_played(ask: Callable[..., Said]) -> None:
    said = ask("a_shop:checkout", "--start", f"[{START}]", "--instances", "3", "--jobs", "2", "--seeds", "6")

    assert said.code == 0
    assert "6 worlds played" in said.out


def test_json_is_one_document(ask: Callable[..., Said]) -> None:
    said = ask("a_shop:whole", "--faults", "crash after effect", "--json")

    document = json.loads(said.out)
    assert said.code == 1
    assert document["ok"] is False
    assert document["failures"][0]["invariant"] == "never_charged_twice"
    assert document["failures"][0]["command"].startswith("understudy simulate a_shop:whole --seed ")
    assert document["failures"][0]["trace"][0]["kind"] == "open"
    assert said.err == ""


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("nowhere:checkout",), "cannot import nowhere: there is no module nowhere"),
        (("a_shop:chekout",), "a_shop:chekout is not there, and no process; did you mean checkout?"),
        (("a_shop:number",), "a_shop:number is int 3, and no process; the processes and simulations of a_shop are: "),
        (("a_shop:checkout",), "checkout cannot start; its input does not fit"),
        (("a_shop:whole", "--start", START), "is a Simulation, which has what it needs: leave out --start"),
        (("a_shop:checkout", "--start", START, "--faults", "crahs"), "there is no fault 'crahs': did you mean crash?"),
        (("a_shop:checkout", "--start", START, "--stand-ins", "json"), "no function of json is called like a task"),
        (("a_shop:checkout", "--start", START, "--invariants", "once"), "is not of the form MODULE:NAME"),
        (("a_shop:checkout", "--start", START, "--invariants", "a_shop:caled_once"), "did you mean called_once?"),
        (("a_shop:parcel", "--start", START), "nobody would ever send it: give its payload"),
        (("a_shop:checkout", "--start", START, "--only", "other"), "no instance of checkout is called other"),
    ],
)
def test_what_cannot_be_played_is_told_with_what_was_found_instead(
    ask: Callable[..., Said], words: tuple[str, ...], reason: str
) -> None:
    said = ask(*words)

    assert said.code == 1
    assert said.out == ""
    assert reason in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    "words", [("a_shop",), ("a_shop:checkout", "--seeds", "0"), ("a_shop:checkout", "--start", "{order_id: 7}")]
)
def test_wrong_usage_is_told_as_such(ask: Callable[..., Said], words: tuple[str, ...]) -> None:
    assert ask(*words).code == 2


def test_an_error_in_an_invariant_is_told_with_its_seed(ask: Callable[..., Said], tmp_path: Path) -> None:
    (tmp_path / "a_cast.py").write_text("def broken(history):\n    history['nobody']\n", encoding="utf-8")

    said = ask("a_shop:checkout", "--start", START, "--invariants", "a_cast:broken")

    assert said.code == 1
    assert "no instance 'nobody' was started in this world" in said.err
    assert "in the world of seed 0" in said.err


def test_ctrl_c_ends_it_and_shows_what_was_found_so_far(tmp_path: Path) -> None:
    (tmp_path / "a_shop.py").write_text(SHOP, encoding="utf-8")
    source = f"import sys; sys.path[:] = {sys.path!r}; from understudy.cli import main; sys.exit(main())"
    words = ("simulate", "a_shop:checkout", "--start", START, "--seeds", "100000")
    command = [sys.executable, "-u", "-c", source, *words]
    told = {**os.environ, "NO_COLOR": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=told, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "playing" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert re.match(r"checkout: ok, \d+ of 100,000 worlds played", out)
    assert "Traceback" not in err
