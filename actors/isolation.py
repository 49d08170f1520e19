"""Process isolation: runs a handler in a child process that can really be killed.

It owns the child processes and the frames between them and us. A child runs one call at a time and is used again; it
is killed, with everything that it started, when its call is cancelled or runs too long, and it dies when its parent
does. What a payload means is the caller's affair: bytes go in, bytes come out, nothing is ever unpickled. POSIX only.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import queue
import select
import signal as signals
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from understudy.model.errors import Cancelled, Closed, Rejected, TimedOut, UnderstudyError

if TYPE_CHECKING:  # The child would import all of asyncio for it.
    from understudy.actors.pool import CancelSignal

# The import path is an argument, because an environment variable would be handed on to the handler's own children.
_BOOT = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from understudy.actors.isolation import serve
serve(sys.argv[2], int(sys.argv[3]))
"""
_HEADER = struct.Struct(">cQ")  # A frame's kind, and the length of its body.
_CALL, _RESULT, _ERROR, _BEAT = b"C", b"R", b"E", b"B"
_CHUNK = 1 << 16
_GRACE_S = 1.0  # From the end of a child's frames to its exit, before it is killed.
_TRACEBACK_LIMIT = 20_000


class ProcessRunner:
    """Calls handlers by their import path, each in a child process that it has for itself during the call."""

    def __init__(self, *, entry: str = "understudy.actors.isolation:call", executable: str = sys.executable) -> None:
        self._entry = entry
        self._executable = executable
        self._lock = threading.Lock()
        self._idle: list[_Child] = []  # The last one used is used next. There are never more than calls at once.
        self._busy: set[_Child] = set()
        self._closed = False

    def run(self, reference: str, payload: bytes, *, timeout_ms: int | None, signal: CancelSignal) -> bytes:
        """Call `entry(reference, payload)` in a child and wait for its bytes; meant for a thread of the pool.

        Raises what the handler raised, in the same class if that is loaded here; `TimedOut` and `Cancelled` after the
        child was killed for it; `UnderstudyError` when it died in another way. The timeout counts from the call, which
        may have to start a child first, or from the last `beat()`. A job whose timeout the pool watches passes None:
        the pool cancels the signal.
        """
        child = self._take(reference)
        try:
            return child.call(reference, payload, timeout_ms, signal)
        finally:
            self._give_back(child)

    def close(self) -> None:
        """Kill every child. A call that is under way ends with an error that says so."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for child in busy:
            child.kill()
        for child in idle:
            child.discard()

    def _take(self, reference: str) -> _Child:
        if reference.startswith("__main__:"):
            raise Rejected(f"no other process can import {reference!r}; move the handler into a module of its own")
        with self._lock:
            if self._closed:
                raise Closed(f"the process runner has been closed; {reference!r} was not called")
            child = self._idle.pop() if self._idle else _Child(self._executable, self._entry)
            self._busy.add(child)
        if child.is_alive():
            return child
        self._give_back(child)  # It died while nobody used it.
        return self._take(reference)

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            self._busy.discard(child)
            if child.is_alive() and not self._closed:
                self._idle.append(child)
                return
        child.discard()


class _Child:
    """A child process, seen from its parent."""

    def __init__(self, executable: str, entry: str) -> None:
        path = json.dumps([place for place in sys.path if isinstance(place, str)])
        their_calls, self._calls = os.pipe()
        self._results, their_results = os.pipe()
        try:
            self._process = subprocess.Popen(
                [executable, "-c", _BOOT, path, entry, str(their_results)],
                stdin=their_calls,
                pass_fds=(their_results,),
                start_new_session=True,  # A group of its own can be killed as a whole, and hears no Ctrl-C of ours.
            )
        except BaseException:
            os.close(self._calls)
            os.close(self._results)
            raise
        finally:
            os.close(their_calls)
            os.close(their_results)
        os.set_blocking(self._calls, False)
        self._lock = threading.RLock()
        self._is_dead = False
        self._received = bytearray()

    def is_alive(self) -> bool:
        with self._lock:
            return not self._is_dead and self._process.poll() is None

    def call(self, reference: str, payload: bytes, timeout_ms: int | None, signal: CancelSignal) -> bytes:
        call = _Call(reference, self._process.pid, timeout_ms, signal)
        signal.on_cancel(lambda: self._cancel(call))
        try:
            return self._exchange(call, _frame(_CALL, reference.encode() + b"\0" + payload))
        finally:
            with self._lock:
                call.is_over = True

    def kill(self) -> None:
        with self._lock:
            self._is_dead = True
            # Only `poll` and `wait` under this lock reap the child, so its id cannot have passed to another process.
            if self._process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signals.SIGKILL)

    def discard(self) -> None:
        self.kill()
        with self._lock:
            self._process.wait()
        os.close(self._results)
        os.close(self._calls)

    def _cancel(self, call: _Call) -> None:
        with self._lock:
            if not call.is_over:
                call.is_cancelled = True
                self.kill()  # The caller sees its pipe end.

    def _exchange(self, call: _Call, request: bytes) -> bytes:
        """Send and receive at the same time, since neither side may wait for the other to empty a pipe."""
        unsent = memoryview(request)
        poll = select.poll()
        poll.register(self._results, select.POLLIN)
        poll.register(self._calls, select.POLLOUT)
        while True:
            ready = dict(poll.poll(call.left_ms()))
            if self._calls in ready:
                unsent = self._send(unsent)
                if not unsent:
                    poll.unregister(self._calls)
            if self._results in ready:
                self._receive(call)
                for kind, body in self._frames():
                    if kind == _RESULT:
                        return body
                    call.hear(kind, body)
            if call.left_ms() == 0:
                self.kill()
                call.overran()

    def _send(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._calls, unsent[:_CHUNK]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            return unsent[:0]  # The child is dead, as the end of its frames will show.

    def _receive(self, call: _Call) -> None:
        received = os.read(self._results, _CHUNK)
        if not received:
            call.lost(self._exit())
        self._received += received

    def _frames(self) -> list[tuple[bytes, bytes]]:
        frames = []
        while len(self._received) >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._received)
            end = _HEADER.size + length
            if len(self._received) < end:
                break
            frames.append((kind, bytes(self._received[_HEADER.size : end])))
            del self._received[:end]
        return frames

    def _exit(self) -> str:
        with self._lock:
            try:
                code = self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self.kill()
                self._process.wait()
                return "closed its pipe and was killed"
        return f"exited with code {code}" if code >= 0 else f"was ended by {signals.Signals(-code).name}"


class _Call:
    """One call under way: its time, and what is said when it does not give a result."""

    def __init__(self, reference: str, pid: int, timeout_ms: int | None, signal: CancelSignal) -> None:
        self.is_over = False
        self.is_cancelled = False
        self._reference = reference
        self._pid = pid
        self._timeout_ms = timeout_ms
        self._signal = signal
        self._since_s = monotonic()

    def left_ms(self) -> float | None:
        if self._timeout_ms is None:
            return None
        return max(0.0, self._timeout_ms - (monotonic() - self._since_s) * 1000)

    def hear(self, kind: bytes, body: bytes) -> None:
        if kind == _ERROR:
            raise _rebuilt(json.loads(body))
        assert kind == _BEAT, f"{self._reference!r}: a frame of kind {kind!r} is none of ours"
        self._since_s = monotonic()
        self._signal.beat()

    def overran(self) -> NoReturn:
        raise TimedOut(f"{self._reference!r} ran over {self._timeout_ms} ms; its process {self._pid} has been killed")

    def lost(self, how: str) -> NoReturn:
        if self.is_cancelled:
            raise Cancelled(f"{self._reference!r} was cancelled; its process {self._pid} has been killed")
        raise UnderstudyError(
            f"the process {self._pid} that ran {self._reference!r} {how} before it gave a result. What it did until "
            "then stands; look at its output, and at the system's log for a lack of memory"
        )


def _rebuilt(report: dict[str, Any]) -> BaseException:
    """The child's exception, in its own class if that is loaded here: retry rules ask for the class."""
    error = _exception(report) or UnderstudyError(report["text"])
    error.add_note(f"In the child process:\n{report['traceback']}")
    return error


def _exception(report: dict[str, Any]) -> BaseException | None:
    module, _, name = report["class"].partition(":")
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not (isinstance(found, type) and issubclass(found, BaseException)):
        return None
    try:
        return found(*report["args"])
    except Exception:  # Its constructor takes something else than what it calls its arguments.
        return found.__new__(found, *report["args"])


# --- in the child -----------------------------------------------------------------------------------------------------


def call(reference: str, payload: bytes) -> bytes:
    """The default entry: import `module:qualname` and call it with the payload."""
    result = _resolve(reference)(payload)
    if not isinstance(result, bytes):
        raise Rejected(f"{reference!r} returned {type(result).__name__}; across a process it must be bytes")
    return result


def beat() -> None:
    """Count the timeout anew: for handlers in a child; elsewhere it does nothing."""
    if _parent is not None:
        _parent.send(_BEAT)


def serve(entry: str, results: int) -> None:
    """Be a child: answer calls until the parent is gone."""
    global _parent
    _parent = _Parent(results)
    function = _resolve(entry)
    while True:
        reference, _, payload = _parent.calls.get().partition(b"\0")
        kind, body = _answer(function, reference.decode(), payload)
        with contextlib.suppress(OSError, ValueError):  # What a handler printed is not worth a call.
            sys.stdout.flush()
        _parent.send(kind, body)


class _Parent:
    """The parent process, seen from its child."""

    def __init__(self, results: int) -> None:
        self.calls: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._results = results
        self._lock = threading.Lock()
        os.set_inheritable(results, False)  # A grandchild that held it open would hide the death of this process.
        frames = os.fdopen(os.dup(0), "rb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # A handler that reads its standard input must not read our frames.
        os.close(nothing)
        threading.Thread(target=self._listen, args=(frames,), name="understudy-parent", daemon=True).start()

    def send(self, kind: bytes, body: bytes = b"") -> None:
        unsent = memoryview(_frame(kind, body))
        with self._lock:
            while unsent:
                unsent = unsent[os.write(self._results, unsent) :]

    def _listen(self, frames: BinaryIO) -> None:
        # On a thread of its own, so that the end of the parent is noticed also in the middle of a handler.
        while len(header := frames.read(_HEADER.size)) == _HEADER.size:
            _, length = _HEADER.unpack(header)
            self.calls.put(frames.read(length))
        os.killpg(os.getpgrp(), signals.SIGKILL)


_parent: _Parent | None = None


def _answer(function: Callable[[str, bytes], bytes], reference: str, payload: bytes) -> tuple[bytes, bytes]:
    try:
        return _RESULT, function(reference, payload)
    except BaseException as error:
        return _ERROR, json.dumps(_report(error)).encode()


def _report(error: BaseException) -> dict[str, Any]:
    kind = type(error)
    text = "".join(traceback.format_exception_only(error)).strip()
    arguments: Any = list(error.args)
    try:
        json.dumps(arguments)
    except (TypeError, ValueError, RecursionError):
        arguments = [text]
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "args": arguments,
        "text": text,
        "traceback": "".join(traceback.format_exception(error))[-_TRACEBACK_LIMIT:],
    }


def _resolve(reference: str) -> Any:
    module, _, name = reference.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _frame(kind: bytes, body: bytes) -> bytes:
    return _HEADER.pack(kind, len(body)) + body
