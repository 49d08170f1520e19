"""`python -m understudy.simulations`: play one seed with every step in words, hunt through many, or run a gate."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from understudy.simulations import gates
from understudy.simulations.playing import play
from understudy.simulations.plugins import SCENARIOS


def main(arguments: list[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    run = {"play": _play, "hunt": _hunt, "gate": _gate, "verdicts": _verdicts, "list": _list}[given.command]
    return run(given)


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


def _verdicts(_given: argparse.Namespace) -> int:
    gates.tell_verdicts()
    return 0


def _list(_given: argparse.Namespace) -> int:
    for name, scenario in sorted(SCENARIOS.items()):
        print(f"{name:28} {scenario.about.splitlines()[0] if scenario.about else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
