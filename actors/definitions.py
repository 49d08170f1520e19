"""The graphs of all definitions that are in use, by the number of their row; each is read and compiled once."""

from __future__ import annotations

import threading
from collections.abc import Callable

from understudy.model.definition import Graph, decode_definition
from understudy.model.errors import Damaged
from understudy.model.values import digest


class Definitions:
    """Safe to use from any thread. `read` gives a definition's body, version and digest, or None."""

    def __init__(self, read: Callable[[int], tuple[str, int, str] | None]) -> None:
        self._read = read
        self._graphs: dict[int, Graph] = {}
        self._lock = threading.Lock()

    def add(self, graph: Graph) -> None:
        with self._lock:
            self._graphs.setdefault(graph.no, graph)

    def graph(self, no: int) -> Graph:
        found = self._graphs.get(no)
        if found is not None:
            return found
        row = self._read(no)
        if row is None:
            raise Damaged(f"definition {no} is not in the database; restore a backup")
        body, version, written = row
        if digest(body) != written:
            raise Damaged(f"definition {no} is not what was deployed (digest); restore a backup")
        self.add(Graph(decode_definition(body), version=version, no=no))
        return self._graphs[no]
