"""Deterministic simulation: every crash, every order, from one number.

What users need of it is here: `simulate` and what it gives. Names are loaded when they are first used, so that
importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.simulations.histories import History as History
    from understudy.simulations.histories import Past as Past
    from understudy.simulations.ledger import Ledger as Ledger
    from understudy.simulations.ledger import Line as Line
    from understudy.simulations.report import Failure as Failure
    from understudy.simulations.report import Report as Report
    from understudy.simulations.report import SimulationFailed as SimulationFailed
    from understudy.simulations.users import Simulation as Simulation
    from understudy.simulations.users import simulate as simulate
    from understudy.simulations.world import World as World

_HOMES = {
    "understudy.simulations.histories": "History Past",
    "understudy.simulations.ledger": "Ledger Line",
    "understudy.simulations.report": "Failure Report SimulationFailed",
    "understudy.simulations.users": "Simulation simulate",
    "understudy.simulations.world": "World",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME)  # noqa: PLE0605 - A sorted list of the names above.


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"understudy.simulations has no {name!r}; its public names are {', '.join(__all__)}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
