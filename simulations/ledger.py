"""What handlers really did to the outside world: the one thing that no crash takes back.

Each call of a handler is a line, whether its result was ever committed or not. Checkers compare the lines with history;
users' invariants read them ("never charged twice").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a handler, as the outside world saw it."""

    step: int
    at_ms: int
    node: str
    epoch: int  # Of the owner that called it.
    handler: str
    instance: str
    key: str  # The same for all attempts.
    attempt: int
    given: dict[str, Any]
    had_effect: bool  # False for a call that failed before it did anything.


class Ledger:
    """All calls, in their order."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._by_key: dict[str, list[Line]] = {}

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self._by_key.setdefault(line.key, []).append(line)

    def of(self, handler: str, *, instance: str | None = None) -> list[Line]:
        """The calls of a handler that had an effect, of one instance or of all."""
        return [
            line
            for line in self.lines
            if line.handler == handler and line.had_effect and instance in (None, line.instance)
        ]

    def under(self, key: str) -> list[Line]:
        """The calls under one key."""
        return self._by_key.get(key, [])

    def __len__(self) -> int:
        return len(self.lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)
