"""I10, and the parts of I9 and I2 that only somebody who looks on can see: who has written what, and when.

The database shows one commit for each version. Whether two were told that theirs is the one, whether one that was told
so is gone, and whether there is one that nobody wrote, is seen by comparing it with what the writers were told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from understudy.model.invariants import Violation
from understudy.simulations.checkers.evidence import Evidence, Row
from understudy.simulations.plugins import Checker, checker

if TYPE_CHECKING:
    from understudy.simulations.world import World


@checker
class OneCommitter(Checker):
    id = "I10"
    statement = "each version of an instance has one committer, whose epoch is the highest granted"

    def watch(self, world: World) -> None:
        Evidence.of(world)

    def find(self, world: World) -> Iterable[str | Violation]:
        evidence = Evidence.of(world)
        yield from self._told(evidence)
        yield from self._kept(evidence)

    def _told(self, evidence: Evidence) -> Iterator[Violation]:
        """What writers were told: each version once, upwards, and all of it is there."""
        there = {(row.instance, row.version): row.digest for row in evidence.rows}
        newest: dict[str, int] = {}
        for report in evidence.reports:
            before = newest.get(report.instance, 0)
            if report.version <= before:
                words = f"version {report.version} was committed at step {report.step}, after version {before}"
                yield Violation(self.id, words, report.instance)
            newest[report.instance] = max(before, report.version)
            if there.get((report.instance, report.version)) != report.digest:
                words = f"version {report.version}, committed at step {report.step}, is gone or another one now"
                yield Violation("I8", words, report.instance)

    def _kept(self, evidence: Evidence) -> Iterator[Violation]:
        """What is there: each version once, upwards, by the highest epoch, and written by somebody."""
        newest: dict[str, int] = {}
        last: Row | None = None
        for row in evidence.rows:
            landing = row.landing
            if row.version != newest.get(row.instance, 0) + 1:
                words = f"version {row.version} follows version {newest.get(row.instance, 0)}"
                yield Violation("I9", words, row.instance)
            newest[row.instance] = row.version
            if landing is None:
                yield Violation(self.id, f"nobody in this world has written version {row.version}", row.instance)
            elif row.epoch < landing.highest_epoch:
                words = f"epoch {row.epoch} has committed version {row.version} after {landing.highest_epoch} began"
                yield Violation(self.id, words, row.instance)
            if last is not None and (row.epoch < last.epoch or 0 < row.step < last.step):
                words = f"commit {last.seq} of epoch {last.epoch} and step {last.step} comes before commit {row.seq}"
                yield Violation("I9", f"{words} of epoch {row.epoch} and step {row.step}")
            last = row
