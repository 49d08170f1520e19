"""Whoever starts processes again when they have died, as an init system does; and a rival that waits to take over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from understudy.store.ownership import HungDetector

if TYPE_CHECKING:
    from understudy.simulations.node import Life, Node
    from understudy.simulations.world import World

PAUSE_MS: Final = (1, 2_000)  # Between a death and the next life.
LOOKS_IN_A_LEASE: Final = 4


class Keeper:
    """Opens nodes, and opens them again."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._random = world.stream("keeper")
        self._wanted: list[Node] = []
        world.on_lost.append(self._lost)
        world.on_settle.append(self._open_all)

    def keep(self, node: Node) -> None:
        """Open it now, and whenever it is down."""
        self._wanted.append(node)
        self._open(node)

    def _lost(self, life: Life) -> None:
        if life.node in self._wanted:
            self._world.after(self._random.randrange(*PAUSE_MS), lambda: self._open(life.node))

    def _open(self, node: Node) -> None:
        if node.life is None and node.open() is None:
            self._world.after(self._random.randrange(*PAUSE_MS), lambda: self._open(node))

    def _open_all(self) -> None:
        for node in self._wanted:
            self._open(node)


class Rival:
    """A node that watches the owner's beat and takes over when it stands still, or when there is no owner."""

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._lease_ms = node.limits.lease_ms
        self._detector = HungDetector(lease_s=self._lease_ms / 1_000)
        self._look()
        world.on_opened.append(self._beat)

    def _look(self) -> None:
        world = self._world
        if self._node.life is None:
            epoch, beat = world.peek("SELECT epoch, beat FROM owner WHERE partition = 0")[0]
            owned = any(node.life is not None and node is not self._node for node in world.nodes)
            is_hung = self._detector.observe(epoch=epoch, beat=beat, now_s=world.time.now_ms / 1_000)
            if not owned or is_hung:
                if owned:
                    world.probe("took_over_from_a_hung_owner")
                self._node.open(after_epoch=epoch)
        world.after(self._lease_ms // LOOKS_IN_A_LEASE, self._look)

    def _beat(self, life: Life) -> None:
        if life.is_dead:
            return
        if life.node.beats:
            interval_ms = life.node.limits.lease_ms // LOOKS_IN_A_LEASE
            life.clock.alarm("beat", life.clock.now_ms() + interval_ms, lambda: self._beaten(life))

    def _beaten(self, life: Life) -> None:
        if life.system.services.lost is None:
            life.system.beat()
            self._beat(life)
