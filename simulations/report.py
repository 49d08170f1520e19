"""What a simulation has found: how much was played, what went wrong in it, and each failure in its shortest form."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any, Final

import attrs

from understudy.model.invariants import Violation
from understudy.simulations.playing import Outcome
from understudy.simulations.plugins import PROBES
from understudy.simulations.shrinking import Case
from understudy.simulations.trace import Moment

LAST: Final = 50  # Moments that a transcript shows, unless somebody wants more.
MOST_VIOLATIONS: Final = 5  # Of one world, that are shown to people; `violations` has all.
WIDTH: Final = 118
MOST_SEEDS: Final = 10  # Of those that failed; `failing_seeds` has all.


class SimulationFailed(AssertionError):
    """Something that must hold did not, in at least one world."""


@attrs.frozen(kw_only=True, eq=False)
class Failure:
    """One thing that does not hold, in the shortest world that was found for it."""

    name: str  # Of what was simulated.
    found: int  # The seed in which it was seen first.
    case: Case  # The shortest world, by what decides about it.
    drawn: tuple[str, ...]
    violations: tuple[Violation, ...]
    trace: tuple[Moment, ...]
    steps: int
    faults: Counter[str]  # How often each has struck.

    @property
    def seed(self) -> int:
        return self.case.seed

    @property
    def invariant(self) -> str:
        """The name of what is violated."""
        return self.violations[0].id

    @property
    def replay(self) -> str:
        """What to add to the arguments of `simulate` to play this very world again."""
        case = self.case
        words = [
            f"seeds=[{case.seed}]",
            f"steps={case.steps}",
            f"strikes={case.strikes}",
            f"faults={list(case.faults or ())!r}",
        ]
        words += [f"only={list(case.only)!r}"] if case.only else []
        words += ["calm=True"] if case.is_calm else []
        return f"simulate(..., {', '.join(words)})"

    def command(self, target: str, *others: str) -> str:
        """The command that plays this very world again, for a `MODULE:NAME` and further options."""
        case = self.case
        words = ["understudy", "simulate", target, "--seed", str(case.seed), "--steps", str(case.steps)]
        words += ["--strikes", str(case.strikes)]
        words += ["--faults", ",".join(case.faults or ()) or "none"]
        words += ["--only", ",".join(case.only)] if case.only else []
        words += ["--calm"] if case.is_calm else []
        return shlex.join([*words, *others])

    def transcript(self, *, last: int = LAST, colour: bool = False, width: int = WIDTH) -> str:
        """What was drawn, what does not hold, and the last moments, one line each."""
        from understudy.simulations.transcript import transcript

        told = self.findings
        return transcript(
            self.trace, last=last, drawn=self.drawn, title=self.title, violations=told, colour=colour, width=width
        )

    def svg(self) -> str:
        """A picture: one lane for each actor or instance."""
        from understudy.simulations.timeline import timeline_svg

        return timeline_svg(self.trace, title=self.title, drawn=self.drawn, violations=self._told())

    def html(self, path: str | Path) -> Path:
        """Write the picture to a file, as a page for a browser."""
        from understudy.simulations.timeline import timeline_html

        page = timeline_html(self.trace, title=self.title, drawn=self.drawn, violations=self._told())
        written = Path(path)
        written.write_text(page, encoding="utf-8")
        return written

    @property
    def title(self) -> str:
        return f"{self.name}, seed {self.seed}: {self.invariant}"

    def _told(self) -> list[str]:
        return [str(violation) for violation in self.violations]

    @property
    def findings(self) -> tuple[str, ...]:
        """What does not hold, for people."""
        more = len(self.violations) - MOST_VIOLATIONS
        return (*self._told()[:MOST_VIOLATIONS], *((f"... and {more} more",) if more > 0 else ()))

    @property
    def world(self) -> tuple[str, ...]:
        """Where it does not hold, for people."""
        struck = ", ".join(f"{name} ({count})" for name, count in sorted(self.faults.items())) or "no fault"
        first = "" if self.seed == self.found else f", seen first with seed {self.found}"
        return (f"world:   seed {self.seed}{first}", f"drawn:   {'; '.join(self.drawn)}", f"struck:  {struck}")

    @property
    def lines(self) -> tuple[str, ...]:
        """Both, and how to see it again."""
        return (*self.findings, *(f"  {line}" for line in (*self.world, f"replay:  {self.replay}")))

    def __str__(self) -> str:
        return "\n".join((self.transcript(), "", f"replay: {self.replay}"))


@attrs.define(kw_only=True, eq=False)
class Report:
    """The sum of all worlds that were played, and what failed."""

    name: str
    asked: int  # How many seeds were to be played.
    worlds: int = 0
    steps: int = 0
    seconds: float = 0.0  # Of one core.
    lives: int = 0
    commits: int = 0
    calls: int = 0  # Of handlers.
    faults: Counter[str] = attrs.field(factory=Counter)
    probes: Counter[str] = attrs.field(factory=Counter)
    failing_seeds: list[int] = attrs.field(factory=list)
    failures: list[Failure] = attrs.field(factory=list)

    @property
    def ok(self) -> bool:
        return not self.failing_seeds and not self.failures

    @property
    def steps_per_second(self) -> float:
        return self.steps / self.seconds if self.seconds else 0.0

    @property
    def never_reached(self) -> list[str]:
        """The rare states that no world has come to."""
        return sorted(set(PROBES) - set(self.probes))

    def add(self, outcome: Outcome) -> None:
        self.worlds += 1
        self.steps += outcome.steps
        self.seconds += outcome.seconds
        self.lives += outcome.lives
        self.commits += outcome.commits
        self.calls += outcome.calls
        self.faults.update(outcome.faults)
        self.probes.update(outcome.probes)
        if outcome.violations:
            self.failing_seeds.append(outcome.seed)

    def raise_if_failed(self, *, last: int = LAST) -> None:
        """Raise an `AssertionError` that shows everything, with the transcripts of the failures."""
        __tracebackhide__ = True  # For pytest, which shows the line of the test instead.
        if not self.ok:
            told = [f"{each.transcript(last=last)}\n\nreplay: {each.replay}" for each in self.failures]
            raise SimulationFailed("\n\n".join(["\n".join(self.head), *told]))

    @property
    def head(self) -> tuple[str, ...]:
        """The verdict and the figures, for people."""
        played = f"{self.worlds:,} of {self.asked:,}" if self.worlds < self.asked else f"{self.worlds:,}"
        failed = f"FAILED with seed{'s' if len(self.failing_seeds) > 1 else ''} {_few(self.failing_seeds)}"
        figures = f"{self.steps:,} steps ({self.steps_per_second:,.0f}/s), {self.lives:,} lives of the process"
        lines = [
            f"{self.name}: {'ok' if self.ok else failed}, {played} worlds played",
            f"  {figures}, {self.commits:,} commits, {self.calls:,} calls of handlers",
            f"  faults: {_counted(self.faults)}",
        ]
        if self.probes:
            lines.append(f"  probes: {_counted(self.probes)}")
        return tuple(lines)

    @property
    def lines(self) -> tuple[str, ...]:
        """Everything but the transcripts, for people."""
        return (*self.head, *(line for failure in self.failures for line in ("", *failure.lines)))

    def as_dict(self) -> dict[str, Any]:
        """For programs."""
        return {
            "name": self.name,
            "ok": self.ok,
            "asked": self.asked,
            "worlds": self.worlds,
            "steps": self.steps,
            "steps_per_second": round(self.steps_per_second),
            "lives": self.lives,
            "commits": self.commits,
            "calls": self.calls,
            "faults": dict(sorted(self.faults.items())),
            "probes": dict(sorted(self.probes.items())),
            "failing_seeds": self.failing_seeds,
            "failures": [_failure(failure) for failure in self.failures],
        }

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "invariant": failure.invariant,
        "found": failure.found,
        "case": attrs.asdict(failure.case),
        "drawn": list(failure.drawn),
        "steps": failure.steps,
        "faults": dict(sorted(failure.faults.items())),
        "violations": [attrs.asdict(violation) for violation in failure.violations],
        "replay": failure.replay,
        "trace": [_moment(moment) for moment in failure.trace],
    }


def _moment(moment: Moment) -> dict[str, Any]:
    return {name: getattr(moment, name) for name in moment.__struct_fields__}


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _few(seeds: list[int]) -> str:
    shown = ", ".join(map(str, seeds[:MOST_SEEDS]))
    return shown if len(seeds) <= MOST_SEEDS else f"{shown} and {len(seeds) - MOST_SEEDS:,} more"
