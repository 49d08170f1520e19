"""Durations and moments as people write them, in integer milliseconds.

A duration is "3d", "1h30m", "250ms", ISO 8601 "PT1H30M", a timedelta, or a number of seconds. A moment is an ISO date
and time with its zone, or an aware datetime, and becomes UTC. What has no one length (months, years) or no one meaning
(a time without a zone) is refused. No clock is read here: "now" always comes from outside.
"""

from __future__ import annotations

import datetime
import math
import re
from fractions import Fraction

from understudy.model.errors import Rejected

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
WEEK_MS = 7 * DAY_MS
LONGEST_MS = 36_525 * DAY_MS  # A hundred years; more is a slip in the unit.


def duration_ms(duration: str | datetime.timedelta | int | float) -> int:
    """Give a duration in milliseconds, rounded to the nearest, but never down to nothing; a bare number is seconds."""
    exact_ms: Fraction | int
    if isinstance(duration, str):
        exact_ms = _read_duration(duration.strip())
    elif isinstance(duration, datetime.timedelta):
        exact_ms = Fraction(duration // _MICROSECOND, 1000)
    elif isinstance(duration, (int, float)) and not isinstance(duration, bool):
        exact_ms = _read_seconds(duration)
    else:
        raise Rejected(f"a duration cannot be a {type(duration).__name__}; {_DURATIONS}")
    if exact_ms < 0:
        raise Rejected(f"a duration cannot be negative; {_DURATIONS}")
    if exact_ms > LONGEST_MS:
        raise Rejected("a duration cannot be longer than a hundred years; check its unit (a bare number is seconds)")
    return round(exact_ms) or (1 if exact_ms else 0)


def moment_ms(moment: str | datetime.datetime) -> int:
    """Give a moment in UTC milliseconds since 1970, cut to the millisecond."""
    if isinstance(moment, str):
        parsed = _read_moment(moment.strip())
    elif isinstance(moment, datetime.datetime):
        parsed = moment
    else:
        raise Rejected(f"a moment cannot be a {type(moment).__name__}; {_MOMENTS}")
    if parsed.utcoffset() is None:
        raise Rejected(f"{str(moment)!r} has no time zone, so it is no one moment; {_MOMENTS}")
    return (parsed - _EPOCH) // _MILLISECOND


def show_duration(length_ms: int) -> str:
    """Give a duration for people: at most two units, cut rather than rounded, readable by `duration_ms`."""
    sign, rest_ms = ("-", -length_ms) if length_ms < 0 else ("", length_ms)
    if rest_ms < SECOND_MS:
        return f"{sign}{rest_ms} ms"
    if rest_ms < MINUTE_MS:
        return f"{sign}{rest_ms / SECOND_MS:g}s"
    parts = []
    for unit, unit_ms in (("d", DAY_MS), ("h", HOUR_MS), ("m", MINUTE_MS), ("s", SECOND_MS)):
        count, rest_ms = divmod(rest_ms, unit_ms)
        parts.append(f"{count}{unit}" if count else "")
    first = next(index for index, part in enumerate(parts) if part)
    return sign + " ".join(part for part in parts[first : first + 2] if part)


def show_moment(at_ms: int) -> str:
    """Give a moment for people, in UTC, cut to the second."""
    try:
        moment = _EPOCH + datetime.timedelta(milliseconds=at_ms)
    except OverflowError:
        return f"{at_ms} ms since 1970"  # Outside the years 1 to 9999; whoever prints a report still gets one.
    return f"{moment.replace(tzinfo=None).isoformat(' ', 'seconds')}Z"


# --- reading ----------------------------------------------------------------------------------------------------------

_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MILLISECOND = datetime.timedelta(milliseconds=1)
_MICROSECOND = datetime.timedelta(microseconds=1)
_LIMIT_TEXT = 100  # Characters.

_DURATIONS = 'write "3d", "1h30m", "250ms", "PT1H30M", a timedelta, or a number of seconds'
_MOMENTS = 'write "2026-11-18T09:49:51Z" or "2026-11-18T10:49:51+01:00", or give a datetime with a tzinfo'

_UNITS_MS = (WEEK_MS, DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS, 1)
_COMPACT = re.compile("".join(rf"(?:([0-9]+(?:\.[0-9]+)?) *{unit} *)?" for unit in ("w", "d", "h", "m", "s", "ms")))
_ISO = re.compile("P(?:{n}W)?(?:{n}D)?(?:T(?=.)(?:{n}H)?(?:{n}M)?(?:{n}S)?)?".format(n=r"([0-9]+(?:[.,][0-9]+)?)"))


def _read_duration(text: str) -> Fraction | int:
    if len(text) > _LIMIT_TEXT:
        raise Rejected(f"a text of {len(text):,} characters is no duration; {_DURATIONS}")
    sign, unsigned = (-1, text[1:]) if text.startswith("-") else (1, text)
    match = _ISO.fullmatch(unsigned) or _COMPACT.fullmatch(unsigned)
    if match is None or not any(match.groups()):
        raise Rejected(_why_unreadable(text))
    parts = zip(match.groups(), _UNITS_MS, strict=False)  # ISO has no milliseconds of their own.
    return sign * sum(_exact(number) * unit_ms for number, unit_ms in parts if number)


def _exact(number: str) -> Fraction | int:
    return int(number) if number.isdigit() else Fraction(number.replace(",", "."))


def _why_unreadable(text: str) -> str:
    if re.match(r"P[^T]*[YM]", text):
        return f"{text!r} counts years or months, which differ in length; write days or weeks, such as P30D"
    if re.fullmatch(r"[0-9.]+", text):
        return f"{text!r} has no unit; write {text}s if seconds are meant"
    return f"{text!r} is no duration; {_DURATIONS} (units are w d h m s ms, in this order)"


def _read_seconds(seconds: int | float) -> Fraction | int:
    if isinstance(seconds, int):
        return seconds * SECOND_MS
    if not math.isfinite(seconds):
        raise Rejected(f"{seconds} is no duration; {_DURATIONS}")
    # The shortest text of a float is what its author wrote: 0.1 is 100 ms, not a little more.
    return Fraction(float.__repr__(seconds)) * SECOND_MS


def _read_moment(text: str) -> datetime.datetime:
    try:
        return datetime.datetime.fromisoformat(text[:_LIMIT_TEXT])
    except ValueError as error:
        raise Rejected(f"{text[:_LIMIT_TEXT]!r} is no moment ({error}); {_MOMENTS}") from None
