"""The fixtures `rehearsal` and `simulation`, for every project that has Understudy installed. Importing this costs
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.rehearsal import Rehearsal
    from understudy.simulations.report import Report

MARKER = (
    "simulation(seeds=200, steps=2000, faults=None, jobs=1, ...): "
    "what the `simulation` fixture gives to `simulate` where the test gives nothing"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("understudy")
    group.addoption(
        "--simulation-seeds",
        type=int,
        metavar="N",
        help="how many seeds each simulation plays, whatever its test says; one that names its seeds keeps them",
    )
    group.addoption("--simulation-jobs", type=int, metavar="N", help="by how many processes at once")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    """A runtime of its own for each test, on a clock that the test moves, with crashes at the test's word."""
    from understudy.rehearsal import Rehearsal

    play = Rehearsal(tmp_path)
    try:
        yield play
    finally:
        play.close()


@pytest.fixture
def simulation(request: pytest.FixtureRequest) -> Callable[..., Report]:
    """`simulate`, with what the test's marker says; the test fails with the transcript of the shortest failure."""
    given: dict[str, Any] = {}
    for marker in reversed(list(request.node.iter_markers("simulation"))):  # The closest one is the last word.
        if marker.args:
            raise pytest.UsageError(f"write @pytest.mark.simulation(seeds={marker.args[0]!r}): its arguments are named")
        given.update(marker.kwargs)
    option = request.config.getoption

    def run(*processes: Any, **arguments: Any) -> Report:
        __tracebackhide__ = True
        from understudy.simulations.users import SEEDS, simulate

        wanted = {**given, **arguments}
        if option("--simulation-seeds") is not None and isinstance(wanted.get("seeds", SEEDS), int):
            wanted["seeds"] = option("--simulation-seeds")
        if option("--simulation-jobs") is not None:
            wanted["jobs"] = option("--simulation-jobs")
        report = simulate(*processes, **wanted)
        report.raise_if_failed()
        return report

    return run
