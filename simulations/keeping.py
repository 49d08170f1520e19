"""Whoever starts processes again when they have died, as an init system does; and a rival that waits to take over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from understudy.store.ownership import HungDetector

if TYPE_CHECKING:
    from understudy.simulations.node import Life, Node
    from understudy.simulations.world import World

PAUSE_MS: Final = (1, 2_000)  # Between a death and the next life.
LOOKS_IN_A_LEASE: Final = 4
LEASES_TO_SETTLE: Final = 20


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
    """Keeps a node that shares the database with others.

    Its node takes over when nobody is there, or when the owner's beat stands still for a lease; as the owner it beats,
    and once it is fenced it steps down. When the world settles it goes on for some time, and then leaves all as it is.
    """

    def __init__(self, world: World, node: Node) -> None:
        self._world = world
        self._node = node
        self._lease_ms = node.limits.lease_ms
        self._interval_ms = max(1, self._lease_ms // LOOKS_IN_A_LEASE)
        self._detector = HungDetector(lease_s=self._lease_ms / 1_000)
        self._end_ms: int | None = None
        world.on_opened.append(self._opened)
        world.on_settle.append(self._settle)
        self._look()

    def _settle(self) -> None:
        self._end_ms = self._world.time.now_ms + LEASES_TO_SETTLE * self._lease_ms

    @property
    def _is_over(self) -> bool:
        return self._end_ms is not None and self._world.time.now_ms > self._end_ms

    def _look(self) -> None:
        world = self._world
        if self._node.life is None:
            epoch, beat = world.peek("SELECT epoch, beat FROM owner WHERE partition = 0")[0]
            is_owned = any(node.life is not None for node in world.nodes)
            is_hung = self._detector.observe(epoch=epoch, beat=beat, now_s=world.time.now_ms / 1_000)
            if (is_hung or not is_owned) and self._node.open(after_epoch=epoch) is not None and is_owned:
                world.probe("took_over_from_a_hung_owner")
        if not self._is_over:
            world.after(self._interval_ms, self._look)

    def _opened(self, life: Life) -> None:
        if life.node is self._node:
            life.system.lost = lambda _reason: self._world.after(1, lambda: self._step_down(life))
            self._beat_later(life)

    def _beat_later(self, life: Life) -> None:
        if life.node.beats and not life.is_dead and not self._is_over:
            life.later(self._interval_ms, lambda: self._beat(life), label="beat")

    def _beat(self, life: Life) -> None:
        if life.system.services.lost is None:
            life.system.beat()
            self._beat_later(life)

    def _step_down(self, life: Life) -> None:
        """As a process does that finds out that it was replaced: it closes, and watches from then on."""
        if self._node.life is not life:
            return
        if self._node.is_paused:
            self._world.after(self._interval_ms, lambda: self._step_down(life))
        else:
            self._node.close()


class Pauses:
    """Stops the owner's process again and again, for less than a lease or for more, and lets it go on."""

    def __init__(self, world: World, *, between_ms: tuple[int, int], longest_ms: int) -> None:
        self._world = world
        self._random = world.stream("pauses")
        self._between_ms = between_ms
        self._longest_ms = longest_ms
        self._later()

    def _later(self) -> None:
        self._world.after(self._random.randrange(*self._between_ms), self._pause)

    def _pause(self) -> None:
        life = self._world.owner
        if self._world.is_settling:
            return
        if life is not None:
            self._world.fault("pause", node=life.name)
            life.node.pause()
            self._world.after(self._random.randrange(1, self._longest_ms), life.node.resume)
        self._later()
