"""Tests the tests: `python tests/mutants/run.py` plants each bug of this folder in a copy of the code and lets the
simulator hunt for it.

A bug that nobody finds means a gap in the generator or in a checker. The unchanged code is hunted too, because whatever
is found there makes every other finding worthless. The repository itself is never changed: patches are applied to
copies in a temporary folder. Only what a hunter says itself counts as found; a hunter that breaks or hangs has found
nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import attrs
from rich.console import Console
from rich.markup import escape
from rich.table import Table

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
FLOORS: Final = ("model", "store", "actors", "bpmn", "simulations", "console")  # As in the Makefile.
PACKAGE: Final = "api"  # Installs as `understudy` itself.
UNCHANGED: Final = "(unchanged)"
WIDTH: Final = 180  # Of the table, when nobody's terminal says how wide it is.
HUNTERS: Final = {
    "": "hunt --seeds {seeds} --quiet",
    "disk": "boundaries --quiet",
    "torn": "torn --quiet",
    "kills": "kills --quiet",
}
FOUND: Final = re.compile(r"^found after (\d+) seeds?: (.+)$", re.MULTILINE)
_HEADER: Final = re.compile(r"^# (what|finds|hunter): *(\S.*)$", re.MULTILINE)
_HUNK: Final = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


class Misfit(Exception):
    """The patch and the code do not belong together any more; make it anew against today's code."""


@attrs.frozen(kw_only=True)
class Hunk:
    """Some lines in a row, as they are and as they shall be."""

    start: int  # The index of the first line, where it was when the patch was made.
    before: tuple[str, ...]
    after: tuple[str, ...]


@attrs.frozen(kw_only=True)
class Mutant:
    """A seeded bug."""

    name: str
    what: str
    finds: str
    hunter: str
    hunks: dict[str, tuple[Hunk, ...]]  # By path, relative to the root of the repository.


@attrs.frozen(kw_only=True)
class Hunt:
    """How a hunt has ended."""

    mutant: Mutant
    verdict: str  # "found", "survived", "hung", "broken" or "void"
    detail: str
    seconds: float
    seeds: int = 0  # After how many it was found.

    @property
    def title(self) -> str:
        return f"{self.mutant.name} ({self.mutant.hunter})" if self.mutant.hunter else self.mutant.name

    @property
    def outcome(self) -> str:
        return self.detail if self.verdict == "found" else f"{self.verdict} {self.detail}".strip()

    @property
    def is_good(self) -> bool:
        return self.verdict == ("survived" if self.mutant.name == UNCHANGED else "found")


# --- patches ----------------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[Mutant]:
    """All seeded bugs of a folder, by name."""
    return [parse(path.stem, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.patch"))]


def parse(name: str, text: str) -> Mutant:
    """A seeded bug from its patch: a header of comments, then a unified diff."""
    said = dict(_HEADER.findall(text))
    missing = [field for field in ("what", "finds") if field not in said]
    if missing:
        raise Misfit(f"{name}: the patch does not say {' nor '.join(missing)}; begin it with '# {missing[0]}: …'")
    hunter = said.get("hunter", "")
    if hunter not in HUNTERS:
        raise Misfit(f"{name}: there is no hunter {hunter!r}; there are: {', '.join(filter(None, HUNTERS))}")
    hunks = dict(_files(name, text.splitlines(keepends=True)))
    if not hunks:
        raise Misfit(f"{name}: the patch changes nothing")
    return Mutant(name=name, what=said["what"], finds=said["finds"], hunter=hunter, hunks=hunks)


def _files(name: str, lines: Sequence[str]) -> Iterator[tuple[str, tuple[Hunk, ...]]]:
    begins = [n for n, line in enumerate(lines) if line.startswith("+++ b/")]
    for begin, end in zip(begins, [*(n - 1 for n in begins[1:]), len(lines)], strict=True):
        path = lines[begin].removeprefix("+++ b/").strip()
        yield path, tuple(_hunks(name, lines[begin + 1 : end]))


def _hunks(name: str, lines: Sequence[str]) -> Iterator[Hunk]:
    begins = [n for n, line in enumerate(lines) if line.startswith("@@")]
    for begin, end in zip(begins, [*begins[1:], len(lines)], strict=True):
        head = _HUNK.match(lines[begin])
        if head is None:
            raise Misfit(f"{name}: {lines[begin].strip()!r} is not the head of a hunk")
        body = [(line[0], line[1:]) for line in lines[begin + 1 : end]]
        yield Hunk(
            start=int(head[1]) - 1,
            before=tuple(text for sign, text in body if sign in " -"),
            after=tuple(text for sign, text in body if sign in " +"),
        )


def mutated(mutant: Mutant, root: Path) -> dict[str, str]:
    """The changed files' new content. Lines must match exactly; where they stand may have changed."""
    return {path: _patched(mutant.name, root, path, hunks) for path, hunks in mutant.hunks.items()}


def _patched(name: str, root: Path, path: str, hunks: Sequence[Hunk]) -> str:
    if not (root / path).is_file():
        raise Misfit(f"{name}: there is no {path} any more")
    lines = (root / path).read_text(encoding="utf-8").splitlines(keepends=True)
    shift = 0
    for hunk in hunks:
        size = len(hunk.before)
        fitting = [n for n in range(len(lines) - size + 1) if tuple(lines[n : n + size]) == hunk.before]
        if not fitting:
            raise Misfit(f"{name}: {path} has no such lines any more:\n{''.join(hunk.before)}")
        at = min(fitting, key=lambda n: abs(n - hunk.start - shift))
        lines[at : at + size] = hunk.after
        shift = at - hunk.start + len(hunk.after) - size
    return "".join(lines)


# --- checking without hunting -----------------------------------------------------------------------------------------


def check(mutants: Sequence[Mutant], say: Callable[[str], None]) -> bool:
    """Whether all of them apply, differ from the code as it is, and can be imported."""
    troubles = list(filter(None, map(_trouble, mutants)))
    for trouble in troubles:
        say(f"[red]{escape(trouble)}[/red]")
    say(f"{len(mutants) - len(troubles)} of {len(mutants)} mutants apply and can be imported")
    return not troubles


def _trouble(mutant: Mutant) -> str:
    try:
        for path, text in mutated(mutant, ROOT).items():
            if text == (ROOT / path).read_text(encoding="utf-8"):
                return f"{mutant.name}: {path} stays as it is"
            _import(path, text)
    except Misfit as misfit:
        return str(misfit)
    except Exception as error:  # Whatever the changed module raises while it is imported.
        return f"{mutant.name}: cannot be imported ({error!r})"
    return ""


def _import(path: str, text: str) -> None:
    """Run a module's changed text among the unchanged others, as an import does it."""
    folder, *rest = Path(path).with_suffix("").parts
    name = ".".join(["understudy", *rest] if folder == PACKAGE else ["understudy", folder, *rest])
    importlib.import_module(name)
    module = types.ModuleType(name)
    exec(compile(text, path, "exec"), module.__dict__)


# --- hunting ----------------------------------------------------------------------------------------------------------


def hunt(mutant: Mutant, command: str, *, seeds: int, limit_s: float) -> Hunt:
    """Plant the bug in a copy and let its hunter look for it."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"mutant-{mutant.name.strip('()')}-") as folder:
        house = plant(mutant, Path(folder))
        words = [sys.executable if word == "python" else word for word in shlex.split(command.format(seeds=seeds))]
        verdict, detail, found_after = _verdict(words, house, limit_s)
    seconds = time.monotonic() - began_s
    return Hunt(mutant=mutant, verdict=verdict, detail=detail, seconds=seconds, seeds=found_after)


def plant(mutant: Mutant, folder: Path) -> Path:
    """Copy the sources, change them, and link them to a folder that looks like the installed package."""
    floors = [floor for floor in FLOORS if (ROOT / floor).is_dir()]
    for name in (PACKAGE, *floors):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for path, text in mutated(mutant, folder).items():
        (folder / path).write_text(text, encoding="utf-8")
    house = folder / "house" / "understudy"
    house.mkdir(parents=True)
    for entry in [*(folder / PACKAGE).iterdir(), *(folder / floor for floor in floors)]:
        (house / entry.name).symlink_to(entry)
    return house.parent


def _verdict(words: Sequence[str], house: Path, limit_s: float) -> tuple[str, str, int]:
    environment = {**os.environ, "PYTHONPATH": str(house), "PYTHONDONTWRITEBYTECODE": "1"}
    hunter = subprocess.Popen(
        words,
        cwd=house.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # A hunter may have children, and all of them end with it.
    )
    try:
        out, errors = hunter.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return "hung", f"the hunt had not ended after {limit_s:g} s", 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(hunter.pid, signal.SIGKILL)
        hunter.communicate()
    found = FOUND.search(out)
    if hunter.returncode == 1 and found is not None:
        return "found", f"{found[1]}: {found[2]}", int(found[1])
    if hunter.returncode == 0 and found is None:
        return "survived", "", 0
    last = (errors.strip() or out.strip() or "no output").splitlines()[-1]
    return "broken", f"exit code {hunter.returncode}: {last}", 0


def believed(each: Hunt, unchanged: Hunt) -> Hunt:
    """A finding counts only if the unchanged code was clean up to the same seed."""
    is_clean = unchanged.is_good or (unchanged.verdict == "found" and each.seeds < unchanged.seeds)
    if each.verdict != "found" or is_clean:
        return each
    return attrs.evolve(each, verdict="void", detail=f"(the unchanged code fails too) {each.detail}")


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    console = Console(soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH)
    try:
        mutants = [mutant for mutant in read(options.patches) if options.only in ("", mutant.name)]
        if not mutants:
            raise Misfit(f"there is no mutant {options.only!r} in {options.patches}")
        if options.check:
            return 0 if check(mutants, console.print) else 1
        hunts = _hunt_all(mutants, options, console)
    except Misfit as misfit:
        console.print(f"[red]{escape(str(misfit))}[/red]")
        return 2
    return _report(hunts, console)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Let the simulator hunt for seeded bugs.")
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds a hunt may take (default: 500)")
    parser.add_argument("--only", default="", metavar="NAME", help="hunt for this one alone")
    parser.add_argument("--jobs", type=int, default=2, help="hunts at the same time (default: 2)")
    parser.add_argument("--limit", type=float, default=300.0, metavar="SECONDS", help="for each hunt (default: 300)")
    parser.add_argument("--check", action="store_true", help="only see whether all patches apply and can be imported")
    parser.add_argument("--command", default="", help="hunt with this instead; {seeds} stands for their number")
    parser.add_argument("--patches", type=Path, default=HERE, help="the folder of the patches")
    return parser


def _hunt_all(mutants: Sequence[Mutant], options: argparse.Namespace, console: Console) -> list[Hunt]:
    for mutant in mutants:
        mutated(mutant, ROOT)  # What does not apply shows before the first hunt, not after the last.
    first = _unchanged(mutants)
    done: list[str] = []
    lock = threading.Lock()

    def one(mutant: Mutant) -> Hunt:
        command = options.command or f"python -m understudy.simulations {HUNTERS[mutant.hunter]}"
        result = hunt(mutant, command, seeds=options.seeds, limit_s=options.limit)
        with lock:
            done.append(mutant.name)
            console.print(f"{len(done)}/{len(first) + len(mutants)} {escape(result.title)}: {escape(result.outcome)}")
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        hunts = list(pool.map(one, [*first, *mutants]))
    unchanged = {each.mutant.hunter: each for each in hunts[: len(first)]}
    return [*hunts[: len(first)], *(believed(each, unchanged[each.mutant.hunter]) for each in hunts[len(first) :])]


def _unchanged(mutants: Sequence[Mutant]) -> list[Mutant]:
    """The code as it is, for each hunter that is sent out."""
    hunters = sorted({mutant.hunter for mutant in mutants})
    return [
        Mutant(name=UNCHANGED, what="nothing is wrong here", finds="nothing", hunter=hunter, hunks={})
        for hunter in hunters
    ]


def _report(hunts: Sequence[Hunt], console: Console) -> int:
    table = Table("mutant", "what is wrong in it", "found after how many seeds, and how", "seconds")
    table.columns[0].no_wrap = True
    for each in hunts:
        colour = "green" if each.is_good else "red"
        title, outcome = (f"[{colour}]{escape(text)}[/]" for text in (each.title, each.outcome))
        table.add_row(title, escape(each.mutant.what), outcome, f"{each.seconds:.1f}")
    console.print(table)
    bad = [each.title for each in hunts if not each.is_good]
    found = sum(each.is_good and each.verdict == "found" for each in hunts)
    console.print(f"{found} found; not as it should be: {len(bad)} {', '.join(bad)}".rstrip())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
