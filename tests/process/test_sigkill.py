"""A service is killed again and again: whatever it has acknowledged is there, and in the end everything is done."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.process.conftest import Histories, World

LIVES = 22
PARCELS = 250  # Started in the first life; the others start more.


def test_nothing_acknowledged_is_lost_however_often_the_service_is_killed(
    world: World, eventually: Callable[..., Any]
) -> None:
    chance = random.Random(7)
    started: set[str] = set()
    paid: set[str] = set()

    for life in range(LIVES):
        child = world.victim(seed=life)
        if life == 0:
            eventually(lambda child=child: len(child.acknowledged("start")) >= PARCELS, "the first parcels")
        time.sleep(chance.uniform(0, 0.06))
        child.kill()
        started.update(child.acknowledged("start"))
        paid.update(child.acknowledged("send"))

        histories = world.audit()
        assert started <= histories.keys()
        assert all(_times(histories, id, under=f"{id}/paid") == 1 for id in paid)

    finisher = world.finisher()
    assert finisher.wait() == 0

    histories = world.audit()
    assert set(finisher.acknowledged("end")) == histories.keys()
    assert {result["result"] for result in finisher.acks if result["ack"] == "end"} == {
        f"shipped with receipt {number}" for number in range(len(histories))
    }
    assert _counted(world) == {effect: len(histories) for effect in ("charge", "ship")}


def _times(histories: Histories, id: str, *, under: str) -> int:
    return sum(entry.key == under for entry in histories[id])


def _counted(world: World) -> dict[str, int]:
    """How often each effect counts for somebody who counts each key once, as a bank does."""
    runs = world.effects()
    counted = set(runs)
    assert len(counted) <= len(runs)
    assert all(times == 1 for times in Counter((effect, id) for effect, _key, id in counted).values())
    return dict(Counter(effect for effect, _key, _id in counted))
