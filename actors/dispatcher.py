"""Actors that share a few threads.

Owns `PooledActor`, its inbox and its ref, and `Dispatcher`, the threads that run them. pykka's own loop still receives
and replies; it is left whenever the inbox has nothing more for it, and entered again when a message comes, so an idle
actor is only memory. An actor is in a ready queue at most once, and no two threads ever run it at the same time. No
actor from here is known to pykka's `ActorRegistry`: the host's `stop_all` must not stop ours, and nothing that ours
raise may stop the host's.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, cast

import pykka
from pykka import messages

from understudy.actors.promise import Driver, Promise, current

if TYPE_CHECKING:
    from pykka._envelope import Envelope

__all__ = ["Dispatcher", "Inbox", "PooledActor", "PooledRef", "Scheduler"]

A = TypeVar("A", bound="PooledActor")

logger = logging.getLogger(__name__)

PYKKA_MESSAGES = (messages.ProxyCall, messages.ProxyGetAttr, messages.ProxySetAttr, messages._ActorStop)


class Scheduler(Protocol):
    """What an actor needs of whatever runs it: threads in service, a stage in tests and simulations."""

    @property
    def name(self) -> str:
        """The first part of the names of its actors."""

    @property
    def driver(self) -> Driver | None:
        """For the promises that its actors will settle; None if other threads run them."""

    def start(self) -> None:
        """Begin to run what is ready."""

    def stop(self, timeout_s: float) -> bool:
        """Run nothing more and tell whoever waits for an actor here that it is dead; False if something still runs."""

    def next_number(self) -> int:
        """The second part of an actor's name: 0, 1, 2 and so on, the same in every run that starts the same actors."""

    def schedule(self, actor: PooledActor) -> None:
        """Call `actor.run_slice` soon, and again for as long as it returns True."""

    def failed(self, failure: BaseException) -> None:
        """Take note of what an actor here has died of."""


class Dispatcher:
    """Worker threads with one queue of actors that are ready to run."""

    driver: Driver | None = None

    def __init__(self, name: str, *, workers: int = 1, slice_size: int = 64) -> None:
        if workers < 1 or slice_size < 1:
            raise ValueError(f"dispatcher {name!r} needs at least one worker and one message in a slice")
        self.name = name
        self._slice_size = slice_size
        self._ready: queue.SimpleQueue[PooledActor | None] = queue.SimpleQueue()
        self._numbers = itertools.count()
        self._stopped = False
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True) for n in range(workers)]

    def start(self) -> None:
        """Start the workers; a dispatcher is started once."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Let every worker end its slice and begin no other; to have work finished, stop the actors first.

        Whatever is still in an inbox is refused with `ActorDeadError`. Returns False if a worker is busy at the end of
        the timeout; what its actor has left is refused as soon as that slice ends.
        """
        self._stopped = True
        self._abandon_ready()
        deadline = time.monotonic() + timeout_s
        others = [thread for thread in self._threads if thread.is_alive() and thread is not threading.current_thread()]
        for thread in others:
            thread.join(max(deadline - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in others)

    def next_number(self) -> int:
        return next(self._numbers)

    def schedule(self, actor: PooledActor) -> None:
        self._ready.put(actor)
        if self._stopped:  # Looked at after the put, so that either this thread or the one that stops finds the actor.
            self._abandon_ready()

    def failed(self, failure: BaseException) -> None:
        """Nothing to do: the actor has logged it, and this worker goes on with the others."""

    def _work(self) -> None:
        while (actor := self._ready.get()) is not None:
            if self._stopped:
                actor.perish()
            elif actor.run_slice(self._slice_size):
                self.schedule(actor)
            del actor  # A worker without work must not keep a dead actor in memory.
        self._ready.put(None)  # For the next worker; in a stopped dispatcher the mark stays in the queue for good.

    def _abandon_ready(self) -> None:
        try:
            while True:
                actor = self._ready.get_nowait()
                if actor is not None:
                    actor.perish()
        except queue.Empty:
            self._ready.put(None)


class SliceUsed(Exception):
    """Leaves pykka's loop, which calls `inbox.get()` outside of its `try`.

    It is raised anew each time: a single instance would collect the tracebacks of all its uses, and so their actors.
    """


NONE_TAKEN: list[Envelope[Any]] = []  # One for all idle inboxes; nothing is ever put into it.


class Inbox:
    """The messages of one actor, and the claim on running it.

    Anybody may `put`. Everything else belongs to whoever holds the claim: the thread that makes the actor until it is
    started, then the ready queue or the worker that the actor is with.
    """

    __slots__ = ("_arrived", "_claim", "_epitaph", "_handled", "_taken", "actor", "dispatcher", "left")

    def __init__(self, actor: PooledActor, dispatcher: Scheduler) -> None:
        self.dispatcher = dispatcher
        self.actor: PooledActor | None = actor
        self._epitaph = ""
        self._claim = threading.Lock()  # A flag that is tested and set in one go; nobody ever waits for it.
        self._claim.acquire()
        # Two lists, because an empty deque takes ten times the memory. Messages arrive at the end of the one and are
        # taken, all at once and in reverse, into the other, from whose end they are handled.
        self._arrived: list[Envelope[Any]] = []
        self._taken = NONE_TAKEN
        self._handled: Envelope[Any] | None = None
        self.left = 0  # How many messages of the slice may still be handled.

    def __len__(self) -> int:
        """How many messages wait; at once out of date if others put or handle some."""
        return len(self._arrived) + len(self._taken)

    @property
    def asked(self) -> bool:
        """Whether somebody waits for an answer to the message that is being handled."""
        return self._handled is not None and self._handled.reply_to is not None

    def put(self, envelope: Envelope[Any], /) -> None:
        """Never blocks, never drops: who must not flood an actor looks at `PooledRef.is_full` before."""
        self._arrived.append(envelope)
        if self._claim.acquire(False):
            if self.actor is None:
                self._refuse_all()
            else:
                self.dispatcher.schedule(self.actor)

    def get(self) -> Envelope[Any]:
        """The next message of the slice, for pykka's loop; `SliceUsed` if there is none."""
        if self.left and (self._taken or self._take()):
            self.left -= 1
            self._handled = envelope = self._taken.pop()
            return envelope
        self._handled = None
        raise SliceUsed

    def empty(self) -> bool:
        return not self._taken and not self._arrived

    def peek(self) -> Any:
        """The message that comes next, or None."""
        return self._taken[-1].message if self._taken or self._take() else None

    def end_slice(self) -> bool:
        """Give up the claim and return False if nothing waits; else keep it and return True."""
        if self._taken or self._arrived:
            return True
        self._claim.release()
        # Who put a message between the look and the release did not get the claim and so did not schedule the actor.
        return bool(self._arrived) and self._claim.acquire(False)

    def close(self) -> None:
        """Refuse whatever waits or will come, and let go of the actor: no cycle keeps a dead one in memory."""
        if self.actor is not None:
            self._epitaph = f"{self.actor} stopped before handling the message"
        self.actor = None
        self._handled = None
        self._refuse_all()

    def _take(self) -> bool:
        count = len(self._arrived)  # More may arrive meanwhile, behind these.
        if count == 0:
            self._taken = NONE_TAKEN
            return False
        self._taken = self._arrived[:count]
        del self._arrived[:count]
        self._taken.reverse()
        return True

    def _refuse_all(self) -> None:
        claimed = True
        while claimed:
            while self._taken or self._take():
                self._refuse(self._taken.pop())
            claimed = self.end_slice()

    def _refuse(self, envelope: Envelope[Any]) -> None:
        if envelope.reply_to is None:
            return
        if isinstance(envelope.message, messages._ActorStop):
            envelope.reply_to.set(None)
        else:
            envelope.reply_to.set_exception((pykka.ActorDeadError, pykka.ActorDeadError(self._epitaph), None))


class StopFlag:
    """The two methods of `threading.Event` that pykka uses, for an actor that has no thread to be waited for."""

    __slots__ = ("_is_set",)

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True


class PooledRef(pykka.ActorRef[A]):
    """pykka's ref, whose promises know their driver and whose inbox can be measured."""

    actor_inbox: Inbox
    actor_stopped: StopFlag  # type: ignore[assignment]  # It has all that pykka uses of an Event.

    def __init__(self, actor: A) -> None:
        # pykka's own __init__ isn't called: it would make a weak reference, but the inbox knows the actor anyway.
        self.actor_class = type(actor)
        self.actor_urn = actor.actor_urn
        self.actor_inbox = actor.actor_inbox
        self.actor_stopped = actor.actor_stopped

    @property
    def inbox(self) -> Inbox:
        """What waits for the actor; `len(ref.inbox)` is cheap."""
        return self.actor_inbox

    @property
    def is_full(self) -> bool:
        """Whether as much waits as the actor's `inbox_limit` allows; for whoever can refuse new work at the door."""
        limit = self.actor_class.inbox_limit
        return limit is not None and len(self.actor_inbox) >= limit

    def ask(self, message: Any, *, block: bool = True, timeout: float | None = None) -> Any:
        """As pykka's, but a failure is fatal to the actor."""
        promise = cast("Promise[Any]", super().ask(message, block=False))
        promise.driver = self.actor_inbox.dispatcher.driver
        return promise.get(timeout=timeout) if block else promise

    def stop(self, *, block: bool = True, timeout: float | None = None) -> Any:
        """As pykka's, but its promise is settled by the stop itself, not by the `get`, and so can call back."""
        asked: Promise[None] = self.ask(messages._ActorStop(), block=False)
        stopped: Promise[bool] = Promise(driver=asked.driver)
        asked.add_done_callback(lambda _: stopped.resolve(asked.error is None))
        return stopped.get(timeout=timeout) if block else stopped

    def _actor_weakref(self) -> A | None:  # type: ignore[override]  # pykka's proxies only call it.
        return cast("A | None", self.actor_inbox.actor)


class PooledActor(pykka.Actor):
    """An actor without a thread of its own; subclass it as any of pykka's, passing `dispatcher` to `super().__init__`.

    Other than in pykka every failure is fatal, whether the message was told or asked: after an exception nobody knows
    what the actor's memory is worth. Whatever `on_start`, `on_receive` or `on_stop` raise, `BaseException` included, is
    logged, stops this actor alone and is given to its `on_failure`; who asked is answered after that.
    """

    inbox_limit: ClassVar[int | None] = None

    actor_inbox: Inbox
    actor_stopped: StopFlag  # type: ignore[assignment]  # It has all that pykka uses of an Event.
    _actor_ref: PooledRef[Any]

    def __init__(self, *, dispatcher: Scheduler) -> None:
        # pykka's own __init__ isn't called: it would draw a UUID and make an Event for every actor.
        self.actor_urn = f"{dispatcher.name}/{dispatcher.next_number()}"
        self.actor_inbox = Inbox(self, dispatcher)
        self.actor_stopped = StopFlag()
        self._actor_ref = PooledRef(self)
        # Without an on_start there is nothing to do before the first message, and nothing to schedule the actor for.
        self._actor_started = type(self).on_start is pykka.Actor.on_start

    @classmethod
    def start_on(cls, dispatcher: Scheduler, *args: Any, **kwargs: Any) -> PooledRef[Self]:
        """Make the actor with these arguments and let the dispatcher run it."""
        return cls.start(*args, dispatcher=dispatcher, **kwargs)

    @classmethod
    def start(cls, *args: Any, **kwargs: Any) -> PooledRef[Self]:
        """As `start_on`, with the dispatcher among the arguments; unlike pykka's it leaves the registry alone."""
        actor = cls(*args, **kwargs)
        actor._start_actor_loop()
        return actor.actor_ref

    @property
    def actor_ref(self) -> PooledRef[Self]:
        return self._actor_ref

    @property
    def inbox(self) -> Inbox:
        return self.actor_inbox

    @property
    def is_started(self) -> bool:
        """Whether `on_start` has run, or there is none."""
        return self._actor_started

    def run_slice(self, size: int) -> bool:
        """Handle up to `size` messages; True if more wait. Only a scheduler calls it, once for each `schedule`."""
        outer, current.actor = current.actor, self
        try:
            return self._actor_run(size)
        finally:
            current.actor = outer

    def perish(self) -> None:
        """Die without on_stop or on_failure. Only a stopped scheduler calls it, in place of a slice."""
        self.actor_stopped.set()
        self.actor_inbox.close()

    def _actor_run(self, size: int) -> bool:
        self.actor_inbox.left = size
        try:
            if not self._actor_started:
                self._actor_started = True
                self.on_start()
            self._actor_loop_running()
        except SliceUsed:
            return self.actor_inbox.end_slice()
        except BaseException as failure:
            self._actor_fail(failure)
        self.actor_inbox.close()
        return False

    @staticmethod
    def _create_actor_inbox() -> Inbox:
        raise NotImplementedError("the inbox is made by __init__, which knows the dispatcher")

    @staticmethod
    def _create_future() -> Promise[Any]:
        return Promise()

    def _start_actor_loop(self) -> None:
        # The claim was held since __init__: who tells itself something there must not be run before it is complete.
        if not self._actor_started or self.actor_inbox.end_slice():
            self.actor_inbox.dispatcher.schedule(self)

    def _handle_receive(self, message: Any) -> Any:
        try:
            if isinstance(message, PYKKA_MESSAGES):
                return super()._handle_receive(message)
            return self.on_receive(message)
        except BaseException as failure:
            # pykka would keep the actor after a failed ask, and answer a BaseException with ActorRegistry.stop_all().
            self._actor_fail(failure)
            if not self.actor_inbox.asked:
                return None
            if isinstance(failure, Exception):
                raise
            raise pykka.ActorDeadError(f"{self} died of {failure!r}") from failure

    def _stop(self) -> None:
        self.actor_stopped.set()
        try:
            self.on_stop()
        except BaseException as failure:
            self._actor_fail(failure)

    def _actor_fail(self, failure: BaseException) -> None:
        logger.error("%s failed and is stopped", self, exc_info=failure)
        self.actor_stopped.set()
        try:
            self.on_failure(type(failure), failure, failure.__traceback__)
        except BaseException:
            logger.exception("on_failure of %s raised", self)
        self.actor_inbox.dispatcher.failed(failure)
