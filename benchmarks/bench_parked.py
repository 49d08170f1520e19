"""100,000 instances that wait for a message: what they cost at rest, and how fast any one of them answers.

All are started, come to rest and leave memory. Then messages go to instances drawn at random, one at a time; an
answer counts when the step that follows the message is durable.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from harness import child, figure, save, show

from understudy import Limits, Process, Runtime, task, wait
from understudy.actors.promise import Promise
from understudy.actors.system import System

INSTANCES = 100_000
MESSAGES = 500


@task
def greet() -> None:
    pass


@task
def answer() -> None:
    pass


PARKED = Process("parked", greet, wait("go"), answer, wait("end"))


def measure(instances: int, messages: int) -> dict[str, float]:
    folder = tempfile.mkdtemp()
    limits = Limits(resident=1_000, idle_ms=500)
    with Runtime(f"{folder}/parked.db", PARKED, role="owner", limits=limits) as runtime:
        started_s = time.perf_counter()
        _start(runtime, instances)
        _wait_until_all_left(runtime, instances)
        sample = {
            "start_per_s": instances / (time.perf_counter() - started_s),
            "rss_mb": _rss_mb(),
            "threads": float(threading.active_count()),
            "resident": float(len(_system(runtime).directory)),
        }
        chance = random.Random(7)
        latencies_ms = [_answered_ms(runtime, f"p{chance.randrange(instances)}") for _ in range(messages)]
    sample["answer_p50_ms"] = statistics.median(latencies_ms)
    sample["answer_p99_ms"] = sorted(latencies_ms)[int(messages * 0.99)]
    sample["file_mb"] = sum(part.stat().st_size for part in Path(folder).iterdir()) / 1e6
    shutil.rmtree(folder)
    return sample


def _start(runtime: Runtime, instances: int) -> None:
    under_way = threading.Semaphore(2_000)
    failures: list[BaseException] = []

    def settled(promise: Promise[object]) -> None:
        if promise.error is not None:
            failures.append(promise.error)
        under_way.release()

    for number in range(instances):
        under_way.acquire()
        request = {"process": "parked", "digest": PARKED.definition.digest, "id": f"p{number}", "variables": {}}
        runtime.node.submit("start", request).add_done_callback(settled)
    for _ in range(2_000):
        under_way.acquire()
    assert not failures, failures[:3]


def _wait_until_all_left(runtime: Runtime, instances: int) -> None:
    """Until each waits for its message, on disk, and none is in memory."""
    count = "SELECT count(*) FROM wait WHERE kind = 'message'"
    while runtime.node.reads.rows(count)[0][0] < instances or len(_system(runtime).directory):
        time.sleep(0.1)


def _answered_ms(runtime: Runtime, name: str) -> float:
    began_s = time.perf_counter()
    runtime.send(name, "go")
    runtime.wait_until(name, lambda state: not state.is_waiting_for("go") and not state.is_waiting_at("answer"))
    return (time.perf_counter() - began_s) * 1_000


def _system(runtime: Runtime) -> System:
    assert runtime.node.system is not None
    return runtime.node.system


def _rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4_096 / 1e6


def main() -> None:
    sample = child(__file__, "parked", instances=INSTANCES, messages=MESSAGES)
    figures = {
        "parked_rss_mb": figure([sample["rss_mb"]], aim=250, at_most=True),
        "parked_threads": figure([sample["threads"]]),
        "parked_resident": figure([sample["resident"]], aim=0, at_most=True),
        "parked_answer_p50_ms": figure([sample["answer_p50_ms"]], aim=20, at_most=True),
        "parked_answer_p99_ms": figure([sample["answer_p99_ms"]]),
        "parked_start_per_s": figure([sample["start_per_s"]]),
        "parked_file_mb": figure([sample["file_mb"]]),
    }
    show(f"{INSTANCES:,} instances that wait for a message", figures)
    save(figures)


if __name__ == "__main__":
    if "--child" in sys.argv:
        print(json.dumps(measure(**json.loads(sys.argv[sys.argv.index("--child") + 2]))))
    else:
        main()
