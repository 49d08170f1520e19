"""SQLite's view of the simulated disks: one virtual file system, in which a path begins with its disk's number.

SQLite must unwind when the process dies, so that the operation at which it does is an I/O error to it; whatever it asks
of a dead disk after that succeeds and does nothing. Nothing here raises into a finalizer, where it would only be
printed. Time stands still and chance comes from the disk's seed: a run must be the same in every process.
"""

# ruff: noqa: ARG002, N802  # The names of the methods, and what they are given, are SQLite's.

from __future__ import annotations

import hashlib
import types
from typing import Final, cast
from weakref import WeakValueDictionary

import apsw

from understudy.simulations.disk import Died, Disk, Failed, File

NAME: Final = "understudy"
SECTOR_BYTES: Final = 4_096  # As SQLite takes it on unix; the disk tears at smaller ones.
EPOCH_MS: Final = 210_866_760_000_000  # 1970 in milliseconds of the Julian day.
CODES: Final = {
    "full": apsw.SQLITE_FULL,
    "busy": apsw.SQLITE_BUSY,
    "read": apsw.SQLITE_IOERR_READ,
    "write": apsw.SQLITE_IOERR_WRITE,
    "sync": apsw.SQLITE_IOERR_FSYNC,
    "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    "delete": apsw.SQLITE_IOERR_DELETE,
}

_disks: WeakValueDictionary[int, Disk] = WeakValueDictionary()


def mounted(disk: Disk, name: str) -> str:
    """The path under which SQLite finds a file of a disk."""
    _disks[disk.number] = disk
    return f"/{disk.number}/{name}"


def throw_dice(disk: Disk) -> None:
    """Let SQLite's chance begin anew, for a connection that is about to be opened.

    Each opening has its own: with the same salts, a log would take frames of a former life for its own.
    """
    disk.openings += 1
    _dice.seed = f"{disk.seed} {disk.life} {disk.openings}"
    apsw.randomness(0)


def _find(path: str) -> tuple[Disk | None, str]:
    _root, number, name = path.split("/", 2)
    return _disks.get(int(number)), name


class Dice(apsw.VFS):
    """The default file system, with known randomness: only the default one is asked for it."""

    def __init__(self) -> None:
        super().__init__(f"{NAME}-dice", base="", makedefault=True)
        self.seed = ""

    def xRandomness(self, numbytes: int) -> bytes:
        return hashlib.shake_128(self.seed.encode()).digest(numbytes)


class Disks(apsw.VFS):
    """All disks of the process."""

    def __init__(self) -> None:
        super().__init__(NAME, base="")

    def excepthook(
        self,
        etype: type[BaseException] | None,
        evalue: BaseException | None,
        etraceback: types.TracebackType | None,
    ) -> bool:
        return True  # What SQLite itself lets pass is nobody's business.

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        flags[1] = flags[0]
        if name is None:
            return cast(apsw.VFSFile, Handle(Disk(), File("scratch")))  # It is nobody's, and goes with its handle.
        disk, file = _find(name if isinstance(name, str) else name.filename())
        if disk is None:
            raise apsw.exception_for(apsw.SQLITE_CANTOPEN)
        return cast(apsw.VFSFile, Handle(disk, disk.open(file)))

    def xDelete(self, filename: str, syncdir: bool) -> None:
        disk, name = _find(filename)
        if disk is None or disk.is_dead or name not in disk.files:
            return  # That it is gone already is no error to SQLite, but one raised here would reach the caller.
        try:
            disk.delete(name, is_durable=syncdir)
        except (Died, Failed) as trouble:
            raise _error(trouble) from None

    def xAccess(self, pathname: str, flags: int) -> bool:
        disk, name = _find(pathname)
        return disk is not None and name in disk.files

    def xFullPathname(self, name: str) -> str:
        return name

    def xCurrentTimeInt64(self) -> int:
        return EPOCH_MS

    def xCurrentTime(self) -> float:
        return EPOCH_MS / 86_400_000

    def xSleep(self, microseconds: int) -> int:
        return microseconds


class Handle:
    """A file that SQLite has open. Locks are not kept: the connections of a disk take turns by themselves."""

    __slots__ = ("disk", "file")

    def __init__(self, disk: Disk, file: File) -> None:
        self.disk = disk
        self.file = file

    def xRead(self, amount: int, offset: int) -> bytes:
        try:
            return bytes(self.disk.read(self.file, offset, amount))
        except Failed as trouble:
            raise _error(trouble) from None

    def xWrite(self, data: bytes, offset: int) -> None:
        disk = self.disk
        if disk.is_dead:
            return
        try:
            disk.write(self.file, offset, bytes(data))
        except (Died, Failed) as trouble:
            raise _error(trouble) from None

    def xTruncate(self, newsize: int) -> None:
        disk = self.disk
        if disk.is_dead:
            return
        try:
            disk.cut(self.file, newsize)
        except (Died, Failed) as trouble:
            raise _error(trouble) from None

    def xSync(self, flags: int) -> None:
        disk = self.disk
        if disk.is_dead:
            return
        try:
            disk.sync(self.file)
        except (Died, Failed) as trouble:
            raise _error(trouble) from None

    def xFileSize(self) -> int:
        return len(self.file.content)

    def xLock(self, level: int) -> None:
        pass

    def xUnlock(self, level: int) -> None:
        pass

    def xCheckReservedLock(self) -> bool:
        return False

    def xClose(self) -> None:
        pass

    def xSectorSize(self) -> int:
        return SECTOR_BYTES

    def xDeviceCharacteristics(self) -> int:
        return apsw.SQLITE_IOCAP_POWERSAFE_OVERWRITE  # As on unix: bytes beside a write are safe.

    def xFileControl(self, op: int, ptr: int) -> bool:
        return False


def _error(trouble: Died | Failed) -> Exception:
    return apsw.exception_for(CODES[trouble.kind] if isinstance(trouble, Failed) else apsw.SQLITE_IOERR)


_dice = Dice()
_vfs = Disks()
