"""What every commit must pass: many seeds twice, every seed that ever failed, every write boundary of two scenarios."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from understudy.simulations import boundaries, gates

CORPUS = Path(__file__).with_name("corpus.json")
SEEDS = 300


class Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A seed that once failed, and what it had found."""

    found: str
    scenario: str
    seed: int
    steps: int | None = None


def corpus() -> list[Found]:
    return msgspec.json.decode(CORPUS.read_bytes(), type=list[Found])


@pytest.mark.slow
def test_three_hundred_seeds_hold_and_each_gives_the_same_trace_twice() -> None:
    tally, problems = gates.twice(gates.gate_cases(SEEDS))

    assert problems == []
    assert tally.worlds == SEEDS
    assert tally.steps >= SEEDS * gates.STEPS


@pytest.mark.parametrize("case", corpus(), ids=lambda case: f"{case.scenario}-{case.seed}")
def test_no_seed_that_ever_failed_fails_again(case: Found) -> None:
    verdict = gates.verdict(gates.Case(case.scenario, case.seed, case.steps))

    assert verdict.violations == [], case.found


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["fork_and_join", "saga_failures"])
def test_a_death_at_any_write_boundary_loses_nothing(scenario: str) -> None:
    report = boundaries.enumerate_boundaries(scenario)

    assert report.violations == ()
    assert report.deaths >= report.points == 2 * report.boundaries


def test_a_relaxed_database_keeps_at_a_kill_what_it_may_lose_at_a_power_cut() -> None:
    killed = boundaries.enumerate_boundaries("mixed", durability="relaxed", modes=["kill"], stride=11)
    cut = boundaries.enumerate_boundaries("mixed", durability="relaxed", modes=["power"], stride=11)

    assert killed.violations == cut.violations == ()
    assert killed.lost == 0
    assert cut.lost > 0
