"""The world's one time, and the wall clocks that nodes have of it: each may be wrong by its own amount, and jump.

Time passes only when the world lets it. A node's alarms are set by its own wall clock, as in service; the monotonic
clock is the world's, because no jump of a wall clock moves it. Nothing here rings by itself.
"""

from __future__ import annotations

from understudy.actors.clock import Alarms, Ring

START_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z: every world begins at the same moment.


class Time:
    """How late it really is."""

    __slots__ = ("now_ms",)

    def __init__(self, now_ms: int = START_MS) -> None:
        self.now_ms = now_ms


class NodeClock:
    """The clock of one life of a node."""

    def __init__(self, time: Time, *, skew_ms: int = 0) -> None:
        self._time = time
        self._skew_ms = skew_ms
        self._alarms = Alarms()
        self._delays = Alarms()

    def now_ms(self) -> int:
        return self._time.now_ms + self._skew_ms

    def monotonic_s(self) -> float:
        return self._time.now_ms / 1_000

    def alarm(self, name: str, due_ms: int | None, ring: Ring) -> None:
        self._alarms.set(name, due_ms, ring)

    def after(self, name: str, delay_ms: int | None, ring: Ring) -> None:
        self._delays.set(name, None if delay_ms is None else self._time.now_ms + delay_ms, ring)

    def start(self) -> None:
        """Nothing to do: the world rings."""

    def stop(self) -> None:
        self._alarms = Alarms()
        self._delays = Alarms()

    # --- for the world ---

    @property
    def skew_ms(self) -> int:
        return self._skew_ms

    def jump(self, ms: int) -> None:
        """Set the wall clock forward or back."""
        self._skew_ms += ms

    def next_due_ms(self) -> int | None:
        """When the next alarm rings, in the world's time; one that is overdue rings now."""
        due_ms, delayed_ms = self._alarms.next_due_ms(), self._delays.next_due_ms()
        due = [None if due_ms is None else max(due_ms - self._skew_ms, self._time.now_ms), delayed_ms]
        return min((moment_ms for moment_ms in due if moment_ms is not None), default=None)

    def take_due(self) -> Ring | None:
        return self._alarms.take_due(self.now_ms()) or self._delays.take_due(self._time.now_ms)
