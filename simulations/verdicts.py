"""What a user's invariant says: nothing, a text, several, or an assertion that failed.

Anything else that it raises or returns is a mistake in the invariant, not a finding about the process, and is never
made one: it comes out as it is.
"""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Final


def verdicts(name: str, ask: Callable[[], object]) -> Iterator[str]:
    """What is wrong, in words."""
    try:
        yield from list(_words(name, ask()))
    except AssertionError as error:
        yield _message(str(error)) or _asserted(error)


def _words(name: str, answer: object) -> Iterator[str]:
    if answer is None or answer is True or answer == "":
        return
    if answer is False:
        yield "it does not hold"
    elif isinstance(answer, str):
        yield answer
    elif isinstance(answer, Iterable) and not isinstance(answer, bytes):
        for each in answer:
            yield from _words(name, each)
    else:
        raise TypeError(
            f"the invariant {name} gave {answer!r}; one gives None or True when it holds, and else a text or False, "
            "or it asserts"
        )


def _message(text: str) -> str:
    """On one line. pytest adds how it came to it, with addresses that are others in each run."""
    said, _, how = text.partition("\nassert ")
    return _ADDRESS.sub("0x…", " ".join((said or how).split()))


_ADDRESS: Final = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def _asserted(error: AssertionError) -> str:
    """A plain `assert` has no words but its own source."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = frame.line or linecache.getline(frame.filename, frame.lineno or 0).strip()
    return line or f"an assertion failed at {frame.filename}:{frame.lineno}"
