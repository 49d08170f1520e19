"""What became of the instances of a world, for invariants: read from the committed rows, and never changed by a look.

A `Past` is one instance as it stands when the world has come to rest. Each is read when it is first asked for, because
most invariants look at few of them. After the world is closed nothing more can be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from understudy.model.definition import Graph, decode_definition
from understudy.model.events import AnyEvent
from understudy.model.instance import Fault
from understudy.state import State, Waiting, state_of
from understudy.store.reads import Reads
from understudy.views import Step, left_of, path_of, steps_of, undone_of


class Past:
    """One instance: where it stands, and how it came there."""

    def __init__(self, history: History, id_: str) -> None:
        self.id = id_
        self._history = history

    @cached_property
    def state(self) -> State:
        """As `runtime.state(id)` shows it."""
        detail = self._history.reads.detail(self.id)
        return state_of(detail, self._history.graph(detail.definition))

    @cached_property
    def steps(self) -> list[Step]:
        """Its commits, as `runtime.history(id)` shows them; each prints as one line."""
        return steps_of(self._history.reads.history(self.id))

    @property
    def process(self) -> str:
        return self.state.process

    @property
    def outcome(self) -> str | None:
        """completed, failed, cancelled or terminated; None if it has not ended."""
        return self.state.outcome

    @property
    def is_ended(self) -> bool:
        return self.state.is_ended

    @property
    def is_stuck(self) -> bool:
        """Whether it waits for an operator."""
        return bool(self.state.incidents)

    @property
    def waiting(self) -> tuple[Waiting, ...]:
        """What it waits for."""
        return self.state.waiting

    @property
    def error(self) -> Fault | None:
        return self.state.error

    @property
    def result(self) -> Any:
        return self.state.result

    @property
    def variables(self) -> dict[str, Any]:
        """The last value of each; what the instance was started with is among them."""
        return self.state.variables

    @cached_property
    def path(self) -> list[str]:
        """The steps that were done, in that order; those that were undone later are still on it."""
        return path_of(self.steps)

    @cached_property
    def undone(self) -> list[str]:
        """The steps that were undone, in that order."""
        return undone_of(self.steps)

    @cached_property
    def left(self) -> list[str]:
        """The steps that were done, could have been undone, and were not, although their saga has failed."""
        return left_of(self.steps)

    @cached_property
    def events(self) -> list[AnyEvent]:
        """Everything that was committed, in its order."""
        return [event for step in self.steps for entry in step.entries for event in entry.events]

    def __str__(self) -> str:
        return str(self.state)

    def __repr__(self) -> str:
        return f"<past {self}>"


class History(Mapping[str, Past]):
    """All instances of a world by their ids, in the order in which they were started."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self._pasts = {id_: Past(self, id_) for id_ in reads.ids()}
        self._graphs: dict[int, Graph] = {}

    def of(self, process: str) -> list[Past]:
        """The instances of one process, by its name."""
        return [past for past in self.values() if past.process == process]

    def graph(self, no: int) -> Graph:
        found = self._graphs.get(no)
        if found is None:
            row = self.reads.definition(no)
            assert row is not None, f"definition {no}"
            found = self._graphs[no] = Graph(decode_definition(row[0]), version=row[1], no=no)
        return found

    def __getitem__(self, id_: str) -> Past:
        try:
            return self._pasts[id_]
        except KeyError:
            there = ", ".join(self._pasts) or "none"
            raise KeyError(f"no instance {id_!r} was started in this world; there are: {there}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._pasts)

    def __len__(self) -> int:
        return len(self._pasts)

    def __repr__(self) -> str:
        return f"<history of {', '.join(self._pasts) or 'nothing'}>"
