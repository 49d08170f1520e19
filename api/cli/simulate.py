"""The command that plays a process in many worlds: progress, verdict, and for a failure the words and the picture."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from types import FrameType, ModuleType, TracebackType
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from understudy.cli import INTERRUPTED
from understudy.cli.output import Output, styled
from understudy.cli.running import imported
from understudy.model.errors import Rejected, UnderstudyError
from understudy.model.validation import near
from understudy.process import Process
from understudy.simulations.report import Failure, Report
from understudy.simulations.users import Simulation
from understudy.tasks import Activity

OF_A_PROCESS: Final = ("start", "instances", "messages", "stand_ins", "invariants")  # A `Simulation` has its own.
WIDEST: Final = 140  # Where lines may be as long as they like, and on very wide screens.
LINES: Final = 10  # So many lines of progress, where nobody sees a bar.


def simulate(arguments: Namespace, output: Output) -> int:
    # What modules print is not the result: beside a JSON document it would be noise.
    with contextlib.redirect_stdout(sys.stderr) if output.as_json else contextlib.nullcontext():
        simulation = _simulation(arguments)
    seeds = range(arguments.first, arguments.first + arguments.seeds) if arguments.seed is None else [arguments.seed]
    with _Progress(len(seeds), is_silent=output.as_json) as progress:
        report = _run(
            simulation,
            seeds,
            steps=arguments.steps,
            faults=_faults(arguments.faults),
            only=_listed(arguments.only),
            strikes=arguments.strikes,
            calm=arguments.calm,
            jobs=arguments.jobs,
            keep_on=arguments.keep_on,
            progress=progress,
        )
    _Told(arguments, output).tell(report)
    if not report.ok:
        return 1
    return INTERRUPTED if progress.is_interrupted else 0


def _run(simulation: Simulation, seeds: Iterable[int], **options: Any) -> Report:
    try:
        return simulation.run(seeds, **options)
    except UnderstudyError:
        raise
    except Exception as error:  # In an invariant, or in a function that makes something: it says in which world.
        where = "; ".join(getattr(error, "__notes__", ()))
        raise Rejected(f"{type(error).__name__}: {error} ({where}; UNDERSTUDY_DEBUG=1 shows where)") from error


# --- what is to be played ---------------------------------------------------------------------------------------------


def _simulation(arguments: Namespace) -> Simulation:
    found = _found(*arguments.target)
    given = {name: value for name in OF_A_PROCESS if (value := getattr(arguments, name)) is not None}
    if isinstance(found, Simulation):
        if given:
            options = " and ".join("--" + name.replace("_", "-") for name in given)
            raise Rejected(
                f"{':'.join(arguments.target)} is a Simulation, which has what it needs: leave out {options}"
            )
        return found
    if "stand_ins" in given:
        given["stand_ins"] = _stand_ins(imported(given["stand_ins"]), found)
    if "invariants" in given:
        given["invariants"] = [_invariant(name) for name in _listed(given["invariants"])]
    return Simulation(found, **given)


def _found(module: str, name: str) -> Process[Any, Any] | Simulation:
    home = imported(module)
    found: Any = home
    for part in name.split("."):
        found = getattr(found, part, None)
    if isinstance(found, Process | Simulation):
        return found
    names = [key for key, value in vars(home).items() if isinstance(value, Process | Simulation)]
    what = f"is {type(found).__name__} {found!r:.60}" if found is not None else "is not there"
    hint = near(name, names) or f"the processes and simulations of {module} are: {', '.join(names) or 'none'}"
    raise Rejected(f"{module}:{name} {what}, and no process; {hint}")


def _stand_ins(module: ModuleType, process: Process[Any, Any]) -> dict[str, Any]:
    """The functions of a module that are called like tasks of the process."""
    played = {name: getattr(module, name) for name in process.handlers if callable(getattr(module, name, None))}
    if not played:
        tasks = ", ".join(sorted(process.handlers)) or "none"
        raise Rejected(f"no function of {module.__name__} is called like a task of {process.name}; its tasks: {tasks}")
    return {name: each.function if isinstance(each, Activity) else each for name, each in played.items()}


def _invariant(name: str) -> Any:
    module, _, function = name.partition(":")
    if not (module and function):
        raise Rejected(f"{name!r} is not of the form MODULE:NAME, as in shop:never_charged_twice")
    home = imported(module)
    found = getattr(home, function, None)
    if found is None:
        functions = [key for key, value in vars(home).items() if callable(value) and not isinstance(value, type)]
        hint = near(function, functions) or f"its functions are: {', '.join(functions) or 'none'}"
        raise Rejected(f"{module} has no {function}; {hint}")
    return found


def _faults(text: str | None) -> tuple[str, ...] | None:
    if text in (None, "all"):
        return None
    return () if text == "none" else _listed(text)


def _listed(text: str | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in (text or "").split(",") if part.strip())


# --- while it runs ----------------------------------------------------------------------------------------------------


class _Progress:
    """A bar on a terminal, a few lines elsewhere. The first Ctrl-C ends the run after the present world."""

    def __init__(self, asked: int, *, is_silent: bool) -> None:
        self._asked = asked
        self._console = Console(stderr=True, quiet=is_silent, highlight=False, markup=False, emoji=False)
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._told = 0
        self.is_interrupted = False

    def __enter__(self) -> _Progress:
        self._before: Any = None
        with contextlib.suppress(ValueError):  # Only the main thread hears of signals.
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        if self._console.is_terminal and not self._console.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("worlds", total=self._asked, figures="")
        else:
            self._console.print(f"playing {self._asked:,} worlds")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, report: Report) -> bool:
        if self._bar is not None:
            description = "worlds" if report.ok else "shortening"
            self._bar.update(self._task, completed=report.worlds, figures=_figures(report), description=description)
        elif report.worlds * LINES // self._asked > self._told and self._asked >= LINES:
            self._told = report.worlds * LINES // self._asked
            self._console.print(f"{report.worlds:,} of {self._asked:,} worlds, {_figures(report)}")
        return not self.is_interrupted

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        self.is_interrupted = True
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)  # A second one ends it at once.


def _figures(report: Report) -> str:
    struck = sum(report.faults.values())
    return f"{report.steps_per_second:,.0f} steps/s, {struck:,} faults, {report.lives:,} lives"


# --- what was found ---------------------------------------------------------------------------------------------------


class _Told:
    """Shows a report."""

    def __init__(self, arguments: Namespace, output: Output) -> None:
        self._arguments = arguments
        self._output = output

    def tell(self, report: Report) -> None:
        if self._output.as_json:
            self._output.document(self._document(report))
            return
        for failure in report.failures:
            words = failure.transcript(last=self._arguments.last, colour=True, width=min(self._output.width, WIDEST))
            self._output.say(Text.from_ansi(words))
            self._output.say("")
        head, *others = report.head
        self._output.say(styled(head, "bold green" if report.ok else "bold red"))
        for line in others:
            self._output.say(styled(line))
        for number, failure in enumerate(report.failures, 1):
            self._output.say(styled(f"picture: {failure.html(self._picture(failure, number))}"))
            replay = styled(f"replay:  {self._command(failure)}", "bold")
            replay.no_wrap, replay.overflow = True, "ignore"  # It is to be copied: the terminal itself may break it.
            self._output.say(replay)

    def _picture(self, failure: Failure, number: int) -> Path:
        wanted = Path(self._arguments.html or f"simulation-{failure.seed}.html")
        return wanted if number == 1 else wanted.with_stem(f"{wanted.stem}-{number}")

    def _command(self, failure: Failure) -> str:
        return failure.command(":".join(self._arguments.target), *_same(self._arguments))

    def _document(self, report: Report) -> dict[str, Any]:
        document = report.as_dict()
        for number, failure in enumerate(report.failures, 1):
            shown = document["failures"][number - 1]
            shown["command"] = self._command(failure)
            if self._arguments.html:
                shown["picture"] = str(failure.html(self._picture(failure, number)))
        return document


def _same(arguments: Namespace) -> list[str]:
    """Those options that decide about every world."""
    words = []
    for name in OF_A_PROCESS:
        value = getattr(arguments, name)
        if value is not None:
            words += ["--" + name.replace("_", "-"), value if isinstance(value, str) else json.dumps(value)]
    return words
