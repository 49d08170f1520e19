"""The marks, lanes and axes of a timeline, as SVG.

What is rare is large and coloured, what is common is small and grey, and nothing but colour and size tells them apart
from far away. Every text is escaped here, wherever it comes from: the name of an instance is no markup.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from understudy.simulations.lanes import Layout, place
from understudy.simulations.trace import Moment
from understudy.simulations.transcript import MARKS, Fold, fold, printable, show_time

_LANE: Final = 22  # The height of one, in pixels as all that follows.
_TOP: Final = 30  # The axis of steps.
_BOTTOM: Final = 46  # The axis of time.
_LEAST_WIDTH: Final = 1_080  # Of the plot.
_CALLOUT: Final = 16
_CALLOUT_ROWS: Final = 5
CHARACTER: Final = 6.1  # The width of one, on average.
_WIDEST_CALLOUT: Final = 64  # In characters.
EDGE: Final = 14
_LEGEND: Final = (
    ("message", "message"),
    ("job", "handler, arrival"),
    ("timer", "timer"),
    ("call", "call"),
    ("answer", "answer"),
    ("commit", "commit"),
    ("open", "opened"),
    ("close", "closed"),
    ("fault", "fault"),
    ("crash", "crash"),
    ("probe", "probe"),
    ("violation", "violation"),
)
_LEGEND_STEP: Final = 38
LEGEND_WIDTH: Final = round(sum(_LEGEND_STEP + len(words) * CHARACTER for _, words in _LEGEND) + 160)


class Picture:
    """The moments that are shown, and how they are drawn."""

    def __init__(self, moments: Sequence[Moment], most: int, *, has_table: bool = False) -> None:
        self.began_ms = moments[0].at_ms if moments else 0
        self.folds = fold(moments)[-most:]
        self.layout = Layout([each.moment for each in self.folds])
        self.has_table = has_table
        left_out = len(moments) - sum(each.times for each in self.folds)
        self.about = f"{len(moments):,} moments" + (f", the first {left_out:,} are left out" if left_out else "")
        self.pitch = max(6.0, min(40.0, _LEAST_WIDTH / self.layout.width))
        longest = max((len(lane.label) for lane in self.layout.lanes), default=0)
        self.labels_width = round(2 * EDGE + min(longest, 26) * 6.6)
        self.plot_width = max(round(self.layout.width * self.pitch), _LEAST_WIDTH) + 2 * EDGE
        self.callouts = list(self._callouts())
        self.top = _TOP + _CALLOUT * (1 + max((callout.row for callout in self.callouts), default=-1))
        self.lanes_height = len(self.layout.lanes) * _LANE
        self.height = self.top + self.lanes_height + _BOTTOM

    def x(self, column: int) -> float:
        return round(EDGE + (column + 0.5) * self.pitch, 1)

    def y(self, row: int) -> float:
        return self.top + (row + 0.5) * _LANE

    # --- lanes ---

    def labels(self) -> Iterator[str]:
        for row, lane in enumerate(self.layout.lanes):
            yield self._stripe(row, self.labels_width)
            class_ = "label concerned" if self.layout.is_concerned(lane) else "label"
            words = cut(lane.label, 26)
            yield text(self.labels_width - 8, self.y(row) + 4, words, class_, anchor="end", hint=lane.label)
        yield text(self.labels_width - 8, self.top - 9, "step", "axis", anchor="end")
        yield text(self.labels_width - 8, self.top + self.lanes_height + 16, "time", "axis", anchor="end")

    def _stripe(self, row: int, width: int) -> str:
        group = self.layout.lanes[row].group
        is_first = row == 0 or self.layout.lanes[row - 1].group != group
        top = self.y(row) - _LANE / 2
        stripe = tag("rect", class_=f"lane {'odd' if row % 2 else 'even'}", y=top, width=width, height=_LANE)
        return stripe + (_line(0, top, width, top, "between") if is_first else "")

    def plot(self) -> Iterator[str]:
        """From the back to the front."""
        yield from (self._stripe(row, self.plot_width) for row in range(len(self.layout.lanes)))
        yield from self._bands()
        yield from self._axes()
        yield from self._crashes()
        yield from (self._join(number) for number, each in enumerate(self.folds) if each.moment.kind == "commit")
        yield from (self._moment(number) for number in range(len(self.folds)))
        yield from map(self._callout, self.callouts)

    def _bands(self) -> Iterator[str]:
        for span in self.layout.spans():
            left, right = self.x(span.first), min(self.x(span.last), self.plot_width - EDGE)
            rows = [row for row, lane in enumerate(self.layout.lanes) if lane.node == span.node]
            for row in rows:
                size = {"width": max(right - left, 1), "height": _LANE}
                words = f"{span.node or 'the world'} was {span.kind}"
                yield tag("rect", _hint(words), class_=span.kind, x=left, y=self.y(row) - _LANE / 2, **size)
            if rows and span.kind == "paused" and right - left > 50:
                yield text((left + right) / 2, self.y(rows[0]) + 4, "paused", "band", anchor="middle")

    # --- axes ---

    def _axes(self) -> Iterator[str]:
        bottom = self.top + self.lanes_height
        yield _line(0, self.top, self.plot_width, self.top, "axis-line")
        yield _line(0, bottom, self.plot_width, bottom, "axis-line")
        crossed = [self.x(self.layout.columns[callout.number]) for callout in self.callouts]
        yield from self._ticks(self.top - 9, 70, [str(each.moment.step) for each in self.folds], crossed)
        times = [show_time(each.moment.at_ms - self.began_ms) for each in self.folds]
        yield from self._ticks(bottom + 16, 96, times, [])
        taken: list[tuple[float, float]] = []
        for jump in self.layout.jumps():
            x = self.x(jump.column) - self.pitch / 2
            words = f"{show_time(jump.ms)[1:]} pass"
            yield tag("g", _line(x, self.top, x, bottom + 5, "jump") + _hint(words))
            reach = (x - len(words) * 3.2, x + len(words) * 3.2)
            if not any(_overlap(reach, other) for other in taken):
                taken.append(reach)
                anchor = "start" if reach[0] < 0 else "end" if reach[1] > self.plot_width else "middle"
                yield text(x, bottom + 34, words, "jumped", anchor=anchor)

    def _ticks(self, y: float, room: int, words: Sequence[str], crossed: list[float]) -> Iterator[str]:
        """Words at the first moment that has them, as far as there is room, and no line goes through them."""
        free = 0.0
        last = ""
        for column, word in zip(self.layout.columns, words, strict=True):
            x = self.x(column)
            half = len(word) * 3.2
            if word != last and x - half >= free and not any(abs(x - other) < half + 2 for other in crossed):
                anchor = "end" if x + half > self.plot_width else "middle"
                yield text(x, y, word, "axis", anchor=anchor)
                free = x + room - half
                last = word

    # --- moments ---

    def _join(self, number: int) -> str:
        rows = self.layout.joined(self.folds[number].moment)
        x = self.x(self.layout.columns[number])
        if len(rows) < 2:
            return ""
        dots = "".join(tag("circle", class_="joined", cx=x, cy=self.y(row), r=2) for row in rows)
        return _line(x, self.y(rows[0]), x, self.y(rows[-1]), "join") + dots

    def _moment(self, number: int) -> str:
        each = self.folds[number]
        x, y = self.x(self.layout.columns[number]), self.y(self.layout.row(each.moment))
        reach = max(self.pitch, 10)
        area = tag("rect", class_="area", x=x - reach / 2, y=y - _LANE / 2, width=reach, height=_LANE)
        drawn = tag(
            "g", _hint(self.told(each)) + area + _mark(each.moment.kind, x, y), class_=f"moment {kind_of(each)}"
        )
        return tag("a", drawn, href=f"#m{number}") if self.has_table else drawn

    def told(self, each: Fold) -> str:
        moment = each.moment
        times = f" ({each.times} times)" if each.times > 1 else ""
        where = f"{moment.node} {moment.lane}".strip()
        when = f"step {moment.step}, {show_time(moment.at_ms - self.began_ms)}"
        return f"{when}, {where}\n{moment.kind}{times}: {moment.text}"

    # --- what stands out ---

    def _crashes(self) -> Iterator[str]:
        for number, each in enumerate(self.folds):
            if each.moment.kind == "crash":
                x = self.x(self.layout.columns[number])
                hint = _hint(self.told(each))
                yield tag("g", hint + _line(x, self.top - 4, x, self.top + self.lanes_height, "crash-line"))

    def _callouts(self) -> Iterator[_Callout]:
        """Violations first, then crashes, each in a row where it covers no other; who finds no room keeps its line."""
        rows: list[list[tuple[float, float]]] = [[] for _ in range(_CALLOUT_ROWS)]
        for number, each in sorted(enumerate(self.folds), key=lambda pair: pair[1].moment.kind != "violation"):
            if each.moment.kind not in ("violation", "crash"):
                continue
            words, size = _called(each.moment)
            left = max(2.0, min(self.x(self.layout.columns[number]) - 5, self.plot_width - size - 2))
            reach = (left - 3, left + size + 3)
            row = next((row for row, taken in enumerate(rows) if not any(_overlap(reach, one) for one in taken)), None)
            if row is not None:
                rows[row].append(reach)
                yield _Callout(number, words, left, size, row)

    def _callout(self, callout: _Callout) -> str:
        each = self.folds[callout.number]
        kind = each.moment.kind
        x, top = self.x(self.layout.columns[callout.number]), 4 + callout.row * _CALLOUT
        end = self.y(self.layout.row(each.moment)) if kind == "violation" else self.top
        return tag(
            "g",
            _hint(self.told(each))
            + _line(x, top + 14, x, end, f"{kind}-line")
            + tag("rect", class_=f"callout {kind}", x=callout.left, y=top, width=callout.size, height=14, rx=3)
            + text(callout.left + 6, top + 10.5, callout.words, f"callout-text {kind}"),
        )


class _Callout(NamedTuple):
    """The words above a moment, and where they found room."""

    number: int
    words: str
    left: float
    size: float
    row: int


def _called(moment: Moment) -> tuple[str, float]:
    """What a callout says, and how wide that is; violations are in bold type."""
    node = place(moment.node)
    if moment.kind == "violation":
        words = cut(moment.text, _WIDEST_CALLOUT)
        return words, len(words) * 1.13 * CHARACTER + 12
    words = cut(f"{node}: {moment.text}" if node else moment.text, _WIDEST_CALLOUT)
    return words, len(words) * CHARACTER + 12


def kind_of(each: Fold) -> str:
    return each.moment.kind if each.moment.kind in MARKS else "message"


def _mark(kind: str, x: float, y: float) -> str:
    """The sign of a moment; ticks are small so that what is rare stands out."""
    paths = {
        "job": f"M{x - 2.5} {y - 4}L{x + 3} {y}L{x - 2.5} {y + 4}Z",
        "call": f"M{x - 2} {y - 4.5}L{x + 3} {y}L{x - 2} {y + 4.5}",
        "answer": f"M{x + 2} {y - 4.5}L{x - 3} {y}L{x + 2} {y + 4.5}",
        "fault": f"M{x} {y - 6.5}L{x + 6.5} {y + 5}L{x - 6.5} {y + 5}Z",
        "probe": f"M{x} {y - 5.5}L{x + 4.5} {y}L{x} {y + 5.5}L{x - 4.5} {y}Z",
        "crash": f"M{x - 5} {y - 5}L{x + 5} {y + 5}M{x - 5} {y + 5}L{x + 5} {y - 5}",
        "pause": f"M{x - 2.5} {y - 5}V{y + 5}M{x + 2.5} {y - 5}V{y + 5}",
        "resume": f"M{x - 3.5} {y - 5}L{x + 5} {y}L{x - 3.5} {y + 5}Z",
    }
    if kind in paths:
        return tag("path", d=paths[kind], class_=f"mark {kind}")
    if kind in ("commit", "open", "timer"):
        return tag("circle", class_=f"mark {kind}", cx=x, cy=y, r={"commit": 4.2, "open": 4.5, "timer": 3}[kind])
    if kind == "close":
        return tag("rect", class_="mark close", x=x - 4, y=y - 4, width=8, height=8)
    if kind == "violation":
        star = f"M{x - 4} {y - 4}L{x + 4} {y + 4}M{x - 4} {y + 4}L{x + 4} {y - 4}"
        return tag("circle", class_="mark violation", cx=x, cy=y, r=8) + tag("path", class_="cross", d=star)
    return _line(x, y - 4.5, x, y + 4.5, "mark message")


def legend() -> Iterator[str]:
    x = 0.0
    for kind, words in _LEGEND:
        yield _mark(kind, x + 9, 12)
        yield text(x + 20, 16, words, "legend")
        x += _LEGEND_STEP + len(words) * CHARACTER
    for kind in ("paused", "down"):
        yield tag("rect", class_=kind, x=x, y=4, width=18, height=16)
        yield text(x + 24, 16, kind, "legend")
        x += _LEGEND_STEP + 8 + len(kind) * CHARACTER


# --- words of SVG -----------------------------------------------------------------------------------------------------


def svg(width: float, height: float, body: Sequence[str] | Iterator[str]) -> str:
    box = f"0 0 {width} {height}"
    return tag("svg", "".join(body), xmlns="http://www.w3.org/2000/svg", width=width, height=height, viewBox=box)


def tag(name: str, content: str = "", /, *, class_: str = "", **attributes: object) -> str:
    given = {"class": class_, **attributes} if class_ else attributes
    words = "".join(f' {key}="{escaped(_number(value))}"' for key, value in given.items())
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def _number(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def _line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return tag("path", d=f"M{_number(x1)} {_number(y1)}L{_number(x2)} {_number(y2)}", class_=class_)


def text(x: float, y: float, words: str, class_: str, *, anchor: str = "start", hint: str = "") -> str:
    more = {} if anchor == "start" else {"text-anchor": anchor}
    return tag("text", escaped(words) + (_hint(hint) if hint else ""), x=x, y=y, class_=class_, **more)


def shifted(body: Iterator[str], x: float, y: float) -> str:
    return tag("g", "".join(body), transform=f"translate({_number(x)} {_number(y)})")


def _hint(words: str) -> str:
    return tag("title", "\n".join(escaped(line) for line in words.split("\n", 1)))


def escaped(text: str) -> str:
    return html.escape(printable(text))


def cut(text: str, most: int) -> str:
    text = printable(text)
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


# Colours are chosen for both schemes to be told apart by those who see no red or green: lightness differs too.
STYLE: Final = """
:root, svg { --page: #ffffff; --ink: #1f2430; --faint: #6b7280; --even: #f7f8fa; --odd: #eef0f4; --rule: #c9ced8;
  --message: #8a93a3; --job: #0e7490; --timer: #7c3aed; --call: #2563eb; --commit: #15803d; --fault: #d97706;
  --probe: #a21caf; --wrong: #dc2626; --paused: #9ca3af; --down: #dc2626;
  --on-wrong: #ffffff; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root, svg { --page: #14171d; --ink: #e5e7eb; --faint: #98a1b0; --even: #1a1e26;
  --odd: #20252f; --rule: #3b4252; --message: #7b8494; --job: #22b8cf; --timer: #a78bfa; --call: #6ea8fe;
  --commit: #4ade80; --fault: #fbbf24; --probe: #e879f9; --wrong: #f87171; --paused: #6b7280; --down: #f87171;
  --on-wrong: #14171d; } }
svg text { font-family: ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 11px;
  fill: var(--ink); }
.page { fill: var(--page); } .even { fill: var(--even); } .odd { fill: var(--odd); }
svg .title { font-size: 16px; font-weight: 600; } svg .note { fill: var(--faint); } svg .wrong { fill: var(--wrong); }
svg .label { font-size: 11.5px; } svg .concerned { fill: var(--wrong); font-weight: 600; }
svg .axis, svg .jumped { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
svg .axis, svg .jumped, svg .band { fill: var(--faint); font-size: 10px; } svg .jumped { fill: var(--timer); }
.between, .axis-line { stroke: var(--rule); fill: none; }
.jump { stroke: var(--timer); stroke-dasharray: 2 3; fill: none; }
.down { fill: var(--down); fill-opacity: .13; } .paused { fill: var(--paused); fill-opacity: .38; }
.join { stroke: var(--commit); stroke-opacity: .4; fill: none; } .joined { fill: var(--commit); fill-opacity: .7; }
.crash-line { stroke: var(--wrong); stroke-width: 1.6; fill: none; }
.violation-line { stroke: var(--wrong); stroke-width: 1.2; stroke-dasharray: 4 2; fill: none; }
.area { fill: transparent; } .mark { fill: none; stroke-width: 1.4; stroke-linejoin: round; stroke-linecap: round; }
.mark.message { stroke: var(--message); } .mark.job { fill: var(--job); } .mark.timer { stroke: var(--timer); }
.mark.call, .mark.answer { stroke: var(--call); stroke-width: 1.8; } .mark.commit { fill: var(--commit); }
.mark.fault { fill: var(--fault); stroke: var(--page); stroke-width: .8; }
.mark.probe { fill: var(--probe); stroke: var(--page); stroke-width: .8; }
.mark.crash { stroke: var(--wrong); stroke-width: 2.6; } .mark.pause { stroke: var(--fault); stroke-width: 2.4; }
.mark.resume { fill: var(--fault); } .mark.open { stroke: var(--commit); stroke-width: 2; fill: var(--page); }
.mark.close { stroke: var(--commit); stroke-width: 2; fill: var(--page); }
.mark.violation { fill: var(--wrong); stroke: var(--page); } .cross { stroke: var(--on-wrong); stroke-width: 2; }
.callout.violation { fill: var(--wrong); } svg .callout-text.violation { fill: var(--on-wrong); font-weight: 600; }
.callout.crash { fill: var(--page); stroke: var(--wrong); } svg .callout-text.crash { fill: var(--wrong); }
svg .callout-text { font-size: 10.5px; } .moment:hover .area { fill: var(--ink); fill-opacity: .14; }
"""
