"""More callers than the runtime takes at once wait at the door; who waits too long is told, and nothing is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from understudy import Limits, Process, Runtime, Unavailable, connect, wait
from understudy.store.writer import Writer

Eventually = Callable[..., Any]

play = Process("play", wait("go"))


@contextmanager
def _stuck_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait until the event is set; reads and everything else go on."""
    flows = threading.Event()
    write = Writer.write

    def wait_and_write(self: Writer, *given: Any, **named: Any) -> Any:
        flows.wait(60)
        return write(self, *given, **named)

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "write", wait_and_write)
        try:
            yield flows
        finally:
            flows.set()


def _call(runtime: Runtime, ids: list[str]) -> tuple[list[threading.Thread], dict[str, str]]:
    outcomes: dict[str, str] = {}

    def call(id: str) -> None:
        try:
            outcomes[id] = runtime.start(play, id=id).id
        except Unavailable as error:
            outcomes[id] = str(error)

    threads = [threading.Thread(target=call, args=(id,)) for id in ids]
    for thread in threads:
        thread.start()
    return threads, outcomes


@pytest.mark.parametrize("is_client", [False, True])
def test_who_finds_no_place_in_time_is_told_so_and_was_not_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually, is_client: bool
) -> None:
    limits = Limits(in_flight=5, patience_ms=20)
    with Runtime(tmp_path / "a.db", play, limits=limits) as owner:
        runtime = connect(tmp_path / "a.db", play) if is_client else owner
        with _stuck_disk(monkeypatch) as flows:
            threads, outcomes = _call(runtime, [f"{n}" for n in range(20)])
            eventually(lambda: len(outcomes) == 15)
            flows.set()
            for thread in threads:
                thread.join(60)

        done = {id for id, outcome in outcomes.items() if outcome == id}
        refused = [outcome for id, outcome in outcomes.items() if outcome != id]
        assert len(done) == 5
        assert all("5 commands are under way" in text and "nothing was done" in text for text in refused)
        assert {summary.id for summary in owner.list()} == done
        assert runtime.start(play, id="later").id == "later"
        runtime.close()


def test_who_waits_at_the_door_gets_in_when_somebody_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually
) -> None:
    with Runtime(tmp_path / "a.db", play, limits=Limits(in_flight=3, patience_ms=60_000)) as runtime:
        with _stuck_disk(monkeypatch) as flows:
            threads, outcomes = _call(runtime, [f"{n}" for n in range(30)])
            eventually(lambda: len(runtime.node.system.directory) == 3 if runtime.node.system else False)
            assert outcomes == {}
            flows.set()
            for thread in threads:
                thread.join(60)

        assert outcomes == {f"{n}": f"{n}" for n in range(30)}


def test_refused_and_failed_commands_give_their_places_back(tmp_path: Path) -> None:
    with Runtime(tmp_path / "a.db", play, limits=Limits(in_flight=2, patience_ms=20)) as runtime:
        for _ in range(20):
            with pytest.raises(Exception, match="no instance"):
                runtime.send("nobody", "go")

        assert runtime.start(play, id="one").id == "one"
