"""The control port: how other processes of the same user talk to the owner of a database.

It owns the wire between them: one JSON line each way over loopback, a hello with the secret first, answers in whatever
order they become ready. It must never decide anything (`answer` does that), never let one client delay another or the
actor whose promise it waits for, and never say anything about itself to whoever does not know the secret.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from math import inf
from queue import SimpleQueue
from time import monotonic
from typing import Any, Final, TypeVar
from weakref import WeakSet

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from understudy.actors.promise import Promise
from understudy.model import errors
from understudy.model.errors import (
    BadValue,
    InvalidDefinition,
    OutcomeUnknown,
    Problem,
    Rejected,
    TimedOut,
    Unavailable,
    UnderstudyError,
    UsedAfterFork,
)
from understudy.store.ownership import Address

PROTOCOL: Final = 1
LINE_LIMIT_BYTES: Final = 16 * 2**20
CLIENTS_LIMIT: Final = 64
UNANSWERED_LIMIT: Final = 10_000  # Calls of one client; each costs the owner a little memory until its answer is sent.

Answer = Callable[[str, dict[str, Any]], Any]
"""Given a call's name and parameters: a value that JSON can carry, or a promise of one. It may block its own client."""

_log = logging.getLogger(__name__)


def fresh_secret() -> str:
    return secrets.token_urlsafe(32)


class ControlServer:
    """Listens on loopback and passes calls on to `answer`, on a thread for each client."""

    def __init__(self, answer: Answer, *, secret: str, clients_limit: int = CLIENTS_LIMIT) -> None:
        self.answer = answer
        self.secret = secret.encode()
        self._clients_limit = clients_limit
        self._pid = os.getpid()
        self._guard = threading.Lock()
        self._guests: dict[_Connection, None] = {}  # Those that have not said hello, the oldest first.
        self._clients: set[_Connection] = set()
        self._is_closed = threading.Event()
        self._listener = _tracked(socket.create_server(("127.0.0.1", 0), backlog=128))
        self.port: int = self._listener.getsockname()[1]
        self._thread = _start(self._accept, "understudy-control")

    def close(self) -> None:
        """Take no more connections and end those there are; every client sees it at once."""
        if os.getpid() != self._pid or self._is_closed.is_set():
            return  # A forked child has nothing to close: its copies are closed already, and the parent goes on.
        with self._guard:
            self._is_closed.set()
            for connection in (*self._guests, *self._clients):
                connection.hang_up()
        self._stop_accepting()
        self._thread.join(timeout=1)
        self._listener.close()

    def admit(self, connection: _Connection) -> None:
        """Count a guest that knows the secret among the clients."""
        with self._guard:
            if len(self._clients) >= self._clients_limit:
                raise Unavailable(f"{self._clients_limit} clients are connected already; close one and try again")
            self._guests.pop(connection, None)
            self._clients.add(connection)

    def forget(self, connection: _Connection) -> None:
        with self._guard:
            self._guests.pop(connection, None)
            self._clients.discard(connection)

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                peer, _ = self._listener.accept()
                self._receive(_Connection(self, peer))
            except (OSError, RuntimeError):
                self._is_closed.wait(0.05)  # Out of descriptors or threads: the next guest may have more luck.

    def _receive(self, connection: _Connection) -> None:
        with self._guard:
            if self._is_closed.is_set():
                connection.hang_up()
            elif len(self._guests) >= _GUESTS_LIMIT:
                # Whoever connects and says nothing gives way to the next, or strangers could lock everybody out.
                oldest = next(iter(self._guests))
                del self._guests[oldest]
                oldest.hang_up()
            self._guests[connection] = None
        connection.start()

    def _stop_accepting(self) -> None:
        """Linux wakes `accept` when told so; elsewhere it takes a caller."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()


class ControlClient:
    """One connection to an owner. When it ends otherwise than by `close`, `on_lost` is called: once, on our own thread.

    Values must have passed the codec before: JSON as such would turn NaN into null without a word.
    """

    def __init__(self, address: Address, *, on_lost: Callable[[], None], connect_timeout_s: float = 5.0) -> None:
        self._owner = f"the owner at port {address.port} (process {address.pid}, epoch {address.epoch})"
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._numbers = itertools.count(_HELLO + 1)
        self._changed = threading.Condition(threading.Lock())  # Guards the next four.
        self._pending: dict[int, _Call] = {}
        self._nearest_s = inf
        self._is_watched = False
        self._ended: str | None = None  # Why no more calls are taken.
        self._lines = self._connect(address, monotonic() + connect_timeout_s)
        self._outbox = _Outbox(self._lines.socket)
        _start(self._read, "understudy-control-client")

    def call(self, name: str, parameters: Mapping[str, Any], *, timeout_s: float | None = None) -> Promise[Any]:
        """Send a call and return at once; whatever goes wrong, now or later, is in the promise."""
        if os.getpid() != self._pid:
            raise UsedAfterFork("this connection was made before a fork; connect again in the child process")
        call = _Call(name=name, due_s=inf if timeout_s is None else monotonic() + timeout_s)
        number = next(self._numbers)
        try:
            line = _encode(_Request(id=number, call=name, parameters=parameters))
            self._expect(number, call)
        except UnderstudyError as error:
            call.promise.reject(error)
        else:
            self._outbox.send(line)
        return call.promise

    @property
    def is_ended(self) -> bool:
        """Whether no more calls are taken: the owner is gone, or the connection was closed."""
        return self._ended is not None

    def close(self) -> None:
        """End the connection; calls without an answer are rejected as if the owner had gone."""
        if os.getpid() == self._pid:
            self._end("this connection was closed")

    def _connect(self, address: Address, deadline_s: float) -> _Lines:
        with contextlib.ExitStack() as stack:
            try:
                timeout_s = max(0.001, deadline_s - monotonic())
                peer = socket.create_connection(("127.0.0.1", address.port), timeout=timeout_s)
                lines = _Lines(stack.enter_context(peer))
                peer.sendall(_encode(_Hello(secret=address.secret)))
                reply = _decode(lines.read(deadline_s=deadline_s) or b"", _Reply)
            except (OSError, _Malformed) as error:
                raise Unavailable(f"{self._owner} does not answer ({error}); look who is the owner now") from error
            if not isinstance(reply.error, UnsetType):
                raise _rebuilt(replace(reply.error, message=f"{self._owner} says: {reply.error.message}"))
            stack.pop_all()
        return lines

    def _expect(self, number: int, call: _Call) -> None:
        with self._changed:
            if self._ended is not None:
                raise Unavailable(f"{self._ended}; nothing was sent, connect again")
            if self._outbox.backlog_bytes > _BACKLOG_LIMIT_BYTES:
                raise Unavailable(f"{self._owner} takes no more calls at this moment; nothing was sent, try again")
            self._pending[number] = call
            if call.due_s < self._nearest_s:
                self._nearest_s = call.due_s
                self._watch()

    def _read(self) -> None:
        reason = "the connection ended"
        try:
            while (line := self._lines.read()) is not None:
                self._settle(_decode(line, _Reply))
        except (OSError, _Malformed, UnderstudyError) as error:
            reason = str(error)
        is_lost = self._end(f"{self._owner} is gone: {reason}")
        self._outbox.finish()
        self._lines.socket.close()
        if is_lost:
            self._on_lost()

    def _settle(self, reply: _Reply) -> None:
        if reply.id is None:
            raise _Malformed("a line without a number") if isinstance(reply.error, UnsetType) else _rebuilt(reply.error)
        with self._changed:
            call = self._pending.pop(reply.id, None)
        if call is None:
            return  # Its deadline was earlier.
        if isinstance(reply.error, UnsetType):
            call.promise.resolve(reply.answer)
        else:
            call.promise.reject(_rebuilt(reply.error))

    def _end(self, reason: str) -> bool:
        """Take no more calls and reject those that wait; False if that was done before."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended = reason
            calls, self._pending = list(self._pending.values()), {}
            self._changed.notify()
            _hang_up(self._lines.socket)  # Under the lock, because the thread that reads closes it after this.
        for call in calls:
            call.promise.reject(
                OutcomeUnknown(f"{reason}; whether it did this is unknown, ask again with the same key")
            )
        return True

    def _watch(self) -> None:
        """Have somebody wait for the nearest deadline: a thread that exists from the first call with a timeout on."""
        if self._is_watched:
            self._changed.notify()
        else:
            self._is_watched = True
            _start(self._expire, "understudy-control-deadlines")

    def _expire(self) -> None:
        while (late := self._late()) is not None:
            for call in late:
                silent = f"{self._owner} has not answered {call.name!r} in time"
                call.promise.reject(TimedOut(f"{silent}; it may still do it, ask again with the same key"))

    def _late(self) -> list[_Call] | None:
        """Wait until calls are late, and take them; None when the connection has ended."""
        with self._changed:
            while self._ended is None:
                now_s = monotonic()
                late = [number for number, call in self._pending.items() if call.due_s <= now_s]
                if late:
                    return [self._pending.pop(number) for number in late]
                self._nearest_s = min((call.due_s for call in self._pending.values()), default=inf)
                self._changed.wait(min(self._nearest_s - now_s, threading.TIMEOUT_MAX))
        return None


class _Connection:
    """One peer of the server: a thread that reads and calls `answer`, and one that sends."""

    def __init__(self, server: ControlServer, peer: socket.socket) -> None:
        self._server = server
        self._lines = _Lines(peer)
        self._outbox = _Outbox(peer)
        self._taken = 1  # The hello is answered like a call.

    def start(self) -> None:
        try:
            _start(self._run, "understudy-control-peer")
        except RuntimeError:
            self._leave()
            raise

    def hang_up(self) -> None:
        _hang_up(self._lines.socket)

    def _run(self) -> None:
        try:
            self._greet()
            while (line := self._lines.read()) is not None:
                self._serve(_decode(line, _Request))
        except (_Malformed, UnderstudyError) as error:
            self._part(error)
        except OSError:
            pass  # The peer is gone, and with it whoever could be told.
        finally:
            self._leave()

    def _leave(self) -> None:
        self._server.forget(self)  # From here on nobody else touches the socket.
        self.hang_up()
        self._outbox.finish()
        self._lines.socket.close()

    def _greet(self) -> None:
        """Refuse alike whoever does not know the secret, be it a browser or a stale client; help the others."""
        try:
            line = self._lines.read(limit_bytes=_HELLO_LIMIT_BYTES, deadline_s=monotonic() + _HELLO_S)
            hello = _decode(line or b"", _Hello)
        except (_Malformed, TimeoutError):
            raise Unavailable(_REFUSAL) from None
        if not hmac.compare_digest(hello.secret.encode(), self._server.secret):
            raise Unavailable(_REFUSAL)
        if hello.protocol != PROTOCOL:
            raise Rejected(f"this owner speaks protocol {PROTOCOL}, not {hello.protocol}; use one version for both")
        self._server.admit(self)
        self._outbox.send(_encode(_Reply(id=_HELLO, answer={"protocol": PROTOCOL})))

    def _serve(self, request: _Request) -> None:
        self._taken += 1
        unanswered = self._taken - self._outbox.sent
        if unanswered > 2 * UNANSWERED_LIMIT:
            raise Unavailable("this client sends calls and reads no answers")
        if unanswered > UNANSWERED_LIMIT:
            promise = _rejected(Unavailable(f"{UNANSWERED_LIMIT} calls of this client wait for answers; try again"))
        else:
            promise = self._ask(request)
        if promise.done and not self._outbox.backlog_bytes:
            self._outbox.send(_reply_to(request, promise))
        else:
            # It will be settled on an actor's thread, which must neither encode nor send.
            promise.add_done_callback(lambda done: self._outbox.put(partial(_reply_to, request, done)))

    def _ask(self, request: _Request) -> Promise[Any]:
        try:
            answer = self._server.answer(request.call, dict(request.parameters))
        except Exception as error:
            return _rejected(error)
        if isinstance(answer, Promise):
            return answer
        promise: Promise[Any] = Promise()
        promise.resolve(answer)
        return promise

    def _part(self, error: Exception) -> None:
        """Say why, and let the peer read it: closing while it still sends would destroy what it has not read."""
        self._outbox.put(partial(_encode, _Reply(id=None, error=_fault(error, call="a line"))))
        self._outbox.finish()
        with contextlib.suppress(OSError):
            self._lines.socket.shutdown(socket.SHUT_WR)
            self._lines.discard(deadline_s=monotonic() + _FAREWELL_S)


# --- what is said -----------------------------------------------------------------------------------------------------

_HELLO: Final = 0  # Its number among the calls.
_REFUSAL: Final = "refused; read the address again"
_HELLO_LIMIT_BYTES: Final = 1024
_HELLO_S: Final = 5.0
_FAREWELL_S: Final = 1.0
_STALL_S: Final = 30.0  # A peer that takes nothing for so long is as good as gone.
_GUESTS_LIMIT: Final = 32
_CHUNK_BYTES: Final = 2**16
_BACKLOG_LIMIT_BYTES: Final = 4 * LINE_LIMIT_BYTES
_MESSAGE_LIMIT: Final = 2**16

T = TypeVar("T")


class _Hello(msgspec.Struct, frozen=True):
    secret: str
    protocol: int = PROTOCOL


class _Request(msgspec.Struct, frozen=True):
    id: int
    call: str
    parameters: Mapping[str, Any] = msgspec.field(name="with")


class _Fault(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of our errors; the last two fields are those of `InvalidDefinition`."""

    kind: str
    message: str
    name: str = ""
    problems: tuple[Problem, ...] = ()


class _Reply(msgspec.Struct, frozen=True):
    """The answer to a call, or its error. An error without a number is the last line of its connection."""

    id: int | None
    answer: Any = UNSET
    error: _Fault | UnsetType = UNSET


class _Call(msgspec.Struct, frozen=True):
    """What a client still waits for."""

    name: str
    due_s: float
    promise: Promise[Any] = msgspec.field(default_factory=Promise)


class _Malformed(Exception):
    """What came is no line of this protocol."""


def _encode(message: msgspec.Struct) -> bytes:
    try:
        line = msgspec.json.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadValue(f"this cannot be sent as JSON: {error}") from error
    if len(line) > LINE_LIMIT_BYTES:
        raise Rejected(f"{len(line)} bytes are more than one line may have ({LINE_LIMIT_BYTES}); ask for less at once")
    # Only ready-made JSON within a message can contain line ends, and there only between values.
    return line.replace(b"\n", b" ") + b"\n"


def _decode(line: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(line, type=kind)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"this is no line of the control port: {error}") from error


def _reply_to(request: _Request, promise: Promise[Any]) -> bytes:
    try:
        return _encode(_Reply(id=request.id, answer=promise.get(timeout=0)))
    except BaseException as error:  # It was raised elsewhere, and is only reported here.
        return _encode(_Reply(id=request.id, error=_fault(error, call=request.call)))


def _rejected(error: Exception) -> Promise[Any]:
    promise: Promise[Any] = Promise()
    promise.reject(error)
    return promise


_KINDS: Final[dict[str, type[UnderstudyError]]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, UnderstudyError)
}


def _fault(error: BaseException, *, call: str) -> _Fault:
    if isinstance(error, InvalidDefinition):
        return _Fault(kind="InvalidDefinition", message=str(error), name=error.name, problems=error.problems)
    if isinstance(error, _Malformed):
        return _Fault(kind="Rejected", message=str(error)[:_MESSAGE_LIMIT])
    kind = next((kind.__name__ for kind in type(error).__mro__ if _KINDS.get(kind.__name__) is kind), None)
    if kind is None:
        _log.error("the control port could not answer %s", call, exc_info=error)
        what = f"the owner failed at {call} with {type(error).__name__}; its log says more"
        return _Fault(kind="UnderstudyError", message=what)
    return _Fault(kind=kind, message=str(error)[:_MESSAGE_LIMIT])


def _rebuilt(fault: _Fault) -> UnderstudyError:
    if fault.kind == "InvalidDefinition":
        return InvalidDefinition(fault.name, fault.problems)
    kind = _KINDS.get(fault.kind, UnderstudyError)
    return kind.__new__(kind, fault.message)  # Whatever its constructor takes: what it says is known already.


# --- sockets and threads ----------------------------------------------------------------------------------------------


class _Lines:
    """What a socket receives, line by line. Only the thread that reads may use it."""

    def __init__(self, peer: socket.socket) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = _tracked(peer)
        self._buffer = bytearray()

    def read(self, *, limit_bytes: int = LINE_LIMIT_BYTES, deadline_s: float | None = None) -> bytes | None:
        """The next line without its end; None when no more come. A line that is cut off was never said."""
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            if searched > limit_bytes:
                break
            if not self._receive(deadline_s):
                return None
        if not 0 <= end <= limit_bytes:
            raise _Malformed(f"more than {limit_bytes} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return line

    def discard(self, *, deadline_s: float) -> None:
        """Take in whatever still comes, until it ends or the time is up."""
        while self._receive(deadline_s):
            self._buffer.clear()

    def _receive(self, deadline_s: float | None) -> bool:
        if deadline_s is None:
            chunk = self.socket.recv(_CHUNK_BYTES)
        elif (timeout_s := deadline_s - monotonic()) <= 0:
            raise TimeoutError("no complete line in time")
        else:
            self.socket.settimeout(timeout_s)
            try:
                chunk = self.socket.recv(_CHUNK_BYTES)
            finally:
                self.socket.settimeout(None)
        self._buffer += chunk
        return len(chunk) > 0


class _Outbox:
    """Bytes on their way out, in order; whatever cannot go at once waits for a thread that does nothing else.

    `send` costs a system call, and with it the GIL. `put` does not: an actor's thread may use it.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.sent = 0
        self._socket = peer
        self._turn = threading.Lock()  # Guards what is above and the two below. Nobody waits for the peer holding it.
        self._rest = bytearray()
        self._is_finished = False
        self._lines: SimpleQueue[Callable[[], bytes] | None] = SimpleQueue()
        self._thread = _start(self._run, "understudy-control-sender")

    @property
    def backlog_bytes(self) -> int:
        return len(self._rest)

    def put(self, line: Callable[[], bytes]) -> None:
        self._lines.put(line)

    def send(self, line: bytes) -> None:
        with self._turn:
            was_clear = not self._rest
            self._rest += line
            self.sent += 1
            self._flush()
            if was_clear and self._rest:
                self._lines.put(bytes)  # No more bytes: only a reason to wake up.

    def finish(self) -> None:
        """Return when all is sent or cannot be. Only then may the socket be closed: its number is soon another's."""
        self._lines.put(None)
        self._thread.join()
        with self._turn:
            self._is_finished = True

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                if made := line():
                    self.send(made)
                while self._rest:
                    self._wait_for_room()
                    with self._turn:
                        self._flush()
        except Exception as error:
            if not isinstance(error, OSError):
                _log.exception("an answer cannot be sent; its connection ends")
            _hang_up(self._socket)

    def _flush(self) -> None:
        if self._is_finished:
            self._rest.clear()
            return
        try:
            sent = self._socket.send(self._rest, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            self._rest.clear()
            _hang_up(self._socket)  # The thread that reads will notice and tidy up.
        else:
            del self._rest[:sent]

    def _wait_for_room(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        if not poll.poll(_STALL_S * 1000):
            raise TimeoutError("the peer takes nothing")


# A child that kept its copies of these would keep the clients of a dead owner waiting, and its port taken.
_open: WeakSet[socket.socket] = WeakSet()


def _tracked(peer: socket.socket) -> socket.socket:
    _open.add(peer)
    return peer


def _close_in_child() -> None:
    """Closing a copy does not end the connection; `shutdown` would, also for the parent."""
    for peer in list(_open):
        peer.close()


os.register_at_fork(after_in_child=_close_in_child)


def _hang_up(peer: socket.socket) -> None:
    """End the connection for everybody who has it, and wake whoever waits for it in this process."""
    with contextlib.suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


def _start(target: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread
