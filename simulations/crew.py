"""Cases played one after the other, or by several processes at once; the results come in the order of the cases.

The order does not depend on who is faster, so that a report is the same with any number of jobs. Processes are forked:
the functions of a simulation, lambdas among them, need not be importable.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from understudy.model.errors import Rejected
from understudy.simulations.shrinking import Case, Played

Play = Callable[[Case], Played]


class Crew:
    """Plays cases; iterate over it for what became of them."""

    def __init__(self, play: Play, cases: Sequence[Case], jobs: int) -> None:
        self._play = play
        self._cases = cases
        self._jobs = min(jobs, len(cases))
        self._workers: list[Any] = []
        if jobs > 1 and "fork" not in multiprocessing.get_all_start_methods():
            raise Rejected("jobs needs processes that can be forked, which this system has not; leave jobs out")

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.join()

    def __iter__(self) -> Iterator[Played]:
        if self._jobs == 1:
            return map(self._play, self._cases)
        return self._at_once()

    def _at_once(self) -> Iterator[Played]:
        context = multiprocessing.get_context("fork")
        pipes: list[Connection] = []
        for number in range(self._jobs):
            reading, writing = context.Pipe(duplex=False)
            worker = context.Process(target=_work, args=(self._play, self._cases[number :: self._jobs], writing))
            worker.start()
            writing.close()
            self._workers.append(worker)
            pipes.append(reading)
        for number in range(len(self._cases)):
            try:
                result = pipes[number % self._jobs].recv()
            except EOFError:
                seed = self._cases[number].seed
                raise RuntimeError(f"a process that plays worlds has ended by itself, at seed {seed}") from None
            if isinstance(result, BaseException):
                raise result
            yield result


def _work(play: Play, cases: Sequence[Case], results: Connection) -> None:
    try:
        for case in cases:
            results.send(play(case))
    except KeyboardInterrupt:
        return
    except Exception as error:
        results.send(_sendable(error))


def _sendable(error: Exception) -> Exception:
    """What cannot be sent is told in words."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        notes = getattr(error, "__notes__", [])
        return RuntimeError("; ".join([f"{type(error).__name__}: {error}", *notes]))
    return error
