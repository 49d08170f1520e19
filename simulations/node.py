"""A node of a world: one process on the database, with as many lives as it is given.

A life is the real thing from the writer upwards (`System`, `Service`, `Reads`), on a stage of its own. To kill it is
to drop that stage: whatever was ready never happens. A paused life keeps everything and takes no step, as a stopped
process does, and wakes up believing that it still owns the file.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import attrs

from understudy.actors.handlers import Context, Handler
from understudy.actors.stepping import Stage
from understudy.actors.system import Limits, Ports, System
from understudy.model.errors import Closed, UnderstudyError
from understudy.opening import bind
from understudy.service import Service
from understudy.simulations.clocks import NodeClock
from understudy.simulations.ledger import Line
from understudy.simulations.memory import Died
from understudy.simulations.pool import WorldPool
from understudy.simulations.script import PLAIN, Act, Conduct, Mishap
from understudy.store.connection import Settings, Storage
from understudy.store.reads import Readers, Reads
from understudy.store.writer import Change, Operation, Writer, Written

if TYPE_CHECKING:
    from understudy.simulations.world import World

PATH: Final = "world.db"
_CONTEXT: Final = "the context"  # Under which a handler that takes no context is told its key all the same.


class WatchedWriter(Writer):
    """The writer, and the world looks on."""

    def __init__(self, life: Life, settings: Settings, storage: Storage) -> None:
        self._life = life
        super().__init__(PATH, settings, storage=storage)

    def take_over(self, holder: str, *, after_epoch: int | None = None) -> int:
        epoch = super().take_over(holder, after_epoch=after_epoch)
        self._life.world.granted(epoch)
        return epoch

    def reopen(self) -> None:
        super().reopen()
        self._life.world.probe("degraded_and_reopened")

    def write(self, changes: Sequence[Change], *, now_ms: int) -> Written:
        self._life.world.writing(self._life, changes)
        written = super().write(changes, now_ms=now_ms)
        self._life.world.landed(self._life, changes, written)
        return written

    def run(self, operation: Operation) -> Any:
        self._life.world.writing(self._life, (operation,))
        answer = super().run(operation)
        self._life.world.ran(self._life, operation)
        return answer


class Life:
    """One process, from its start to its end."""

    def __init__(self, node: Node, storage: Any, *, after_epoch: int | None) -> None:
        world = self.world = node.world
        self.node = node
        self.name = f"{node.name}.{node.lives}"
        self.storage = storage
        self.is_dead = False
        self.act: Act = PLAIN  # Of the handler that was called last.
        self.stage = Stage(choose=lambda _ready: 0, trace=functools.partial(world.note, self))
        self.clock = NodeClock(world.time, skew_ms=node.skew_ms)
        self.pool = WorldPool(self)
        self.writer = WatchedWriter(self, node.settings, storage)
        self.epoch = self.writer.take_over(self.name, after_epoch=after_epoch)
        self.handlers = self._seated()
        self.system = System(self.writer, self.handlers, self._ports(), node.limits)
        self._readers = Readers(PATH, lambda: storage.reader(PATH))
        self.reads = Reads(self._readers)
        self.service = Service(self.system, self.reads)

    def _ports(self) -> Ports:
        stage = self.stage
        return Ports(
            clock=self.clock,
            instances=stage.dispatcher("instances"),
            persistence=stage.dispatcher("persistence"),
            reading=stage.dispatcher("reading"),
            pool=self.pool,
            new_id=self.world.new_id,
            driver=stage,
            monotonic_s=self.clock.monotonic_s if self.node.beats else _never_replaced,
        )

    # --- what the pool needs ---

    def post(self, job: Callable[[], object], *, label: str) -> None:
        self.stage.post(job, label=label)

    def later(self, delay_ms: int, job: Callable[[], object], *, label: str) -> None:
        self.world.after(delay_ms, lambda: None if self.is_dead else self.stage.post(job, label=label))

    def overrun_after(self, delay_ms: int, job: Callable[[], object]) -> None:
        """When so much time has passed, at once: whatever comes later comes too late. A stopped process is late too."""

        def now() -> None:
            if self.node.is_paused:
                self.stage.post(job, label="overrun")
            elif not self.is_dead:
                job()

        self.world.after(delay_ms, now)

    # --- what a subscriber needs of its node ---

    @property
    def is_closed(self) -> bool:
        return self.is_dead

    def check(self) -> None:
        if self.is_dead:
            raise Closed()

    def listen(self, changed: Callable[[], None]) -> None:
        """A life has one part, and it ends with it."""

    # --- handlers ---

    def _seated(self) -> dict[str, Handler]:
        bound = bind(list(self.world.cast.values()))
        return {name: self.seat(name, handler) for name, handler in bound.handlers.items()}

    def seat(self, name: str, handler: Handler) -> Handler:
        return attrs.evolve(
            handler, function=self._played(name, handler), context=handler.context or _CONTEXT, is_async=False
        )

    def _played(self, name: str, handler: Handler) -> Callable[..., Any]:
        ours = (handler.context or _CONTEXT, handler.connection)

        def play(**given: Any) -> Any:
            context: Context = given[ours[0]] if handler.context else given.pop(_CONTEXT)
            act = self.act = self.world.script.act(name, context.key, context.attempt)
            has_effect = act.conduct is not Conduct.FAIL_FIRST
            line = Line(
                step=self.world.steps,
                at_ms=self.world.time.now_ms,
                node=self.name,
                epoch=self.epoch,
                handler=name,
                instance=context.instance,
                key=context.key,
                attempt=context.attempt,
                given={key: value for key, value in given.items() if key not in ours},
                had_effect=has_effect,
            )
            self.world.ledger.add(line)
            for listener in self.world.on_called:
                listener(self, line, act)
            if not has_effect:
                raise Mishap(f"{name} failed before it did anything")
            try:
                value = _called(self.world.stand_ins.get(name), handler.function, given)
            except BaseException:
                self.world.raised[context.key, context.attempt] = None
                raise
            return _done(act, name, value)

        return play

    # --- the end ---

    def die(self) -> None:
        """Nothing in memory survives; the database holds what was committed."""
        self.is_dead = True
        self.clock.stop()
        self.system.kill()
        self._readers.close()
        self.storage.die()

    def close(self) -> None:
        """End in good order, unless it dies meanwhile."""
        self.system.stop(timeout_s=0)
        if self.is_dead:
            self.die()
        self.is_dead = True
        self._readers.close()


class Node:
    """A place where a process runs, dies and is started again."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        limits: Limits,
        settings: Settings,
        skew_ms: int = 0,
        beats: bool = False,
    ) -> None:
        self.world = world
        self.name = name
        self.limits = limits
        self.settings = settings
        self.skew_ms = skew_ms
        self.beats = beats  # Whether it shows signs of life to rivals; alone it needs not.
        self.lives = 0
        self.life: Life | None = None
        self.is_paused = False

    @property
    def is_up(self) -> bool:
        return self.life is not None and not self.is_paused

    def open(self, *, after_epoch: int | None = None, go_on: bool = True) -> Life | None:
        """Start a process; None if it died, or gave up, before it served. Without `go_on` it only takes commands."""
        assert self.life is None, f"{self.name} is open"
        self.lives += 1
        storage = self.world.new_storage()
        try:
            life = Life(self, storage, after_epoch=after_epoch)
        except (UnderstudyError, Died) as error:
            storage.die()
            self.world.tell(self.name, "world", "crash", f"could not open: {error or 'it died'}")
            return None
        self.life = life
        self.world.tell(self.name, "world", "open", f"life {self.lives}, epoch {life.epoch}")
        life.system.start(go_on=go_on)
        self.world.opened(life)
        return life

    def kill(self, why: str = "killed") -> None:
        life, self.life = self.life, None
        self.is_paused = False
        if life is not None:
            self.world.tell(self.name, "world", "crash", why)
            life.die()
            self.world.lost(life)

    def pause(self) -> None:
        if self.is_up:
            self.is_paused = True
            self.world.tell(self.name, "world", "pause", "stopped")

    def resume(self) -> None:
        if self.is_paused:
            self.is_paused = False
            self.world.tell(self.name, "world", "resume", "goes on")

    def close(self) -> None:
        life = self.life
        if life is not None:
            self.world.tell(self.name, "world", "close", "closed in good order")
            life.close()
            self.life = None  # Only now: it may die while it closes.
            self.world.lost(life)


def _called(stand_in: Callable[..., Any] | None, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    if stand_in is not None:
        names = inspect.signature(stand_in).parameters
        given = {name: value for name, value in given.items() if name in names}
    value = (stand_in or function)(**given)
    return asyncio.run(_awaited(value)) if inspect.iscoroutine(value) else value


async def _awaited(value: Any) -> Any:
    return await value


def _done(act: Act, name: str, value: Any) -> Any:
    """What the handler gives after its effect."""
    conduct = act.conduct
    if conduct is Conduct.FAIL_AFTER:
        raise Mishap(f"{name} failed after it had done its work")
    if conduct is Conduct.EXIT:
        raise SystemExit(f"{name} wants to end the process")
    if conduct is Conduct.INTERRUPT:
        raise KeyboardInterrupt
    if conduct is Conduct.UNSERIALIZABLE:
        return object()
    if conduct is Conduct.TOO_LARGE:
        return "x" * 2_000_000
    return value


def _never_replaced() -> float:
    return 0.0
