"""A subscriber in a world: it follows history in each life of each node, as `Runtime.subscribe` does, without a thread.

All that delivers and holds back is the real `Subscription`. Here is only what its thread does: it is woken by a commit
or by a held delivery that is due, hands over one page in one step, and goes on when the cursor is stored. Between the
two a crash delivers the page again. What was delivered, to whomever, in whichever life, is kept as evidence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.actors.promise import Promise
from understudy.model.errors import UnderstudyError
from understudy.requests import Duration, seconds
from understudy.simulations.memory import Died
from understudy.simulations.script import Mishap
from understudy.store.operations import MoveCursor
from understudy.subscriptions import LEAST_PAUSE_S, MOVE_S, Change, Subscription

if TYPE_CHECKING:
    from understudy.simulations.node import Life
    from understudy.simulations.world import World


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a subscriber."""

    step: int
    at_ms: int
    life: str
    seq: int
    instance: str
    n: int
    is_first: bool  # Nobody has taken this one before.
    is_taken: bool  # False: the subscriber has raised.


class Subscriber:
    """Somebody who wants to know everything, under one name, wherever the database is owned.

    `receive` may raise. `failing` is how likely a delivery fails by itself, until the world settles; what is drawn for
    the n-th try of a commit is the same under every schedule.
    """

    def __init__(
        self,
        world: World,
        name: str,
        receive: Callable[[Change], object] | None = None,
        *,
        tries: int = 5,
        backoff: Duration = "1s",
        from_start: bool = True,
        failing: float = 0.0,
    ) -> None:
        self.world = world
        self.name = name
        self.tries = tries
        self.backoff_s = seconds(backoff) or 0.0
        self.from_start = from_start
        self.failing = failing
        self.begin: int | None = None  # The place in the sequence behind which it began.
        self.deliveries: list[Delivery] = []
        self._receive = receive
        self._taken: set[int] = set()
        self._tried: dict[int, int] = {}
        world.subscribers.append(self)
        world.on_opened.append(self._opened)
        for life in world.all_lives():
            self._opened(life)

    def _opened(self, life: Life) -> None:
        if not life.is_dead:
            _Follower(self, life)

    def take(self, life: Life, change: Change) -> None:
        """What each life calls with a commit."""
        is_taken = False
        try:
            self._maybe_fail(change.seq)
            if self._receive is not None:
                self._receive(change)
            is_taken = True
        finally:
            self._note(life, change, is_taken=is_taken)

    def _maybe_fail(self, seq: int) -> None:
        tried = self._tried[seq] = self._tried.get(seq, 0) + 1
        if not self.failing or self.world.is_settling:
            return
        if Random(f"{self.world.seed}/subscriber {self.name}/{seq}/{tried}").random() < self.failing:
            self.world.fault("subscriber fails", f"{self.name} on commit {seq}")
            raise Mishap(f"{self.name} does not take commit {seq}")

    def _note(self, life: Life, change: Change, *, is_taken: bool) -> None:
        self.deliveries.append(
            Delivery(
                step=self.world.steps,
                at_ms=self.world.time.now_ms,
                life=life.name,
                seq=change.seq,
                instance=change.instance,
                n=change.n,
                is_first=change.seq not in self._taken,
                is_taken=is_taken,
            )
        )
        if is_taken:
            self._taken.add(change.seq)


class _Follower(Subscription):
    """A subscriber in one life."""

    def __init__(self, subscriber: Subscriber, life: Life) -> None:
        self.name = subscriber.name
        self.cursor = 0
        self._node: Any = life  # It has all that a follower needs of a node.
        self._receive = partial(subscriber.take, life)
        self._tries = subscriber.tries
        self._backoff_s = subscriber.backoff_s
        self._closed = False
        self._subscriber = subscriber
        self._life = life
        self._is_posted = False
        self._is_woken = False  # By a commit, while the cursor is being stored.
        self._moving: MoveCursor | None = None  # That is being stored.
        self._is_lost = True  # Where it has come to is to be read anew.
        self._post(self._subscribe)

    def _post(self, job: Callable[[], object]) -> None:
        self._life.post(job, label=f"subscriber {self.name}")

    @property
    def _is_over(self) -> bool:
        return self._closed or self._life.is_dead or self._life.system.services.lost is not None

    # --- beginning ---

    def _subscribe(self) -> None:
        request = {"subscriber": self.name, "from_start": self._subscriber.from_start}
        try:
            promise: Promise[Any] = self._life.service.call("subscribe", request)
        except UnderstudyError:
            self._pause(self._subscribe)
        else:
            promise.add_done_callback(self._subscribed)

    def _subscribed(self, promise: Promise[Any]) -> None:
        if promise.error is not None:
            self._pause(self._subscribe)
        elif not self._is_over:
            self._life.system.watch.add(None, self._wake_up)
            self._wake_up()

    # --- following ---

    def _wake_up(self) -> None:
        if self._moving is not None:
            self._is_woken = True
        elif not self._is_posted and not self._is_over:
            self._is_posted = True
            self._post(self._turn)

    def _turn(self) -> None:
        """Hand over a page, and store how far that was."""
        self._is_posted = False
        if self._is_over or self._moving is not None:
            return
        try:
            self._find_place()
            move, is_full = self._delivered()
            if move is None:
                self._sleep()
            else:
                self._store(move, is_full)
        except Died:
            pass
        except UnderstudyError:
            self._go_back()

    def _find_place(self) -> None:
        if self._is_lost:
            self.cursor = self._life.reads.cursor(self.name) or 0
            self._is_lost = False
            if self._subscriber.begin is None:
                self._subscriber.begin = self.cursor

    def _store(self, move: MoveCursor, is_full: bool) -> None:
        promise = self._life.system.run(move)
        self._moving = move
        promise.add_done_callback(partial(self._stored, move, is_full))
        if self._moving is move:
            self._ring_in(int(MOVE_S * 1_000), partial(self._timed_out, move), name="cursor of")

    def _stored(self, move: MoveCursor, is_full: bool, promise: Promise[Any]) -> None:
        if self._moving is not move or self._is_over:
            return  # It came too late: the page is handed over again.
        is_woken, self._is_woken, self._moving = self._is_woken or is_full, False, None
        self._life.clock.alarm(f"cursor of {self.name}", None, _nothing)
        if promise.error is not None:
            self._go_back()
            return
        self.cursor = move.cursor
        try:
            self._wake_up() if is_woken else self._sleep()
        except UnderstudyError:
            self._go_back()

    def _timed_out(self, move: MoveCursor) -> None:
        if self._moving is move:
            self._moving = None
            self._go_back()

    # --- waiting ---

    def _sleep(self) -> None:
        """Until the next held delivery is due; without one, until a commit."""
        patience_s = self._patience_s()
        if patience_s is None:
            self._life.clock.alarm(f"subscriber {self.name}", None, _nothing)
        else:
            self._ring_in(int(patience_s * 1_000), self._wake_up)

    def _go_back(self) -> None:
        """What could not be read or stored: go on after a while from what is stored."""
        self._is_lost = True
        self._pause(self._wake_up)

    def _pause(self, then: Callable[[], None]) -> None:
        if not self._is_over:
            self._ring_in(int(max(self._backoff_s, LEAST_PAUSE_S) * 1_000), lambda: self._post(then))

    def _ring_in(self, delay_ms: int, ring: Callable[[], None], *, name: str = "subscriber") -> None:
        clock = self._life.clock
        clock.alarm(f"{name} {self.name}", clock.now_ms() + delay_ms, ring)


def _nothing() -> None:
    pass
