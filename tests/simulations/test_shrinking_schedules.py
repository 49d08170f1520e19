"""Hypothesis draws what a world does next: a schedule that fails shrinks to a short one."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from understudy.simulations import gates
from understudy.simulations.playing import play
from understudy.simulations.plugins import SCENARIOS, Fault
from understudy.simulations.schedule import Told
from understudy.simulations.world import World

CHOICES = st.lists(st.integers(min_value=0, max_value=7), max_size=200)
CRASHES = st.lists(st.integers(min_value=1, max_value=300), max_size=3)


class CrashAt(Fault):
    """The owner dies right before these steps."""

    name = "crash at"
    kind = "process"
    must = "survive"

    def __init__(self, steps: list[int]) -> None:
        self.steps = steps

    def arm(self, world: World) -> None:
        for step in self.steps:
            world.at_step(step, lambda: self._strike(world))

    def _strike(self, world: World) -> None:
        life = world.owner
        if life is not None and not world.is_settling:
            life.node.kill("crash")

    def __str__(self) -> str:
        return f"crash at {self.steps}"


def told(choices: list[int]) -> Told:
    """Take the choices one after the other, and the oldest step when there are none left."""
    left = iter(choices)
    return Told(lambda _ready: next(left, 0))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(choices=CHOICES, crashes=CRASHES)
def test_a_join_survives_every_order_and_every_crash(choices: list[int], crashes: list[int]) -> None:
    outcome = play("fork_and_join", 0, steps=300, schedule=told(choices), faults=[CrashAt(crashes)])

    assert outcome.violations == ()


def test_a_schedule_that_fails_shrinks_to_a_short_one() -> None:
    found: list[tuple[list[int], list[int]]] = []

    @settings(
        max_examples=60,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(choices=CHOICES, crashes=CRASHES)
    def nobody_dies(choices: list[int], crashes: list[int]) -> None:
        outcome = play("fork_and_join", 0, steps=120, schedule=told(choices), faults=[CrashAt(crashes)])
        if outcome.lives > 1:
            found.append((choices, crashes))
        assert outcome.lives == 1

    with pytest.raises(AssertionError):
        nobody_dies()

    choices, crashes = found[-1]
    assert choices == []
    assert crashes == [1]


def test_every_scenario_is_played_by_the_gate() -> None:
    assert {case.scenario for case in gates.gate_cases(300)} == set(SCENARIOS)
