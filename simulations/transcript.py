"""The moments of a failing world, for people: aligned, folded, and with whatever went wrong in plain sight.

It shows the last moments in full. Of those before it keeps what somebody who looks for the cause would search for:
faults, crashes and whatever concerns the violated instances. A text comes from anywhere, so nothing in it reaches the
terminal unescaped, and nothing in it is taken for markup.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias

import attrs
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from understudy.simulations.trace import Moment

WIDTH: Final = 118
LONG_MS: Final = 60_000  # So much time between two moments is told in a line of its own.
WRONG: Final = frozenset({"fault", "crash", "pause", "violation"})
LANDMARKS: Final = WRONG | {"open", "close", "resume"}
MARKS: Final = {
    "message": "·",
    "job": "▸",
    "timer": "◷",
    "commit": "●",
    "call": "→",
    "answer": "←",
    "fault": "▲",
    "crash": "✖",
    "pause": "‖",
    "resume": "►",
    "open": "○",
    "close": "□",
    "probe": "◆",
    "violation": "✘",
}
_STYLES: Final = {
    "job": "cyan",
    "timer": "magenta",
    "commit": "bold green",
    "call": "blue",
    "answer": "blue",
    "fault": "bold yellow",
    "crash": "bold red",
    "pause": "bold yellow",
    "resume": "yellow",
    "open": "green",
    "close": "green",
    "probe": "magenta",
    "violation": "bold white on red",
}
_RULED: Final = frozenset({"crash", "violation"})  # A line right across the page.
_SMALL_GAP: Final = 2
_MOST_VIOLATIONS: Final = 8  # At the head; below, each stands at its moment.
_WIDEST: Final = {"node": 8, "lane": 18}

Line: TypeAlias = list[tuple[str, str]]  # Words and their style.


def transcript(
    moments: Sequence[Moment],
    *,
    last: int = 50,
    drawn: Sequence[str] = (),
    title: str = "",
    replay: str = "",
    violations: Sequence[str] = (),
    colour: bool = False,
    width: int = WIDTH,
) -> str:
    """The last lines, and of those before what helps to understand them; `drawn`, `replay` and the rest go on top."""
    told = violations or [moment.text for moment in moments if moment.kind == "violation"]
    lines = [*_head(title, drawn, replay, told, width), *_body(moments, last, width)]
    text = Text("\n").join([Text.assemble(*line) for line in lines])
    return _coloured(text, width) if colour else text.plain


@attrs.frozen
class Fold:
    """A moment, how often it came in a row, and how many were left out before it."""

    moment: Moment
    times: int = 1
    left_out: int = 0


def fold(moments: Iterable[Moment]) -> list[Fold]:
    """Equal moments that follow each other, as one."""
    folds: list[Fold] = []
    for moment in moments:
        if folds and _same(folds[-1].moment, moment):
            folds[-1] = attrs.evolve(folds[-1], times=folds[-1].times + 1)
        else:
            folds.append(Fold(moment))
    return folds


def printable(text: str) -> str:
    """The text with whatever a terminal or a page would obey, hide or refuse as an escape sequence."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape", "surrogatepass").decode()
        for character in text
    )


def show_time(ms: int) -> str:
    """A time since the beginning: fine while it is short, two units when it is long."""
    seconds, minutes, hours, days = ms / 1_000, ms // 60_000, ms // 3_600_000, ms // 86_400_000
    if ms < 60_000:
        return f"+{seconds:.3f}s"
    if ms < 3_600_000:
        return f"+{minutes}m {seconds - minutes * 60:.1f}s"
    if ms < 86_400_000:
        return f"+{hours}h {minutes % 60}m"
    return f"+{days}d {hours % 24}h"


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(title: str, drawn: Sequence[str], replay: str, violations: Sequence[str], width: int) -> Iterator[Line]:
    if title:
        yield [(_ruled(f"━━ {_cut(printable(title), width - 8)} ", width), "bold")]
    if drawn:
        yield from _entry("drawn", _wrapped(" · ".join(map(printable, drawn)), width - 9), "")
    if replay:
        yield [("replay   ", "dim"), (printable(replay), "bold")]  # Never cut: it is to be copied.
    for violation in violations[:_MOST_VIOLATIONS]:
        words = _wrapped(printable(violation), width - 3)
        yield from ([("✘  " if first else "   ", "bold red"), (line, "red")] for first, line in _firsts(words))
    if len(violations) > _MOST_VIOLATIONS:
        yield [(f"   and {len(violations) - _MOST_VIOLATIONS} more", "red")]
    if title or drawn or replay or violations:
        yield []


def _entry(name: str, lines: list[str], style: str) -> Iterator[Line]:
    for first, line in _firsts(lines):
        yield [(f"{name if first else '':<9}", "dim"), (line, style)]


def _firsts(lines: Iterable[str]) -> Iterator[tuple[bool, str]]:
    return ((number == 0, line) for number, line in enumerate(lines))


def _wrapped(text: str, width: int) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) > width:
            lines.append(word)
        else:
            lines[-1] += f" {word}" if lines[-1] else word
    return [_cut(line, width) for line in lines]


# --- the body ---------------------------------------------------------------------------------------------------------


def _body(moments: Sequence[Moment], last: int, width: int) -> Iterator[Line]:
    shown = _chosen(fold(moments), last)
    if not shown:
        yield [("nothing happened", "dim")]
        return
    columns = _columns(shown)
    concerned = _concerned(moments)
    began_ms = moments[0].at_ms
    yield [(f"{'step':>{columns[0]}}  {'time':<11}{'node':<{columns[1]}}  actor", "dim")]
    now_ms: int | None = None
    for each in shown:
        if each.left_out:
            yield [(f"{'⋮':>{columns[0]}}  {_counted(each.left_out)} left out", "dim")]
        elif now_ms is not None and each.moment.at_ms - now_ms >= LONG_MS:
            yield [(f"{'⋮':>{columns[0]}}  {show_time(each.moment.at_ms - now_ms)[1:]} pass", "dim")]
        time = "" if each.moment.at_ms == now_ms else show_time(each.moment.at_ms - began_ms)
        yield _line(each, time, columns, width, is_concerned=each.moment.instance in concerned)
        now_ms = each.moment.at_ms


def _chosen(folds: list[Fold], last: int) -> list[Fold]:
    """The last ones, and half as many landmarks from before them. Violations are extra: they stand at the very end."""
    others = [place for place, each in enumerate(folds) if each.moment.kind != "violation"]
    first = others[-last] if 0 < last <= len(others) else 0
    concerned = _concerned(each.moment for each in folds)
    kept = [place for place, each in enumerate(folds[:first]) if _is_landmark(each.moment, concerned)][-(last // 2) :]
    chosen: list[Fold] = []
    next_place = 0
    for place, each in enumerate(folds):
        if place >= first or place in kept or each.moment.kind == "violation":
            between = folds[next_place:place]
            if len(between) <= _SMALL_GAP:  # To say that they are left out takes as much room as they do.
                chosen += between
                between = []
            chosen.append(attrs.evolve(each, left_out=sum(one.times for one in between)))
            next_place = place + 1
    return chosen


def _is_landmark(moment: Moment, concerned: frozenset[str]) -> bool:
    return moment.kind in LANDMARKS or moment.instance in concerned


def _concerned(moments: Iterable[Moment]) -> frozenset[str]:
    """The instances of which something does not hold."""
    return frozenset(moment.instance for moment in moments if moment.kind == "violation") - {""}


def _columns(shown: list[Fold]) -> tuple[int, int, int]:
    steps = max(4, *(len(str(each.moment.step)) for each in shown))
    nodes = max(4, *(min(cell_len(printable(each.moment.node)), _WIDEST["node"]) for each in shown))
    lanes = max(5, *(min(cell_len(printable(each.moment.lane)), _WIDEST["lane"]) for each in shown))
    return steps, nodes, lanes


def _line(each: Fold, time: str, columns: tuple[int, int, int], width: int, *, is_concerned: bool) -> Line:
    moment = each.moment
    steps, nodes, lanes = columns
    style = _STYLES.get(moment.kind, "")
    begin = f"{moment.step:>{steps}}  {time:<11}{_cell(moment.node, nodes)}  "
    times = f" x {each.times}" if each.times > 1 else ""
    room = width - cell_len(begin) - lanes - len("   · ") - len(times)
    text = _cut(_words(moment), room)
    if moment.kind in _RULED and cell_len(text) + 2 <= room:
        text = _ruled(f"{text} ", room)
    return [
        (begin, "dim"),
        (_cell(moment.lane, lanes), style if moment.kind in WRONG else ""),
        (" ▌ " if is_concerned else "   ", "red"),
        (f"{MARKS.get(moment.kind, '?')} ", style),
        (text, style),
        (times, "bold"),
    ]


def _words(moment: Moment) -> str:
    text = printable(moment.text).rstrip()
    if moment.kind in WRONG:
        return f"{moment.kind.upper()}: {text}"
    return f"{moment.kind}: {text}" if moment.kind in LANDMARKS or moment.kind == "probe" else text


def _same(one: Moment, other: Moment) -> bool:
    alike = (one.node, one.lane, one.kind, one.text) == (other.node, other.lane, other.kind, other.text)
    return alike and other.at_ms - one.at_ms < LONG_MS


def _cell(text: str, width: int) -> str:
    return set_cell_size(_cut(printable(text), width), width)


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)).rstrip() + "…"


def _ruled(text: str, width: int) -> str:
    return text + "━" * max(width - cell_len(text), 0)


def _counted(number: int) -> str:
    return "1 moment" if number == 1 else f"{number:,} moments"


def _coloured(text: Text, width: int) -> str:
    """As ANSI, whatever this process's own terminal can do."""
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, color_system="standard", no_color=False, legacy_windows=False, width=width
    )
    console.print(text, soft_wrap=True, highlight=False, markup=False, emoji=False, end="")
    return file.getvalue()
