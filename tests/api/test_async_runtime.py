"""The runtime on asyncio: the names and signatures of `Runtime`, to be awaited."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen

from understudy import (
    AsyncHandle,
    AsyncRuntime,
    Cancelled,
    Change,
    Closed,
    Conflict,
    Context,
    Failed,
    Handle,
    Process,
    Rejected,
    Runtime,
    Stuck,
    TimedOut,
    UnknownInstance,
    saga,
    task,
    wait,
)

MANY = 1_000
WAIT_S = 10  # For events that come at once; it is never used up when all is well.


@frozen
class Order:
    order_id: str
    amount: int = 40


@frozen
class Receipt:
    id: str


@task(into="receipt")
async def charge(order_id: str) -> Receipt:
    await asyncio.sleep(0)
    return Receipt(f"r-{order_id}")


@charge.undo
async def refund(receipt: Receipt) -> None: ...


@task(into="packed")
def pack(order_id: str) -> str:
    return threading.current_thread().name


@task
async def refuse(order_id: str) -> None:
    raise ValueError("nobody at home")


checkout = Process("checkout", saga(charge), pack, wait("go", into="went"), takes=Order, gives="receipt")
quick = Process("quick", saga(charge), takes=Order, gives="receipt")
doomed = Process("doomed", saga(charge, refuse), takes=Order)
stopped = Process("stopped", refuse, takes=Order)
PROCESSES = (checkout, quick, doomed, stopped)

Play = Callable[[AsyncRuntime], Coroutine[Any, Any, Any]]


def played(tmp_path: Path, play: Play) -> Any:
    """What the play gives, on a loop and a runtime of its own."""

    async def stage() -> Any:
        async with AsyncRuntime(tmp_path / "p.db", *PROCESSES) as runtime:
            return await asyncio.wait_for(play(runtime), 4 * WAIT_S)

    return asyncio.run(stage(), debug=False)


# --- the same names and signatures ------------------------------------------------------------------------------------


def _public(cls: type) -> dict[str, Any]:
    return {name: member for name, member in vars(cls).items() if not name.startswith("_")}


def _parameters(function: Any) -> list[tuple[str, Any, Any, Any]]:
    return [(p.name, p.kind, p.default, p.annotation) for p in inspect.signature(function).parameters.values()]


def test_both_runtimes_have_the_same_names() -> None:
    only_async = {"open", "node"}  # `async with` opens; a Runtime is open when it is made, and its node an attribute.

    assert set(_public(AsyncRuntime)) - only_async == set(_public(Runtime))


def test_both_handles_have_the_same_names() -> None:
    assert set(_public(AsyncHandle)) == set(_public(Handle))


@pytest.mark.parametrize(("plain", "to_await"), [(Runtime, AsyncRuntime), (Handle, AsyncHandle)])
def test_every_method_has_the_same_parameters_and_gives_the_same(plain: type, to_await: type) -> None:
    for name, member in _public(plain).items():
        other = vars(to_await)[name]
        if isinstance(member, property) and isinstance(other, property):
            continue  # `is_owner`: it reads nothing.
        method = member.fget if isinstance(member, property) else member
        if not inspect.isfunction(method):
            continue
        assert _parameters(method) == _parameters(other), name
        assert inspect.iscoroutinefunction(other), name
        gives = (inspect.signature(each).return_annotation for each in (method, other))
        assert len({text.replace("AsyncHandle", "Handle") for text in gives}) == 1, name


def test_both_runtimes_are_made_with_the_same_arguments() -> None:
    assert _parameters(Runtime.__init__) == _parameters(AsyncRuntime.__init__)


# --- playing ----------------------------------------------------------------------------------------------------------


def test_an_instance_goes_its_way(tmp_path: Path) -> None:
    async def play(runtime: AsyncRuntime) -> tuple[Any, ...]:
        order = await runtime.start(checkout, Order("7"), id="order-7", tags={"a": "b"})
        state = await order.wait_until(lambda state: state.is_waiting_for("go"))
        kept = await order.send("else")
        explained = str(await order.explain())
        received = await order.send("go", {"at": "door"})
        result = await order.result()
        return state.id, kept, received, result, await order.path(), (await order.variables())["went"], explained

    identity, kept, received, result, path, went, explained = played(tmp_path, play)

    assert (identity, kept, received, result) == ("order-7", False, True, Receipt("r-7"))
    assert (path, went) == (["charge", "pack"], {"at": "door"})
    assert "at go for message `go`" in explained


def test_async_handlers_run_on_the_loop_that_opened_the_runtime_and_plain_ones_beside_it(tmp_path: Path) -> None:
    seen: list[tuple[object, str]] = []

    @task
    async def on_the_loop() -> None:
        seen.append((asyncio.get_running_loop(), threading.current_thread().name))

    process = Process("both", on_the_loop, pack, takes=Order, gives="packed")

    async def stage() -> tuple[object, str, str]:
        async with AsyncRuntime(tmp_path / "p.db", process) as runtime:
            thread = await (await runtime.start(process, Order("7"))).result()
            return asyncio.get_running_loop(), threading.current_thread().name, thread

    loop, here, beside = asyncio.run(stage())

    assert seen == [(loop, here)]
    assert beside.startswith("understudy-local")


def test_a_thousand_starts_and_results_at_once(tmp_path: Path) -> None:
    async def one(runtime: AsyncRuntime, n: int) -> str:
        order = await runtime.start(quick, Order(str(n)), id=f"order-{n}")
        receipt: Receipt = await order.result()
        return receipt.id

    async def play(runtime: AsyncRuntime) -> list[str]:
        return await asyncio.gather(*(one(runtime, n) for n in range(MANY)))

    assert played(tmp_path, play) == [f"r-{n}" for n in range(MANY)]


def test_who_awaits_may_be_cancelled_and_nothing_else_is(tmp_path: Path) -> None:
    async def play(runtime: AsyncRuntime) -> tuple[Any, ...]:
        order = await runtime.start(checkout, Order("7"))
        waiters = [asyncio.create_task(order.result()) for _ in range(10)]
        await asyncio.sleep(0)
        for waiter in waiters[1:]:
            waiter.cancel()
        cancelled = await asyncio.gather(*waiters[1:], return_exceptions=True)
        starting = asyncio.create_task(runtime.start(quick, Order("8"), id="order-8"))
        await asyncio.sleep(0)
        starting.cancel()
        await order.send("go")
        first = await waiters[0]
        again = await (await runtime.start(quick, Order("8"), id="order-8")).result()
        return cancelled, first, again, runtime.node.system.watch._of

    cancelled, first, again, watched = played(tmp_path, play)

    assert all(isinstance(error, asyncio.CancelledError) for error in cancelled)
    assert (first, again) == (Receipt("r-7"), Receipt("r-8"))
    assert watched == {}


def test_waits_that_time_out_leave_nothing_behind(tmp_path: Path) -> None:
    async def play(runtime: AsyncRuntime) -> Any:
        order = await runtime.start(checkout, Order("7"), id="order-7")
        for _ in range(3):
            with pytest.raises(TimedOut, match="order-7: "):
                await order.result(timeout="20ms")
        return runtime.node.system.watch._of

    assert played(tmp_path, play) == {}


def test_every_outcome_is_raised_as_in_the_plain_runtime(tmp_path: Path) -> None:
    async def play(runtime: AsyncRuntime) -> None:
        with pytest.raises(Failed, match="failed at refuse: ValueError: nobody at home; undone: charge"):
            await (await runtime.start(doomed, Order("7"))).result()
        with pytest.raises(Stuck, match="stopped at refuse"):
            await (await runtime.start(stopped, Order("7"))).result()
        order = await runtime.start(checkout, Order("7"), id="order-7")
        await order.wait_until(lambda state: state.is_waiting_for("go"))
        with pytest.raises(Conflict):
            await runtime.start(checkout, Order("8"), id="order-7")
        await order.cancel(reason="enough")
        with pytest.raises(Cancelled, match="enough"):
            await order.result()
        with pytest.raises(UnknownInstance):
            await runtime.state("nobody")
        with pytest.raises(UnknownInstance):
            await runtime.send("nobody", "go")
        with pytest.raises(Rejected):
            await runtime.list(status="nonsense")

    played(tmp_path, play)


def test_operators_and_lists_work_alike(tmp_path: Path) -> None:
    async def play(runtime: AsyncRuntime) -> tuple[Any, ...]:
        order = await runtime.start(stopped, Order("7"), id="order-7", title="Seventh")
        (incident,) = (await order.wait_until(lambda state: bool(state.incidents))).incidents
        with_incident = [summary.id for summary in await runtime.list(with_incident=True)]
        await order.pause()
        await order.skip(incident.incident)
        await order.resume()
        state = await order.wait_until(lambda state: state.is_ended)
        found: AsyncHandle[None] = await runtime.get("order-7")
        return with_incident, state.outcome, [str(step) for step in await found.history()], await runtime.report()

    with_incident, outcome, history, report = played(tmp_path, play)

    assert (with_incident, outcome, report) == (["order-7"], "completed", [])
    assert any("refuse skipped" in line for line in history)


def test_a_message_is_published_and_subscribers_hear(tmp_path: Path) -> None:
    heard: list[int] = []
    complete = threading.Event()

    def receive(change: Change) -> None:
        heard.append(change.n)
        complete.set()

    async def play(runtime: AsyncRuntime) -> Any:
        await runtime.subscribe("audit", receive, from_start=True)
        with pytest.raises(Rejected, match="later is async; a subscriber is an ordinary function"):
            await runtime.subscribe("other", later)
        await runtime.publish("go", 1)
        order = await runtime.start(checkout, Order("7"))
        await asyncio.to_thread(complete.wait, WAIT_S)
        return await order.result()

    async def later(change: Change) -> None: ...

    assert played(tmp_path, play) == Receipt("r-7")
    assert heard[0] == 1


def test_an_async_handler_hears_of_its_cancellation(tmp_path: Path) -> None:
    async def stage() -> tuple[str | None, bool]:
        begun, stopped_early = asyncio.Event(), asyncio.Event()

        @task
        async def patient(ctx: Context) -> None:
            begun.set()
            try:
                await asyncio.sleep(60)
            finally:
                stopped_early.set()

        process = Process("patient", patient)
        async with AsyncRuntime(tmp_path / "p.db", process) as runtime:
            order = await runtime.start(process)
            await begun.wait()
            await order.cancel()
            await asyncio.wait_for(stopped_early.wait(), WAIT_S)
            return (await order.state()).outcome, stopped_early.is_set()

    assert asyncio.run(stage()) == ("cancelled", True)


# --- life -------------------------------------------------------------------------------------------------------------


def test_a_runtime_that_is_not_open_or_closed_says_so(tmp_path: Path) -> None:
    async def stage() -> None:
        runtime = AsyncRuntime(tmp_path / "p.db", quick)
        with pytest.raises(Closed, match="not open; use `async with`, or await open"):
            await runtime.start(quick, Order("7"))
        assert await runtime.close() is True
        await runtime.open()
        with pytest.raises(Rejected, match="opened before"):
            await runtime.open()
        await runtime.close()
        for call in (runtime.start(quick, Order("7")), runtime.list(), runtime.report(), runtime.get("x")):
            with pytest.raises(Closed):
                await call

    asyncio.run(stage())


def test_in_memory_it_works_too() -> None:
    async def stage() -> Any:
        async with AsyncRuntime(":memory:", quick) as runtime:
            return await (await runtime.start(quick, Order("7"))).result()

    assert asyncio.run(stage()) == Receipt("r-7")


def test_what_one_kind_of_runtime_has_begun_the_other_ends(tmp_path: Path) -> None:
    with Runtime(tmp_path / "p.db", *PROCESSES) as runtime:
        runtime.start(checkout, Order("7"), id="order-7")

    async def play(runtime: AsyncRuntime) -> Any:
        await runtime.send("order-7", "go")
        return await runtime.result("order-7")

    assert played(tmp_path, play) == Receipt("r-7")


def test_an_async_client_talks_to_the_owner_elsewhere(tmp_path: Path) -> None:
    with Runtime(tmp_path / "p.db", *PROCESSES) as owner:

        async def play(runtime: AsyncRuntime) -> tuple[bool, Any]:
            order = await runtime.start(quick, Order("7"), id="order-7")
            return runtime.is_owner, await order.result()

        assert played(tmp_path, play) == (False, Receipt("r-7"))
        assert owner.result("order-7") == Receipt("r-7")
