"""Durable steps a second: a process of five trivial steps, each durable (`synchronous=FULL`) before the next begins.

Beside it, raw `sqlite3` writing the same rows: with a commit for each step, which no design that commits step by step
can beat, and in batches of 1,000, which is the limit of the disk and the library. `--profile` shows where the time
goes.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import Sample, child, figure, interleave, ratio, save, show

from understudy import Context, Handle, Process, Runtime, task
from understudy.store.batch import COLUMNS, HISTORY, HOT

STEPS = 5
ROUNDS = 5


# --- ours -------------------------------------------------------------------------------------------------------------


def measure(concurrent: int, instances: int, *, busy: bool = False) -> Sample:
    """Keep `concurrent` instances under way until `instances` have ended."""
    load = Load(instances)
    path = f"{tempfile.mkdtemp()}/bench.db"
    with Runtime(path, load.process, role="owner") as runtime:
        load.runtime = runtime
        stop = _busy_thread() if busy else None
        started_s = time.perf_counter()
        for _ in range(concurrent):
            load.start_next()
        load.done.wait()
        _all_ended(runtime, instances)
        taken_s = time.perf_counter() - started_s
        if stop is not None:
            stop.set()
    shutil.rmtree(Path(path).parent)
    latencies = sorted(load.latencies_s)
    return {
        "per_s": instances * STEPS / taken_s,
        "p50_ms": statistics.median(latencies) * 1_000,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1_000,
    }


class Load:
    """Starts the next instance when one reaches its last step; notes how long each step took to follow the one
    before.
    """

    runtime: Runtime

    def __init__(self, instances: int) -> None:
        self.done = threading.Event()
        self.latencies_s: list[float] = []
        self._left = instances
        self._ended = 0
        self._instances = instances
        self._last_s: dict[str, float] = {}
        self._lock = threading.Lock()
        self.process = Process("bench", *(self._step(number) for number in range(STEPS)))

    def _step(self, number: int) -> Any:
        @task(name=f"step{number}")
        def step(ctx: Context) -> None:
            now_s = time.perf_counter()
            before_s = self._last_s.get(ctx.instance)
            if before_s is not None:
                self.latencies_s.append(now_s - before_s)
            self._last_s[ctx.instance] = now_s
            if number == STEPS - 1:
                self._last_s.pop(ctx.instance)
                self._ended_one()

        return step

    def _ended_one(self) -> None:
        with self._lock:
            self._ended += 1
            if self._ended == self._instances:
                self.done.set()
        self.start_next()

    def start_next(self) -> None:
        with self._lock:
            if self._left == 0:
                return
            self._left -= 1
        name = self.runtime.node.new_id()
        content = self.process.definition.digest
        request = {"process": "bench", "digest": content, "id": name, "is_new": True, "variables": {}}
        self.runtime.node.submit("start", request)


def _all_ended(runtime: Runtime, instances: int) -> None:
    """The last step's handler ran; its commit is durable when the store says so."""
    wake = threading.Event()
    assert runtime.node.system is not None
    unwatch = runtime.node.system.watch.add(None, wake.set)
    while runtime.node.reads.count().get("completed", 0) < instances:
        wake.wait(1)
        wake.clear()
    unwatch()


def _busy_thread() -> threading.Event:
    stop = threading.Event()

    def spin() -> None:
        number = 0
        while not stop.is_set():
            number = (number * 31 + 7) % 1_000_003

    threading.Thread(target=spin, daemon=True).start()
    return stop


# --- raw sqlite3 ------------------------------------------------------------------------------------------------------


def raw(together: int, steps: int) -> Sample:
    """The rows of one step (instance, token, history), written by plain statements, `together` steps in a commit."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "raw.db")
        rows = _sample_rows(path)
        connection = sqlite3.connect(path, isolation_level=None)
        for pragma in ("synchronous=FULL", "wal_autocheckpoint=16000", "cache_size=-65536", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")
        update, upsert, insert = _statements()
        seq = connection.execute("SELECT max(seq) FROM history").fetchone()[0]
        started_s = time.perf_counter()
        for begin in range(0, steps, together):
            numbers = range(seq + begin + 1, seq + begin + together + 1)
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(update, [(*rows["hot"], rows["nos"][n % len(rows["nos"])]) for n in numbers])
            connection.executemany(upsert, [(rows["nos"][n % len(rows["nos"])], *rows["token"]) for n in numbers])
            history = [(n, rows["nos"][n % len(rows["nos"])], *rows["history"]) for n in numbers]
            connection.executemany(insert, history)
            connection.execute("COMMIT")
        taken_s = time.perf_counter() - started_s
        connection.close()
    return {"per_s": steps / taken_s}


def _statements() -> tuple[str, str, str]:
    key, others = COLUMNS["token"]
    columns = ["instance", *key, *others]
    changes = ", ".join(f'"{name}" = excluded."{name}"' for name in others)
    return (
        f"UPDATE instance SET {', '.join(f'{name} = ?' for name in HOT)} WHERE no = ?",
        f"INSERT INTO token ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
        f"ON CONFLICT (instance, id) DO UPDATE SET {changes}",
        f"INSERT INTO history ({', '.join(HISTORY)}, partition) VALUES ({', '.join('?' * len(HISTORY))}, 0)",
    )


def _sample_rows(path: str) -> dict[str, Any]:
    """Rows as our own steps write them: 1,000 instances that wait, and the content of one step of one of them."""
    gate = threading.Event()

    @task
    def first() -> None:
        pass

    @task
    def second() -> None:
        gate.wait()

    with Runtime(path, Process("bench", first, second), role="owner") as runtime:
        handle: Handle[None] = runtime.start("bench")
        handle.wait_until(lambda state: state.version >= 2)
        for _ in range(999):
            runtime.start("bench")
        one = runtime.list(text=handle.id)[0]
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        hot = connection.execute(f"SELECT {', '.join(HOT)} FROM instance WHERE no = ?", (one.no,)).fetchone()
        token = connection.execute("SELECT * FROM token WHERE instance = ?", (one.no,)).fetchone()[1:]
        columns = ", ".join(HISTORY[2:])
        history = connection.execute(
            f"SELECT {columns} FROM history WHERE seq = ?", (hot[HOT.index("head")],)
        ).fetchone()
        nos = [row[0] for row in connection.execute("SELECT no FROM instance")]
        connection.close()
        gate.set()
    return {"hot": hot, "token": token, "history": history, "nos": nos}


# --- the table --------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "1": {"concurrent": 1, "instances": 400},
    "100": {"concurrent": 100, "instances": 3_000},
    "1000": {"concurrent": 1_000, "instances": 6_000},
    "100 busy": {"concurrent": 100, "instances": 1_500, "busy": True},
    "1000 busy": {"concurrent": 1_000, "instances": 4_000, "busy": True},
    "raw each": {"together": 1, "steps": 8_000},
    "raw batch": {"together": 1_000, "steps": 60_000},
}


def main() -> None:
    rounds = interleave({name: partial(child, __file__, name, **given) for name, given in VARIANTS.items()}, ROUNDS)
    figures = {
        f"steps_per_s_{name.replace(' ', '_')}": figure([taken[name]["per_s"] for taken in rounds]) for name in VARIANTS
    }
    for name in ("1", "100", "1000"):
        for of in ("p50_ms", "p99_ms"):
            figures[f"step_{of}_{name}"] = figure([taken[name][of] for taken in rounds])
    figures |= {
        "x_raw_each_1": figure(ratio(rounds, "1", "raw each")),
        "x_raw_each_100": figure(ratio(rounds, "100", "raw each"), aim=1.0),
        "x_raw_each_1000": figure(ratio(rounds, "1000", "raw each"), aim=1.0),
        "x_raw_batch_1000": figure(ratio(rounds, "1000", "raw batch")),
        "busy_x_raw_each_1000": figure(ratio(rounds, "1000 busy", "raw each"), aim=0.25),
        "busy_x_idle_100": figure(ratio(rounds, "100 busy", "100")),
        "busy_x_idle_1000": figure(ratio(rounds, "1000 busy", "1000")),
    }
    show("Durable steps: five trivial steps, synchronous=FULL", figures)
    save(figures)


def run_child(name: str, options: dict[str, Any]) -> None:
    sample = raw(**options) if name.startswith("raw") else measure(**options)
    print(json.dumps(sample))


def profile() -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    measure(1_000, 3_000)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(40)


if __name__ == "__main__":
    if "--child" in sys.argv:
        where = sys.argv.index("--child")
        run_child(sys.argv[where + 1], json.loads(sys.argv[where + 2]))
    elif "--profile" in sys.argv:
        profile()
    else:
        main()
