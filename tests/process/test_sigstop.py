"""An owner is stopped past its lease, replaced, and wakes up believing that it still rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.process.conftest import Child, World

Eventually = Callable[..., Any]
LEASE_MS = 800


def test_a_stopped_owner_is_replaced_and_commits_nothing_when_it_wakes_up(world: World, eventually: Eventually) -> None:
    old = world.worker(lease_ms=LEASE_MS)
    new = world.worker(lease_ms=LEASE_MS)
    old.ask("start", id="held", process="held")
    eventually(world.effects, "the handler has begun")
    assert (old.ask("is_owner"), new.ask("is_owner")) == (True, False)

    _replace(world, old, new, eventually)
    with world.reads() as reads:
        _holder, epoch, _beat = reads.owner()
        takeover = reads.last_seq()
    asked = [old.tell("start", id=f"late-{n}", process="parcel", number=n) for n in range(20)]
    world.open_gate()  # Both attempts of the handler come back: the new owner's, and the old one's.
    old.wake()

    assert [old.answer(order) for order in asked] == [f"late-{n}" for n in range(20)]  # As a client of the new owner.
    assert old.ask("result", id="held") == new.ask("result", id="held") == 2
    assert (old.ask("is_owner"), new.ask("is_owner")) == (False, True)
    with world.reads() as reads:
        assert {record.epoch for record, _id in reads.after(takeover, 10_000)} == {epoch}
    world.audit()


def test_one_who_wants_to_own_or_nothing_is_fenced_when_it_wakes_up(world: World, eventually: Eventually) -> None:
    old = world.worker(role="owner", lease_ms=LEASE_MS)
    new = world.worker(lease_ms=LEASE_MS)

    _replace(world, old, new, eventually)
    asked = [old.tell("start", id=f"late-{n}", process="parcel", number=n) for n in range(20)]
    old.wake()

    assert {_outcome(old, order) for order in asked} == {"Fenced"}
    assert new.ask("start", id="late-0", process="parcel", number=0) == "late-0"


def test_a_process_that_comes_while_the_owner_hangs_takes_over_after_a_lease(world: World) -> None:
    old = world.worker(lease_ms=LEASE_MS)
    old.ask("start", id="parcel", process="parcel", number=7)
    world.stop(old)

    new = world.worker(lease_ms=LEASE_MS)

    assert new.ask("is_owner")
    new.ask("send", id="parcel", message="paid")
    assert new.ask("result", id="parcel") == "shipped with receipt 7"
    old.wake()
    assert old.ask("result", id="parcel") == "shipped with receipt 7"


def test_the_other_clients_of_a_hung_owner_go_to_the_new_one(world: World, eventually: Eventually) -> None:
    old = world.worker(lease_ms=LEASE_MS)
    others = [world.worker(lease_ms=LEASE_MS) for _ in range(3)]

    world.stop(old)
    asked = [other.tell("start", id=f"by-{n}", process="parcel", number=n) for n, other in enumerate(others)]

    assert [other.answer(order) for other, order in zip(others, asked, strict=True)] == ["by-0", "by-1", "by-2"]
    assert sum(other.ask("is_owner") for other in others) == 1
    old.wake()


def _replace(world: World, old: Child, new: Child, eventually: Eventually) -> None:
    """Stop the old owner until the new one has taken over."""
    world.stop(old)
    eventually(lambda: new.ask("is_owner"), "the new owner")


def _outcome(worker: Child, order: int) -> str:
    try:
        return f"gave {worker.answer(order)}"
    except Exception as error:
        return str(error).split(":")[0]
