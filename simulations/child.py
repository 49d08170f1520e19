"""The process that is killed: a real `Runtime` on a real file, with a small mix of processes, which says what it does.

    python -m understudy.simulations.child <number of a socket>

It is a template: it has imported everything, opens nothing, and forks a fresh life for each order that comes through
the socket, so that a life costs milliseconds. A life writes one line for each acknowledgement and for each call of a
handler into the pipe that came with its order, each in one write: a killed process leaves no half of one behind
another. Nothing is said before it is true, and nothing here decides who is killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, Final

import msgspec
from attrs import frozen

from understudy.actors.handlers import Context
from understudy.actors.persistence import Health
from understudy.actors.system import Limits
from understudy.model.errors import AlreadyEnded, Failed, Fenced, Stuck, UnderstudyError
from understudy.process import Process
from understudy.runtime import Runtime
from understudy.steps import parallel, saga, sleep, wait
from understudy.subscriptions import Change
from understudy.tasks import task

CLIENTS: Final = 3  # Threads of a life that start, send, publish and wait for results.
MOST_STARTS: Final = 1_000  # Of one client in one life; the numbers of instances leave room for so many.
LONGEST_LIFE_S: Final = 120.0  # A life that nobody ends, because its parent is gone, ends by itself.
LOOK_EVERY_S: Final = 0.002  # How often a life looks whether it is still the owner.
FAILS_EVERY: Final = 3  # Every third journey finds its train full, and is undone.
SUBSCRIBER: Final = "watcher"
GONE: Final = 3  # The exit code of a life that nobody hears any more.
TELL: Final = signal.SIGUSR1  # Makes a life print what all its threads are doing.
MOST_BYTES: Final = 4_096  # Of one order.
ACKNOWLEDGEMENTS: Final = ("start", "send", "publish", "result")


class Order(msgspec.Struct, frozen=True):
    """What the template is to do, and what a life is to be."""

    do: str  # "serve" until it is killed, "finish" all that is open, or wait for a life: "stopped", "ended".
    path: str = ""
    life: int = 0  # Numbered through all lives on one file.
    seed: str = ""
    role: str = "owner"
    lease_ms: int = 10_000
    pid: int = 0


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a life says.

    "serving", "owner", "deposed", "call" of a handler, an acknowledgement, "told" by a subscriber, "refused" or
    "finished".
    """

    say: str
    of: str = ""  # The instance.
    key: str = ""  # Of the request, or of the handler's call.
    number: int = 0  # Of the attempt, of the commit that a subscriber was told of, or the owner's epoch.
    text: str = ""


# --- the mix ----------------------------------------------------------------------------------------------------------


@frozen
class Given:
    number: int


class Full(Exception):
    """The journey cannot be made."""


_pipe = -1  # Where this life's lines go; below zero when nobody listens.


def say(line: Line) -> None:
    if _pipe >= 0:
        try:
            os.write(_pipe, msgspec.json.encode(line) + b"\n")
        except OSError:
            os._exit(GONE)  # Whoever has started us is gone.


def _note(ctx: Context) -> None:
    """Said before the handler's effect counts: a result without a line would be a call that never happened."""
    say(Line("call", ctx.instance, ctx.key, ctx.attempt, ctx.node))


@task(into="seat")
def reserve(number: int, ctx: Context) -> str:
    _note(ctx)
    return f"seat {number}"


@reserve.undo
def release(ctx: Context) -> None:
    _note(ctx)


@task(into="receipt")
def charge(number: int, ctx: Context) -> str:
    _note(ctx)
    return f"receipt {number}"


@charge.undo
def refund(ctx: Context) -> None:
    _note(ctx)


@task
def depart(number: int, ctx: Context) -> str:
    _note(ctx)
    if number % FAILS_EVERY == 0:
        raise Full(f"no place is left for {number}")
    return f"departed {number}"


@task(into="box")
def pack(number: int, ctx: Context) -> str:
    _note(ctx)
    return f"box {number}"


@task(into="bill")
def invoice(number: int, ctx: Context) -> str:
    _note(ctx)
    return f"bill {number}"


@task
def ship(number: int, ctx: Context) -> str:
    _note(ctx)
    return f"shipped {number}"


@task(transactional=True)
def enter(number: int, ctx: Context, connection: Any) -> str:
    """What it writes is there exactly once, because it is one commit with the record of its result."""
    _note(ctx)
    connection.execute("CREATE TABLE IF NOT EXISTS journal (key TEXT NOT NULL, number INTEGER NOT NULL)")
    connection.execute("INSERT INTO journal VALUES (?, ?)", (ctx.key, number))
    return f"entered {number}"


journey = Process("journey", saga(reserve, charge, depart), takes=Given, gives=depart)
parcel = Process("parcel", pack, wait("paid", key="number", into="payment"), ship, takes=Given, gives=ship)
bundle = Process("bundle", parallel(pack, invoice), ship, takes=Given, gives=ship)
nap = Process("nap", pack, sleep("5ms"), ship, takes=Given, gives=ship)
entry = Process("entry", enter, takes=Given, gives=enter)
PROCESSES: Final[tuple[Process[Any, Any], ...]] = (journey, parcel, bundle, nap, entry)


# --- a life -----------------------------------------------------------------------------------------------------------


def serve(order: Order) -> None:
    """Start and pay and wait, as the owner or through it, until the end comes from outside."""
    runtime = _open(order)
    for number in range(CLIENTS):
        threading.Thread(target=_Client(runtime, order, number).run, daemon=True).start()
    end_s = time.monotonic() + LONGEST_LIFE_S
    reign = 0
    while time.monotonic() < end_s:
        epoch = _epoch(runtime)
        if epoch != reign:
            say(Line("owner", number=epoch) if epoch else Line("deposed", number=reign))
            reign = epoch
        time.sleep(LOOK_EVERY_S)


def finish(order: Order) -> None:
    """Bring everything to its end, and tell the subscriber of it."""
    runtime = _open(order)
    client = _Client(runtime, order, 0)
    everything = runtime.list(limit=10_000)
    for summary in everything:
        if summary.process == parcel.name:
            client.pay(summary.id)
    for summary in everything:
        while not client.see_result(summary.id, timeout="60s"):
            # Three lives in a row have ended within the same step, which is for an operator to look at.
            runtime.retry(summary.id)
    last = runtime.node.reads.last_seq()
    while (runtime.node.reads.cursor(SUBSCRIBER) or 0) < last:
        time.sleep(LOOK_EVERY_S)
    runtime.close()
    say(Line("finished"))


PLAYS: Final[dict[str, Callable[[Order], None]]] = {"serve": serve, "finish": finish}


class _Client:
    """One thread that uses the runtime as a service does. What it draws depends on the seed, and not on the time."""

    def __init__(self, runtime: Runtime, order: Order, number: int) -> None:
        self._runtime = runtime
        self._first = (order.life * CLIENTS + number) * MOST_STARTS
        self._chance = random.Random(f"{order.seed}/{order.life}/{number}")
        self._open_parcels = [one.id for one in runtime.list(process=parcel.name, open_only=True)]

    def run(self) -> None:
        for number in range(self._first, self._first + MOST_STARTS):
            try:
                self._move(number)
            except Fenced:
                return
            except UnderstudyError as error:
                say(Line("refused", text=type(error).__name__))

    def _move(self, number: int) -> None:
        if self._open_parcels and self._chance.random() < 0.4:
            place = self._chance.randrange(len(self._open_parcels))
            self.pay(self._open_parcels[place])
            self._open_parcels.pop(place)
            return
        process = self._chance.choice(PROCESSES)
        id_ = f"{process.name}-{number}"
        self._runtime.start(process, Given(number), id=id_)
        say(Line("start", id_))
        if process is parcel:
            self._open_parcels.append(id_)
        elif self._chance.random() < 0.5:
            self.see_result(id_, timeout="5s")

    def pay(self, id_: str) -> None:
        """Under one key for all lives: whoever pays again pays nothing. Every second parcel is paid by publishing."""
        number = number_of(id_)
        key = f"{id_}/paid"
        if number % 2:
            self._runtime.publish("paid", "published", key=number, request_key=key)
            say(Line("publish", id_, key))
            return
        with contextlib.suppress(AlreadyEnded):
            self._runtime.send(id_, "paid", "sent", key=number, request_key=key)
            say(Line("send", id_, key))

    def see_result(self, id_: str, *, timeout: str) -> bool:
        """Whether it has one; else it waits for an operator."""
        try:
            said = f"completed {self._runtime.result(id_, timeout=timeout)}"
        except Failed:
            said = "failed "
        except Stuck:
            return False
        say(Line("result", id_, text=said))
        return True


def number_of(id_: str) -> int:
    return int(id_.rpartition("-")[2])


def _open(order: Order) -> Runtime:
    limits = Limits(lease_ms=order.lease_ms, threads=4)
    runtime = Runtime(order.path, *PROCESSES, role=order.role, limits=limits, call_timeout="60s")
    runtime.subscribe(SUBSCRIBER, _hear, from_start=True)
    say(Line("serving"))
    return runtime


def _hear(change: Change) -> None:
    say(Line("told", change.instance, number=change.n))


def _epoch(runtime: Runtime) -> int:
    """In which it owns the file; 0 when it does not, or no longer."""
    system = runtime.node.system
    return 0 if system is None or system.health is Health.FENCED else system.writer.epoch


# --- the template -----------------------------------------------------------------------------------------------------


class Template:
    """Forks lives, and waits for them, because only a parent may."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._lives: set[int] = set()

    def run(self) -> None:
        """Until whoever gives the orders is gone; then all lives end."""
        try:
            while True:
                text, descriptors, _flags, _address = socket.recv_fds(self._orders, MOST_BYTES, 1)
                if not text:
                    return
                answer = self._carry_out(msgspec.json.decode(text, type=Order), descriptors)
                self._orders.sendall(msgspec.json.encode(answer))
        finally:
            for pid in self._lives:
                os.kill(pid, signal.SIGKILL)

    def _carry_out(self, order: Order, descriptors: list[int]) -> int:
        """The process of a new life, or how an old one has ended: its exit code, or its signal below zero."""
        if order.do == "stopped":
            os.waitid(os.P_PID, order.pid, os.WSTOPPED)
            return order.pid
        if order.do == "ended":
            self._lives.discard(order.pid)
            return os.waitstatus_to_exitcode(os.waitpid(order.pid, 0)[1])
        pid = self._fork(order, descriptors[0])
        os.close(descriptors[0])
        self._lives.add(pid)
        return pid

    def _fork(self, order: Order, pipe: int) -> int:
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            self._orders.close()
            live(order, pipe)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # Whatever happens, a life never goes on as a template.


def live(order: Order, pipe: int) -> None:
    global _pipe
    _pipe = pipe
    PLAYS[order.do](order)


def main() -> None:
    logging.getLogger("understudy").disabled = True  # Lives end in the middle; what they warn of is meant to be.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A Ctrl-C is for whoever gives the orders, who then goes.
    faulthandler.enable()
    faulthandler.register(TELL, all_threads=True)
    gc.freeze()
    Template(socket.socket(fileno=int(sys.argv[1]))).run()


if __name__ == "__main__":
    main()
