"""What people write about time becomes exact milliseconds, or a refusal that shows how to write it."""

from __future__ import annotations

import contextlib
import datetime
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.model.durations import (
    DAY_MS,
    HOUR_MS,
    LONGEST_MS,
    MINUTE_MS,
    SECOND_MS,
    WEEK_MS,
    duration_ms,
    moment_ms,
    show_duration,
    show_moment,
)
from understudy.model.errors import Rejected

SUMMER_IN_BERLIN = datetime.timezone(datetime.timedelta(hours=2))
ZONES = st.integers(-1439, 1439).map(lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes)))


@pytest.mark.parametrize(
    ("written", "expected_ms"),
    [
        ("3d", 3 * DAY_MS),
        ("72h", 3 * DAY_MS),
        ("1h30m", 90 * MINUTE_MS),
        ("1h 30m", 90 * MINUTE_MS),
        ("250ms", 250),
        (" 250 ms ", 250),
        ("1.5s", 1500),
        ("2w", 2 * WEEK_MS),
        ("1w1d1h1m1s1ms", WEEK_MS + DAY_MS + HOUR_MS + MINUTE_MS + SECOND_MS + 1),
        ("1m1ms", MINUTE_MS + 1),
        ("0.1s", 100),
        ("90m", 90 * MINUTE_MS),
        ("0s", 0),
        ("0.1ms", 1),
        ("PT1H30M", 90 * MINUTE_MS),
        ("P3D", 3 * DAY_MS),
        ("P2W", 2 * WEEK_MS),
        ("P1DT12H", 36 * HOUR_MS),
        ("PT0.25S", 250),
        ("PT0,25S", 250),
        ("PT1M", MINUTE_MS),
        ("PT0S", 0),
        (datetime.timedelta(days=1, milliseconds=1), DAY_MS + 1),
        (datetime.timedelta(microseconds=1), 1),
        (datetime.timedelta(0), 0),
        (30, 30_000),
        (0.1, 100),
        (0.1 + 0.2, 300),
        (1e-9, 1),
        (0, 0),
        (-0.0, 0),
        ("36525d", LONGEST_MS),
    ],
)
def test_a_duration_is_read_exactly(written: Any, expected_ms: int) -> None:
    assert duration_ms(written) == expected_ms


@pytest.mark.parametrize(
    "written",
    [
        "",
        " ",
        "d",
        "3",
        "3x",
        "3 days",
        "3D",
        "30m1h",
        "1h1h",
        "1,500ms",
        "1.h",
        ".5s",
        "1e3s",
        "٣d",
        "P",
        "PT",
        "P1DT",
        "P1H",
        "PT1D",
        "pt1h",
        "PT-1H",
        "--3d",
        "+3d",
        "x" * 1000,
        "9" * 1000 + "d",
        "\ud800",
        True,
        None,
        b"3d",
        [3],
        math.nan,
        math.inf,
    ],
)
def test_what_is_no_duration_is_refused_with_examples(written: Any) -> None:
    with pytest.raises(Rejected, match=r'write "3d", "1h30m"|has no unit; write 3s'):
        duration_ms(written)


@pytest.mark.parametrize("written", ["P1M", "P1Y", "P1Y2M3DT4H", "P0.5Y"])
def test_months_and_years_are_refused_because_they_differ_in_length(written: str) -> None:
    with pytest.raises(Rejected, match="counts years or months, which differ in length; write days or weeks"):
        duration_ms(written)


@pytest.mark.parametrize("written", ["-3d", "-PT1H", "-1ms", -1, -0.5, datetime.timedelta(microseconds=-1)])
def test_negative_durations_are_refused(written: Any) -> None:
    with pytest.raises(Rejected, match="cannot be negative"):
        duration_ms(written)


@pytest.mark.parametrize("written", ["36525d 1ms", "99999999w", 10**10, 1e300, datetime.timedelta.max])
def test_durations_beyond_a_hundred_years_are_refused(written: Any) -> None:
    with pytest.raises(Rejected, match="longer than a hundred years; check its unit"):
        duration_ms(written)


def test_an_integer_of_any_length_is_refused_without_writing_it_out() -> None:
    with pytest.raises(Rejected, match="longer than a hundred years"):
        duration_ms(10**5000)
    with pytest.raises(Rejected, match="cannot be negative"):
        duration_ms(-(10**5000))


@given(st.text() | st.text("0123456789.,wdhmsPTYM -"))
def test_any_text_is_a_duration_or_refused(text: str) -> None:
    with contextlib.suppress(Rejected):
        assert 0 <= duration_ms(text) <= LONGEST_MS


@given(*[st.integers(0, 99)] * 6)
def test_both_notations_and_timedelta_agree(
    weeks: int, days: int, hours: int, minutes: int, seconds: int, millis: int
) -> None:
    span = datetime.timedelta(
        weeks=weeks, days=days, hours=hours, minutes=minutes, seconds=seconds, milliseconds=millis
    )

    assert duration_ms(f"{weeks}w{days}d{hours}h{minutes}m{seconds}s{millis}ms") == duration_ms(span)
    assert duration_ms(f"P{weeks}W{days}DT{hours}H{minutes}M{seconds}.{millis:03}S") == duration_ms(span)
    assert duration_ms(span.total_seconds()) == duration_ms(span)


@pytest.mark.parametrize(
    ("length_ms", "shown"),
    [
        (0, "0 ms"),
        (250, "250 ms"),
        (1000, "1s"),
        (1500, "1.5s"),
        (59_999, "59.999s"),
        (60_000, "1m"),
        (90_999, "1m 30s"),
        (3 * DAY_MS + 4 * HOUR_MS, "3d 4h"),
        (DAY_MS + 59 * MINUTE_MS, "1d"),
        (400 * DAY_MS, "400d"),
        (-90_000, "-1m 30s"),
        (-1, "-1 ms"),
    ],
)
def test_a_duration_is_shown_in_at_most_two_units(length_ms: int, shown: str) -> None:
    assert show_duration(length_ms) == shown


@given(st.integers(0, LONGEST_MS))
def test_a_shown_duration_can_be_read_and_is_never_longer(length_ms: int) -> None:
    read_ms = duration_ms(show_duration(length_ms))

    assert length_ms * 24 / 25 <= read_ms <= length_ms
    assert duration_ms(show_duration(read_ms)) == read_ms


@pytest.mark.parametrize(
    ("written", "expected_ms"),
    [
        ("1970-01-01T00:00:00Z", 0),
        ("1970-01-01T01:00:00+01:00", 0),
        ("1969-12-31 23:59:59.999Z", -1),
        ("2026-11-18T09:49:51Z", 1_794_995_391_000),
        (" 2026-11-18 09:49:51.1239Z ", 1_794_995_391_123),
        (datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC), 0),
        (datetime.datetime(2026, 7, 1, 2, tzinfo=SUMMER_IN_BERLIN), 1_782_864_000_000),
    ],
)
def test_a_moment_with_a_zone_is_read_as_utc(written: Any, expected_ms: int) -> None:
    assert moment_ms(written) == expected_ms


@pytest.mark.parametrize("written", ["2026-11-18T09:49:51", "2026-11-18", datetime.datetime(2026, 11, 18)])  # noqa: DTZ001
def test_a_moment_without_a_zone_is_refused_with_what_to_write(written: Any) -> None:
    with pytest.raises(Rejected, match='has no time zone, so it is no one moment; write "2026-11-18T09:49:51Z"'):
        moment_ms(written)


@pytest.mark.parametrize(
    "written", ["", "tomorrow", "2026-02-30T00:00:00Z", "x" * 1000, "\ud800", 0, 1.5, None, datetime.date(2026, 1, 1)]
)
def test_what_is_no_moment_is_refused_with_what_to_write(written: Any) -> None:
    with pytest.raises(Rejected, match='write "2026-11-18T09:49:51Z"'):
        moment_ms(written)


@given(st.text() | st.text("0123456789-:TZ+. W"))
def test_any_text_is_a_moment_or_refused(text: str) -> None:
    with contextlib.suppress(Rejected):
        assert isinstance(moment_ms(text), int)


@given(st.datetimes(datetime.datetime(2, 1, 1), datetime.datetime(9998, 12, 31), timezones=ZONES))  # noqa: DTZ001
def test_a_moment_is_the_same_as_datetime_and_as_text(moment: datetime.datetime) -> None:
    utc_ms = moment_ms(moment)

    assert moment_ms(moment.isoformat()) == utc_ms
    assert moment_ms(show_moment(utc_ms)) == utc_ms // 1000 * 1000


def test_a_moment_is_shown_in_utc() -> None:
    assert show_moment(1_794_995_391_999) == "2026-11-18 09:49:51Z"
    assert show_moment(-1) == "1969-12-31 23:59:59Z"
    assert show_moment(10**18) == "1000000000000000000 ms since 1970"
