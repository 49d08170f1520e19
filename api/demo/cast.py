"""Who takes part in the demonstration beside the audience: the service's processes, and its customers.

Both report by putting functions into the inbox of the play, which calls them on its own thread; nothing here touches
the play otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from understudy.demo.board import Board
from understudy.demo.orders import HELD, READY, Order, fulfil
from understudy.model.errors import TimedOut, Unavailable, UnderstudyError
from understudy.runtime import Runtime, connect

Inbox = queue.Queue[Callable[[], None]]

_GAP_S: Final = 0.5  # Between two customers.
_TRANSIT_S: Final = (1.0, 1.8)
_ENDING_S: Final = 10.0


class Trouble(Exception):
    """The demonstration cannot go on."""


class Child:
    """One process of the service. It listens to its standard input, and so cannot outlive its parent."""

    def __init__(self, number: int, arguments: Sequence[str], inbox: Inbox) -> None:
        self.number = number
        self.is_ready = False
        self.is_killed = False
        self.held: str | None = None  # The key of the call that it has made and waits behind.
        self._words: deque[str] = deque(maxlen=8)
        self._is_leaving = False
        # -P: a module of the same name in the user's folder must not stand in the way. A session of its own: Ctrl-C is
        # for the parent, which then ends its children itself.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "understudy.demo.orders", *arguments, f"--process={number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(inbox,), daemon=True)
        self._listener.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_words(self) -> str:
        return "; ".join(word.strip() for word in self._words)

    @property
    def is_up(self) -> bool:
        return self.is_ready and not self.is_killed

    def kill(self) -> None:
        """SIGKILL."""
        self.is_killed = True
        self._process.kill()

    def close(self) -> None:
        """Let it end by itself: nothing is on its way any more."""
        self._is_leaving = True
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDING_S)

    def bury(self) -> None:
        """Wait until it is dead, and let go of what belonged to it."""
        self._process.wait()
        self._listener.join(_ENDING_S)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()

    def _listen(self, inbox: Inbox) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            inbox.put(functools.partial(self._hear, line.rstrip("\n")))
        inbox.put(self._ended)

    def _hear(self, line: str) -> None:
        if line == READY:
            self.is_ready = True
        elif line.startswith(f"{HELD} "):
            self.held = line.removeprefix(f"{HELD} ")
        else:
            self._words.append(line)

    def _ended(self) -> None:
        if not self.is_killed and not self._is_leaving:
            status = self._process.wait()
            raise Trouble(f"process {self.number} ended by itself with status {status}: {self.last_words}")


class Customers:
    """People who place an order, wait for the parcel, and say that it was delivered. Each insists until acknowledged.

    A call that nobody answered is made again under the same key, so that it cannot count twice.
    """

    def __init__(
        self, database: Path, inbox: Inbox, *, note: Callable[[str], None], fail: Callable[[str], None]
    ) -> None:
        self.accepted: set[str] = set()
        self.delivered: set[str] = set()
        self._database = str(database)
        self._inbox = inbox
        self._note = note
        self._fail = fail
        self._over = threading.Event()
        self._packed: dict[str, threading.Event] = {}
        self._threads: list[threading.Thread] = []

    def open(self, orders: Sequence[Order], *, seed: int) -> None:
        for place, order in enumerate(orders):
            self._packed[order.order_id] = threading.Event()
            transit_s = random.Random(f"{seed}/{order.order_id}").uniform(*_TRANSIT_S)
            thread = threading.Thread(target=self._shop, args=(order, place * _GAP_S, transit_s), daemon=True)
            self._threads.append(thread)
            thread.start()

    def look(self, board: Board) -> None:
        """Whose order waits for its delivery is told so."""
        for id_, packed in self._packed.items():
            if board[id_].is_waiting_for("delivered"):
                packed.set()

    def close(self) -> None:
        self._over.set()
        for packed in self._packed.values():
            packed.set()
        for thread in self._threads:
            thread.join(_ENDING_S)

    def _shop(self, order: Order, after_s: float, transit_s: float) -> None:
        try:
            self._place(order, after_s)
            self._packed[order.order_id].wait()
            self._receive(order.order_id, transit_s)
        except UnderstudyError as error:
            self._inbox.put(functools.partial(self._fail, f"{order.order_id}: {error}"))

    def _place(self, order: Order, after_s: float) -> None:
        id_ = order.order_id
        if not self._over.wait(after_s) and self._insist(
            lambda shop: shop.start(fulfil, order, id=id_, title=order.item, by="a customer")
        ):
            self._inbox.put(lambda: self._acknowledged(self.accepted, id_, f"{id_} ({order.item}) accepted"))

    def _receive(self, id_: str, transit_s: float) -> None:
        if not self._over.wait(transit_s) and self._insist(
            lambda shop: shop.send(id_, "delivered", request_key=f"delivered/{id_}", by="a customer")
        ):
            self._inbox.put(lambda: self._acknowledged(self.delivered, id_, f"message delivered to {id_} acknowledged"))

    def _acknowledged(self, known: set[str], id_: str, text: str) -> None:
        known.add(id_)
        self._note(text)

    def _insist(self, call: Callable[[Runtime], Any]) -> bool:
        """Call until it is acknowledged; False when the play is over before that."""
        while not self._over.is_set():
            try:
                with connect(self._database, call_timeout="1s") as shop:
                    call(shop)
                return True
            except (Unavailable, TimedOut):
                time.sleep(0.02)  # Nobody owns the database at this moment.
        return False
