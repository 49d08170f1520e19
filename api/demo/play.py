"""The demonstration: orders run through a service whose process is killed, again and again, and none is lost.

The play kills the process that owns the database, and follows the orders by reading committed rows. It never asks a
process how things stand, and every figure that it shows is measured. The processes are real, and SIGKILL leaves them no
last word.
"""

from __future__ import annotations

import argparse
import queue
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import attrs
from rich.console import Console

from understudy.demo.board import Board, News
from understudy.demo.cast import Child, Customers, Inbox, Trouble
from understudy.demo.orders import LOST_ITEM, Ledger, Order
from understudy.demo.show import Ending, Kill, Scene, Show, open_show, report
from understudy.model.errors import Damaged, UnderstudyError
from understudy.store.connection import open_reader
from understudy.store.reads import Readers, Reads

FEWEST: Final = 3
MOST: Final = 8
_ITEMS: Final = ("lamp", "teapot", "kettle", "mirror", "clock", "basket", "blanket", "candle")
_FRAME_S: Final = 0.08
_TICK_S: Final = 0.02
_FAST_TICK_S: Final = 0.001  # While a recovery is measured.
_LIMIT_S: Final = 90.0


def main(argv: list[str] | None = None) -> int:
    """Run the demonstration. 0: everything acknowledged is there at its end; 1: it is not, or nothing could be run."""
    given = _arguments(argv)
    console, show = open_show()
    try:
        database = _database(given.db)
        with show:
            ending = Play(database, _orders(given.orders, given.seed), seed=given.seed, show=show).run()
    except KeyboardInterrupt:
        console.print("Stopped; no process of the demonstration is left.")
        return 130
    except (Trouble, UnderstudyError, OSError) as error:
        Console(stderr=True, highlight=False, markup=False).print(f"The demonstration failed: {error}", soft_wrap=True)
        return 1
    report(console, ending)
    return 1 if ending.missing else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="understudy demo",
        description="Run orders through a service, kill its process with SIGKILL on the way, and see what is left.",
    )
    parser.add_argument("--db", type=Path, metavar="PATH", help="where to make the database (default: a new folder)")
    parser.add_argument("--orders", type=_count, default=6, metavar="N", help=f"{FEWEST} to {MOST} (default: 6)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="varies goods, prices and durations")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal() or not FEWEST <= int(text) <= MOST:
        raise argparse.ArgumentTypeError(f"give a number from {FEWEST} to {MOST}, not {text}")
    return int(text)


def _database(wanted: Path | None) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix="understudy-demo-")) / "orders.db"
    if wanted.exists() or _ledger_of(wanted).exists():
        raise Trouble(f"{wanted} or its ledger is there already; give a path where there is nothing yet")
    if not wanted.parent.is_dir():
        raise Trouble(f"there is no folder {wanted.parent}; make it first, or give another path")
    return wanted.absolute()


def _ledger_of(database: Path) -> Path:
    return database.with_name(f"{database.stem}-ledger.jsonl")


@attrs.frozen
class Roles:
    """Which order meets which misfortune, as places in the list of orders."""

    repeated: int  # The process is killed between charging its card and committing that.
    parallel: int  # The process is killed while this one, or one after it, is packed and invoiced.
    failing: int  # It fails, and all processes are killed between refunding it and committing that.

    @classmethod
    def of(cls, count: int) -> Roles:
        spare = int(count > 4)
        return cls(spare, count // 2, count - 1 - spare)


def _orders(count: int, seed: int) -> list[Order]:
    chance = random.Random(seed)
    items = chance.sample(_ITEMS, count)
    items[Roles.of(count).failing] = LOST_ITEM
    return [Order(f"order-{n}", item, chance.randrange(990, 9_990, 10)) for n, item in enumerate(items, 1)]


class Play:
    """One run, from an empty database to the proof that nothing is missing in it."""

    def __init__(self, database: Path, orders: Sequence[Order], *, seed: int, show: Show) -> None:
        self._roles = Roles.of(len(orders))
        self._repeated = orders[self._roles.repeated].order_id
        self._failing = orders[self._roles.failing].order_id
        self._database = database
        self._ledger = Ledger(_ledger_of(database))
        self._orders = orders
        self._seed = seed
        self._show = show
        self._began_s = time.monotonic()
        self._drawn_s = 0.0
        self._inbox: Inbox = queue.Queue()
        self._children: list[Child] = []
        self._rulers: dict[int, int] = {}  # Which process ruled in which epoch.
        self._kills: list[Kill] = []
        self._recovering: Kill | None = None
        self._has_struck_parallel = False
        self._readers = Readers(str(database), lambda: open_reader(str(database)))
        self._board = Board(Reads(self._readers), orders)
        self._customers = Customers(
            database, self._inbox, note=lambda text: self._note(text, kind="accepted"), fail=self._fail
        )

    def run(self) -> Ending:
        try:
            self._note(f"the database is {self._database}")
            first = self._enter()
            while not first.is_ready:
                self._hear(_TICK_S)
            self._note("process 1 owns it; process 2 is started and will stand by")
            self._enter()
            self._customers.open(self._orders, seed=self._seed)
            while not self._board.is_finished:
                self._tick()
            return self._end()
        finally:
            self._customers.close()
            _kill(self._children)
            self._readers.close()

    def _enter(self) -> Child:
        """Start one more process: it owns the database if nobody does, else it stands by."""
        holds = (f"--hold={self._repeated}:charge", f"--hold={self._failing}:refund")
        given = (str(self._database), str(self._ledger.path), f"--seed={self._seed}", *holds)
        child = Child(len(self._children) + 1, given, self._inbox)
        self._children.append(child)
        return child

    def _tick(self) -> None:
        self._hear(_TICK_S if self._recovering is None else _FAST_TICK_S)
        for news in self._board.look():
            self._follow(news)
        self._customers.look(self._board)
        if self._recovering is None:
            self._strike()
        if self._at_s - self._drawn_s >= _FRAME_S or self._board.is_finished:
            self._drawn_s = self._at_s
            self._show.draw(self._scene())

    def _hear(self, timeout_s: float) -> None:
        """Take in what processes and customers have to say."""
        if self._at_s > _LIMIT_S:
            raise Trouble(f"it is not done after {_LIMIT_S:g} s; look with: understudy list {self._database}")
        try:
            self._inbox.get(timeout=timeout_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _follow(self, news: News) -> None:
        numbers = {child.pid: child.number for child in self._children}
        self._rulers.setdefault(self._board.epoch, numbers[self._board.owner_pid])
        if self._recovering is not None and news.epoch > self._recovering.epoch:
            self._recovered(self._recovering, self._rulers[news.epoch])
        self._note(f"{news.order}: {news.words}", kind="failure" if " failed" in news.words else "")

    def _fail(self, why: str) -> None:
        words = [f"process {child.number} said: {child.last_words}" for child in self._children if child.last_words]
        raise Trouble("; ".join([why, *words]))

    # --- misfortune ---

    def _strike(self) -> None:
        """Kill the owner when its moment has come, and not before another process stands by."""
        owner = self._owner()
        others = [child for child in self._children if child is not owner and child.is_up]
        if owner is None or not others:
            return
        if owner.held is not None and owner.held.startswith(f"{self._failing}/"):
            self._kill(f"{self._failing} refunded, not yet committed", owner, *others)
        elif owner.held is not None:
            self._kill(f"{self._repeated} charged, not yet committed", owner)
        elif (parallel := self._in_parallel()) is not None:
            self._has_struck_parallel = True
            self._kill(f"{parallel} being packed and invoiced", owner)

    def _in_parallel(self) -> str | None:
        """An order that is packed and invoiced just now, if that has killed nobody yet.

        Not before the first kill is overcome: what is lost three times in a row is an incident, and rightly so.
        """
        if self._has_struck_parallel or self._board[self._repeated].mark("charge") != "done":
            return None
        lines = (self._board[order.order_id] for order in self._orders[self._roles.parallel :])
        return next((line.id for line in lines if line.mark("pack") == line.mark("invoice") == "running"), None)

    def _kill(self, why: str, *children: Child) -> None:
        at_s = self._at_s
        _kill(children)
        victims = tuple(child.number for child in children)
        self._recovering = Kill(at_s=at_s, victims=victims, why=why, epoch=self._board.epoch)
        self._kills.append(self._recovering)
        self._show.note(at_s, f"SIGKILL to {self._recovering.names}: {why}", kind="kill")
        if len(children) > 1:
            self._enter()

    def _recovered(self, kill: Kill, by: int) -> None:
        kill.recovered_ms = (self._at_s - kill.at_s) * 1_000
        kill.recovered_by = by
        kill.stood_by = len(kill.victims) == 1
        self._recovering = None
        self._note(kill.recovery, kind="recovery")
        if kill.stood_by:
            self._enter()

    def _owner(self) -> Child | None:
        living = (child for child in self._children if not child.is_killed)
        return next((child for child in living if child.pid == self._board.owner_pid), None)

    # --- showing ---

    @property
    def _at_s(self) -> float:
        return time.monotonic() - self._began_s

    def _note(self, text: str, *, kind: str = "") -> None:
        self._show.note(self._at_s, text, kind=kind)

    def _scene(self) -> Scene:
        return Scene(
            at_s=self._at_s,
            board=self._board,
            processes={child.number: self._status(child) for child in self._children},
            kills=self._kills,
            calls=self._ledger.calls(),
        )

    def _status(self, child: Child) -> str:
        if child.is_killed:
            return "killed"
        if child is self._owner():
            return "owns"
        return "stands by" if child.is_up else "starts"

    # --- the end ---

    def _end(self) -> Ending:
        self._customers.close()
        self._hear(0)  # The last acknowledgements.
        scene = self._scene()
        for child in self._children:
            child.close()
        return Ending(
            database=self._database,
            ledger=self._ledger.path,
            scene=scene,
            rulers=self._rulers,
            accepted=len(self._customers.accepted),
            delivered=len(self._customers.delivered),
            missing=self._missing(scene),
        )

    def _missing(self, scene: Scene) -> list[str]:
        """Whatever was acknowledged, or seen as committed, and is not there now; and money that is nobody's."""
        reads = self._board.reads
        stored = set(reads.ids())
        missing = [f"{id_} was accepted and is gone" for id_ in self._customers.accepted - stored]
        undelivered = (id_ for id_ in self._customers.delivered if self._board[id_].mark("delivered") != "done")
        missing += [f"the message to {id_} was acknowledged and is gone" for id_ in undelivered]
        if lost := self._board.lost_commits():
            missing.append(f"{lost} commits were seen and are gone")
        if scene.money_taken != scene.money_due:
            missing.append(f"{scene.money_taken} cents were taken from cards, but {scene.money_due} were due")
        for id_ in stored:
            try:
                reads.check_chain(id_)
            except Damaged as error:
                missing.append(str(error))
        return missing


def _kill(children: Sequence[Child]) -> None:
    """All at once; the owner, who is the first, last: otherwise another one could still take its place."""
    for child in reversed(children):
        child.kill()
    for child in children:
        child.bury()
