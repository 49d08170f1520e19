"""A promise settles once, calls back, and is waited for only where waiting is allowed."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator

import pykka
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.actors.promise import BlockedInsideActor, Promise, current

TIMEOUT_S = 10.0  # Only a broken promise lets a test wait that long.


@pytest.fixture
def inside_an_actor() -> Iterator[None]:
    current.actor = "an actor"
    yield
    current.actor = None


class SettlingDriver:
    """A world in which the awaited thing happens at the n-th step."""

    def __init__(self, settle: Callable[[], object], *, after_steps: int) -> None:
        self.steps = 0
        self.timeouts: list[float | None] = []
        self._settle = settle
        self._after_steps = after_steps

    def drive(self, condition: Callable[[], bool], *, timeout_s: float | None) -> None:
        self.timeouts.append(timeout_s)
        while not condition():
            self.steps += 1
            if self.steps == self._after_steps:
                self._settle()


def start_thread(target: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_a_resolved_promise_gives_its_value_as_often_as_it_is_asked() -> None:
    promise: Promise[int] = Promise()

    assert promise.resolve(7)

    assert [promise.get(), promise.get()] == [7, 7]
    assert promise.done
    assert promise.error is None


def test_none_and_false_are_values_like_any_other() -> None:
    nothing: Promise[None] = Promise()
    no: Promise[bool] = Promise()

    nothing.resolve(None)
    no.set(value=False)

    assert nothing.done
    assert nothing.get(timeout=0) is None
    assert no.get(timeout=0) is False


def test_a_rejected_promise_raises_the_very_exception() -> None:
    promise: Promise[int] = Promise()
    error = ValueError("no")

    assert promise.reject(error)

    assert promise.error is error
    with pytest.raises(ValueError, match="no") as caught:
        promise.get()
    assert caught.value is error


def test_raising_the_same_exception_often_does_not_lengthen_its_traceback() -> None:
    promise: Promise[int] = Promise()
    promise.reject(ValueError("no"))
    lengths = set()

    for _ in range(5):
        with pytest.raises(ValueError, match="no") as caught:
            promise.get()
        lengths.add(len(traceback.extract_tb(caught.value.__traceback__)))

    assert len(lengths) == 1


@given(st.lists(st.sampled_from(["resolve", "reject", "set", "set_exception"]), min_size=1, max_size=6))
def test_the_first_settlement_wins_and_later_ones_are_ignored(attempts: list[str]) -> None:
    promise: Promise[int] = Promise()
    calls: list[object] = []
    promise.add_done_callback(calls.append)

    for number, attempt in enumerate(attempts):
        error = LookupError(number)
        match attempt:
            case "resolve":
                assert promise.resolve(number) is (number == 0)
            case "reject":
                assert promise.reject(error) is (number == 0)
            case "set":
                promise.set(number)
            case _:
                promise.set_exception((LookupError, error, None))

    assert calls == [promise]
    if attempts[0] in ("resolve", "set"):
        assert promise.get() == 0
    else:
        with pytest.raises(LookupError, match="0"):
            promise.get()


def test_of_many_threads_that_settle_at_once_exactly_one_wins() -> None:
    def race(promise: Promise[int], number: int) -> None:
        barrier.wait(TIMEOUT_S)
        promise.add_done_callback(calls.append)
        if promise.resolve(number):
            winners.append(number)

    for _ in range(50):
        promise: Promise[int] = Promise()
        barrier, winners, calls = threading.Barrier(4), list[int](), list[object]()
        threads = [threading.Thread(target=race, args=(promise, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)

        assert winners == [promise.get(timeout=TIMEOUT_S)]
        assert calls == [promise] * 4


def test_set_exception_takes_the_exception_being_handled_as_pykka_expects() -> None:
    promise: Promise[int] = Promise()

    try:
        raise KeyError("lost")
    except KeyError:
        promise.set_exception()

    with pytest.raises(KeyError, match="lost"):
        promise.get()


def test_set_exception_makes_the_exception_if_only_its_class_is_known() -> None:
    promise: Promise[int] = Promise()

    promise.set_exception((KeyError, None, None))

    assert isinstance(promise.error, KeyError)


def test_callbacks_run_in_order_on_the_settling_thread_and_at_once_when_settled() -> None:
    promise: Promise[str] = Promise()
    calls: list[tuple[str, str, str]] = []

    def noting(name: str) -> Callable[[Promise[str]], None]:
        return lambda settled: calls.append((name, settled.get(), threading.current_thread().name))

    promise.add_done_callback(noting("first"))
    promise.add_done_callback(noting("second"))
    thread = threading.Thread(target=promise.resolve, args=("x",), name="settler")
    thread.start()
    thread.join(TIMEOUT_S)
    promise.add_done_callback(noting("late"))

    here = threading.current_thread().name
    assert calls == [("first", "x", "settler"), ("second", "x", "settler"), ("late", "x", here)]


@pytest.mark.parametrize("error", [ValueError("broken"), SystemExit(3)])
def test_what_a_callback_raises_is_logged_and_spares_the_settler_and_the_others(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    promise: Promise[int] = Promise()
    calls: list[object] = []

    def broken(_: Promise[int]) -> None:
        raise error

    promise.add_done_callback(broken)
    promise.add_done_callback(calls.append)

    assert promise.resolve(1)
    assert calls == [promise]
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == [error]


def test_get_waits_for_another_thread() -> None:
    promise: Promise[int] = Promise()
    waiting = threading.Event()
    answers: list[int] = []

    def wait() -> None:
        waiting.set()
        answers.append(promise.get(timeout=TIMEOUT_S))

    threads = [start_thread(wait) for _ in range(3)]
    waiting.wait(TIMEOUT_S)
    promise.resolve(5)
    for thread in threads:
        thread.join(TIMEOUT_S)

    assert answers == [5, 5, 5]


@pytest.mark.parametrize("timeout_s", [0, 0.001, -1])
def test_a_wait_that_is_too_long_ends_with_pykkas_timeout_and_leaves_nothing_behind(timeout_s: float) -> None:
    promise: Promise[int] = Promise()

    for _ in range(3):
        with pytest.raises(pykka.Timeout):
            promise.get(timeout=timeout_s)

    assert not promise._callbacks
    assert promise.resolve(1)
    assert promise.get(timeout=timeout_s) == 1


def test_a_timeout_beyond_what_the_platform_can_wait_is_no_error() -> None:
    promise: Promise[int] = Promise()
    thread = start_thread(lambda: promise.resolve(1))

    assert promise.get(timeout=1e30) == 1
    thread.join(TIMEOUT_S)


@pytest.mark.usefixtures("inside_an_actor")
def test_inside_an_actor_a_pending_promise_raises_instead_of_waiting() -> None:
    promise: Promise[int] = Promise()

    with pytest.raises(BlockedInsideActor, match="an actor would wait"):
        promise.get(timeout=0)


@pytest.mark.usefixtures("inside_an_actor")
def test_inside_an_actor_a_promise_derived_from_a_pending_one_raises_too() -> None:
    promise: Promise[int] = Promise()

    with pytest.raises(BlockedInsideActor):
        promise.map(lambda value: value + 1).get()


@pytest.mark.usefixtures("inside_an_actor")
def test_inside_an_actor_a_settled_promise_is_read() -> None:
    promise: Promise[int] = Promise()

    promise.resolve(1)

    assert promise.get() == 1


def test_a_thread_outside_may_wait_while_another_thread_runs_an_actor() -> None:
    promise: Promise[int] = Promise()

    def act() -> None:
        current.actor = "an actor"
        promise.resolve(1)

    thread = start_thread(act)

    assert promise.get(timeout=TIMEOUT_S) == 1
    thread.join(TIMEOUT_S)


def test_a_driver_runs_its_world_until_the_promise_is_settled() -> None:
    promise: Promise[int] = Promise()
    driver = SettlingDriver(lambda: promise.resolve(9), after_steps=3)
    promise.driver = driver

    assert promise.get(timeout=2.5) == 9
    assert promise.get() == 9

    assert driver.steps == 3
    assert driver.timeouts == [2.5]


def test_what_pykka_derives_from_a_promise_settles_when_it_is_got() -> None:
    promise: Promise[int] = Promise()
    other: Promise[int] = Promise()
    doubled = promise.map(lambda value: value * 2)
    joined = promise.join(other)
    calls: list[object] = []
    assert isinstance(doubled, Promise)
    doubled.add_done_callback(calls.append)

    promise.resolve(4)
    other.resolve(5)

    assert doubled.get() == 8
    assert doubled.done
    assert calls == [doubled]
    assert joined.get() == [4, 5]


def test_a_promise_says_how_it_stands() -> None:
    pending: Promise[int] = Promise()
    resolved: Promise[int] = Promise()
    rejected: Promise[int] = Promise()

    resolved.resolve(1)
    rejected.reject(ValueError("no"))

    assert repr(pending) == "<Promise pending>"
    assert repr(resolved) == "<Promise resolved 1>"
    assert repr(rejected) == "<Promise rejected ValueError('no')>"
