"""Processes that are started to be killed, as their parent sees them: what they say, and how they are ended.

One template process has imported everything and forks a life for each order. Whatever a life has said to the end
before it died is heard; what it has not said to the end it has not said. Nothing here looks into a database.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

import msgspec

from understudy.simulations.child import ACKNOWLEDGEMENTS, MOST_BYTES, TELL, Line, Order

PATIENCE_S: Final = 60.0  # Nothing is expected to take so long, however busy the machine is.
TELLING_S: Final = 1.0
READ_BYTES: Final = 65_536
_DECODER = msgspec.json.Decoder(Line)


class Life:
    """One process that serves, until it is killed."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid = pid
        self.pipe = pipe
        self.lines: list[Line] = []
        self.is_silent = False  # It has said its last word.
        self._rest = b""

    def has_said(self, *words: str) -> bool:
        return any(line.say in words for line in self.lines)

    @property
    def has_acknowledged(self) -> bool:
        return self.has_said(*ACKNOWLEDGEMENTS)

    @property
    def epoch(self) -> int:
        """The last epoch in which it has owned the file."""
        return next((line.number for line in reversed(self.lines) if line.say == "owner"), 0)

    def hear(self) -> None:
        """Read what there is, and wait if there is nothing."""
        read = os.read(self.pipe, READ_BYTES)
        if not read:
            self.is_silent = True
            return
        *whole, self._rest = (self._rest + read).split(b"\n")
        self.lines += map(_DECODER.decode, whole)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class Lives:
    """The template, and the lives that it has forked."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._orders = ours
        self._template = subprocess.Popen(
            [sys.executable, "-m", "understudy.simulations.child", str(theirs.fileno())], pass_fds=[theirs.fileno()]
        )
        theirs.close()
        self._living: list[Life] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_all()
        self._orders.close()
        self._template.wait(PATIENCE_S)

    def begin(self, order: Order) -> Life:
        reading, writing = os.pipe()
        try:
            life = Life(self._ask(order, writing), reading)
        finally:
            os.close(writing)
        self._living.append(life)
        return life

    def listen(self, until: Callable[[], bool], *, timeout_s: float = PATIENCE_S) -> bool:
        """Hear all living until something is so; False when it is not so in time, or can no more become so."""
        end_s = time.monotonic() + timeout_s
        while not until():
            waiting_s = end_s - time.monotonic()
            speaking = {life.pipe: life for life in self._living if not life.is_silent}
            if waiting_s <= 0 or not speaking:
                return False
            for pipe in select.select(list(speaking), [], [], waiting_s)[0]:
                speaking[pipe].hear()
        return True

    def listen_for(self, seconds: float) -> None:
        self.listen(lambda: False, timeout_s=seconds)

    def stop(self, life: Life) -> None:
        """SIGSTOP, and wait until it stands still."""
        life.signal(signal.SIGSTOP)
        self._ask(Order("stopped", pid=life.pid))

    def wake(self, life: Life) -> None:
        life.signal(signal.SIGCONT)

    def kill(self, life: Life) -> int:
        """SIGKILL; hear its last words, and wait until nothing is left of it. How it has ended, as `bury` says it."""
        life.signal(signal.SIGKILL)
        return self.bury(life)

    def kill_all(self) -> None:
        for life in list(self._living):
            self.kill(life)

    def bury(self, life: Life) -> int:
        """Wait for the end of one that ends by itself: its exit code, or below zero the signal that has ended it."""
        while not life.is_silent:
            life.hear()
        code = self._ask(Order("ended", pid=life.pid))
        os.close(life.pipe)
        self._living.remove(life)
        return code

    def explain(self, life: Life) -> str:
        """What is the matter with one that does not do what it is there for; it is over then.

        One that hangs prints what its threads are doing on standard error.
        """
        is_over = life.is_silent
        if not is_over:
            life.signal(TELL)
            self.listen_for(TELLING_S)
        code = self.kill(life)
        last = f"the last it said is {life.lines[-1:]}"
        return f"it has ended by itself (exit code {code}), {last}" if is_over else f"it hangs, {last}"

    def _ask(self, order: Order, *descriptors: int) -> int:
        socket.send_fds(self._orders, [msgspec.json.encode(order)], descriptors)
        answer = self._orders.recv(MOST_BYTES)
        if not answer:
            raise ChildProcessError("the template of all lives has ended; its last words are on standard error")
        return int(msgspec.json.decode(answer, type=int))
