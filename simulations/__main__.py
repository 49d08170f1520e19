"""`python -m understudy.simulations`: play one seed with every step in words, hunt through many, or run a gate."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from understudy.simulations import gates
from understudy.simulations.playing import play
from understudy.simulations.plugins import SCENARIOS


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    return COMMANDS[given.command](given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m understudy.simulations", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("play", help="one seed, in words")
    one.add_argument("scenario", choices=sorted(SCENARIOS))
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--steps", type=int)
    one.add_argument("--last", type=int, default=50, help="how many moments are shown")
    one.add_argument("--html", help="where to write a picture of it")
    many = commands.add_parser("hunt", help="seeds until one fails")
    many.add_argument("--seeds", type=int, default=500)
    many.add_argument("--first", type=int, default=0)
    many.add_argument("--scenario", choices=sorted(SCENARIOS))
    many.add_argument("--keep-on", action="store_true", help="do not stop at the first that fails")
    many.add_argument("--quiet", action="store_true")
    gate = commands.add_parser("gate", help="what every commit must pass")
    gate.add_argument("--seeds", type=int, default=300)
    edge = commands.add_parser("boundary", help="one death at one operation of the simulated disk")
    edge.add_argument("scenario", choices=sorted(SCENARIOS))
    edge.add_argument("--seed", type=int, default=1)
    edge.add_argument("--steps", type=int, default=40)
    edge.add_argument("--mode", default="kill")
    edge.add_argument("--at", type=int, required=True)
    edge.add_argument("--count", type=int, default=1)
    edge.add_argument("--nested", type=int, action="append", default=[])
    edge.add_argument("--durability", default="full")
    edge.add_argument("--last", type=int, default=50)
    edges = commands.add_parser("boundaries", help="every operation of the simulated disk")
    edges.add_argument("scenarios", nargs="*")
    edges.add_argument("--durability", default="full")
    edges.add_argument("--modes", default="kill,power")
    edges.add_argument("--stride", type=int, default=1)
    edges.add_argument("--quiet", action="store_true")
    long = commands.add_parser("soak", help="about an hour of everything")
    long.add_argument("--minutes", type=float, default=60.0)
    long.add_argument("--json", help="where to write what was done")
    lane = commands.add_parser("soak-lane", help="one process of a soak")
    lane.add_argument("--lane", type=int, required=True)
    lane.add_argument("--minutes", type=float, required=True)
    for name in ("torn", "kills"):
        real = commands.add_parser(name, help=f"real files: {name}")
        real.add_argument("--number", type=int, default=200)
        real.add_argument("--seed", type=int, default=1)
        real.add_argument("--quiet", action="store_true")
    commands.add_parser("verdicts", help="cases from standard input, verdicts to standard output")
    commands.add_parser("list", help="the scenarios")
    return parser


def _play(given: argparse.Namespace) -> int:
    from understudy.simulations.timeline import timeline_html
    from understudy.simulations.transcript import transcript

    outcome = play(given.scenario, given.seed, steps=given.steps, recording=True)
    violations = [str(violation) for violation in outcome.violations]
    print(transcript(outcome.moments, last=given.last, drawn=outcome.drawn, colour=sys.stdout.isatty()))
    print(f"{outcome.steps} steps, digest {outcome.digest}, {len(violations)} violations")
    for violation in violations:
        print(f"  {violation}")
    if given.html:
        page = timeline_html(outcome.moments, title=outcome.replay, drawn=outcome.drawn, violations=violations)
        Path(given.html).write_text(page, encoding="utf-8")
    return 0 if outcome.ok else 1


def _hunt(given: argparse.Namespace) -> int:
    if given.scenario:
        cases = [gates.Case(given.scenario, seed) for seed in range(given.first, given.first + given.seeds)]
    else:
        cases = gates.gate_cases(given.seeds, first=given.first)
    tally = gates.Tally()
    began_s = time.perf_counter()
    for case in cases:
        verdict = gates.verdict(case)
        tally.add(verdict)
        if verdict.violations:
            print(f"found after {tally.worlds} seeds: {verdict.violations[0]}")
            print(f"  {case}")
            if not given.quiet:
                print(f"  drawn: {', '.join(verdict.drawn)}")
                for violation in verdict.violations[1:4]:
                    print(f"  {violation}")
            if not given.keep_on:
                return 1
    if not given.quiet:
        _show(tally, time.perf_counter() - began_s)
    return 1 if tally.failures else 0


def _gate(given: argparse.Namespace) -> int:
    began_s = time.perf_counter()
    tally, problems = gates.twice(gates.gate_cases(given.seeds))
    for problem in problems:
        print(problem)
    _show(tally, time.perf_counter() - began_s)
    return 1 if problems else 0


def _show(tally: gates.Tally, seconds: float) -> None:
    print(
        f"{tally.worlds} worlds, {tally.steps:,} steps, {tally.steps / max(tally.seconds, 1e-9):,.0f} steps/s "
        f"of one core, {tally.lives:,} lives, {tally.commits:,} commits, {len(tally.failures)} failures, "
        f"{seconds:.1f} s"
    )
    print("faults: " + ", ".join(f"{name} {count:,}" for name, count in sorted(tally.faults.items())))
    print("probes: " + ", ".join(f"{name} {count:,}" for name, count in sorted(tally.probes.items())))
    print("never reached: " + (", ".join(tally.missed_probes) or "none"))


def _boundary(given: argparse.Namespace) -> int:
    from understudy.simulations.boundaries import Point, visit
    from understudy.simulations.transcript import transcript

    point = Point(
        scenario=given.scenario,
        seed=given.seed,
        steps=given.steps,
        mode=given.mode,
        at=given.at,
        count=given.count,
        nested=tuple(given.nested),
        durability=given.durability,
    )
    outcome, _memory, _missing = visit(point, recording=True)
    print(transcript(outcome.moments, last=given.last, drawn=[str(point)], colour=sys.stdout.isatty()))
    for violation in outcome.violations:
        print(f"  {violation}")
    return 0 if outcome.ok else 1


def _boundaries(given: argparse.Namespace) -> int:
    from understudy.simulations.boundaries import enumerate_boundaries

    violations = 0
    for scenario in given.scenarios or ["fork_and_join", "saga_failures"]:
        report = enumerate_boundaries(
            scenario, durability=given.durability, modes=given.modes.split(","), stride=given.stride
        )
        violations += len(report.violations)
        if report.violations:
            print(f"found after {report.points} points: {report.violations[0]}")
        if not given.quiet:
            print(
                f"{scenario}: {report.boundaries} boundaries, {report.points} visits, {report.lives} lives, "
                f"{report.lives / report.seconds:.0f} lives/s, {report.lost} commits lost, "
                f"{len(report.violations)} violations"
            )
    return 1 if violations else 0


def _soak(given: argparse.Namespace) -> int:
    from understudy.simulations.soak import soak

    done = soak(minutes=given.minutes, say=lambda line: print(line, flush=True))
    for violation in done.violations[:50]:
        print(violation)
    width = max(len(name) for name, _ in done.rows())
    for name, value in done.rows():
        print(f"{name:{width}}  {value}")
    if given.json:
        Path(given.json).write_text(json.dumps(dict(done.rows()), indent=2) + "\n", encoding="utf-8")
    return 1 if done.violations else 0


def _soak_lane(given: argparse.Namespace) -> int:
    from understudy.simulations.soak import lane

    lane(given.lane, minutes=given.minutes)
    return 0


def _torn(given: argparse.Namespace) -> int:
    from understudy.simulations.torn import torn_files

    with tempfile.TemporaryDirectory() as folder:
        report = torn_files(Path(folder), cases=given.number, seed=given.seed)
    return _told(report.rows(), report.violations, quiet=given.quiet)


def _kills(given: argparse.Namespace) -> int:
    from understudy.simulations.kills import kill_loops

    with tempfile.TemporaryDirectory() as folder:
        report = kill_loops(Path(folder), loops=given.number, seed=given.seed)
    return _told(report.rows(), report.violations, quiet=given.quiet)


def _told(rows: Sequence[tuple[str, str]], violations: Sequence[str], *, quiet: bool) -> int:
    for violation in violations[:5]:
        print(f"found: {violation}")
    if not quiet:
        for name, value in rows:
            print(f"{name:32} {value}")
    return 1 if violations else 0


def _verdicts(_given: argparse.Namespace) -> int:
    gates.tell_verdicts()
    return 0


def _list(_given: argparse.Namespace) -> int:
    for name, scenario in sorted(SCENARIOS.items()):
        print(f"{name:28} {scenario.about.splitlines()[0] if scenario.about else ''}")
    return 0


COMMANDS: Final[dict[str, Callable[[argparse.Namespace], int]]] = {
    "play": _play,
    "hunt": _hunt,
    "gate": _gate,
    "boundary": _boundary,
    "boundaries": _boundaries,
    "soak": _soak,
    "soak-lane": _soak_lane,
    "torn": _torn,
    "kills": _kills,
    "verdicts": _verdicts,
    "list": _list,
}


if __name__ == "__main__":
    sys.exit(main())
