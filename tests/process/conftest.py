"""Real processes for tests: services that are told what to do, killed, stopped and woken up; and what must hold after.

Children get the environment of the test, so that they find the package wherever the test has found it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from understudy import Context, Process, Runtime, task
from understudy.audit import audit
from understudy.model.events import Entry
from understudy.store.connection import open_reader
from understudy.store.reads import Readers, Reads

CHILD = Path(__file__).with_name("child.py")
PATIENCE_S = 60.0  # Nothing is expected to take so long, however busy the machine is.

Histories = dict[str, list[Entry]]


class Refused(Exception):
    """A worker's call raised; `kind` is the name of the class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Child:
    """A service in a process of its own, and what it says."""

    def __init__(self, ledger: Path, *arguments: object) -> None:
        self.acks: list[dict[str, Any]] = []
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any] | None]] = {}
        self._serving = threading.Event()
        self._process = subprocess.Popen(
            [sys.executable, str(CHILD), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "LEDGER": str(ledger)},
            bufsize=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_until_serving(self) -> None:
        assert self._serving.wait(PATIENCE_S), "the service was never ready"

    # --- orders ---

    def tell(self, do: str, **parameters: Any) -> int:
        """Order something; `answer` has what it gives."""
        assert self._process.stdin is not None
        number = len(self._answers) + 1
        self._answers[number] = queue.SimpleQueue()
        self._process.stdin.write((json.dumps({"order": number, "do": do, **parameters}) + "\n").encode())
        return number

    def answer(self, order: int) -> Any:
        said = self._answers[order].get(timeout=PATIENCE_S)
        assert said is not None, "the worker died before it answered"
        if "error" in said:
            raise Refused(said["error"], said["text"])
        return said["value"]

    def ask(self, do: str, **parameters: Any) -> Any:
        return self.answer(self.tell(do, **parameters))

    def acknowledged(self, kind: str) -> list[str]:
        return [said["of"] for said in self.acks if said["ack"] == kind]

    # --- signals ---

    def kill(self) -> int:
        """SIGKILL, and wait until nothing is left of it; the moment of the signal, on the monotonic clock."""
        at_ns = time.monotonic_ns()
        self._process.send_signal(signal.SIGKILL)
        self.wait()
        return at_ns

    def stop(self) -> None:
        """SIGSTOP, and wait until it stands still."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def leave(self) -> int:
        """Let it close by itself; its exit code."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self.wait()

    def wait(self) -> int:
        code = self._process.wait(timeout=PATIENCE_S)
        self._reader.join(timeout=PATIENCE_S)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                if line.endswith(b"\n"):  # What a killed process has not said to the end it has not said.
                    self._hear(json.loads(line))
        for answers in list(self._answers.values()):
            answers.put(None)

    def _hear(self, said: dict[str, Any]) -> None:
        if "answers" in said:
            self._answers[said["answers"]].put(said)
        elif "ack" in said:
            self.acks.append(said)
        else:
            self._serving.set()


class World:
    """A folder with a database and a ledger, and the services that were started on them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "play.db"
        self.ledger = folder / "ledger"
        self._children: list[Child] = []

    def worker(self, *, role: str = "auto", lease_ms: int = 10_000) -> Child:
        return self._child("worker", self.path, role, lease_ms)

    def workers(self, count: int) -> list[Child]:
        """So many workers, all at once."""
        children = [self._begin("worker", self.path, "auto", 10_000) for _ in range(count)]
        for child in children:
            child.wait_until_serving()
        return children

    def victim(self, *, seed: int) -> Child:
        return self._child("victim", self.path, seed)

    def finisher(self) -> Child:
        return self._child("finisher", self.path)

    def publisher(self, *, seed: int, is_last: bool = False) -> Child:
        return self._child("publisher", self.path, seed, *(["last"] if is_last else []))

    def _child(self, *arguments: object) -> Child:
        child = self._begin(*arguments)
        child.wait_until_serving()
        return child

    def _begin(self, *arguments: object) -> Child:
        child = Child(self.ledger, *arguments)
        self._children.append(child)
        return child

    def stop(self, child: Child) -> None:
        """Stop a service outside of its writes: one that stands still inside keeps SQLite's own lock."""
        child.stop()
        while self._is_locked():
            child.wake()
            child.stop()

    def _is_locked(self) -> bool:
        database = sqlite3.connect(self.path, timeout=0, isolation_level=None)
        try:
            database.execute("BEGIN IMMEDIATE")
            database.execute("ROLLBACK")
        except sqlite3.OperationalError:
            return True
        finally:
            database.close()
        return False

    def end(self) -> None:
        for child in self._children:
            if child.is_alive:
                child.kill()
            child.wait()

    # --- the outside world ---

    def open_gate(self) -> None:
        Path(f"{self.ledger}.gate").touch()

    def effects(self) -> list[tuple[str, str, str]]:
        """What has happened: effect, key and instance, as often as it has happened."""
        lines = self.ledger.read_text().splitlines() if self.ledger.exists() else []
        return [(effect, key, instance) for effect, key, instance, _attempt in map(str.split, lines)]

    def told(self) -> list[tuple[str, int]]:
        """What a subscriber was told: instance and number of the commit, as often as it was told."""
        file = Path(f"{self.ledger}.told")
        lines = file.read_text().splitlines() if file.exists() else []
        return [(instance, int(n)) for instance, n, _seq in map(str.split, lines)]

    # --- the database ---

    @contextmanager
    def reads(self) -> Iterator[Reads]:
        readers = Readers(str(self.path), lambda: open_reader(str(self.path)))
        try:
            yield Reads(readers)
        finally:
            readers.close()

    def audit(self) -> Histories:
        """All histories, after everything was checked that can be."""
        with self.reads() as reads:
            report = audit(reads)
            assert report.ok, report.lines
            return {id: [entry for record in reads.history(id) for entry in record.entries] for id in reads.ids()}


class Stage:
    """What the handlers of one test do and have done."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun: list[tuple[str, str, int]] = []
        self.gate = threading.Event()

    def enter(self, name: str, ctx: Context) -> None:
        self.begun.append((name, ctx.instance, ctx.attempt))

    def count(self, name: str) -> int:
        return sum(begun == name for begun, _instance, _attempt in self.begun)

    def play(self) -> Process[Any, Any]:
        """Two steps, of which the first waits for the gate."""

        @task
        def first(ctx: Context) -> None:
            self.enter("first", ctx)
            assert self.gate.wait(60)

        @task
        def second(ctx: Context) -> str:
            self.enter("second", ctx)
            return "done"

        return Process("play", first, second, gives=second)

    def events(self, runtime: Runtime, kind: type) -> list[Any]:
        """All events of that kind, of all instances."""
        return [
            event
            for summary in runtime.list(limit=1_000)
            for step in runtime.history(summary.id)
            for entry in step.entries
            for event in entry.events
            if isinstance(event, kind)
        ]

    @contextmanager
    def closing(self, runtime: Runtime) -> Iterator[list[bool]]:
        """Close on another thread; the block runs as soon as no handler begins any more.

        What the close said stands in the list afterwards.
        """
        said: list[bool] = []
        system = runtime.node.system
        assert system is not None
        pool: Any = system.ports.pool
        thread = threading.Thread(target=lambda: said.append(runtime.close(timeout="60s")))
        thread.start()
        try:
            while not pool.closed:
                thread.join(0.001)
            yield said
        finally:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def wait_for(condition: Callable[[], Any], what: str = "what is waited for") -> Any:
    """What the condition gives, once that is true: for what only another thread or process can bring about."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(0.001)
    return found


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return wait_for


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.end()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path / "a.db")
    yield made
    made.gate.set()  # Whoever still hangs goes with the test.
