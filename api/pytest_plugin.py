"""The `rehearsal` fixture, for every project that has Understudy installed. Importing this costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from understudy.rehearsal import Rehearsal


@pytest.fixture
def rehearsal(tmp_path: Path) -> Iterator[Rehearsal]:
    """A runtime of its own for each test, on a clock that the test moves, with crashes at the test's word."""
    from understudy.rehearsal import Rehearsal

    play = Rehearsal(tmp_path)
    try:
        yield play
    finally:
        play.close()
