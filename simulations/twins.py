"""Two runs of one seed that should have been the same, compared commit by commit.

The digest of a run says that something differs, not what. A diary keeps what was committed and when, so that the first
difference can be shown to whoever wrote the handler that made it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World
    from understudy.store.commit import Commit

AROUND: Final = 60  # Characters that are shown before and behind the first one that differs.
ADVICE: Final = (
    "your handlers are not deterministic: two runs of this seed differ. Time, random numbers, ids, files, threads and "
    "whatever outlives a world (a global list, a counter) are not the world's; make them fakes"
)


@attrs.frozen
class Entry:
    """One commit."""

    step: int
    instance: str
    version: int
    events: str

    @property
    def place(self) -> str:
        return f"at step {self.step}, commit {self.version} of {self.instance}"


class Diary:
    """What was committed in one run."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def of(self, begin: Callable[[World], None]) -> Callable[[World], None]:
        """The same beginning of a world, with somebody who takes notes."""

        def begin_noted(world: World) -> None:
            def note(_life: Life, commit: Commit, version: int) -> None:
                self.entries.append(Entry(world.steps, commit.id, version, commit.events))

            world.on_landed.append(note)
            begin(world)

        return begin_noted


def first_difference(one: Diary, other: Diary) -> str:
    for left, right in itertools.zip_longest(one.entries, other.entries):
        if left != right:
            return f"{ADVICE}. First {_difference(left, right)}"
    return f"{ADVICE}. Both have committed the same, in another order of calls or with other violations"


def _difference(left: Entry | None, right: Entry | None) -> str:
    if left is None or right is None:
        there = left or right
        assert there is not None
        return f"{there.place}, which only one of them has made"
    if (left.instance, left.version) != (right.instance, right.version):
        return f"{left.place}, where the other run made commit {right.version} of {right.instance}"
    if left.events == right.events:
        return f"{left.place}, which the other run made at step {right.step}"
    at = next(i for i, pair in enumerate(itertools.zip_longest(left.events, right.events)) if pair[0] != pair[1])
    begin = max(0, at - AROUND)
    return f"{left.place}: …{left.events[begin : at + AROUND]}… or …{right.events[begin : at + AROUND]}…"
