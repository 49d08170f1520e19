"""Ownership among real processes: each rival is one, told what to do line by line."""

from __future__ import annotations

import ast
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.model.errors import AlreadyOpen, Conflict, Rejected, Unavailable
from understudy.store.ownership import Address, HungDetector, OwnerFile

RIVAL = """
import os, sqlite3, sys
from contextlib import closing
from understudy.store.ownership import Address, OwnerFile

def elect():
    with file.election(), closing(sqlite3.connect(sys.argv[1], isolation_level=None)) as database:
        epoch, = database.execute("SELECT epoch FROM owner").fetchone()
        if file.is_alive(epoch):
            return None
        file.hold(epoch + 1)
        database.execute("UPDATE owner SET epoch = ? WHERE epoch = ?", (epoch + 1, epoch))
        return epoch + 1

def tried(expression):
    try:
        return eval(expression)
    except Exception as error:
        return type(error).__name__

def forked(expression):
    answers, answer = os.pipe()
    if os.fork() == 0:
        os.write(answer, repr(tried(expression)).encode())
        os._exit(0)
    os.wait()
    return eval(os.read(answers, 1000))

def elect_for_ever(kept=[]):
    kept.append(file.election())
    kept[0].__enter__()

def forked_in_election():
    parent = os.getpid()
    try:
        with file.election():
            child = os.fork()
        code = 0
    except OSError:
        code = 1
    if os.getpid() != parent:
        os._exit(code)
    return os.waitpid(child, 0)[1]

def publish_in_turn(times, *addresses):
    for turn in range(times):
        file.publish(addresses[turn % len(addresses)])

file = OwnerFile.of(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    print(repr(tried(line)), flush=True)
"""


class Rival:
    """Another process with the owner file of the same database in its variable `file`."""

    def __init__(self, database: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RIVAL, str(database)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONUTF8": "1"},
            encoding="utf-8",
        )
        assert self._line() == "ready"

    def tell(self, expression: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()

    def hear(self) -> object:
        return ast.literal_eval(self._line())

    def ask(self, expression: str) -> object:
        self.tell(expression)
        return self.hear()

    def stop(self) -> None:
        """Suspend it, and return when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()

    def _line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "Aufträge.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("CREATE TABLE owner(epoch INTEGER)")
        connection.execute("INSERT INTO owner VALUES (0)")
    return path


@pytest.fixture
def file(database: Path) -> Iterator[OwnerFile]:
    with OwnerFile.of(database) as file:
        yield file


@pytest.fixture
def rival(database: Path) -> Iterator[Callable[[], Rival]]:
    with ExitStack() as stack:

        def start() -> Rival:
            rival = Rival(database)
            stack.callback(rival.kill)
            return rival

        yield start


def address(epoch: int, *, port: int = 4711, secret: str = "s" * 43) -> Address:
    return Address(port=port, secret=secret, pid=os.getpid(), epoch=epoch)


# --- dead, alive, hung ------------------------------------------------------------------------------------------------


def test_a_living_owner_is_alive_and_a_killed_one_is_dead(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    owner = rival()
    assert owner.ask("file.hold(7)") is None
    assert [file.is_alive(epoch) for epoch in (6, 7, 8)] == [False, True, False]

    owner.kill()

    assert not file.is_alive(7)


def test_a_stopped_owner_is_alive_by_its_lock_and_hung_by_its_beat(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    owner, detector = rival(), HungDetector(lease_s=4)
    owner.ask("file.hold(1)")

    owner.stop()

    assert file.is_alive(1)
    assert [detector.observe(epoch=1, beat=9, now_s=at_s) for at_s in (0, 1, 2, 3, 4)] == [False] * 4 + [True]


def test_the_successor_of_a_hung_owner_is_not_mistaken_for_dead(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    hung, observer = rival(), rival()
    hung.ask("file.hold(1)")
    hung.stop()

    with file.election():
        file.hold(2)

    assert observer.ask("[file.is_alive(1), file.is_alive(2)]") == [True, True]


def test_nobody_owns_a_database_that_never_had_an_owner(file: OwnerFile) -> None:
    with file.election():
        assert not file.is_alive(0)

    assert file.address() is None


def test_an_epoch_that_is_held_cannot_be_held_by_another_process(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    owner = rival()
    owner.ask("file.hold(3)")

    with pytest.raises(Conflict, match=f"process {owner.process.pid}"):
        file.hold(3)

    assert not file.claimed


# --- elections --------------------------------------------------------------------------------------------------------


def test_of_several_challengers_exactly_one_wins_each_election(rival: Callable[[], Rival]) -> None:
    rivals = [rival() for _ in range(3)]

    for epoch in range(1, 31):
        for each in rivals:
            each.tell("elect()")
        outcomes = [each.hear() for each in rivals]

        assert sorted(outcomes, key=str) == [epoch, None, None]
        rivals[outcomes.index(epoch)].ask("file.let_go()")


def test_an_election_that_does_not_end_is_reported_with_its_process(
    file: OwnerFile, rival: Callable[[], Rival]
) -> None:
    elector = rival()
    elector.ask("elect_for_ever()")
    elector.stop()

    with pytest.raises(Unavailable, match=f"process {elector.process.pid} "), file.election(timeout_s=0.01):
        pass

    elector.kill()
    with file.election(timeout_s=0):
        pass


def test_two_users_in_one_process_elect_one_after_the_other(file: OwnerFile, database: Path) -> None:
    with (
        OwnerFile.of(database) as other,
        file.election(),
        pytest.raises(Unavailable, match="this process"),
        other.election(timeout_s=0.01),
    ):
        pass


def test_an_election_in_one_process_waits_for_that_in_another(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    challenger = rival()

    with file.election():
        challenger.tell("elect()")
        file.hold(1)
        file.let_go()

    assert challenger.hear() == 1


def test_releasing_in_the_middle_of_an_election_ends_both(database: Path, rival: Callable[[], Rival]) -> None:
    challenger, file = rival(), OwnerFile.of(database)

    with file.election():
        file.hold(1)
        file.release()

    assert challenger.ask("elect()") == 1


# --- one descriptor for each process ----------------------------------------------------------------------------------


def test_reading_the_address_and_opening_the_file_again_keep_the_lock(
    file: OwnerFile, database: Path, rival: Callable[[], Rival]
) -> None:
    observer = rival()
    file.hold(5)
    file.publish(address(5))

    with OwnerFile.of(database) as again:
        assert again.address() == address(5)

    assert observer.ask("file.is_alive(5)")
    assert observer.ask("file.address().port") == 4711


def test_a_second_user_in_this_process_sees_that_the_file_is_claimed(file: OwnerFile, database: Path) -> None:
    file.hold(1)

    with OwnerFile.of(database) as other:
        assert other.claimed
        assert other.is_alive(1)
        with pytest.raises(AlreadyOpen, match="this process"):
            other.hold(2)
        file.release()
        assert not other.claimed
        other.hold(2)


@pytest.mark.parametrize("spelling", ["link", "folder", "relative", "hard link of the owner file"])
def test_every_spelling_of_a_path_is_the_same_file(
    file: OwnerFile, database: Path, spelling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = database.parent / "other.db"
    match spelling:
        case "link":
            other.symlink_to(database)
        case "folder":
            (database.parent / "folder").symlink_to(database.parent)
            other = database.parent / "folder" / database.name
        case "relative":
            monkeypatch.chdir(database.parent)
            other = Path(database.name)
        case _:
            other.with_name("other.db-owner").hardlink_to(file.path)
    file.hold(1)

    with OwnerFile.of(other) as same:
        assert same.claimed
        assert same.path == file.path


def test_releasing_the_last_user_frees_the_epoch(database: Path, rival: Callable[[], Rival]) -> None:
    observer, file = rival(), OwnerFile.of(database)
    file.hold(1)

    file.release()
    file.release()

    assert not observer.ask("file.is_alive(1)")


def test_threads_that_open_and_release_never_cost_the_owner_its_lock(
    file: OwnerFile, database: Path, rival: Callable[[], Rival]
) -> None:
    def open_and_release() -> None:
        for _ in range(200):
            with OwnerFile.of(database) as other:
                other.address()

    observer = rival()
    file.hold(1)
    threads = [threading.Thread(target=open_and_release) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert observer.ask("file.is_alive(1)")


# --- fork -------------------------------------------------------------------------------------------------------------


def test_a_forked_child_owns_nothing_and_takes_nothing(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    owner = rival()
    owner.ask("file.hold(1)")

    assert owner.ask("forked('file.is_alive(1)')") == "UsedAfterFork"
    assert owner.ask("forked('file.hold(1)')") == "UsedAfterFork"
    assert owner.ask("forked('file.release()')") is None
    assert owner.ask("forked('OwnerFile.of(sys.argv[1]).is_alive(1)')") is True
    assert owner.ask("forked('OwnerFile.of(sys.argv[1]).claimed')") is False
    assert owner.ask("forked('OwnerFile.of(sys.argv[1]).hold(1)')") == "Conflict"
    assert owner.ask("forked('OwnerFile.of(sys.argv[1]).release()')") is None

    assert file.is_alive(1)


def test_a_fork_in_the_middle_of_an_election_leaves_it_to_the_parent(
    file: OwnerFile, rival: Callable[[], Rival]
) -> None:
    elector = rival()

    assert elector.ask("forked_in_election()") == 0

    with file.election(timeout_s=0):
        pass


# --- what others do to the file ---------------------------------------------------------------------------------------


def test_the_next_beat_mends_a_lock_that_a_foreign_close_has_dropped(
    file: OwnerFile, rival: Callable[[], Rival]
) -> None:
    observer = rival()
    file.hold(1)
    file.path.read_bytes()
    assert not observer.ask("file.is_alive(1)")

    file.hold(1)

    assert observer.ask("file.is_alive(1)")


def test_the_next_beat_mends_a_deleted_file(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    early = rival()
    file.hold(1)
    file.publish(address(1))
    file.path.unlink()

    file.hold(1)

    for observer in (early, rival()):
        assert observer.ask("[file.is_alive(1), file.address().epoch]") == [True, 1]


def test_the_next_beat_mends_lost_contents_but_never_those_of_a_successor(
    file: OwnerFile, rival: Callable[[], Rival]
) -> None:
    successor = rival()
    file.hold(1)
    file.publish(address(1))
    os.truncate(file.path, 0)

    file.hold(1)
    assert file.address() == address(1)

    successor.ask("[file.hold(2), file.publish(Address(port=1, secret='new', pid=1, epoch=2))]")
    file.hold(1)
    assert file.address() == Address(port=1, secret="new", pid=1, epoch=2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(contents=st.one_of(st.binary(max_size=600), st.just(b'{"address":' + b"[" * 500), st.just(b'{"x":' * 100)))
def test_illegible_contents_are_no_address(file: OwnerFile, contents: bytes) -> None:
    descriptor = os.open(file.path, os.O_WRONLY | os.O_TRUNC)
    os.write(descriptor, contents)
    os.close(descriptor)

    assert file.address() is None


def test_a_record_that_is_only_half_replaced_is_no_address(file: OwnerFile) -> None:
    file.hold(1)
    file.publish(address(1, port=4711))

    file.path.write_bytes(file.path.read_bytes().replace(b"4711", b"4811"))

    assert file.address() is None


def test_a_reader_never_sees_a_mixture_of_two_addresses(file: OwnerFile, rival: Callable[[], Rival]) -> None:
    writer, seen = rival(), set()
    one, two = address(1, port=1, secret="a" * 300), address(1, port=65000, secret="b" * 40)
    writer.ask("file.hold(1)")
    made = [f"Address(port={each.port}, secret='{each.secret}', pid={each.pid}, epoch=1)" for each in (one, two)]

    writer.tell(f"publish_in_turn(4000, {made[0]}, {made[1]})")
    for _ in range(4000):
        seen.add(file.address())
    assert writer.hear() is None

    assert seen - {None} <= {one, two}
    assert file.address() == two


def test_the_secret_is_for_this_user_alone_and_shows_in_no_text(database: Path) -> None:
    path = database.with_name(database.name + "-owner")
    path.touch(0o644)

    with OwnerFile.of(database):
        assert path.stat().st_mode & 0o777 == 0o600

    assert "sss" not in repr(address(1))


def test_a_symbolic_link_in_the_place_of_the_file_is_refused(database: Path) -> None:
    path = database.with_name(database.name + "-owner")
    path.symlink_to(database.with_name("elsewhere"))

    with pytest.raises(Rejected, match="symbolic link has that name; remove it"):
        OwnerFile.of(database)

    assert not database.with_name("elsewhere").exists()


@pytest.mark.parametrize("name", ["missing/orders.db", "nul\0.db", "x" * 300])
def test_a_path_that_cannot_be_is_refused_with_advice(tmp_path: Path, name: str) -> None:
    with pytest.raises(Rejected, match=r"path"):
        OwnerFile.of(str(tmp_path / name))


def test_a_folder_that_we_may_not_write_to_is_refused_with_advice() -> None:
    script = """
import os, sys
from understudy.store.ownership import OwnerFile
if os.geteuid() == 0:
    os.seteuid(65534)  # Root may write everywhere.
OwnerFile.of(sys.argv[1])
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o555)
        outcome = subprocess.run(
            [sys.executable, "-c", script, folder + "/orders.db"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            encoding="utf-8",
            check=False,
        )
        Path(folder).chmod(0o755)

    assert f"Rejected: cannot use {Path(folder).resolve()}/orders.db-owner (Permission denied); give " in outcome.stderr


# --- the beat ---------------------------------------------------------------------------------------------------------


@given(gaps=st.lists(st.integers(1, 500), min_size=1))
def test_an_owner_is_hung_exactly_when_no_beat_was_seen_for_one_lease(gaps: list[int]) -> None:
    detector, now_s = HungDetector(lease_s=1000), 0
    detector.observe(epoch=1, beat=1, now_s=now_s)

    for gap in gaps:
        now_s += gap
        assert detector.observe(epoch=1, beat=1, now_s=now_s) == (now_s >= 1000)

    assert not detector.observe(epoch=1, beat=2, now_s=now_s + 1)


@given(steps=st.lists(st.tuples(st.floats(0, 1e6), st.booleans())))
def test_an_owner_that_beats_or_is_replaced_is_never_hung(steps: list[tuple[float, bool]]) -> None:
    detector, now_s, epoch, beat = HungDetector(lease_s=1), 0.0, 1, 1

    for gap_s, is_replaced in steps:
        now_s, epoch, beat = now_s + gap_s, epoch + is_replaced, beat + (not is_replaced)
        assert not detector.observe(epoch=epoch, beat=beat, now_s=now_s)


def test_an_observer_that_stood_still_gives_the_owner_time_to_beat() -> None:
    detector = HungDetector(lease_s=10)
    detector.observe(epoch=1, beat=1, now_s=0)

    assert not detector.observe(epoch=1, beat=1, now_s=3600)
    assert not detector.observe(epoch=1, beat=1, now_s=3604)
    assert detector.observe(epoch=1, beat=1, now_s=3605)


def test_nothing_seen_is_not_hung() -> None:
    assert not HungDetector(lease_s=1).hung
