"""Who owns a database file: the record locks and the contents of `<db>-owner`.

The owner of epoch e holds an exclusive record lock on byte e of that file, byte 0 is the mutex of an election, and the
first bytes say where the owner listens. A lock vanishes with its process, so a free byte means a dead owner; a held one
does not mean a healthy owner, which is why `HungDetector` watches the beat. Nothing here is the truth: that is the
epoch in the database, which the caller reads and raises, and by which every commit is fenced. This module must never
open the file twice in one process, because closing any descriptor of a file drops all record locks that the process has
on it; and it must never wait for a lock inside the kernel, because the kernel's search for deadlocks knows only
processes, and reports one where two threads serve two databases.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

import attrs
import msgspec

from understudy.model.errors import AlreadyOpen, Conflict, Rejected, Unavailable, UsedAfterFork

ELECTION_TIMEOUT_S: Final = 10.0


@attrs.frozen(kw_only=True)
class Address:
    """Where the owner of an epoch answers; worth nothing unless that epoch is alive."""

    port: int
    secret: str = attrs.field(repr=False)  # Whoever has it commands the database; it belongs in no log.
    pid: int
    epoch: int


class OwnerFile:
    """One user's hold on `<db>-owner`; all users in a process share one descriptor.

    An election, step by step: inside `election()` read the epoch e from the database, test `is_alive(e)`,
    `hold(e + 1)`, write e + 1 into the database, `publish`. The byte is taken before the epoch is written, so that
    nobody reads an epoch whose byte is free although its owner lives; if the write fails, `let_go`.
    """

    @classmethod
    def of(cls, database: str | os.PathLike[str]) -> OwnerFile:
        """Open (or share) the owner file beside `database`; pair it with `release`, or use it in a `with`."""
        path = _owner_path(database)
        with _guard:
            shared = _find(path) or _Shared(path)
            _shared[shared.path] = shared
            shared.users += 1
        return cls(shared)

    def __init__(self, shared: _Shared) -> None:
        self._shared = shared
        self._pid = os.getpid()
        self._is_released = False

    @property
    def path(self) -> Path:
        return self._shared.path

    @property
    def claimed(self) -> bool:
        """Whether another user in this very process is the owner; its locks do not stop us, so this must."""
        self._check_usable()
        return self._shared.holder not in (None, self)

    @contextmanager
    def election(self, *, timeout_s: float = ELECTION_TIMEOUT_S) -> Iterator[None]:
        """Keep every other process, and every other user in this one, from electing at the same time."""
        self._check_usable()
        deadline_s = time.monotonic() + timeout_s
        if not self._shared.electing.acquire(timeout=timeout_s):
            raise Unavailable(f"another election on {self.path} runs in this process for {timeout_s:g} s; try again")
        try:
            with _guard:
                self._shared.follow()
            self._shared.lock_mutex(deadline_s)
            try:
                yield
            finally:
                self._shared.unlock(_MUTEX)
        finally:
            self._shared.electing.release()

    def is_alive(self, epoch: int) -> bool:
        """Whether the owner of `epoch` still exists, hung or not; more than a hint only within an election."""
        self._check_usable()
        with _guard:
            self._shared.follow()
            is_here = self._shared.holder is not None and self._shared.epoch == epoch
            return epoch > _MUTEX and (is_here or self._shared.locker(epoch) is not None)

    def hold(self, epoch: int) -> None:
        """Become, or stay, the one who holds `epoch`.

        Repeat it with every beat: it mends what others break without knowing, such as a backup in this process that
        opened and closed the file (our locks are gone) or a cleaner that deleted it (they guard a file without a name).
        """
        self._check_usable()
        assert epoch > _MUTEX, f"epoch {epoch} of {self.path}"
        with _guard:
            if self.claimed:
                raise AlreadyOpen(f"{self.path}: a Runtime in this process owns it; close that one or use it")
            self._shared.follow()
            self._shared.take(self, epoch)
            self._shared.rewrite()

    def let_go(self) -> None:
        """Stop holding. The address stays: a dead epoch makes it worthless, and it may be a successor's already."""
        self._check_usable()
        with _guard:
            if self._shared.holder is self:
                self._shared.drop()

    def publish(self, address: Address) -> None:
        """Say where the owner answers; call it inside the election, after `hold`."""
        self._check_usable()
        with _guard:
            assert self._shared.holder is self, f"{address} published without holding it"
            assert self._shared.epoch == address.epoch, f"{address} published while holding {self._shared.epoch}"
            self._shared.address = address
            self._shared.write(address)

    def address(self) -> Address | None:
        """What the last owner published, if anything legible; test `is_alive(address.epoch)` before calling there."""
        self._check_usable()
        with _guard:
            self._shared.follow()
            return self._shared.read()

    def release(self) -> None:
        """Let go and give the descriptor back. Repeating it is harmless, and so is a forked child that does it."""
        if os.getpid() != self._pid:
            return
        with _guard:
            if self._is_released:
                return
            self.let_go()
            self._is_released = True
            self._shared.users -= 1
            if self._shared.users == 0:
                self._shared.close()

    def __enter__(self) -> OwnerFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise UsedAfterFork(f"{self.path} was opened before a fork; open a new Runtime in the child process")
        assert not self._is_released, f"{self.path} was released"


class HungDetector:
    """Tells from the beats that one observer sees whether an owner that still exists also still works.

    Only the observer's own monotonic clock counts. An observer that stood still itself, say because the whole machine
    was paused, has learned nothing in that time: between two looks at most half a lease counts.
    """

    def __init__(self, *, lease_s: float) -> None:
        assert lease_s > 0, f"lease of {lease_s} s"
        self._lease_s = lease_s
        self._seen: tuple[int, int] | None = None
        self._since_s = 0.0
        self._last_s = 0.0

    def observe(self, *, epoch: int, beat: int, now_s: float) -> bool:
        """Take in what the database says now; True when nothing has moved for one lease."""
        if self._seen != (epoch, beat):
            self._seen, self._since_s = (epoch, beat), now_s
        else:
            self._since_s += max(0.0, now_s - self._last_s - self._lease_s / 2)
        self._last_s = now_s
        return self.hung

    @property
    def hung(self) -> bool:
        return self._seen is not None and self._last_s - self._since_s >= self._lease_s


_MUTEX: Final = 0
_CLOSED: Final = -1
_RECORD_BYTES: Final = 512  # Fixed, so that a shorter record leaves no tail of a longer one.
_READS: Final = 5
_FIRST_PAUSE_S: Final = 0.001
_LONGEST_PAUSE_S: Final = 0.02

# `struct flock`, as each family of systems lays it out: the lock's type, whence, start, length and process.
_IS_LINUX: Final = sys.platform.startswith("linux")
_FLOCK: Final = struct.Struct("@hhqqi0q" if _IS_LINUX else "@qqihhi0q")


class _Record(msgspec.Struct, frozen=True):
    """What stands in the file. Readers take no lock; the checksum shows them a record that is just being replaced."""

    address: Address
    check: int


class _Shared:
    """The one descriptor that this process has of an owner file, and who in the process holds what through it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.descriptor = _open(path)
        self.users = 0
        self.holder: OwnerFile | None = None
        self.epoch = 0
        self.address: Address | None = None
        self.electing = threading.Lock()

    def follow(self) -> None:
        """Move to the file that now bears the name, if somebody deleted or replaced ours, and bring our lock along."""
        if self.is_named():
            return
        fresh = _open(self.path)
        os.dup2(fresh, self.descriptor, inheritable=False)
        os.close(fresh)  # This drops our locks on the new file, of which there are none yet.
        if self.holder is not None:
            self.lock(self.epoch)

    def is_named(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), os.fstat(self.descriptor))
        except FileNotFoundError:
            return False
        except OSError as error:
            _refuse(self.path, error)

    def lock_mutex(self, deadline_s: float) -> None:
        """Wait for byte 0 by trying again: an election lasts milliseconds, and a wait in the kernel has no timeout."""
        pause_s = _FIRST_PAUSE_S
        while not self.lock(_MUTEX):
            if time.monotonic() >= deadline_s:
                elector = f"process {self.locker(_MUTEX)} has not finished its election on {self.path}"
                raise Unavailable(f"{elector}; try again, or end that process if it is stopped")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    def take(self, holder: OwnerFile, epoch: int) -> None:
        if not self.lock(epoch):
            holding = f"epoch {epoch} of {self.path} is held by process {self.locker(epoch)}"
            raise Conflict(f"{holding}; read the epoch from the database and elect again")
        if self.holder is not None and self.epoch != epoch:
            self.drop()
        self.holder, self.epoch = holder, epoch

    def drop(self) -> None:
        self.unlock(self.epoch)
        self.holder, self.epoch, self.address = None, 0, None

    def lock(self, byte: int) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            _refuse(self.path, error)
        return True

    def unlock(self, byte: int) -> None:
        if self.descriptor != _CLOSED:  # It may have been released, or the process forked, since the byte was locked.
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1, byte)

    def locker(self, byte: int) -> int | None:
        """The other process that has locked `byte`; asked without locking, so that no question looks like an owner."""
        if _IS_LINUX:
            given = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
            kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_GETLK, given))
        else:
            given = _FLOCK.pack(byte, 1, 0, fcntl.F_WRLCK, os.SEEK_SET, 0)
            _, _, pid, kind, _, _ = _FLOCK.unpack(fcntl.fcntl(self.descriptor, fcntl.F_GETLK, given))
        return None if kind == fcntl.F_UNLCK else int(pid)

    def write(self, address: Address) -> None:
        record = msgspec.json.encode(_Record(address=address, check=_checksum(address))) + b"\n"
        assert len(record) <= _RECORD_BYTES, f"an address of {len(record)} bytes"
        try:
            os.pwrite(self.descriptor, record.ljust(_RECORD_BYTES), 0)
        except OSError as error:
            _refuse(self.path, error)

    def rewrite(self) -> None:
        """Publish again if our address was lost with the file, but never over that of a successor."""
        found = self.read()
        if self.address is not None and (found is None or found.epoch < self.epoch):
            self.write(self.address)

    def read(self) -> Address | None:
        """Illegible contents are no address: a power cut may leave anything, and the next owner replaces it."""
        for _ in range(_READS):
            try:
                record = msgspec.json.decode(os.pread(self.descriptor, _RECORD_BYTES, 0), type=_Record)
            except msgspec.DecodeError:
                continue
            if record.check == _checksum(record.address):
                return record.address
        return None

    def close(self) -> None:
        _shared.pop(self.path, None)
        os.close(self.descriptor)
        self.descriptor = _CLOSED


# Every owner file that this process has open. The lock guards the table and all state in it; nobody waits holding it.
_shared: dict[Path, _Shared] = {}
_guard = threading.RLock()


def _forget_in_child() -> None:
    """A forked child owns nothing. Closing its copies of the descriptors leaves the parent's locks alone."""
    global _guard
    _guard = threading.RLock()  # Another thread of the parent may have held it, and does not exist here.
    for shared in list(_shared.values()):
        shared.close()


os.register_at_fork(after_in_child=_forget_in_child)


def _owner_path(database: str | os.PathLike[str]) -> Path:
    try:
        return Path(os.path.realpath(database) + "-owner")
    except ValueError as error:
        raise Rejected(f"{database!r} is no path ({error}); give another one") from error


def _find(path: Path) -> _Shared | None:
    """The open file of that name, or of another name for the same file: opening it again would cost us our locks."""
    if path in _shared:
        return _shared[path]
    try:
        wanted = path.lstat()
    except OSError:
        return None  # Opening it will say what is wrong.
    return next((one for one in _shared.values() if os.path.samestat(wanted, os.fstat(one.descriptor))), None)


def _open(path: Path) -> int:
    """A symbolic link is refused: it could make us write the secret into somebody else's file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    except (OSError, ValueError) as error:
        _refuse(path, error)
    try:
        _make_private(path, descriptor)
    except OSError as error:
        os.close(descriptor)
        _refuse(path, error)
    return descriptor


def _make_private(path: Path, descriptor: int) -> None:
    """Only the database's user may read the secret; root, helping out for one command, must not lock that user out."""
    if stat.S_IMODE(os.fstat(descriptor).st_mode) != 0o600:
        os.fchmod(descriptor, 0o600)
    database = path.with_name(path.name.removesuffix("-owner"))
    if os.geteuid() == 0 and database.exists():
        user = database.stat()
        os.fchown(descriptor, user.st_uid, user.st_gid)


def _checksum(address: Address) -> int:
    return zlib.crc32(msgspec.json.encode(address))


_ADVICE: Final = {
    errno.EACCES: "give this user write access to the folder and to the file, or choose another path",
    errno.EPERM: "the file belongs to another user; run as that user, or delete it while no Runtime uses the database",
    errno.EROFS: "the file system is read-only; choose a path on a writable one",
    errno.ENOENT: "make the folder first, or choose another path",
    errno.ENOTDIR: "a part of the path is no folder; choose another path",
    errno.EISDIR: "a folder has that name; remove it or choose another path",
    errno.ELOOP: "a symbolic link has that name; remove it",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.EINVAL: "choose another path",
    errno.ENOLCK: "this file system gives no record locks; choose a path on a local disk",
}


def _refuse(path: Path, error: OSError | ValueError) -> NoReturn:
    """What only a person can change is `Rejected`; the rest, such as a full disk, may pass by itself."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    advice = _ADVICE.get(error.errno or 0) if isinstance(error, OSError) else _ADVICE[errno.EINVAL]
    if advice is None:
        raise Unavailable(f"cannot use {path} ({reason}); nothing was done, try again") from error
    raise Rejected(f"cannot use {path} ({reason}); {advice}") from error
