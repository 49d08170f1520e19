"""A failing world in words: everything lines up, nothing is obeyed, and what went wrong cannot be missed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.text import Text

from understudy.simulations.trace import Moment
from understudy.simulations.transcript import MARKS, WIDTH, printable, show_time, transcript

BEGAN_MS = 1_767_225_600_000
DAY_MS = 86_400_000


def moment(step: int, text: str = "flush", *, kind: str = "message", **fields: object) -> Moment:
    given = {"at_ms": BEGAN_MS, "node": "a.1", "lane": "persistence", **fields}
    return Moment(step=step, kind=kind, text=text, **given)  # type: ignore[arg-type]


def lines_of(moments: list[Moment], **more: object) -> list[str]:
    """Without the line that names the columns."""
    return transcript(moments, **more).splitlines()[1:]  # type: ignore[arg-type]


# --- the head ---------------------------------------------------------------------------------------------------------


def test_the_head_says_what_was_drawn_what_failed_and_how_to_see_it_again() -> None:
    replay = "python -m understudy.simulations play mixed --seed 11 " + "--steps 2000 " * 20

    shown = transcript(
        [moment(1)],
        title="mixed, seed 11",
        drawn=["uniform schedule", "crash (0.01)"],
        replay=replay,
        violations=["I8 m5: the acknowledged send is lost"],
    )

    assert shown.splitlines()[:4] == [
        "━━ mixed, seed 11 ".ljust(WIDTH, "━"),
        "drawn    uniform schedule · crash (0.01)",
        f"replay   {replay}",  # Not cut: it is to be copied.
        "✘  I8 m5: the acknowledged send is lost",
    ]


def test_violations_are_found_among_the_moments_when_nobody_gives_them() -> None:
    shown = transcript([moment(1), moment(2, "I9 m1: backwards", kind="violation")])

    assert shown.splitlines()[0] == "✘  I9 m1: backwards"


def test_of_many_violations_the_head_shows_some_and_counts_the_rest() -> None:
    shown = transcript([moment(1)], violations=[f"I{number}: wrong" for number in range(20)])

    assert shown.splitlines()[7:10] == ["✘  I7: wrong", "   and 12 more", ""]


def test_without_anything_to_say_there_is_no_head() -> None:
    assert transcript([moment(1)]).splitlines() == [
        "step  time       node  actor",
        "   1  +0.000s    a.1   persistence   · flush",
    ]


def test_a_world_in_which_nothing_happened_says_so() -> None:
    assert transcript([]) == "nothing happened"


# --- the lines --------------------------------------------------------------------------------------------------------


def test_columns_line_up_whatever_stands_in_them() -> None:
    moments = [
        moment(9, lane="m7", kind="commit"),
        moment(10, node="", lane="client cleo", kind="call"),
        moment(100_000, node="north.12", lane="a very long name of an instance", kind="answer"),
        moment(100_001, node="東京.1", lane="注文-7"),
    ]

    places = [cell_len(line[: line.index(mark)]) for line, mark in zip(lines_of(moments), "●→←·", strict=True)]

    assert len(set(places)) == 1


def test_a_time_is_said_once() -> None:
    moments = [moment(1), moment(2, "again"), moment(3, "later", at_ms=BEGAN_MS + 1_500)]

    times = re.findall(r"\+\S+", "\n".join(lines_of(moments)))

    assert times == ["+0.000s", "+1.500s"]


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (0, "+0.000s"),
        (59_999, "+59.999s"),
        (60_000, "+1m 0.0s"),
        (245_300, "+4m 5.3s"),
        (2 * 3_600_000 + 180_000, "+2h 3m"),
        (2 * DAY_MS + 3 * 3_600_000, "+2d 3h"),
    ],
)
def test_a_time_is_fine_while_it_is_short(ms: int, shown: str) -> None:
    assert show_time(ms) == shown


def test_much_time_gets_a_line_of_its_own() -> None:
    lines = lines_of([moment(1), moment(2, at_ms=BEGAN_MS + 2 * DAY_MS)])

    assert lines[1] == "   ⋮  2d 0h pass"


def test_equal_lines_are_folded() -> None:
    lines = lines_of([*(moment(step) for step in range(14)), moment(20, "done")])

    assert [line[-20:] for line in lines] == ["persistence   · flush x 14"[-20:], "persistence   · done"[-20:]]


def test_only_the_last_lines_are_shown_and_the_rest_is_counted() -> None:
    lines = lines_of([moment(step, f"number {step}") for step in range(1_000)], last=50)

    assert lines[0] == "   ⋮  950 moments left out"
    assert len(lines) == 51
    assert lines[1].endswith("number 950")


def test_of_what_is_left_out_the_faults_are_kept() -> None:
    moments = [moment(step, f"number {step}") for step in range(1_000)]
    moments[10] = moment(10, "killed", kind="crash", node="a", lane="world")

    lines = lines_of(moments, last=5)

    assert [line.split("━")[0].strip() for line in lines[:3]] == [
        "⋮  10 moments left out",
        "10  +0.000s    a     world         ✖ CRASH: killed",
        "⋮  984 moments left out",
    ]


def test_of_what_is_left_out_the_story_of_the_violated_instance_is_kept() -> None:
    moments = [moment(step, f"number {step}") for step in range(1_000)]
    moments[10] = moment(10, "committed version 1", kind="commit", lane="m5", instance="m5")
    moments.append(moment(1_000, "I8 m5: lost", kind="violation", node="", lane="world", instance="m5"))

    marked = [line for line in lines_of(moments, last=5) if "▌" in line]

    assert len(marked) == 2
    assert "▌ ● committed version 1" in marked[0]
    assert "▌ ✘ VIOLATION: I8 m5: lost ━━━" in marked[1]


def test_a_violation_is_never_left_out() -> None:
    early = moment(3, "I10: two owners", kind="violation")

    lines = lines_of([moment(1), early, *(moment(step, str(step)) for step in range(10, 400))], last=2)

    assert [line for line in lines if "I10: two owners" in line]


def test_a_gap_of_a_line_or_two_is_not_worth_telling() -> None:
    moments = [moment(step, str(step)) for step in range(100)]
    moments[50] = moment(50, "disk full", kind="fault")
    moments[53] = moment(53, "disk full", kind="crash")

    lines = lines_of(moments, last=4)

    assert [line.split()[0] for line in lines] == ["⋮", "50", "51", "52", "53", "⋮", "96", "97", "98", "99"]


@pytest.mark.parametrize("kind", ["fault", "crash", "pause", "violation"])
def test_what_went_wrong_is_said_aloud(kind: str) -> None:
    assert f"{MARKS[kind]} {kind.upper()}: it happened" in transcript([moment(1, "it happened", kind=kind)])


@pytest.mark.parametrize("mark", MARKS.values())
def test_every_mark_is_one_cell_wide_and_stands_for_one_kind(mark: str) -> None:
    assert cell_len(mark) == 1
    assert list(MARKS.values()).count(mark) == 1


def test_a_kind_that_is_not_known_is_shown_all_the_same() -> None:
    assert "? flush" in transcript([moment(1, kind="something new")])


# --- texts from anywhere ----------------------------------------------------------------------------------------------


def test_nothing_in_a_text_reaches_the_terminal_as_a_command() -> None:
    shown = transcript([moment(1, "\x1b[2J\r\n\u202e\x00\ud800 done", lane="\x07m5")])

    assert r"\x1b[2J\r\n\u202e\x00\ud800 done" in shown
    assert r"\x07m5" in shown


def test_markup_in_a_text_is_only_text() -> None:
    plain, coloured = (transcript([moment(1, "[bold red]:smile: [/] done")], colour=colour) for colour in (False, True))

    assert "[bold red]:smile: [/] done" in plain
    assert "[bold red]:smile: [/] done" in Text.from_ansi(coloured).plain


@given(
    st.lists(
        st.builds(
            Moment,
            step=st.integers(0, 100),
            at_ms=st.integers(0, 10**10),
            node=st.text(max_size=12),
            lane=st.text(max_size=40),
            kind=st.sampled_from([*MARKS]),
            text=st.text(max_size=300),
            instance=st.sampled_from(["", "m5"]),
        )
    ),
    st.integers(0, 20),
)
def test_no_line_is_wider_than_the_page_or_carries_what_is_not_printable(moments: list[Moment], last: int) -> None:
    lines = transcript(moments, last=last, drawn=["a" * 300, "b"]).split("\n")

    assert all(line.isprintable() for line in lines)
    assert max(map(cell_len, lines)) <= WIDTH


@given(st.text())
def test_what_is_printable_stays_as_it_is(text: str) -> None:
    shown = printable(text)

    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


# --- colour -----------------------------------------------------------------------------------------------------------


def test_colour_adds_colour_and_nothing_else() -> None:
    moments = [moment(step, f"number {step}", kind=kind) for step, kind in enumerate(MARKS)]

    plain, coloured = (transcript(moments, drawn=["x"], title="t", colour=colour) for colour in (False, True))

    assert "\x1b[" not in plain
    assert "\x1b[1;31m" in coloured
    assert Text.from_ansi(coloured).plain.rstrip() == plain.rstrip()


def test_colour_does_not_depend_on_where_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    first = transcript([moment(1, kind="crash")], colour=True)

    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "20")

    assert transcript([moment(1, kind="crash")], colour=True) == first
