"""The demonstration's process, the outside world that its handlers change, and the service that runs it.

The service is an ordinary one: a Runtime, open until its standard input ends. The ledger stands for a bank, a warehouse
and a carrier: it notes every call and counts every key once. Nothing here knows when, or that, it will be killed; but
where it is asked to, a handler reports that its effect has happened and then waits before it returns.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import random
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import attrs
import msgspec
from msgspec import structs

from understudy.actors.handlers import Context
from understudy.actors.system import Limits
from understudy.model.errors import UnderstudyError
from understudy.process import Process
from understudy.runtime import Runtime
from understudy.steps import parallel, saga, wait
from understudy.tasks import Retry, task

STEPS = ("reserve", "charge", "pack", "invoice", "delivered", "ship")
LOST_ITEM = "umbrella"  # The warehouse believes that it has one. The packer finds an empty shelf.
READY, HELD = "ready", "held"  # What the service says: "ready", and "held order-2/5".
_WORK_S = {"reserve": 0.5, "charge": 0.7, "pack": 1.1, "invoice": 0.8, "ship": 0.7}
_UNDO_S = 0.5


# --- the process ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Order:
    order_id: str
    item: str
    price_cents: int


class OutOfStock(Exception):
    """The shelf is empty; trying again fills no shelf."""


@task(into="reservation")
def reserve(item: str, ctx: Context) -> str:
    return world().call("reserve", ctx, item)


@reserve.undo
def release(item: str, ctx: Context) -> None:
    world().call("release", ctx, item)


@task(into="receipt", retry=Retry(3, first="200ms"))
def charge(price_cents: int, ctx: Context) -> str:
    return world().call("charge", ctx, cents=price_cents)


@charge.undo
def refund(receipt: str, price_cents: int, ctx: Context) -> None:
    world().call("refund", ctx, receipt, cents=-price_cents)


@task(into="parcel", retry=Retry(3, first="200ms", never=OutOfStock))
def pack(item: str, ctx: Context) -> str:
    if item == LOST_ITEM:
        world().work("pack", ctx)
        raise OutOfStock(f"no {item} left")
    return world().call("pack", ctx, item)


@pack.undo
def unpack(parcel: str, ctx: Context) -> None:
    world().call("unpack", ctx, parcel)


@task(into="bill")
def invoice(receipt: str, ctx: Context) -> str:
    return world().call("invoice", ctx, receipt)


@invoice.undo
def void(bill: str, ctx: Context) -> None:
    world().call("void", ctx, bill)


@task
def ship(parcel: str, ctx: Context) -> str:
    return world().call("ship", ctx, parcel)


fulfil = Process(
    "order",
    saga(reserve, charge, parallel(pack, invoice)),
    wait("delivered", key="order_id"),
    ship,
    takes=Order,
    gives=ship,
)


# --- the outside world ------------------------------------------------------------------------------------------------


class Call(msgspec.Struct, frozen=True):
    """One call that a handler made to the outside world; calls with the same key are one order to it."""

    key: str
    order: str
    what: str
    cents: int
    process: int
    attempt: int
    number: str  # The receipt: the same for all calls with the same key.
    is_first: bool = True


class Ledger:
    """An append-only file of calls, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, call: Call) -> Call:
        """Write the call down. The first one with its key gets a number, and all later ones get the same."""
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # Until the file is closed: other threads and processes call too.
            file.seek(0)
            before = [_CALL.decode(line) for line in file]
            numbers = {earlier.key: earlier.number for earlier in before}
            known = numbers.get(call.key)
            noted = structs.replace(call, number=known or f"no. {len(numbers) + 1}", is_first=known is None)
            os.write(file.fileno(), msgspec.json.encode(noted) + b"\n")
        return noted

    def calls(self) -> list[Call]:
        if not self.path.exists():
            return []
        whole = self.path.read_bytes().rpartition(b"\n")[0]  # The last line may be on its way.
        return [_CALL.decode(line) for line in whole.splitlines()]


_CALL = msgspec.json.Decoder(Call)


class World:
    """What the handlers of one service process reach."""

    def __init__(self, ledger: Ledger, *, process: int, seed: int, held: Iterable[str] = ()) -> None:
        self._ledger = ledger
        self._process = process
        self._seed = seed
        self._held = frozenset(held)

    def call(self, what: str, ctx: Context, about: str = "", *, cents: int = 0) -> str:
        """Do something that cannot be taken back by forgetting it: it takes time, then it has happened."""
        self.work(what, ctx)
        call = Call(ctx.key, ctx.instance, f"{what} {about}".strip(), cents, self._process, ctx.attempt, "")
        noted = self._ledger.note(call)
        if f"{ctx.instance}:{what}" in self._held and noted.is_first:
            say(f"{HELD} {ctx.key}")
            threading.Event().wait()  # For ever: whoever asked for it kills this process.
        return noted.number

    def work(self, what: str, ctx: Context) -> None:
        share = random.Random(f"{self._seed}/{ctx.instance}/{what}").uniform(0.8, 1.3)
        time.sleep(_WORK_S.get(what, _UNDO_S) * share)


_world: World | None = None


def world() -> World:
    assert _world is not None, "the handlers run in `serve`"
    return _world


# --- the service ------------------------------------------------------------------------------------------------------


def serve(argv: list[str] | None = None) -> int:
    """Own the database, or stand by until its owner dies. Ends with standard input, so it outlives no parent."""
    global _world
    parser = argparse.ArgumentParser(description=serve.__doc__)
    parser.add_argument("database")
    parser.add_argument("ledger", type=Path)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--hold", action="append", default=[], metavar="ORDER:CALL")
    given = parser.parse_args(argv)
    _world = World(Ledger(given.ledger), process=given.process, seed=given.seed, held=given.hold)
    try:
        with Runtime(given.database, fulfil, limits=Limits(threads=16)):
            say(READY)
            sys.stdin.read()
    except UnderstudyError as error:
        say(str(error))
        return 1
    return 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    # Under its own name, so that what the definition says of `OutOfStock` is the same for everybody who imports it.
    from understudy.demo import orders

    sys.exit(orders.serve())
