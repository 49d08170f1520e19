"""How the demonstration looks: a live picture on a terminal, plain lines anywhere else, and the report at the end.

What is shown was read or measured elsewhere. Nothing here decides what happens.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Protocol, Self

import attrs
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from understudy.demo.board import Board, Line
from understudy.demo.orders import STEPS, Call
from understudy.views import steps_of

_STYLES: Final = {"kill": "bold red", "recovery": "green", "accepted": "cyan", "failure": "yellow"}
_MARKS: Final = {
    "ahead": ("·", "dim"),
    "running": ("◐", "yellow"),
    "waiting": ("○", "cyan"),
    "done": ("●", "green"),
    "failed": ("✗", "red"),
    "undoing": ("◑", "magenta"),
    "undone": ("↶", "magenta"),
}
_STATUSES: Final = {"owns": "bold green", "stands by": "cyan", "starts": "dim", "killed": "red"}
_OUTCOMES: Final = {"completed": "green", "failed": "red"}
_WIDE: Final = 100  # Columns from which on there is room for what is in the orders.
_FRAME_ROWS: Final = 9  # What the picture needs beside the orders and the last news.


@attrs.define(kw_only=True)
class Kill:
    """A process that was killed, and how long it took until the next one committed."""

    at_s: float
    victims: tuple[int, ...]
    why: str
    epoch: int
    recovered_ms: float | None = None
    recovered_by: int = 0
    stood_by: bool = False

    @property
    def names(self) -> str:
        return _processes(self.victims)

    @property
    def recovery(self) -> str:
        assert self.recovered_ms is not None, self
        how = "which stood by" if self.stood_by else "started after the kill"
        return f"recovered in {self.recovered_ms:.0f} ms by process {self.recovered_by}, {how}"


@attrs.frozen(kw_only=True)
class Scene:
    """One moment of the play."""

    at_s: float
    board: Board
    processes: Mapping[int, str]
    kills: Sequence[Kill]
    calls: Sequence[Call]

    @property
    def calls_by_key(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            found.setdefault(call.key, []).append(call)
        return found

    @property
    def completed(self) -> list[Line]:
        return [line for line in self.board.lines.values() if line.outcome == "completed"]

    @property
    def money_taken(self) -> int:
        """In cents: charges less refunds, each key counted once."""
        return sum(same[0].cents for same in self.calls_by_key.values())

    @property
    def money_due(self) -> int:
        return sum(line.order.price_cents for line in self.completed)


@attrs.frozen(kw_only=True)
class Ending:
    """What there is to report."""

    database: Path
    ledger: Path
    scene: Scene
    rulers: Mapping[int, int]  # Which process ruled in which epoch.
    accepted: int  # How many orders, and how many messages, were acknowledged.
    delivered: int
    missing: Sequence[str]  # What was acknowledged and is not there. It must be empty.


class Show(Protocol):
    def note(self, at_s: float, text: str, *, kind: str = "") -> None: ...

    def draw(self, scene: Scene) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_show() -> tuple[Console, Show]:
    """The live show on a terminal that can show it; plain lines where nobody looks, or nobody wants colours."""
    console = Console(highlight=False, markup=False, emoji=False)
    wants_plain = bool(os.environ.get("NO_COLOR") or os.environ.get("CI"))
    is_able = sys.stdout.isatty() and not console.is_dumb_terminal and console.encoding.startswith("utf")
    if is_able and not wants_plain:
        return console, LiveShow(console)
    console = Console(highlight=False, markup=False, emoji=False, color_system=None, force_terminal=False)
    return console, PlainShow(console)


class PlainShow:
    """One line for each thing that happens."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, at_s: float, text: str, *, kind: str = "") -> None:  # noqa: ARG002 - Lines here have no style.
        self._console.print(f"{at_s:6.2f} s  {text}", soft_wrap=True)

    def draw(self, scene: Scene) -> None:
        """There is no picture."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


class LiveShow:
    """A picture that is drawn again and again, with the last news below it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._news: deque[Text] = deque(maxlen=40)
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")

    def note(self, at_s: float, text: str, *, kind: str = "") -> None:
        line = Text.assemble((f"{at_s:6.2f} s  ", "dim"), (text, _STYLES.get(kind, "")))
        line.no_wrap, line.overflow = True, "ellipsis"
        self._news.append(line)

    def draw(self, scene: Scene) -> None:
        self._live.update(Padding(self._picture(scene), (1, 1, 0, 1)), refresh=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def _picture(self, scene: Scene) -> RenderableType:
        rows = max(3, min(10, self._console.height - len(scene.board.lines) - _FRAME_ROWS))
        news = list(self._news)[-rows:]
        news += [Text() for _ in range(rows - len(news))]  # The picture does not jump while it fills.
        return Group(self._head(scene), Text(), self._orders(scene.board), Text(), *news, Text(), _progress(scene))

    def _head(self, scene: Scene) -> Text:
        head = Text.assemble(("understudy demo", "bold"), (f"{scene.at_s:6.1f} s    process", "dim"), no_wrap=True)
        for status, style in _STATUSES.items():
            numbers = [str(number) for number, its_status in scene.processes.items() if its_status == status]
            if numbers:
                head.append(f" {', '.join(numbers)} ").append(status, style).append("  ")
        return head

    def _orders(self, board: Board) -> Table:
        is_wide = self._console.width >= _WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 2 if is_wide else 1, 0, 0), header_style="dim", expand=True)
        table.add_column("order", no_wrap=True)
        if is_wide:
            table.add_column("item", no_wrap=True)
        for step in STEPS:
            table.add_column(step, justify="center", no_wrap=True)
        table.add_column("where its tokens are", no_wrap=True, ratio=1, overflow="ellipsis")
        for line in board.lines.values():
            signs = [Text(*_MARKS[line.mark(step)]) for step in STEPS]
            table.add_row(line.id, *([line.order.item] if is_wide else []), *signs, _where(line))
        return table


def _where(line: Line) -> Text:
    return Text(line.where, _OUTCOMES.get(line.outcome or "", ""))


def _progress(scene: Scene) -> RenderableType:
    lines = scene.board.lines.values()
    keys = len(scene.calls_by_key)
    figures = {"commits": len(scene.board.commits), "calls": len(scene.calls), "keys": keys, "kills": len(scene.kills)}
    counts = "   ".join(f"{name} {count}" for name, count in figures.items())
    grid = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(
        total=len(lines) * len(STEPS),
        completed=sum(line.steps_done for line in lines),
        width=24,
        finished_style="green",
    )
    grid.add_row(bar, Text(counts, "dim", no_wrap=True))
    return grid


# --- the report -------------------------------------------------------------------------------------------------------


def report(console: Console, ending: Ending) -> None:
    """What happened, what it proves, and how to go on looking."""
    failed = [line for line in ending.scene.board.lines.values() if line.undone]
    _section(console, "The orders", _outcomes(ending))
    _section(console, "The kills", _kills(ending.scene.kills))
    _section(console, "The ledger", *_ledger(ending))
    for line in failed:
        _section(console, f"Undone: {line.id}", _undone(line))
    chosen = (failed or list(ending.scene.board.lines.values()))[0]
    _section(console, f"The history of {chosen.id}", _history(chosen, ending))
    _section(console, "Nothing acknowledged was lost" if not ending.missing else "LOST", *_proof(ending))
    console.print()
    console.print("The database stays. Go on exploring it:", style="bold")
    console.print()
    for command in _commands(ending, chosen):
        console.print(f"  {command}", soft_wrap=True)
    console.print()


def _section(console: Console, title: str, *parts: RenderableType) -> None:
    console.print()
    console.print(title, style="bold")
    for part in parts:
        console.print(Padding(part, (0, 0, 0, 2), expand=False))


def _outcomes(ending: Ending) -> Table:
    table = _table("order", "item", "price>", "outcome", "why")
    for line in ending.scene.board.lines.values():
        outcome = line.outcome or "open"
        price = _money(line.order.price_cents)
        table.add_row(line.id, line.order.item, price, Text(outcome, _OUTCOMES.get(outcome, "")), line.failure)
    return table


def _kills(kills: Sequence[Kill]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    for kill in kills:
        table.add_row(f"{kill.at_s:5.2f} s", Text.assemble((f"SIGKILL to {kill.names}", "red"), f": {kill.why}"))
        table.add_row("", Text(kill.recovery, "green"))
    table.add_row("", Text("(measured from SIGKILL to the first commit of the next owner)", "dim"))
    return table


def _ledger(ending: Ending) -> Iterable[RenderableType]:
    scene = ending.scene
    by_key = scene.calls_by_key
    repeated = {key: same for key, same in by_key.items() if len(same) > 1}
    yield Text(f"{len(scene.calls)} calls under {len(by_key)} keys; the outside world counts each key once.")
    if repeated:
        table = _table("key", "call", "made by", "")
        for key, same in repeated.items():
            makers = _processes([call.process for call in same])
            times = "twice" if len(same) == 2 else f"{len(same)} times"
            table.add_row(key, _call(same[0]), makers, f"ran {times}, same key, counted once")
        yield table
    every = sum(call.cents for call in scene.calls)
    yield Text(
        f"Taken from cards, less refunds: {_money(scene.money_taken)} (if every call had counted: {_money(every)}). "
        f"Price of the {len(scene.completed)} completed orders: {_money(scene.money_due)}."
    )


def _call(call: Call) -> str:
    return f"{call.what.split()[0]} {_money(abs(call.cents))}" if call.cents else call.what


def _undone(line: Line) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row(Text("done", "dim"), ", then ".join(line.done))
    table.add_row(Text("failed", "dim"), Text(line.failure, "red"))
    table.add_row(Text("undone", "dim"), Text(", then ".join(line.undone), "magenta"))
    return table


def _history(line: Line, ending: Ending) -> Table:
    table = _table("n>", "after>", "committed by", "what")
    records = ending.scene.board.reads.history(line.id)
    for record, step in zip(records, steps_of(records), strict=True):
        after_s = (record.at_ms - records[0].at_ms) / 1_000
        by = f"process {ending.rulers[record.epoch]}"
        table.add_row(str(record.n), f"{after_s:.2f} s", by, "; ".join(step.told))
    return table


def _proof(ending: Ending) -> Iterable[RenderableType]:
    if ending.missing:
        yield from (Text(missing, "bold red") for missing in ending.missing)
        return
    commits = len(ending.scene.board.commits)
    yield Text(
        f"All {ending.accepted} accepted orders have come to their end, after {ending.scene.at_s:.1f} s, and all "
        f"{ending.delivered} acknowledged messages have reached theirs. The {commits} commits that were read before, "
        "between and after the kills are all in the database, and the chain of digests of each order is whole."
    )


def _commands(ending: Ending, chosen: Line) -> list[str]:
    path = shlex.quote(str(ending.database))
    by_id = [f"understudy {word} {path} {chosen.id}" for word in ("show", "history", "explain")]
    return [f"understudy list {path}", *by_id, f"understudy audit {path}", f"cat {shlex.quote(str(ending.ledger))}"]


def _table(*columns: str) -> Table:
    """A table without lines; a column whose name ends with ">" is set to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removesuffix(">"), justify="right" if column.endswith(">") else "left")
    return table


def _money(cents: int) -> str:
    return f"{'-' if cents < 0 else ''}{abs(cents) // 100}.{abs(cents) % 100:02d}"


def _processes(numbers: Sequence[int]) -> str:
    *others, last = map(str, numbers)
    return f"processes {', '.join(others)} and {last}" if others else f"process {last}"
