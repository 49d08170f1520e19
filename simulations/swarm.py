"""Which faults a seed has, and how often each strikes.

A seed draws none to eight of them, each with a rate from rare to frequent, evenly on a logarithmic scale: quiet and
violent worlds both occur, and a fault is not hidden behind louder ones. What was drawn is told, always.
"""

from __future__ import annotations

import math
from random import Random
from typing import Final

from understudy.simulations.plugins import FAULTS, Fault, Scenario

MOST_FAULTS: Final = 8
RAREST: Final = 1 / 2_000
MOST_FREQUENT: Final = 1 / 40
LIKELY: Final = 0.7


def draw_faults(random: Random, scenario: Scenario) -> list[Fault]:
    names = sorted(FAULTS) if scenario.faults is None else sorted(scenario.faults)
    names = [name for name in names if not {name, FAULTS[name].kind} & {*scenario.without}]
    count = random.randrange(0, min(MOST_FAULTS, len(names)) + 1)
    chosen = random.sample(names, count)
    chosen += [name for name in scenario.likely if name not in chosen and random.random() < LIKELY]
    return [FAULTS[name](Random(random.random()), _rate(random)) for name in chosen]


def _rate(random: Random) -> float:
    return math.exp(random.uniform(math.log(RAREST), math.log(MOST_FREQUENT)))
