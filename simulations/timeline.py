"""A picture of a world: a lane for each actor, a column for each step, and whatever went wrong in red.

The SVG stands alone; the page holds the same picture with the transcript as a table below it. Both contain all they
need, load nothing and run nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from understudy.simulations.drawing import (
    CHARACTER,
    EDGE,
    LEGEND_WIDTH,
    STYLE,
    Picture,
    cut,
    escaped,
    kind_of,
    legend,
    shifted,
    svg,
    tag,
    text,
)
from understudy.simulations.trace import Moment
from understudy.simulations.transcript import MARKS, printable, show_time

MOST: Final = 400


def timeline_svg(
    moments: Sequence[Moment], *, title: str, drawn: Sequence[str], violations: Sequence[str], most: int = MOST
) -> str:
    """The last moments as a picture that stands alone."""
    picture = Picture(moments, most)
    width = max(picture.labels_width + picture.plot_width, LEGEND_WIDTH + 2 * EDGE)
    lines = list(_headlines(title, drawn, violations, picture.about, width))
    top = 20 + sum(height for _, _, height in lines)
    body = [tag("rect", class_="page", width=width, height=top + picture.height + 34)]
    y = 12
    for words, class_, height in lines:
        y += height
        body.append(text(EDGE, y - 4, words, class_))
    body.append(shifted(picture.labels(), 0, top))
    body.append(shifted(picture.plot(), picture.labels_width, top))
    body.append(shifted(legend(), EDGE, top + picture.height + 8))
    return svg(width, top + picture.height + 34, [tag("style", STYLE), *body])


def timeline_html(
    moments: Sequence[Moment], *, title: str, drawn: Sequence[str], violations: Sequence[str], most: int = MOST
) -> str:
    """A page with the picture and, below it, the same moments in words."""
    picture = Picture(moments, most, has_table=True)
    wrong = "".join(f"<li>{escaped(violation)}</li>" for violation in violations)
    return _PAGE.format(
        title=escaped(title),
        style=STYLE + _PAGE_STYLE,
        verdict=f'<ul class="verdict">{wrong}</ul>' if wrong else '<p class="fine">Everything held.</p>',
        drawn="".join(f"<li>{escaped(each)}</li>" for each in drawn) or "<li>nothing</li>",
        about=escaped(picture.about),
        legend=svg(LEGEND_WIDTH, 24, legend()),
        labels=svg(picture.labels_width, picture.height, picture.labels()),
        plot=svg(picture.plot_width, picture.height, picture.plot()),
        rows="\n".join(_rows(picture)),
    )


def _headlines(
    title: str, drawn: Sequence[str], violations: Sequence[str], about: str, width: int
) -> Iterator[tuple[str, str, int]]:
    """The words above a picture that stands alone, their look, and the height of each line."""
    room = int((width - 2 * EDGE) / CHARACTER)
    yield cut(title, int(room * 0.8)), "title", 22
    for line in _wrapped(["drawn:", *drawn], room):
        yield line, "note", 16
    yield about, "note", 16
    for violation in violations[:5]:
        yield cut(violation, room), "wrong", 17
    if len(violations) > 5:
        yield f"and {len(violations) - 5} more violations", "wrong", 17


def _wrapped(words: Sequence[str], room: int) -> list[str]:
    lines = [""]
    for word in map(printable, words):
        if lines[-1] and len(lines[-1]) + len(word) + 3 > room:
            lines.append("")
        lines[-1] += f"{' · ' if lines[-1] and not lines[-1].endswith(':') else ' ' if lines[-1] else ''}{word}"
    return [cut(line, room) for line in lines]


def _rows(picture: Picture) -> Iterator[str]:
    for number, each in enumerate(picture.folds):
        moment = each.moment
        times = f' <b class="times">x {each.times}</b>' if each.times > 1 else ""
        cells = (
            f'<td class="number">{moment.step}</td>',
            f'<td class="number">{escaped(show_time(moment.at_ms - picture.began_ms))}</td>',
            f"<td>{escaped(moment.node)}</td>",
            f"<td>{escaped(moment.lane)}</td>",
            f'<td class="sign">{MARKS.get(moment.kind, "?")}</td>',
            f"<td>{escaped(moment.kind)}</td>",
            f'<td class="words">{escaped(moment.text)}{times}</td>',
        )
        yield f'<tr id="m{number}" class="{kind_of(each)}">{"".join(cells)}</tr>'


_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
{verdict}
<ul class="drawn">{drawn}</ul>
<p class="about">{about}. Point at a mark to read it; a click leads to its line below.</p>
<div class="legend">{legend}</div>
<div class="picture"><div class="labels">{labels}</div>{plot}</div>
<table>
<thead><tr><th>step</th><th>time</th><th>node</th><th>actor</th><th></th><th>kind</th><th>text</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</body>
</html>
"""

_PAGE_STYLE: Final = """
body { background: var(--page); color: var(--ink); margin: 24px 28px 60px;
  font: 14px/1.45 ui-sans-serif, system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 20px; margin: 0 0 10px; overflow-wrap: anywhere; }
.verdict { list-style: none; margin: 0 0 12px; padding: 0; color: var(--wrong); }
.verdict li { border-left: 4px solid var(--wrong); padding: 3px 10px; margin: 4px 0; background: var(--even);
  overflow-wrap: anywhere; }
p.fine { color: var(--commit); margin: 0 0 12px; }
.drawn { list-style: none; display: flex; flex-wrap: wrap; gap: 6px; margin: 0 0 10px; padding: 0; }
.drawn li { background: var(--odd); border-radius: 10px; padding: 1px 9px; font-size: 12.5px; }
.about { color: var(--faint); margin: 0 0 6px; } .legend { overflow-x: auto; margin-bottom: 4px; }
.picture { display: flex; overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; margin-bottom: 22px; }
.picture svg { display: block; flex: none; }
.labels { position: sticky; left: 0; flex: none; background: var(--page); z-index: 1;
  border-right: 1px solid var(--rule); }
table { border-collapse: collapse; width: 100%; font-size: 12.5px; }
th { position: sticky; top: 0; background: var(--page); text-align: left; color: var(--faint); font-weight: 500;
  border-bottom: 1px solid var(--rule); }
th, td { padding: 2px 10px 2px 0; vertical-align: top; white-space: nowrap; }
td.words { white-space: normal; overflow-wrap: anywhere; width: 60%; font-family: ui-monospace, "DejaVu Sans Mono",
  monospace; }
td.number { font-variant-numeric: tabular-nums; color: var(--faint); } .times { color: var(--timer); }
tr { scroll-margin-top: 30vh; }
tr:hover { background: var(--odd); } tr:target { outline: 2px solid var(--call); outline-offset: -2px; }
tr.commit .sign { color: var(--commit); } tr.call .sign, tr.answer .sign { color: var(--call); }
tr.fault td { color: var(--fault); } tr.probe .sign { color: var(--probe); } tr.timer .sign { color: var(--timer); }
tr.job .sign { color: var(--job); } tr.open .sign, tr.close .sign { color: var(--commit); }
tr.crash td, tr.violation td { color: var(--wrong); font-weight: 600; }
tr.crash { border-bottom: 2px solid var(--wrong); }
"""
