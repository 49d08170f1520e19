"""The control port, spoken to by its own client, by raw sockets, and across real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.actors import control
from understudy.actors.control import LINE_LIMIT_BYTES, ControlClient, ControlServer, fresh_secret
from understudy.actors.promise import Promise
from understudy.model import errors
from understudy.model.errors import (
    BadValue,
    InvalidDefinition,
    Problem,
    Rejected,
    TimedOut,
    Unavailable,
    UnderstudyError,
)
from understudy.store.ownership import Address, OwnerFile

SECRET = fresh_secret()
PATIENCE_S = 10.0  # Never waited for unless something is broken.

OWNER = """
import os, sys
from understudy.actors.control import ControlServer
from understudy.actors.promise import Promise
from understudy.store.ownership import Address, OwnerFile

def answer(call, parameters):
    if call == "wait":
        return Promise()
    if call == "fork" and os.fork() == 0:
        os.read(0, 1)  # Live as long as the test.
        os._exit(0)
    return os.getpid()

file = OwnerFile.of(sys.argv[1])
server = ControlServer(answer, secret="s")
with file.election():
    file.hold(1)
    file.publish(Address(port=server.port, secret="s", pid=os.getpid(), epoch=1))
print("ready", flush=True)
os.read(0, 1)
"""


class Loss:
    """Counts how often a client is told that its connection is lost."""

    def __init__(self) -> None:
        self.count = 0
        self.happened = threading.Event()

    def __call__(self) -> None:
        self.count += 1
        self.happened.set()


class Wire:
    """A connection without any manners."""

    def __init__(self, server: ControlServer, *, hello: bool = True) -> None:
        self.socket = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        self.lines = self.socket.makefile("rb")
        if hello:
            self.say({"secret": SECRET, "protocol": 1})
            assert self.hear() == {"id": 0, "answer": {"protocol": 1}}

    def say(self, message: object) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self) -> Any:
        return json.loads(self.lines.readline())

    def hear_the_last(self) -> Any:
        """The one line that comes before the end."""
        (line,) = self.lines.readlines()
        return json.loads(line)

    def close(self) -> None:
        self.lines.close()
        self.socket.close()


Serve = Callable[..., ControlServer]
Connect = Callable[..., ControlClient]
Dial = Callable[..., Wire]


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(closing: ExitStack) -> Serve:
    def serve(answer: control.Answer = lambda call, parameters: [call, parameters], **options: Any) -> ControlServer:
        server = ControlServer(answer, secret=SECRET, **options)
        closing.callback(server.close)
        return server

    return serve


@pytest.fixture
def connect(closing: ExitStack) -> Connect:
    def connect(server: ControlServer, *, on_lost: Callable[[], None] = lambda: None) -> ControlClient:
        client = ControlClient(Address(port=server.port, secret=SECRET, pid=1, epoch=1), on_lost=on_lost)
        closing.callback(client.close)
        return client

    return connect


@pytest.fixture
def dial(closing: ExitStack) -> Dial:
    def dial(server: ControlServer, *, hello: bool = True) -> Wire:
        wire = Wire(server, hello=hello)
        closing.callback(wire.close)
        return wire

    return dial


def got(promise: Promise[Any]) -> Any:
    return promise.get(timeout=PATIENCE_S)


# --- calls and answers ------------------------------------------------------------------------------------------------


def test_a_call_is_answered_with_what_the_owner_says(serve: Serve, connect: Connect) -> None:
    client = connect(serve())

    assert got(client.call("start", {"id": "Zoë 🎭\n", "given": {"n": [1, 2.5, None, True]}})) == [
        "start",
        {"id": "Zoë 🎭\n", "given": {"n": [1, 2.5, None, True]}},
    ]


@pytest.mark.parametrize("answer", [None, 0, "", [], {}])
def test_an_empty_answer_is_an_answer(serve: Serve, connect: Connect, answer: object) -> None:
    client = connect(serve(lambda call, parameters: answer))

    assert got(client.call("any", {})) == answer


def test_a_long_wait_does_not_hold_up_other_calls_of_the_same_client(serve: Serve, connect: Connect) -> None:
    wait: Promise[Any] = Promise()
    client = connect(serve(lambda call, parameters: wait if call == "result" else call))

    result = client.call("result", {})
    assert got(client.call("list", {})) == "list"
    assert not result.done
    wait.resolve("done")

    assert got(result) == "done"


def test_calls_arrive_in_the_order_in_which_they_were_made(serve: Serve, connect: Connect) -> None:
    seen: list[int] = []
    client = connect(serve(lambda call, parameters: seen.append(parameters["n"])))

    calls = [client.call("send", {"n": n, "ballast": "x" * (n % 7) * 100_000}) for n in range(100)]
    for call in calls:
        got(call)

    assert seen == list(range(100))


def test_many_threads_share_a_connection(serve: Serve, connect: Connect) -> None:
    client, heard = connect(serve(lambda call, parameters: parameters["n"])), []

    def ask(thread: int) -> None:
        heard.extend([got(client.call("echo", {"n": [thread, n]})) == [thread, n] for n in range(100)])

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert heard == [True] * 800


def test_ready_made_json_with_line_ends_stays_one_line(serve: Serve, connect: Connect) -> None:
    client = connect(serve(lambda call, parameters: {"body": msgspec.Raw(b'{\n  "a": "x\\ny"\n}')}))

    assert got(client.call("show", {})) == {"body": {"a": "x\ny"}}


def test_a_value_that_json_cannot_carry_is_refused_before_anything_is_sent(serve: Serve, connect: Connect) -> None:
    client = connect(serve())

    with pytest.raises(BadValue):
        got(client.call("start", {"given": object()}))

    assert got(client.call("next", {})) == ["next", {}]


def test_a_call_that_is_not_answered_in_time_times_out_alone(serve: Serve, connect: Connect) -> None:
    wait: Promise[Any] = Promise()
    client = connect(serve(lambda call, parameters: wait))
    patient = client.call("result", {}, timeout_s=3600)

    with pytest.raises(TimedOut, match=r"'result' in time; it may still do it, ask again with the same key"):
        got(client.call("result", {}, timeout_s=0.01))

    wait.resolve(1)
    assert got(patient) == 1


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UnderstudyError)]


@pytest.mark.parametrize("kind", [kind for kind in ERRORS if kind is not InvalidDefinition])
@pytest.mark.parametrize("is_late", [False, True])
def test_an_error_arrives_as_what_it_is(
    serve: Serve, connect: Connect, kind: type[UnderstudyError], is_late: bool
) -> None:
    def answer(call: str, parameters: dict[str, Any]) -> Promise[Any]:
        error = kind.__new__(kind, "do this next")
        if not is_late:
            raise error
        promise: Promise[Any] = Promise()
        threading.Timer(0, promise.reject, (error,)).start()
        return promise

    client = connect(serve(answer))

    with pytest.raises(UnderstudyError, match="do this next") as caught:
        got(client.call("any", {}))

    assert type(caught.value) is kind


def test_the_problems_of_a_definition_arrive_one_by_one(serve: Serve, connect: Connect) -> None:
    def answer(call: str, parameters: dict[str, Any]) -> None:
        raise InvalidDefinition("checkout", [Problem("E1", "no end", node="ship", hint="add one"), Problem("E2", "x")])

    client = connect(serve(answer))

    with pytest.raises(InvalidDefinition, match="no end") as caught:
        got(client.call("deploy", {}))

    assert caught.value.name == "checkout"
    assert [problem.hint for problem in caught.value.problems] == ["add one", ""]


def test_an_error_that_only_the_owner_knows_arrives_as_its_nearest_relative(serve: Serve, connect: Connect) -> None:
    class Special(Rejected):
        pass

    def answer(call: str, parameters: dict[str, Any]) -> None:
        raise Special("not so")

    client = connect(serve(answer))

    with pytest.raises(Rejected, match="not so"):
        got(client.call("any", {}))


def test_a_bug_of_the_owner_is_logged_there_and_told_without_its_details(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    client = connect(serve(lambda call, parameters: parameters["password"]))

    with pytest.raises(UnderstudyError, match="failed at login with KeyError") as caught:
        got(client.call("login", {}))

    assert "password" not in str(caught.value)
    assert "password" in caplog.text


def test_an_unknown_kind_of_error_is_still_an_error(closing: ExitStack) -> None:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))

    def newer_owner() -> None:
        peer, _ = listener.accept()
        with peer, peer.makefile("rb") as lines:
            for answer in ('"answer":1', '"error":{"kind":"Novel","message":"what is new"}'):
                number = json.loads(lines.readline()).get("id", 0)
                peer.sendall(b'{"id":%d,%s}\n' % (number, answer.encode()))
            lines.read()

    threading.Thread(target=newer_owner, daemon=True).start()
    address = Address(port=listener.getsockname()[1], secret="s", pid=1, epoch=1)
    client = ControlClient(address, on_lost=lambda: None)
    closing.callback(client.close)

    with pytest.raises(UnderstudyError, match="what is new") as caught:
        got(client.call("any", {}))

    assert type(caught.value) is UnderstudyError


# --- ends -------------------------------------------------------------------------------------------------------------


def test_when_the_server_closes_every_waiting_call_is_rejected_and_the_loss_is_told_once(
    serve: Serve, connect: Connect
) -> None:
    server, loss = serve(lambda call, parameters: Promise()), Loss()
    client = connect(server, on_lost=loss)
    waiting = [client.call("result", {}) for _ in range(3)]

    server.close()

    for call in waiting:
        with pytest.raises(Unavailable, match="whether it did this is unknown, ask again with the same key"):
            got(call)
    assert loss.happened.wait(PATIENCE_S)
    with pytest.raises(Unavailable, match="nothing was sent"):
        got(client.call("result", {}))
    client.close()
    assert loss.count == 1


def test_a_client_that_closes_by_itself_loses_nothing(serve: Serve, connect: Connect) -> None:
    loss = Loss()
    client = connect(serve(lambda call, parameters: Promise()), on_lost=loss)
    call = client.call("result", {})

    client.close()
    client.close()

    with pytest.raises(Unavailable, match="this connection was closed"):
        got(call)
    for thread in threading.enumerate():
        if thread.name == "understudy-control-client":
            thread.join(PATIENCE_S)
    assert loss.count == 0


def test_an_answer_to_a_client_that_has_gone_disturbs_nobody(serve: Serve, connect: Connect) -> None:
    wait: Promise[Any] = Promise()
    server = serve(lambda call, parameters: wait if call == "result" else call)
    gone, other = connect(server), connect(server)
    gone.call("result", {})
    got(gone.call("sync", {}))

    gone.close()
    wait.resolve("too late")

    assert got(other.call("list", {})) == "list"


def test_a_closed_server_can_be_closed_again_and_takes_nobody(serve: Serve, connect: Connect) -> None:
    server = serve()

    server.close()
    server.close()

    with pytest.raises(Unavailable, match="does not answer"):
        connect(server)


# --- strangers --------------------------------------------------------------------------------------------------------

REFUSAL = {"id": None, "error": {"kind": "Unavailable", "message": "refused; read the address again"}}


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Type: text/plain\r\n\r\n" + json.dumps({"secret": SECRET}).encode() + b"\n",
        b'{"secret":"wrong","protocol":1}\n',
        b'{"secret":"","protocol":1}\n',
        b'{"secret":"\\ud800","protocol":1}\n',
        b'{"secret":null}\n',
        b'{"secret":"wrong","protocol":99}\n',
        b'{"id":1,"call":"list","with":{}}\n',
        b"\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\xff\xfe\n",
        b"[" * 1000 + b"\n",
        json.dumps({"secret": SECRET, "ballast": "x" * 1024}).encode() + b"\n",
        b"x" * 17 * 2**20,
    ],
    ids=lambda first: repr(first[:24]),
)
def test_whoever_does_not_begin_with_the_secret_gets_the_same_refusal(serve: Serve, dial: Dial, first: bytes) -> None:
    called: list[str] = []
    wire = dial(serve(lambda call, parameters: called.append(call)), hello=False)

    wire.socket.sendall(first)

    assert wire.hear_the_last() == REFUSAL
    assert called == []


def test_a_line_that_is_cut_off_is_never_heard(serve: Serve, dial: Dial) -> None:
    called: list[str] = []
    stranger, client = dial(server := serve(lambda call, parameters: called.append(call)), hello=False), dial(server)

    stranger.socket.sendall(b'{"secret":')
    stranger.socket.shutdown(socket.SHUT_WR)
    client.socket.sendall(b'{"id":1,"call":"list","with":{}}')
    client.socket.shutdown(socket.SHUT_WR)

    assert stranger.hear_the_last() == REFUSAL
    assert client.lines.read() == b""
    assert called == []


def test_whoever_says_nothing_is_refused_after_a_while(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "_HELLO_S", 0.01)

    assert dial(serve(), hello=False).hear_the_last() == REFUSAL


def test_another_protocol_is_explained_to_whoever_knows_the_secret(serve: Serve, dial: Dial) -> None:
    wire = dial(serve(), hello=False)

    wire.say({"secret": SECRET, "protocol": 2})

    assert "speaks protocol 1, not 2" in wire.hear_the_last()["error"]["message"]


def test_a_client_with_a_stale_secret_is_told_to_look_again(serve: Serve) -> None:
    address = Address(port=serve().port, secret="stale", pid=7, epoch=3)

    with pytest.raises(Unavailable, match=r"process 7, epoch 3\) says: refused; read the address again"):
        ControlClient(address, on_lost=lambda: None)


def test_a_foreign_program_at_the_port_is_not_taken_for_the_owner(closing: ExitStack) -> None:
    listener = closing.enter_context(socket.create_server(("127.0.0.1", 0)))

    def web_server() -> None:
        peer, _ = listener.accept()
        with peer:
            peer.recv(1000)
            peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=web_server, daemon=True).start()

    address = Address(port=listener.getsockname()[1], secret="s", pid=1, epoch=1)
    with pytest.raises(Unavailable, match="does not answer"):
        ControlClient(address, on_lost=lambda: None)


def test_the_port_is_open_on_loopback_only(serve: Serve) -> None:
    listener = serve()._listener

    assert listener.getsockname()[0] == "127.0.0.1"
    assert not listener.get_inheritable()


# --- clients without manners ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"null",
        b"[1, 2]",
        b'{"id":1}',
        b'{"id":"1","call":"list","with":{}}',
        b'{"id":1,"call":"list","with":[]}',
        b"\xff\xfe\x00",
        b'{"id":1,"call":"list","with":' + b'{"a":' * 100_000,
        b"x" * 17 * 2**20,
    ],
    ids=lambda line: repr(line[:30]),
)
def test_a_line_that_is_no_call_ends_its_own_connection_and_says_why(
    serve: Serve, dial: Dial, connect: Connect, line: bytes
) -> None:
    server = serve()
    wire, other = dial(server), connect(server)

    wire.socket.sendall(line + b"\n")

    last = wire.hear_the_last()
    assert last["id"] is None
    assert last["error"]["kind"] == "Rejected"
    assert got(other.call("list", {})) == ["list", {}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=8))
def test_calls_are_understood_however_the_network_cuts_them(serve: Serve, dial: Dial, cuts: list[int]) -> None:
    calls = [{"id": n, "call": "echo", "with": {"name": "ä" * n}} for n in range(1, 8)]
    text = b"".join(json.dumps(call, ensure_ascii=False).encode() + b"\n" for call in calls)
    wire = dial(serve())
    wire.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(text)], strict=True):
        wire.socket.sendall(text[start:end])

    assert [wire.hear() for _ in calls] == [{"id": call["id"], "answer": ["echo", call["with"]]} for call in calls]


def test_a_line_may_be_as_long_as_the_limit_and_no_longer(serve: Serve, connect: Connect) -> None:
    client = connect(
        serve(lambda call, parameters: "x" * parameters["n"] if "n" in parameters else len(parameters["x"]))
    )
    frame = len('{"id":1,"answer":""}')

    assert len(got(client.call("show", {"n": LINE_LIMIT_BYTES - frame}))) == LINE_LIMIT_BYTES - frame
    with pytest.raises(Rejected, match="ask for less at once"):
        got(client.call("show", {"n": LINE_LIMIT_BYTES}))
    with pytest.raises(Rejected, match="ask for less at once"):
        got(client.call("start", {"x": "x" * LINE_LIMIT_BYTES}))
    assert got(client.call("start", {"x": "x" * (LINE_LIMIT_BYTES - 100)})) == LINE_LIMIT_BYTES - 100


def test_a_client_that_reads_nothing_holds_up_neither_others_nor_whoever_settles_its_promises(
    serve: Serve, dial: Dial, connect: Connect
) -> None:
    waits: list[Promise[Any]] = []

    def answer(call: str, parameters: dict[str, Any]) -> Any:
        if call == "list":
            return len(waits)
        waits.append(Promise())
        return waits[-1]

    server = serve(answer)
    greedy, other = dial(server), connect(server)
    for n in range(20):
        greedy.say({"id": n, "call": "show", "with": {}})
    greedy.say({"id": 99, "call": "list", "with": {}})
    assert greedy.hear() == {"id": 99, "answer": 20}

    for wait in waits:
        wait.resolve("x" * 2**21)

    assert got(other.call("list", {})) == 20
    assert sorted(greedy.hear()["id"] for _ in waits) == list(range(20))


def test_calls_beyond_the_limit_are_refused_and_the_others_answered(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "UNANSWERED_LIMIT", 3)
    wait: Promise[Any] = Promise()
    client = connect(serve(lambda call, parameters: wait))

    accepted = [client.call("result", {}) for _ in range(3)]
    with pytest.raises(Unavailable, match="wait for answers; try again"):
        got(client.call("result", {}))
    wait.resolve("done")

    assert [got(call) for call in accepted] == ["done"] * 3
    assert got(client.call("result", {})) == "done"


def test_a_client_that_keeps_calling_and_reads_nothing_is_parted_with(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    parted, part = threading.Event(), control._Connection._part

    def part_and_tell(connection: control._Connection, error: Exception) -> None:
        parted.set()
        part(connection, error)

    monkeypatch.setattr(control, "UNANSWERED_LIMIT", 3)
    monkeypatch.setattr(control._Connection, "_part", part_and_tell)
    wire = dial(serve(lambda call, parameters: "x" * 2**23))

    for n in range(10):
        wire.say({"id": n, "call": "show", "with": {}})
    assert parted.wait(PATIENCE_S)

    *_, last = wire.lines.readlines()
    assert json.loads(last)["error"]["message"] == "this client sends calls and reads no answers"


def test_a_client_that_takes_nothing_for_long_is_taken_for_dead(
    serve: Serve, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = threading.Event()
    server = serve(lambda call, parameters: "x" * 2**23)
    monkeypatch.setattr(control, "_STALL_S", 0.01)
    monkeypatch.setattr(server, "forget", lambda connection: forgotten.set())
    wire = dial(server)

    wire.say({"id": 1, "call": "show", "with": {}})
    assert forgotten.wait(PATIENCE_S)

    assert len(wire.lines.read()) < 2**23


def test_silent_strangers_can_neither_keep_a_client_out_nor_drive_one_away(
    serve: Serve, dial: Dial, connect: Connect
) -> None:
    server = serve()
    early = connect(server)

    for _ in range(100):
        dial(server, hello=False)

    assert got(connect(server).call("list", {})) == ["list", {}]
    assert got(early.call("list", {})) == ["list", {}]
    assert len(server._guests) <= control._GUESTS_LIMIT


def test_clients_beyond_the_limit_are_told_so_until_one_leaves(serve: Serve, connect: Connect, dial: Dial) -> None:
    server = serve(clients_limit=2)
    first, second = dial(server), connect(server)

    with pytest.raises(Unavailable, match="says: 2 clients are connected already; close one and try again"):
        connect(server)
    assert got(second.call("list", {})) == ["list", {}]

    first.socket.shutdown(socket.SHUT_WR)
    assert first.lines.read() == b""
    assert got(connect(server).call("list", {})) == ["list", {}]


# --- other processes --------------------------------------------------------------------------------------------------


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """An owner in a process of its own; children that it forks live as long as the test."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "orders.db")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        encoding="utf-8",
    )
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "ready\n"
        yield owner
        owner.kill()


def test_the_death_of_an_owner_is_told_at_once_although_its_child_lives_and_finds_its_epoch_free(
    owner: subprocess.Popen[str], tmp_path: Path, closing: ExitStack
) -> None:
    file, free, told = closing.enter_context(OwnerFile.of(tmp_path / "orders.db")), [], threading.Event()

    def on_lost() -> None:
        free.append(not file.is_alive(1))
        told.set()

    address = file.address()
    assert address is not None
    client = ControlClient(address, on_lost=on_lost)
    assert got(client.call("fork", {})) == owner.pid == address.pid
    waiting = client.call("wait", {})

    owner.kill()

    assert told.wait(PATIENCE_S)
    assert free == [True]
    with pytest.raises(Unavailable, match=f"process {owner.pid}, epoch 1"):
        got(waiting)
    owner.wait()
    with pytest.raises(Unavailable, match="does not answer"):
        ControlClient(address, on_lost=on_lost)


def test_a_stopped_owner_neither_answers_nor_keeps_a_caller(
    owner: subprocess.Popen[str], tmp_path: Path, closing: ExitStack
) -> None:
    file = closing.enter_context(OwnerFile.of(tmp_path / "orders.db"))
    address, loss = file.address(), Loss()
    assert address is not None
    client = ControlClient(address, on_lost=loss)

    owner.send_signal(signal.SIGSTOP)

    with pytest.raises(TimedOut):
        got(client.call("pid", {}, timeout_s=0.01))
    with pytest.raises(Unavailable, match="does not answer"):
        ControlClient(address, on_lost=loss, connect_timeout_s=0.01)
    assert file.is_alive(1)
    client.close()
    assert loss.count == 0


def test_a_forked_child_cannot_use_its_parents_connection_or_end_it(tmp_path: Path) -> None:
    script = """
import os
from understudy.actors.control import ControlClient, ControlServer
from understudy.model.errors import UsedAfterFork
from understudy.store.ownership import Address

server = ControlServer(lambda call, parameters: call, secret="s")
client = ControlClient(Address(port=server.port, secret="s", pid=1, epoch=1), on_lost=lambda: print("lost"))
if os.fork() == 0:
    try:
        client.call("list", {})
    except UsedAfterFork:
        client.close()
        server.close()
        os._exit(0)
    os._exit(1)
assert os.wait()[1] == 0
print(client.call("list", {}).get(timeout=10))
"""
    outcome = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        check=True,
        timeout=PATIENCE_S,
    )

    assert outcome.stdout == "list\n"
