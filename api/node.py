"""This process's part in a database: its owner, or a client of the owner.

An owner runs the actors and answers on the control port. A client calls there, and when the owner dies it takes over
at once or connects to whoever did; calls under way are repeated then. When the owner merely hangs, its beat stands
still, and it is replaced after a lease. Clocks of two processes are never compared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from understudy.actors.control import ControlClient, ControlServer, fresh_secret
from understudy.actors.handlers import Handler
from understudy.actors.promise import Promise
from understudy.actors.system import Limits, Ports, System, threaded_ports
from understudy.model.errors import (
    AlreadyOpen,
    Closed,
    Conflict,
    Unavailable,
    UnderstudyError,
    UsedAfterFork,
)
from understudy.service import Parameters, Service
from understudy.store.connection import MEMORY, Settings, open_reader
from understudy.store.migrations import check_latest
from understudy.store.ownership import Address, HungDetector, OwnerFile
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Writer

logger = logging.getLogger("understudy")
_NOT_REPEATABLE = frozenset({"send", "publish", "resolve"})  # Sent to another process only under a key.


class Role(Enum):
    OWNER = "owner"  # Own the file, or fail.
    AUTO = "auto"  # Own it if nobody does, else be a client; take over when the owner dies.
    CLIENT = "client"  # Never own it.
    OPERATOR = "operator"  # As AUTO, for one command: as the owner it carries commands out and runs no instance.


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
        self.path = path if path == MEMORY else str(Path(path).absolute())
        self.role = role
        self.limits = limits
        self.system: System | None = None
        self._settings = settings
        self._handlers = handlers
        self._deployments = deployments
        self._make_ports = ports or (lambda: threaded_ports(limits))
        self._pid = os.getpid()
        self._closed = False
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._submit: Callable[[str, Parameters], Promise[Any]] | None = None
        self._parked: list[tuple[str, Parameters, Promise[Any]]] = []
        self._client: ControlClient | None = None
        self._server: ControlServer | None = None
        self._owner_file = None if self.path == MEMORY else OwnerFile.of(self.path)
        self._readers = Readers(self.path, self._open_reader)
        self.reads = Reads(self._readers)
        self._lost = threading.Event()
        self._keeper: threading.Thread | None = None
        try:
            self._begin()
        except BaseException:
            self.close(timeout_s=0)
            raise

    # --- calls ---

    def new_id(self) -> str:
        return self.system.ports.new_id() if self.system is not None else uuid.uuid4().hex

    @property
    def is_owner(self) -> bool:
        return self.system is not None

    def submit(self, call: str, parameters: Parameters) -> Promise[Any]:
        """Make a call, wherever the owner is; if it dies meanwhile, the call is repeated with the next one."""
        self.check()
        if call in _NOT_REPEATABLE and not self.is_owner and not parameters.get("key"):
            parameters = {**parameters, "key": f"call/{uuid.uuid4().hex}"}
        with self._lock:
            submit = self._submit
            if submit is None:
                promise: Promise[Any] = Promise()
                self._parked.append((call, parameters, promise))
                return promise
        try:
            return submit(call, parameters)
        except UnderstudyError as error:
            promise = Promise()
            promise.reject(error)
            return promise

    def check(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork()
        if self._closed:
            raise Closed()

    def _submit_here(self, service: Service, call: str, parameters: Parameters) -> Promise[Any]:
        answer = service.call(call, parameters)
        if isinstance(answer, Promise):
            return answer
        promise: Promise[Any] = Promise()
        promise.resolve(answer)
        return promise

    def _submit_there(self, client: ControlClient, call: str, parameters: Parameters) -> Promise[Any]:
        promise: Promise[Any] = Promise()

        def settled(answer: Promise[Any]) -> None:
            if isinstance(answer.error, Unavailable) and client.is_ended and not self._closed:
                self._park(call, parameters, promise)
            elif answer.error is not None:
                promise.reject(answer.error)
            else:
                promise.resolve(answer.get())

        client.call(call, parameters).add_done_callback(settled)
        return promise

    def _park(self, call: str, parameters: Parameters, promise: Promise[Any]) -> None:
        with self._lock:
            if self._submit is None:
                self._parked.append((call, parameters, promise))
                return
        _forward(self.submit(call, parameters), promise)

    # --- becoming ---

    def _begin(self) -> None:
        if self.path == MEMORY:
            self._own(Writer(MEMORY, self._settings), None)
            return
        deadline_s = time.monotonic() + self.limits.lease_ms / 1_000 + 5
        while not self._try_once():
            if self.role is Role.OWNER:
                raise AlreadyOpen(
                    f"{self.path} has an owner already ({self._describe()}); "
                    'use role="auto" or understudy.connect(path)'
                )
            if self.role is Role.CLIENT and time.monotonic() > deadline_s - self.limits.lease_ms / 1_000 - 4:
                raise Unavailable(f"nobody owns {self.path} at the moment; open a Runtime on it")
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{self.path} has an owner that cannot be reached ({self._describe()})")
            time.sleep(0.01)  # An owner between its election and its first answer.
        if self.role in (Role.AUTO, Role.OPERATOR):
            self._keeper = threading.Thread(target=self._keep, name="understudy-keeper", daemon=True)
            self._keeper.start()

    def _try_once(self, *, replace_epoch: int | None = None) -> bool:
        """Own the file if nobody does (or if its owner hangs), else connect to the owner."""
        assert self._owner_file is not None
        if self.role is not Role.CLIENT and self._try_to_own(replace_epoch):
            return True
        return self.role is not Role.OWNER and self._try_to_connect()

    def _try_to_own(self, replace_epoch: int | None) -> bool:
        assert self._owner_file is not None
        if self._owner_file.claimed:
            return False
        with self._owner_file.election():
            epoch = self._stored_epoch()
            if epoch != replace_epoch and self._owner_file.is_alive(epoch):
                return False
            self._owner_file.hold(epoch + 1)
            try:
                writer = Writer(self.path, self._settings)
                try:
                    writer.take_over(f"{socket.gethostname()}:{os.getpid()}", after_epoch=epoch)
                    self._own(writer, self._owner_file)
                except BaseException:
                    writer.close()
                    raise
            except BaseException:
                self._owner_file.let_go()
                raise
        return True

    def _stored_epoch(self) -> int:
        if not Path(self.path).exists() or Path(self.path).stat().st_size == 0:
            return 0
        database = open_reader(self.path)
        try:
            row = database.connection().execute("SELECT epoch FROM owner WHERE partition = 0").fetchone()
        except sqlite3.Error:
            return 0  # Not ours, damaged, or not made yet: opening it for writing says which.
        finally:
            database.close()
        return int(row[0]) if row else 0

    def _own(self, writer: Writer, owner_file: OwnerFile | None) -> None:
        if owner_file is None:
            writer.take_over("memory")
        system = System(writer, self._handlers, self._make_ports(), self.limits)
        system.lost = lambda _reason: self._lost.set()
        if self.path == MEMORY:
            self._readers = Readers(self.path, self._open_reader, shared=writer.database)
            self.reads = Reads(self._readers)
        service = Service(system, self.reads)
        system.start(go_on=self.role is not Role.OPERATOR)
        for body in self._deployments:
            self._submit_here(service, "deploy", {"body": body}).get(timeout=30)
        if owner_file is not None and system.ports.driver is None:
            secret = fresh_secret()
            self._server = ControlServer(service.call, secret=secret)
            owner_file.publish(Address(port=self._server.port, secret=secret, pid=os.getpid(), epoch=writer.epoch))
            system.services.beat = lambda: owner_file.hold(writer.epoch)
        with self._lock:
            self.system = system
            self._serve(lambda call, parameters: self._submit_here(service, call, parameters))

    def _try_to_connect(self) -> bool:
        assert self._owner_file is not None
        address = self._owner_file.address()
        if address is None or not self._owner_file.is_alive(address.epoch):
            return False
        try:
            client = ControlClient(address, on_lost=self._lost.set)
        except (OSError, UnderstudyError):
            return False
        for body in self._deployments:
            try:
                client.call("deploy", {"body": body}).get(timeout=10)
            except Unavailable:
                return False
        with self._lock:
            self._client = client
            self._serve(lambda call, parameters: self._submit_there(client, call, parameters))
        return True

    def _serve(self, submit: Callable[[str, Parameters], Promise[Any]]) -> None:
        self._submit = submit
        parked, self._parked = self._parked, []
        self._changed.notify_all()
        for call, parameters, promise in parked:
            try:
                _forward(submit(call, parameters), promise)
            except UnderstudyError as error:
                promise.reject(error)

    # --- keeping the place ---

    def _keep(self) -> None:
        """Until the end: when the owner is lost, or hangs, find or become the next one."""
        detector = HungDetector(lease_s=self.limits.lease_ms / 1_000)
        while not self._closed:
            # An owner that hangs is replaced only by who can run its instances; a dead one, for one command too.
            is_patient = self.is_owner or self.role is Role.OPERATOR
            patience_s = None if is_patient else self.limits.lease_ms / 4_000
            if self._lost.wait(patience_s):
                self._lost.clear()
                if not self._closed:
                    self._fall()
                    self._rise(None)
            elif not self.is_owner:
                self._look_at_owner(detector)

    def _look_at_owner(self, detector: HungDetector) -> None:
        with contextlib.suppress(UnderstudyError):
            _holder, epoch, beat = self.reads.owner()
            if detector.observe(epoch=epoch, beat=beat, now_s=time.monotonic()):
                logger.warning("the owner of %s (epoch %d) hangs; taking over", self.path, epoch)
                self._fall()
                self._rise(epoch)

    def _fall(self) -> None:
        with self._lock:
            self._submit = None
            system, self.system = self.system, None
            server, self._server = self._server, None
            client, self._client = self._client, None
        if client is not None:
            client.close()
        if server is not None:
            server.close()
        if system is not None:
            system.stop(timeout_s=0.5)
            if self._owner_file is not None:
                self._owner_file.let_go()

    def _rise(self, replace_epoch: int | None) -> None:
        pause_s = 0.001
        while not self._closed:
            try:
                if self._try_once(replace_epoch=replace_epoch):
                    return
            except (Conflict, AlreadyOpen):
                replace_epoch = None  # Somebody else was first: connect to them.
            except UnderstudyError as error:
                logger.warning("%s: %s", self.path, error)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.1)

    # --- the end ---

    def close(self, *, timeout_s: float) -> bool:
        if self._closed or os.getpid() != self._pid:
            return True
        with self._lock:
            self._closed = True
            self._submit = None
            parked, self._parked = self._parked, []
        self._lost.set()
        for _call, _parameters, promise in parked:
            promise.reject(Closed())
        if self._server is not None:
            self._server.close()
        finished = self.system.stop(timeout_s=timeout_s) if self.system is not None else True
        if self._client is not None:
            self._client.close()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(timeout=5)
        self._readers.close()
        if self._owner_file is not None:
            self._owner_file.release()
        return finished

    def crash(self) -> None:
        """Leave everything as a killed process would; for rehearsals."""
        with self._lock:
            self._closed = True
            self._submit = None
        if self.system is not None:
            self.system.kill()
        if self._server is not None:
            self._server.close()
        self._readers.close()
        if self._owner_file is not None:
            self._owner_file.release()

    def _open_reader(self) -> Any:
        database = open_reader(self.path)
        try:
            check_latest(database, self.path)
        except BaseException:
            database.close()
            raise
        return database

    def _describe(self) -> str:
        assert self._owner_file is not None
        address = self._owner_file.address()
        return "unknown" if address is None else f"process {address.pid}, epoch {address.epoch}"


def _forward(source: Promise[Any], target: Promise[Any]) -> None:
    def settled(promise: Promise[Any]) -> None:
        if promise.error is not None:
            target.reject(promise.error)
        else:
            target.resolve(promise.get())

    source.add_done_callback(settled)
