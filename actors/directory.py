"""Where instances are found: absent, loading, active or leaving.

Instances are virtual: whoever tells one something neither knows nor cares whether it is in memory. The directory
alone holds their refs. An instance leaves only when nothing of it is under way and its inbox is empty, and both are
tested and acted on under the same lock under which messages are told: no message can fall between.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import attrs

from understudy.actors.messages import Drain, Load, Order, Wake

if TYPE_CHECKING:
    from understudy.actors.dispatcher import PooledRef
    from understudy.actors.instance import InstanceActor
    from understudy.store.loading import Loaded

Message = Order | Wake
Activate = Callable[[str, "Loaded | None"], "PooledRef[InstanceActor]"]
_EMPTY: tuple[Message, ...] = ()


@attrs.define
class _Entry:
    ref: PooledRef[InstanceActor] | None = None  # None while it is loading.
    waiting: list[Message] | None = None


class Directory:
    """Maps instance ids to activations. Safe to use from any thread."""

    def __init__(self, *, resident_limit: int) -> None:
        self.resident_limit = resident_limit
        self._entries: dict[str, _Entry] = {}
        self._idle: OrderedDict[str, int] = OrderedDict()  # At rest, longest first, with the moment that it began.
        self._lock = threading.Lock()
        self._activate: Activate | None = None
        self._load: Callable[[Load], Any] | None = None
        self._rests: Callable[[], Any] | None = None
        self._rest_told = False
        self.activations = 0

    def connect(self, activate: Activate, load: Callable[[Load], Any], rests: Callable[[], Any]) -> None:
        """Say how an instance is activated, how one is read, and whom to tell that one rests; done once, at first."""
        self._activate = activate
        self._load = load
        self._rests = rests

    # --- telling ---

    def tell(self, instance: str, message: Message, *, is_new: bool = False) -> None:
        """Hand over a message; `is_new` means that the id was made for it, so that there is nothing to read."""
        assert self._load is not None
        with self._lock:
            entry = self._entries.get(instance)
            if entry is not None:
                if entry.ref is not None:
                    self._idle.pop(instance, None)
                    entry.ref.tell(message)
                else:
                    assert entry.waiting is not None
                    entry.waiting.append(message)
                return
            if is_new:
                self._enter(instance, None, (message,))
                return
            self._entries[instance] = _Entry(waiting=[message])
        self._load(Load(instance))

    def loaded(self, instance: str, found: Loaded | None) -> None:
        """What the store holds of it; None when it holds nothing."""
        with self._lock:
            entry = self._entries[instance]
            waiting = entry.waiting or []
            self._enter(instance, found, tuple(waiting))

    def unreadable(self, instance: str) -> list[Message]:
        """It cannot be activated; whoever waits for it is handed back."""
        with self._lock:
            entry = self._entries.pop(instance)
            return list(entry.waiting or ())

    def _enter(self, instance: str, found: Loaded | None, messages: tuple[Message, ...]) -> None:
        assert self._activate is not None
        self.activations += 1
        ref = self._activate(instance, found)
        self._entries[instance] = _Entry(ref=ref)
        for message in messages:
            ref.tell(message)

    # --- leaving ---

    def rest(self, instance: str, actor: InstanceActor, now_ms: int) -> list[str]:
        """Nothing of the instance is under way; the ids of those that should leave, because too many rest."""
        with self._lock:
            entry = self._entries.get(instance)
            if entry is None or entry.ref is not actor.actor_ref:
                return []
            self._idle[instance] = now_ms
            self._idle.move_to_end(instance)
            surplus = self._surplus()
            told, self._rest_told = self._rest_told, True
        if not told and self._rests is not None:
            self._rests()
        return surplus

    def _surplus(self) -> list[str]:
        over = len(self._idle) - self.resident_limit
        return [name for name, _ in zip(self._idle, range(over), strict=False)] if over > 0 else []

    def leave(self, instance: str) -> InstanceActor | None:
        """Let a resting instance go, if it still rests. The actor that was dropped; nobody can reach it any more."""
        with self._lock:
            entry = self._entries.get(instance)
            if entry is None or entry.ref is None or instance not in self._idle:
                return None
            actor = cast("InstanceActor", entry.ref.inbox.actor)
            if len(entry.ref.inbox) or not actor.is_at_rest:
                self._idle.pop(instance, None)
                return None
            del self._entries[instance]
            del self._idle[instance]
            return actor

    def resting_since(self) -> int | None:
        """When the longest rest began; when nobody rests, the next one that does is told again."""
        with self._lock:
            self._rest_told = bool(self._idle)
            return next(iter(self._idle.values()), None)

    def resting_before(self, moment_ms: int, limit: int) -> list[str]:
        with self._lock:
            found: list[str] = []
            for name, since in self._idle.items():
                if since > moment_ms or len(found) >= limit:
                    break
                found.append(name)
            return found

    def retire(self, instance: str, actor: InstanceActor, messages: list[Message]) -> None:
        """This activation's memory is not to be trusted: a successor reads the store and gets the messages."""
        assert self._load is not None
        with self._lock:
            entry = self._entries.get(instance)
            if entry is None or entry.ref is not actor.actor_ref:
                waiting = None
            else:
                self._entries[instance] = _Entry(waiting=list(messages))
                self._idle.pop(instance, None)
                waiting = messages
        if waiting is None:
            for message in messages:
                self.tell(instance, message)
        else:
            self._load(Load(instance))

    # --- the whole ---

    def drain(self) -> None:
        with self._lock:
            for entry in self._entries.values():
                if entry.ref is not None:
                    entry.ref.tell(Drain())

    def __len__(self) -> int:
        return len(self._entries)

    def is_active(self, instance: str) -> bool:
        entry = self._entries.get(instance)
        return entry is not None and entry.ref is not None

    @property
    def resting(self) -> int:
        return len(self._idle)
