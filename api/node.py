"""This process's part in a database: its owner, or a client of the owner.

An owner runs the actors and answers on the control port. A client calls there, and when the owner dies it takes over
at once or connects to whoever did; calls under way are repeated then. When the owner merely hangs, its beat stands
still, and it is replaced after a lease. Clocks of two processes are never compared.

A node has one part at a time, or none. Only the constructor and then the keeper, a thread, look for one; a call that
meets none, or one that is over, is parked until there is another.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pykka

from understudy.actors.handlers import Handler
from understudy.actors.promise import Promise
from understudy.actors.system import Limits, Ports, System, threaded_ports
from understudy.model.errors import Closed, OutcomeUnknown, Unavailable, UnderstudyError, UsedAfterFork
from understudy.parts import Call, Casting, Owner, Part, Role
from understudy.service import Parameters
from understudy.store.connection import Settings, open_reader
from understudy.store.migrations import check_latest
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Writer

__all__ = ["Node", "Role"]

logger = logging.getLogger("understudy")

DEPLOY_S: Final = 30.0
ELECTION_S: Final = 2.0  # How long the keeper waits for an election of others; a close waits for it.
OWNERLESS_S: Final = 1.0  # How long one who never owns the file waits for somebody who does.
PAUSES_S: Final = (0.001, 0.1)  # Between two tries to find a part: the first, and the longest.


class Node:
    """One process on one database. Safe to use from any thread."""

    def __init__(
        self,
        path: str,
        *,
        role: Role,
        handlers: Mapping[str, Handler],
        deployments: list[str],
        limits: Limits,
        settings: Settings,
        ports: Callable[[], Ports] | None = None,
    ) -> None:
        self.path = str(Path(path).absolute())
        self.role = role
        self.limits = limits
        self._settings = settings
        self._handlers = handlers
        self._make_ports = ports or (lambda: threaded_ports(limits))
        self._pid = os.getpid()
        self._lock = threading.Lock()  # Guards the next four. Nobody waits, and nobody is called, while holding it.
        self._part: Part | None = None
        self._parked: list[Call] = []
        self._listeners: list[Callable[[], None]] = []
        self._closed = False
        self._closing = threading.Lock()
        self._finished: bool | None = None
        self._stirred = threading.Event()  # There is something for the keeper to look at.
        self._keeper: threading.Thread | None = None
        self._users = 1  # Of the files: whoever closes, and the keeper. The last one lets go of them.
        self._casting: Casting | None = None
        self._readers = Readers(self.path, self._open_reader)
        self._reads = Reads(self._readers)
        try:
            self._begin(deployments)
        except BaseException:
            self.close(timeout_s=0)
            raise

    # --- calls ---

    @property
    def system(self) -> System | None:
        """The actors, if they are here."""
        part = self._part
        return part.system if isinstance(part, Owner) else None

    @property
    def is_owner(self) -> bool:
        return self.system is not None

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def reads(self) -> Reads:
        self.check()
        return self._reads

    def new_id(self) -> str:
        system = self.system
        return uuid.uuid4().hex if system is None else system.ports.new_id()

    def check(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork()
        if self._closed:
            raise Closed()

    def submit(self, call: str, parameters: Parameters) -> Promise[Any]:
        """Make a call, wherever the owner is; if it dies meanwhile, the call is repeated with the next one."""
        self.check()
        part = self._part
        promise: Promise[Any] = Promise(driver=None if part is None else part.driver)
        self._pass_on(Call(call, parameters, promise))
        return promise

    def listen(self, changed: Callable[[], None]) -> None:
        """Call back whenever this node has another part, or none; it must only set or tell."""
        with self._lock:
            self._listeners.append(changed)

    def _pass_on(self, call: Call) -> None:
        part = self._part
        if part is None:
            self._park(None, call)
            return
        try:
            answer = part.call(call)
        except UnderstudyError as error:
            self._refused(part, call, error)
        else:
            answer.add_done_callback(lambda answer: self._answered(part, call, answer))

    def _answered(self, part: Part, call: Call, answer: Promise[Any]) -> None:
        if answer.error is None:
            call.promise.resolve(answer.get())
        else:
            self._refused(part, call, answer.error)

    def _refused(self, part: Part, call: Call, error: BaseException) -> None:
        if self._closed or self.role is Role.OWNER or not part.is_over_by(error, call):
            call.reject(error)
        else:
            call.may_be_done = call.may_be_done or isinstance(error, OutcomeUnknown)
            self._park(part, call)

    def _park(self, part: Part | None, call: Call) -> None:
        """Let the call wait for a part other than this one."""
        with self._lock:
            is_closed = self._closed
            is_parked = not is_closed and (self._part is None or self._part is part)
            if is_parked:
                self._parked.append(call)
        if is_parked:
            self._stirred.set()
        elif is_closed:
            call.reject(Closed())
        else:
            self._pass_on(call)

    # --- beginning ---

    def _begin(self, deployments: list[str]) -> None:
        self._casting = Casting(
            self.path,
            self.role,
            self._settings,
            lease_s=self.limits.lease_ms / 1_000,
            make=self._make,
            reads=self._reads,
            on_lost=self._stirred.set,
        )
        self._find_first(self._casting)
        self._keep_it()
        for body in deployments:
            try:
                self.submit("deploy", {"body": body}).get(timeout=DEPLOY_S)
            except pykka.Timeout:
                raise Unavailable(f"{self.path} has not taken a definition within {DEPLOY_S:g} s; try again") from None

    def _make(self, writer: Writer, left: frozenset[str] | None) -> System:
        system = System(writer, self._handlers, self._make_ports(), self.limits, left=left)
        system.lost = lambda _reason: self._stirred.set()
        return system

    def _find_first(self, casting: Casting) -> None:
        patience_s = OWNERLESS_S if self.role is Role.CLIENT else self.limits.lease_ms / 1_000 + 10
        deadline_s = time.monotonic() + patience_s
        pause_s, longest_s = PAUSES_S
        while (part := casting.find(election_s=patience_s)) is None:
            if self.role is Role.OWNER or time.monotonic() > deadline_s:
                raise casting.ownerless()
            time.sleep(pause_s)  # An owner between its election and its first answer, or one that may hang.
            pause_s = min(2 * pause_s, longest_s)
        self._install(part)

    def _keep_it(self) -> None:
        if self._part is None or self._part.driver is None:  # On a stage nobody dies unseen, and there are no threads.
            self._users += 1
            self._keeper = threading.Thread(target=self._keep, name="understudy-keeper", daemon=True)
            self._keeper.start()

    def _install(self, part: Part) -> None:
        with self._lock:
            is_closed = self._closed
            if not is_closed:
                self._part = part
            parked, self._parked = self._parked, []
        if is_closed:
            part.close(timeout_s=0)
        self._say_changed()
        for call in parked:
            self._pass_on(call)

    # --- keeping it ---

    def _keep(self) -> None:
        """Until the end: beat as the owner, watch the owner as a client, and find another part when one is over."""
        interval_s = max(0.001, self.limits.lease_ms / 4_000)
        try:
            while not self._closed:
                if self._part is not None:
                    self._stirred.wait(interval_s)
                self._stirred.clear()
                try:
                    self._look()
                except Exception:  # Without this thread nobody would take over.
                    logger.exception("%s: the keeper goes on after an error", self.path)
                    self._stirred.wait(interval_s)
        finally:
            self._let_go()

    def _look(self) -> None:
        part = self._part
        assert self._casting is not None
        if self._closed:
            return
        if part is None:
            self._rise(self._casting)
        elif not isinstance(part, Owner):
            if part.is_over or self._casting.has_changed(part):
                self._fall(part)
        elif not part.is_over:
            part.beat()
        elif self.role is Role.OWNER:
            part.step_down()  # Who wants to be the owner or nothing is nothing now: every call says so.
        else:
            self._fall(part)

    def _fall(self, part: Part) -> None:
        with self._lock:
            if self._part is not part:
                return
            self._part = None
        self._say_changed()
        part.close(timeout_s=0)

    def _rise(self, casting: Casting) -> None:
        deadline_s = time.monotonic() + OWNERLESS_S
        pause_s, longest_s = PAUSES_S
        obstacle = ""
        while not self._closed:
            try:
                part = casting.find(election_s=ELECTION_S)
            except UnderstudyError as error:
                part = None
                if str(error) != obstacle:
                    obstacle = str(error)
                    logger.warning("%s: %s", self.path, obstacle)
            if part is not None:
                self._install(part)
                return
            if self.role is Role.CLIENT and time.monotonic() > deadline_s:
                self._give_up(casting)
                return
            self._stirred.wait(pause_s)
            self._stirred.clear()
            pause_s = min(2 * pause_s, longest_s)

    def _give_up(self, casting: Casting) -> None:
        """Nobody owns the file, and we never do: those who wait are told so, and the next call looks again."""
        with self._lock:
            parked, self._parked = self._parked, []
        for call in parked:
            call.reject(casting.ownerless())
        self._stirred.wait()

    def _say_changed(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()

    # --- the end ---

    def close(self, *, timeout_s: float) -> bool:
        """Whether nothing was left unfinished. Who closes while another does waits for that one."""
        if os.getpid() != self._pid:
            return True
        with self._closing:
            if self._finished is None:
                self._finished = self._close(timeout_s)
            return self._finished

    def _close(self, timeout_s: float) -> bool:
        with self._lock:
            self._closed = True
            part, self._part = self._part, None
            parked, self._parked = self._parked, []
        self._stirred.set()
        for call in parked:
            call.reject(Closed())
        self._say_changed()
        self._readers.close()  # Before the writer, which then leaves one file behind; who still reads opens anew.
        finished = part is None or part.close(timeout_s=timeout_s)
        keeper = self._keeper
        if keeper is not None and keeper is not threading.current_thread():
            keeper.join(timeout=2 * ELECTION_S)
        self._let_go()
        return finished

    def crash(self) -> None:
        """Leave everything as a killed process would; for rehearsals."""
        with self._lock:
            self._closed = True
            part, self._part = self._part, None
        if isinstance(part, Owner):
            part.crash()
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            self._readers.close()
            if self._casting is not None:
                self._casting.release()

    def _open_reader(self) -> Any:
        database = open_reader(self.path)
        try:
            check_latest(database, self.path)
        except BaseException:
            database.close()
            raise
        return database
