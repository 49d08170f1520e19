"""How fast worlds are played: steps with all checkers on, and lives on the simulated disk with the whole runtime.

Both aims are absolute, because they are about one core and nothing waits for a disk; everything is measured in the
CPU time of this process, so that a busy machine counts for less.
"""

from __future__ import annotations

import time
from random import Random

from harness import figure, save, show

from understudy.actors.system import Limits
from understudy.simulations import gates
from understudy.simulations.boundaries import DiskMemory
from understudy.simulations.disk_storage import prepared_disk
from understudy.simulations.playing import silence
from understudy.simulations.scenarios.fork_and_join import FORK_AND_JOIN
from understudy.simulations.world import World
from understudy.store.connection import Settings

ROUNDS = 5
WORLDS = 60
LIVES = 150
STEPS_AIM = 20_000
LIVES_AIM = 100


def steps_in_a_second(round_number: int) -> float:
    """The cases of the gate, a part of them in each round."""
    cases = gates.gate_cases(WORLDS, first=round_number * WORLDS)
    began_s = time.process_time()
    steps = sum(gates.verdict(case).steps for case in cases)
    return steps / (time.process_time() - began_s)


def lives_in_a_second(round_number: int) -> float:
    """A runtime that dies at a drawn operation of its disk, and the next one that brings its instances back."""
    random = Random(round_number)
    memory = DiskMemory(prepared_disk(), mode="kill", random=random)
    world = World(
        round_number,
        memory=memory,
        settings=Settings(checkpoint_pages=50, cache_kib=1_024),
        limits=Limits(resident=50, idle_ms=2_000),
    )
    world.play(FORK_AND_JOIN)
    node = world.node("only")
    client = world.client("ann")
    began_s = time.process_time()
    with silence():
        for number in range(LIVES):
            memory.disk.crash_at = None
            life = node.open()
            assert life is not None
            memory.disk.crash_at = len(memory.disk.operations) + random.randrange(5, 40)
            client.start(FORK_AND_JOIN.name, f"i{number}", {"n": "1"})
            while node.life is life and world.step():
                pass
            if node.life is life:
                node.kill()
    lives = world.lives
    world.close()
    return lives / (time.process_time() - began_s)


def main() -> None:
    steps = [steps_in_a_second(number) for number in range(ROUNDS)]
    lives = [lives_in_a_second(number) for number in range(ROUNDS)]
    figures = {
        "simulated_steps_per_s": figure(steps, aim=STEPS_AIM),
        "simulated_lives_per_s": figure(lives, aim=LIVES_AIM),
    }
    show("worlds on one core, all checkers on; lives on the simulated disk", figures)
    save(figures)


if __name__ == "__main__":
    main()
