"""Where instances are found: absent, loading, active or leaving.

Instances are virtual: whoever tells one something neither knows nor cares whether it is in memory. The directory
alone holds their refs. An instance leaves only when nothing of it is under way and its inbox is empty, and both are
tested and acted on under the same lock under which messages are told: no message can fall between.

There is such a lock for each stripe of ids, not one for all. Threads that wait for a lock give up the GIL, and beside a
busy thread of the host each of them waits 5 ms to get it back: one lock for everybody was most of the time of a step.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, cast

import attrs

from understudy.actors.answers import answer
from understudy.actors.messages import Drain, Load, Order, Wake
from understudy.model.errors import Closed

if TYPE_CHECKING:
    from understudy.actors.dispatcher import PooledRef
    from understudy.actors.instance import InstanceActor
    from understudy.model.effects import CancelTask
    from understudy.store.loading import Loaded

Message = Order | Wake
Heritage = Mapping[int, "CancelTask"]
"""What a predecessor in this very process has given to handlers, by token; whoever has none begins from the store."""

Activate = Callable[[str, "Loaded | None", "Heritage | None"], "PooledRef[InstanceActor]"]


@attrs.define
class _Entry:
    ref: PooledRef[InstanceActor] | None = None  # None while it is loading.
    waiting: list[Message] = attrs.field(factory=list)
    heritage: Heritage | None = None


STRIPES: Final = 64


class Directory:
    """Maps instance ids to activations. Safe to use from any thread."""

    def __init__(self, *, resident_limit: int) -> None:
        number = STRIPES if resident_limit >= 10 * STRIPES else 1  # A small limit is kept exactly, by one stripe.
        self._stripes = [_Stripe(self, resident_limit=resident_limit // number) for _ in range(number)]
        self.activate: Activate | None = None
        self.load: Callable[[Load], Any] | None = None
        self._rests: Callable[[], Any] | None = None
        self._rest_told = False

    def connect(self, activate: Activate, load: Callable[[Load], Any], rests: Callable[[], Any]) -> None:
        """Say how an instance is activated, how one is read, and whom to tell that one rests; done once, at first."""
        self.activate = activate
        self.load = load
        self._rests = rests

    def _stripe(self, instance: str) -> _Stripe:
        return self._stripes[hash(instance) % len(self._stripes)]

    def tell(self, instance: str, message: Message, *, is_new: bool = False) -> None:
        """Hand over a message; `is_new` means that the id was made for it, so that there is nothing to read."""
        self._stripe(instance).tell(instance, message, is_new=is_new)

    def loaded(self, instance: str, found: Loaded | None) -> None:
        """What the store holds of it; None when it holds nothing."""
        self._stripe(instance).loaded(instance, found)

    def unreadable(self, instance: str) -> list[Message]:
        """It cannot be activated; whoever waits for it is handed back."""
        return self._stripe(instance).unreadable(instance)

    def rest(self, instance: str, actor: InstanceActor, now_ms: int) -> list[str]:
        """Nothing of the instance is under way; the ids of those that should leave, because too many rest."""
        surplus = self._stripe(instance).rest(instance, actor, now_ms)
        if not self._rest_told and self._rests is not None:
            self._rest_told = True
            self._rests()
        return surplus

    def leave(self, instance: str) -> InstanceActor | None:
        """Let a resting instance go, if it still rests. The actor that was dropped; nobody can reach it any more."""
        return self._stripe(instance).leave(instance)

    def retire(
        self, instance: str, actor: InstanceActor, messages: list[Message], heritage: Heritage | None = None
    ) -> None:
        """This activation's memory is not to be trusted: a successor reads the store and gets the messages."""
        self._stripe(instance).retire(instance, actor, messages, heritage)

    def drop(self, instance: str, actor: InstanceActor) -> None:
        """This activation is over and has no successor until somebody tells the instance something."""
        self._stripe(instance).drop(instance, actor)

    # --- the whole ---

    def resting_since(self) -> int | None:
        """When the longest rest began; when nobody rests, the next one that does is told again."""
        self._rest_told = False  # First, so that who comes to rest while we look is told of rather than overlooked.
        began = [since for stripe in self._stripes if (since := stripe.resting_since()) is not None]
        if began:
            self._rest_told = True
        return min(began, default=None)

    def resting_before(self, moment_ms: int, limit: int) -> list[str]:
        found = (name for stripe in self._stripes for name in stripe.resting_before(moment_ms, limit))
        return list(itertools.islice(found, limit))

    def drain(self, drained: Callable[[bool], None]) -> tuple[int, int]:
        """Ask everybody who is not at rest to say when it has nothing to decide or to commit.

        How many were asked, and how many are loading.
        """
        counts = [stripe.drain(drained) for stripe in self._stripes]
        return sum(asked for asked, _ in counts), sum(loading for _, loading in counts)

    def close(self) -> None:
        """Take no more messages: whoever waits for an answer is told so."""
        for stripe in self._stripes:
            stripe.close()

    def __len__(self) -> int:
        return sum(map(len, self._stripes))

    def is_active(self, instance: str) -> bool:
        return self._stripe(instance).is_active(instance)

    @property
    def resting(self) -> int:
        return sum(stripe.resting for stripe in self._stripes)

    @property
    def activations(self) -> int:
        return sum(stripe.activations for stripe in self._stripes)


class _Stripe:
    """The ids of one lock."""

    def __init__(self, directory: Directory, *, resident_limit: int) -> None:
        self._directory = directory
        self._resident_limit = resident_limit
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()  # At rest, longest first, with the moment that it began.
        self._lock = threading.Lock()
        self._closed = False
        self._unclaimed: dict[str, Heritage] = {}  # Of those that could not be read, until they are.
        self.activations = 0

    def tell(self, instance: str, message: Message, *, is_new: bool = False) -> None:
        """Hand over a message; `is_new` means that the id was made for it, so that there is nothing to read."""
        with self._lock:
            if self._closed:
                _refuse(message)
                return
            entry = self._entries.get(instance)
            if entry is None:
                if is_new:
                    self._enter(instance, None, _Entry(waiting=[message]))
                    return
                self._entries[instance] = _Entry(waiting=[message])
            elif entry.ref is None:
                entry.waiting.append(message)
                return
            elif not entry.ref.actor_stopped.is_set():
                self._idle.pop(instance, None)
                entry.ref.tell(message)
                return
            else:  # It has just died of an error and has not said so yet; what it says later goes to its successor.
                self._idle.pop(instance, None)
                self._entries[instance] = _Entry(waiting=[message])
        self._load(instance)

    def loaded(self, instance: str, found: Loaded | None) -> None:
        """What the store holds of it; None when it holds nothing."""
        with self._lock:
            if not self._closed:
                self._enter(instance, found, self._entries[instance])

    def unreadable(self, instance: str) -> list[Message]:
        """It cannot be activated; whoever waits for it is handed back."""
        with self._lock:
            if self._closed:
                return []  # They have been told.
            entry = self._entries.pop(instance)
            if entry.heritage:
                self._unclaimed[instance] = entry.heritage
            return entry.waiting

    def _enter(self, instance: str, found: Loaded | None, entry: _Entry) -> None:
        self.activations += 1
        heritage = self._unclaimed.pop(instance, None) if self._unclaimed else None
        activate = self._directory.activate
        assert activate is not None
        ref = activate(instance, found, heritage if entry.heritage is None else entry.heritage)
        self._entries[instance] = _Entry(ref=ref)
        for message in entry.waiting:
            ref.tell(message)

    # --- leaving ---

    def rest(self, instance: str, actor: InstanceActor, now_ms: int) -> list[str]:
        """Nothing of the instance is under way; the ids of those that should leave, because too many rest.

        Who has a message in its inbox does not rest: it may begin to work at any moment, unseen by `leave`.
        """
        with self._lock:
            entry = self._entries.get(instance)
            if entry is None or entry.ref is not actor.actor_ref or len(entry.ref.inbox):
                return []
            self._idle[instance] = now_ms
            self._idle.move_to_end(instance)
            return self._surplus()

    def _surplus(self) -> list[str]:
        over = len(self._idle) - self._resident_limit
        return [name for name, _ in zip(self._idle, range(over), strict=False)] if over > 0 else []

    def leave(self, instance: str) -> InstanceActor | None:
        """Let a resting instance go, if it still rests. The actor that was dropped; nobody can reach it any more."""
        with self._lock:
            entry = self._entries.get(instance)
            if entry is None or entry.ref is None or instance not in self._idle:
                return None
            del self._idle[instance]
            actor = cast("InstanceActor | None", entry.ref.inbox.actor)
            if actor is None or len(entry.ref.inbox) or not actor.is_at_rest:
                return None
            del self._entries[instance]
            return actor

    def resting_since(self) -> int | None:
        with self._lock:
            return next(iter(self._idle.values()), None)

    def resting_before(self, moment_ms: int, limit: int) -> list[str]:
        with self._lock:
            found: list[str] = []
            for name, since in self._idle.items():
                if since > moment_ms or len(found) >= limit:
                    break
                found.append(name)
            return found

    def retire(
        self, instance: str, actor: InstanceActor, messages: list[Message], heritage: Heritage | None = None
    ) -> None:
        """This activation's memory is not to be trusted: a successor reads the store and gets the messages."""
        with self._lock:
            entry = self._entries.get(instance)
            is_ours = entry is not None and entry.ref is actor.actor_ref and not self._closed
            if is_ours:
                self._entries[instance] = _Entry(waiting=list(messages), heritage=heritage)
                self._idle.pop(instance, None)
        if is_ours:
            self._load(instance)
        else:
            for message in messages:
                self.tell(instance, message)

    def drop(self, instance: str, actor: InstanceActor) -> None:
        """This activation is over and has no successor until somebody tells the instance something."""
        with self._lock:
            entry = self._entries.get(instance)
            if entry is not None and entry.ref is actor.actor_ref:
                del self._entries[instance]
                self._idle.pop(instance, None)

    def _load(self, instance: str) -> None:
        load = self._directory.load
        assert load is not None
        load(Load(instance))

    def drain(self, drained: Callable[[bool], None]) -> tuple[int, int]:
        """Ask everybody who is not at rest to say when it has nothing to decide or to commit.

        How many were asked, and how many are loading.
        """
        with self._lock:
            busy = [entry.ref for name, entry in self._entries.items() if name not in self._idle]
            asked = [ref for ref in busy if ref is not None and not ref.actor_stopped.is_set()]
            for ref in asked:
                ref.tell(Drain(drained))
            return len(asked), busy.count(None)

    def close(self) -> None:
        """Take no more messages: whoever waits for an answer is told so."""
        with self._lock:
            self._closed = True
            entries, self._entries = self._entries, {}
            self._idle.clear()
        for entry in entries.values():
            for message in entry.waiting:
                _refuse(message)

    def __len__(self) -> int:
        return len(self._entries)

    def is_active(self, instance: str) -> bool:
        entry = self._entries.get(instance)
        return entry is not None and entry.ref is not None

    @property
    def resting(self) -> int:
        return len(self._idle)


def _refuse(message: Message) -> None:
    if isinstance(message, Order) and message.answer is not None:
        answer(message, Closed("this Runtime was closed before it came to this; nothing was done"))
