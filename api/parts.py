"""The parts that a process can have in a database: its owner, or a client of the owner; and how one is found.

Whoever wants to own the file holds an election: nobody else decides at that time who owns it. Nothing here waits for
another process longer than it is told to, and nothing here is repeated: that is the node's affair.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sqlite3
import time
import uuid
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from understudy.actors.control import ControlClient, ControlServer, fresh_secret
from understudy.actors.persistence import Health
from understudy.actors.promise import Promise
from understudy.actors.system import System
from understudy.model.errors import AlreadyOpen, Closed, Conflict, Fenced, OutcomeUnknown, Unavailable, UnderstudyError
from understudy.service import Parameters, Service
from understudy.store.connection import Settings, explained, open_reader
from understudy.store.ownership import Address, HungDetector, OwnerFile
from understudy.store.reads import Reads
from understudy.store.writer import Writer

logger = logging.getLogger("understudy")

_ONCE: Final = frozenset({"send", "publish", "resolve", "cancel", "pause", "resume"})  # Repeated only under a key.
_OWNER: Final = "SELECT epoch, beat, holder, address FROM owner WHERE partition = 0"
_CONNECT_S: Final = (0.5, 5.0)  # How long a connection may take to be made, whatever the lease.


class Role(Enum):
    OWNER = "owner"  # Own the file, or fail.
    AUTO = "auto"  # Own it if nobody does, else be a client; take over when the owner dies.
    CLIENT = "client"  # Never own it.
    OPERATOR = "operator"  # As AUTO, for one command: as the owner it carries commands out and runs no instance.


class Call(msgspec.Struct, eq=False):
    """What a caller waits for; it keeps its key when it is repeated."""

    name: str
    parameters: Parameters
    promise: Promise[Any]
    may_be_done: bool = False  # It was sent once, and no answer came.

    def reject(self, error: BaseException) -> None:
        """Say why it is not done; or that it may have been, if nobody could tell us more."""
        if self.may_be_done and isinstance(error, Closed | Unavailable):
            error = OutcomeUnknown(f"an owner may have done this before it went, and then: {error}; look first")
        self.promise.reject(error)

    @property
    def may_repeat(self) -> bool:
        return self.name not in _ONCE or bool(self.parameters.get("key"))


class Owner:
    """The part of the one who owns the file: the actors, the port, and the lock that says that we live."""

    def __init__(self, system: System, service: Service, owner_file: OwnerFile | None) -> None:
        self.system = system
        self.epoch = system.writer.epoch
        self.driver = system.ports.driver
        self._service = service
        self._owner_file = owner_file
        self._server: ControlServer | None = None

    def serve(self, *, go_on: bool) -> None:
        """Begin, and let other processes call; on a stage there are none."""
        self.system.start(go_on=go_on)
        if self._owner_file is not None and self.driver is None:
            secret = fresh_secret()
            self._server = ControlServer(self._service.call, secret=secret)
            address = Address(port=self._server.port, secret=secret, pid=os.getpid(), epoch=self.epoch)
            self._owner_file.publish(address)

    def call(self, call: Call) -> Promise[Any]:
        answer = self._service.call(call.name, call.parameters)
        if not isinstance(answer, Promise):
            promise: Promise[Any] = Promise()
            promise.resolve(answer)
            return promise
        if call.name == "watch":  # It may never be called back: who no longer waits for it ends it.
            call.promise.add_done_callback(lambda _: answer.resolve(False))
        return answer

    @property
    def is_over(self) -> bool:
        return self.system.health is Health.FENCED

    def is_over_by(self, error: BaseException | None, call: Call) -> bool:
        """Whether the next owner is to be asked: nothing was done here, or what was done would not be done twice."""
        if isinstance(error, Fenced | Closed):
            return True
        return isinstance(error, Unavailable) and self.is_over and call.may_repeat

    def beat(self) -> None:
        """Show that we live, to whoever asks the lock and to whoever reads the database."""
        if self.system.services.lost is None:
            if self._owner_file is not None:
                self._owner_file.hold(self.epoch)
            self.system.beat()

    def step_down(self) -> None:
        """Nothing can be committed any more: others shall neither call here nor take us for alive."""
        if self._server is not None:
            self._server.close()
        if self._owner_file is not None:
            self._owner_file.let_go()

    def close(self, *, timeout_s: float) -> bool:
        if self._server is not None:
            self._server.close()
        finished = self.system.stop(timeout_s=timeout_s)
        if self._owner_file is not None:
            self._owner_file.let_go()
        return finished

    def crash(self) -> None:
        self.system.kill()
        if self._server is not None:
            self._server.close()


class Client:
    """The part of one who talks to the owner."""

    def __init__(self, control: ControlClient, epoch: int) -> None:
        self.epoch = epoch
        self.driver = None
        self._control = control
        self._is_stale = False
        self._watches: dict[tuple[str, int], Promise[Any]] = {}

    def call(self, call: Call) -> Promise[Any]:
        if call.name == "watch":
            return self._watch(call)
        if not call.may_repeat:
            call.parameters = {**call.parameters, "key": f"call/{uuid.uuid4().hex}"}
        return self._control.call(call.name, call.parameters)

    def _watch(self, call: Call) -> Promise[Any]:
        """The owner keeps a watch until it is called back: there is one for all who wait for the same."""
        key = (call.parameters["id"], call.parameters["version"])
        pending = self._watches.get(key)
        if pending is None:
            pending = self._watches[key] = self._control.call(call.name, call.parameters)
            pending.add_done_callback(lambda _: self._watches.pop(key, None))
        return pending

    @property
    def is_over(self) -> bool:
        return self._is_stale or self._control.is_ended

    def is_over_by(self, error: BaseException | None, _call: Call) -> bool:
        """Whether the next owner is to be asked. One that says of itself that it is over has done nothing."""
        if isinstance(error, Fenced | Closed):
            self._is_stale = True
            return True
        return isinstance(error, Unavailable) and self._control.is_ended

    def close(self, *, timeout_s: float) -> bool:  # noqa: ARG002  # There is nothing to wait for.
        self._control.close()
        return True


Part = Owner | Client


class Casting:
    """Finds a part for one node, as often as it needs another."""

    def __init__(
        self,
        path: str,
        role: Role,
        settings: Settings,
        *,
        lease_s: float,
        make: Callable[[Writer, frozenset[str] | None], System],
        reads: Reads,
        on_lost: Callable[[], None],
    ) -> None:
        self._path = path
        self._role = role
        self._settings = settings
        self._lease_s = lease_s
        self._make = make  # The actors on a writer, and on what the last owner left running if it left in good order.
        self._reads = reads
        self._on_lost = on_lost
        self._detector = HungDetector(lease_s=lease_s)
        self._owner_file = OwnerFile.of(path)
        self._obstacle = ""

    def find(self, *, election_s: float) -> Part | None:
        """One try: own the file if nobody does or if its owner hangs, else connect to the owner."""
        part: Part | None = None
        if self._role is not Role.CLIENT:
            with contextlib.suppress(Conflict, AlreadyOpen):  # Somebody else was first.
                part = self._own(election_s)
        if part is None and self._role is not Role.OWNER:
            part = self._connect()
        return part

    def has_changed(self, client: Client) -> bool:
        """Whether the owner that the client talks to hangs, or was replaced while it did."""
        try:
            _holder, epoch, beat = self._reads.owner()
        except UnderstudyError as error:
            logger.info("%s", error)
            return False
        if epoch != client.epoch:
            return True
        if self._owner_file.claimed or not self._hangs(epoch, beat):
            return False
        logger.warning("the owner of %s (epoch %d) hangs; taking over", self._path, epoch)
        return True

    def ownerless(self) -> UnderstudyError:
        """Why there is no part."""
        address = self._owner_file.address()
        if address is None or not self._owner_file.is_alive(address.epoch):
            return Unavailable(f"nobody owns {self._path} at the moment; open a Runtime on it")
        owner = f"{self._path} has an owner already (process {address.pid}, epoch {address.epoch})"
        if self._role is Role.OWNER:
            return AlreadyOpen(f'{owner}; use role="auto" or understudy.connect(path)')
        return Unavailable(f"{owner}, which cannot be reached ({self._obstacle or 'it hangs'}); try again")

    def release(self) -> None:
        self._owner_file.release()

    # --- owning ---

    def _own(self, election_s: float) -> Owner | None:
        owner_file = self._owner_file
        if owner_file.claimed:
            return None
        with owner_file.election(timeout_s=election_s), contextlib.ExitStack() as undo:
            epoch, beat, left = self._last_owner()
            is_alive = owner_file.is_alive(epoch)
            if is_alive and not self._hangs(epoch, beat):
                return None
            owner_file.hold(epoch + 1)
            undo.callback(owner_file.let_go)
            writer = Writer(self._path, self._settings)
            undo.callback(writer.close)
            try:
                writer.take_over(f"{socket.gethostname()}:{os.getpid()}", after_epoch=epoch)
            except Unavailable as error:
                if not is_alive:
                    raise
                raise self._locked_out(error) from error
            owner = open_owner(self._make(writer, left), self._reads, owner_file, role=self._role)
            undo.pop_all()
        return owner

    def _locked_out(self, error: Unavailable) -> Unavailable:
        """A process that was stopped inside a transaction keeps SQLite's lock, and only its end frees that."""
        address = self._owner_file.address()
        who = "its owner" if address is None else f"its owner, process {address.pid},"
        return Unavailable(f"{self._path} cannot be taken over ({error}): {who} hangs inside a write; end that process")

    def _last_owner(self) -> tuple[int, int, frozenset[str] | None]:
        """Its epoch, its beat and, if it left in good order, what it left running."""
        path = Path(self._path)
        if not path.exists() or path.stat().st_size == 0:
            return 0, 0, frozenset()
        database = open_reader(self._path)
        try:
            with explained(self._path):
                epoch, beat, holder, left = database.connection().execute(_OWNER).fetchone()
        except Unavailable as error:
            if isinstance(error.__cause__, sqlite3.OperationalError) and "no such table" in str(error.__cause__):
                return 0, 0, frozenset()  # Not made yet, or not ours: opening it for writing says which.
            raise
        finally:
            database.close()
        return epoch, beat, None if holder else frozenset(msgspec.json.decode(left or "[]"))

    def _hangs(self, epoch: int, beat: int) -> bool:
        """Whether the owner exists and does nothing. Only who can run its instances may replace it."""
        is_hung = self._detector.observe(epoch=epoch, beat=beat, now_s=time.monotonic())
        return is_hung and self._role is Role.AUTO

    # --- connecting ---

    def _connect(self) -> Client | None:
        address = self._owner_file.address()
        if address is None or not self._owner_file.is_alive(address.epoch):
            return None
        least_s, most_s = _CONNECT_S
        timeout_s = min(most_s, max(least_s, self._lease_s / 4))
        try:
            control = ControlClient(address, on_lost=self._on_lost, connect_timeout_s=timeout_s)
        except Unavailable as error:
            self._obstacle = str(error)
            return None
        return Client(control, address.epoch)


def open_owner(system: System, reads: Reads, owner_file: OwnerFile | None, *, role: Role) -> Owner:
    owner = Owner(system, Service(system, reads), owner_file)
    try:
        owner.serve(go_on=role is not Role.OPERATOR)
    except BaseException:
        owner.close(timeout_s=0)
        raise
    return owner
