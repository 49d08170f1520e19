"""The services that these tests run, kill, stop and wake up, and the outside world that their handlers change.

    python child.py worker <database> <role> <lease in ms>    does what it is told, one JSON line each way
    python child.py victim <database> <seed>                  starts parcels and pays for them until it is killed
    python child.py finisher <database>                       brings all parcels to their end
    python child.py publisher <database> <seed> [last]        starts parcels, with a subscriber that writes down changes

`LEDGER` names a file to which every handler appends one line in one write: what stands there has happened.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attrs import frozen

from understudy import AlreadyEnded, Change, Context, Limits, Process, Runtime, Stuck, UnderstudyError, task, wait


@frozen
class Parcel:
    number: int


def note(effect: str, ctx: Context) -> None:
    append(os.environ["LEDGER"], f"{effect} {ctx.key} {ctx.instance} {ctx.attempt}")


def append(path: str, line: str) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


@task(into="receipt")
def charge(number: int, ctx: Context) -> str:
    note("charge", ctx)
    return f"receipt {number}"


@task
def ship(receipt: str, ctx: Context) -> str:
    note("ship", ctx)
    return f"shipped with {receipt}"


@task
def hold(ctx: Context) -> int:
    """Wait until the gate, a file beside the ledger, is there."""
    note("hold", ctx)
    gate = Path(os.environ["LEDGER"] + ".gate")
    while not gate.exists():
        time.sleep(0.005)
    note("held", ctx)
    return ctx.attempt


parcel = Process("parcel", charge, wait("paid"), ship, takes=Parcel, gives=ship)
box = Process("box", wait("never"))
held = Process("held", hold, gives=hold)
PROCESSES: dict[str, Process[Any, Any]] = {"parcel": parcel, "box": box, "held": held}

_turn = threading.Lock()


def say(**line: Any) -> None:
    """One write for each line: a killed process leaves no half of one behind another."""
    with _turn:
        os.write(1, (json.dumps(line) + "\n").encode())


class Worker:
    """One worker of a service. What it is told is done on threads of their own."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.is_pumping = True

    def start(self, id: str, process: str, number: int = 0) -> str:
        given = Parcel(number) if process == "parcel" else None
        return self.runtime.start(PROCESSES[process], given, id=id).id

    def send(self, id: str, message: str, payload: Any = None) -> bool:
        return self.runtime.send(id, message, payload)

    def result(self, id: str) -> Any:
        return self.runtime.result(id, timeout="50s")

    def is_owner(self) -> bool:
        return self.runtime.is_owner

    def pump(self, name: str) -> int:
        """Start parcels and send messages, one after the other, until told to stop; each is said once it is done."""
        number = 0
        while self.is_pumping:
            id = f"{name}-{number}"
            self.start(id, "parcel", number)
            say(ack="start", of=id, at_ns=time.monotonic_ns())
            self.send("box", "count", id)
            say(ack="send", of=id, at_ns=time.monotonic_ns())
            number += 1
            time.sleep(0.002)
        return number

    def stop_pumping(self) -> None:
        self.is_pumping = False

    def close(self, timeout: str) -> bool:
        return self.runtime.close(timeout=timeout)


def answer(worker: Worker, order: dict[str, Any]) -> None:
    number, name = order.pop("order"), order.pop("do")
    try:
        value = getattr(worker, name)(**order)
    except UnderstudyError as error:
        say(answers=number, error=type(error).__name__, text=str(error))
    else:
        say(answers=number, value=value)


def work(path: str, role: str, lease_ms: str) -> None:
    limits = Limits(lease_ms=int(lease_ms))
    with Runtime(path, *PROCESSES.values(), role=role, limits=limits, call_timeout="50s") as runtime:
        worker = Worker(runtime)
        say(serving=os.getpid())
        for line in sys.stdin:
            threading.Thread(target=answer, args=(worker, json.loads(line)), daemon=True).start()


def suffer(path: str, seed: str) -> None:
    with Runtime(path, parcel, role="owner") as runtime:
        say(serving=os.getpid())
        known = [summary.id for summary in runtime.list(limit=10_000)]
        chance = random.Random(int(seed))
        while True:
            if chance.random() < 0.5 or not known:
                known.append(runtime.start(parcel, Parcel(len(known)), id=f"parcel-{seed}-{len(known)}").id)
                say(ack="start", of=known[-1])
            else:
                pay(runtime, chance.choice(known))


def pay(runtime: Runtime, id: str) -> None:
    try:
        runtime.send(id, "paid", request_key=f"{id}/paid")
    except AlreadyEnded:
        return
    say(ack="send", of=id)


def publish(path: str, seed: str, is_last: str = "") -> None:
    """Start parcels and write down every change that a subscriber gets; the last one only listens to the end."""

    def write_down(change: Change) -> None:
        append(os.environ["LEDGER"] + ".told", f"{change.instance} {change.n} {change.seq}")

    with Runtime(path, parcel, role="owner") as runtime:
        subscription = runtime.subscribe("writer", write_down, from_start=True)
        say(serving=os.getpid())
        number = 0
        while not is_last:
            runtime.start(parcel, Parcel(number), id=f"parcel-{seed}-{number}")
            number += 1
        for summary in runtime.list(limit=10_000):
            runtime.wait_until(summary.id, lambda state: state.is_waiting_for("paid") or bool(state.incidents))
        while subscription.cursor < runtime.node.reads.last_seq():
            time.sleep(0.005)


def finish(path: str) -> None:
    """Bring every parcel to its end; an operator has to help where three lives in a row ended in the same step."""
    with Runtime(path, parcel, role="owner") as runtime:
        say(serving=os.getpid())
        for summary in runtime.list(limit=10_000):
            pay(runtime, summary.id)
        for summary in runtime.list(limit=10_000):
            while True:
                try:
                    say(ack="end", of=summary.id, result=runtime.result(summary.id, timeout="50s"))
                    break
                except Stuck:
                    assert [wait.name for wait in runtime.state(summary.id).incidents] == ["lost"]
                    runtime.retry(summary.id)
                    say(ack="retry", of=summary.id)


PLAYS: dict[str, Callable[..., None]] = {
    "worker": work,
    "victim": suffer,
    "finisher": finish,
    "publisher": publish,
}

if __name__ == "__main__":
    PLAYS[sys.argv[1]](*sys.argv[2:])
