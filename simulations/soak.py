"""About an hour of everything, bounded, and one table at the end.

Two processes work side by side. One plays worlds with seeds that no gate has; the other visits every write boundary of
the scenarios, kills real processes, tears real files, and then plays worlds too. Each part has its share of the time
and stops there: what the table says was done was done.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from understudy.simulations import gates
from understudy.simulations.plugins import FAULTS, SCENARIOS

FIRST_SEED: Final = 1_000_000  # Far from those of the gate.
LANES: Final = 2
KILL_LOOPS: Final = 2_000
TORN_FILES: Final = 20_000
SHARES: Final = {"boundaries": 0.3, "kills": 0.15, "torn": 0.12}  # Of the second process's time.
LONG: Final = frozenset({"fan_of_a_thousand", "long_loop"})  # Scenarios whose boundaries would take the whole time.


class Soaked(msgspec.Struct):
    """What a soak has done."""

    worlds: gates.Tally
    boundaries: dict[str, dict[str, int]] = {}
    kills: list[tuple[str, str]] = []
    torn: list[tuple[str, str]] = []
    violations: list[str] = []
    seconds: float = 0.0

    def rows(self) -> list[tuple[str, str]]:
        """The one table."""
        worlds = self.worlds
        by_kind: dict[str, int] = {}
        for name, count in worlds.faults.items():
            kind = FAULTS[name].kind if name in FAULTS else "other"
            by_kind[kind] = by_kind.get(kind, 0) + count
        boundaries = self.boundaries.values()
        return [
            ("seeds", f"{worlds.worlds:,}"),
            ("steps", f"{worlds.steps:,}"),
            ("steps/s of one core, checkers on", f"{worlds.steps / max(worlds.seconds, 1e-9):,.0f}"),
            ("commits", f"{worlds.commits:,}"),
            *((f"faults: {kind}", f"{count:,}") for kind, count in sorted(by_kind.items())),
            ("lives in worlds", f"{worlds.lives:,}"),
            ("write boundaries", f"{sum(each['boundaries'] for each in boundaries):,}"),
            ("visits of a boundary", f"{sum(each['points'] for each in boundaries):,}"),
            ("lives on the simulated disk", f"{sum(each['lives'] for each in boundaries):,}"),
            *self.kills,
            *self.torn,
            ("probes reached", f"{len(worlds.probes):,}"),
            ("probes never reached", ", ".join(worlds.missed_probes) or "none"),
            ("minutes", f"{self.seconds / 60:.1f}"),
            ("violations", f"{len(self.violations):,}"),
        ]


def soak(*, minutes: float, say: Callable[[str], None]) -> Soaked:
    """Run both processes for so long, and add up."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "understudy.simulations", "soak-lane"]
    lanes = [
        subprocess.Popen([*command, "--lane", str(lane), "--minutes", str(minutes)], stdout=subprocess.PIPE, text=True)
        for lane in range(LANES)
    ]
    whole = Soaked(gates.Tally())
    for line in _lines(lanes):
        _take(whole, json.loads(line), say)
    for lane in lanes:
        if lane.wait() != 0:
            whole.violations.append(f"a process of the soak has ended with {lane.returncode}")
    whole.seconds = time.monotonic() - began_s
    return whole


def _lines(lanes: list[subprocess.Popen[str]]) -> Iterator[str]:
    """What either of them says, as it comes: a full pipe would stop the one nobody listens to."""
    said: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    for lane in lanes:
        threading.Thread(target=_listen, args=(lane, said), daemon=True).start()
    silent = 0
    while silent < len(lanes):
        line = said.get()
        if line is None:
            silent += 1
        else:
            yield line


def _listen(lane: subprocess.Popen[str], said: queue.SimpleQueue[str | None]) -> None:
    assert lane.stdout is not None
    with lane.stdout as lines:
        for line in lines:
            said.put(line)
    said.put(None)


def _take(whole: Soaked, told: dict[str, Any], say: Callable[[str], None]) -> None:
    kind, content = told["kind"], told["content"]
    if kind == "world":
        verdict = msgspec.convert(content, gates.Verdict)
        whole.worlds.add(verdict)
        whole.violations += [f"{verdict.case}: {violation}" for violation in verdict.violations[:1]]
        if whole.worlds.worlds % 500 == 0:
            say(f"{whole.worlds.worlds:,} worlds, {whole.worlds.steps:,} steps, {len(whole.violations)} violations")
        return
    if kind == "boundaries":
        whole.boundaries[content["name"]] = content["counts"]
    else:
        setattr(whole, kind, [tuple(row) for row in content["rows"]])
    whole.violations += content["violations"]
    say(f"{kind}: {content.get('name', 'done')}, {len(content['violations'])} violations")


# --- one process ------------------------------------------------------------------------------------------------------


def lane(number: int, *, minutes: float) -> None:
    """What one of the two does; each finished piece is one line."""
    end_s = time.monotonic() + minutes * 60
    if number == 1:
        whole_s = minutes * 60
        _tell_boundaries(time.monotonic() + SHARES["boundaries"] * whole_s)
        with tempfile.TemporaryDirectory() as folder:
            _tell_kills(Path(folder), SHARES["kills"] * whole_s)
            _tell_torn(Path(folder), SHARES["torn"] * whole_s)
    for case in _cases(number):
        if time.monotonic() > end_s:
            return
        _tell("world", msgspec.to_builtins(gates.verdict(case)))


def _cases(lane_number: int) -> Iterator[gates.Case]:
    seed = FIRST_SEED + lane_number
    while True:
        yield from gates.gate_cases(1, first=seed)
        seed += LANES + 1  # An odd step, so that both processes play every scenario.


def _tell_boundaries(end_s: float) -> None:
    from understudy.simulations.boundaries import MODES, enumerate_boundaries

    for durability, modes in (("full", ("kill", "power")), ("relaxed", ("kill", "power")), ("full", MODES[2:])):
        for scenario in sorted(set(SCENARIOS) - LONG):
            if time.monotonic() > end_s:
                return
            report = enumerate_boundaries(scenario, durability=durability, modes=modes)
            counts = {"boundaries": report.boundaries, "points": report.points, "lives": report.lives}
            name = f"{scenario}, {durability}, {'/'.join(modes)}"
            _tell("boundaries", {"name": name, "counts": counts, "violations": list(report.violations)})


def _tell_kills(folder: Path, seconds: float) -> None:
    from understudy.simulations.kills import kill_loops

    trial = kill_loops(folder / "trial", loops=20, seed=1)
    loops = max(1, min(KILL_LOOPS, int(seconds * trial.loops_per_s)))
    report = kill_loops(folder / "kills", loops=loops, seed=FIRST_SEED)
    _tell("kills", {"rows": report.rows(), "violations": [*trial.violations, *report.violations]})


def _tell_torn(folder: Path, seconds: float) -> None:
    from understudy.simulations.torn import torn_files

    trial = torn_files(folder / "trial", cases=100, seed=1)
    cases = max(1, min(TORN_FILES, int(seconds * trial.cases_per_s)))
    report = torn_files(folder / "torn", cases=cases, seed=FIRST_SEED)
    _tell("torn", {"rows": report.rows(), "violations": [*trial.violations, *report.violations]})


def _tell(kind: str, content: Any) -> None:
    sys.stdout.write(json.dumps({"kind": kind, "content": content}) + "\n")
    sys.stdout.flush()
