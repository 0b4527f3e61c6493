"""Who else uses this database file: a lock and a doorbell for each process start.

Beside ``jobs.db`` lies a folder ``jobs.db-owners`` with one file for each open store. The store
holds a lock on its file, which the system releases when the process ends, however it ends: a file
that can be locked belonged to an owner that is dead. Next to it a socket takes rings, so that a
commit in one process wakes the others without a poll. Both are a help and never needed: without
them a lease ends by its time, and changes are seen by the file's time stamp.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import trio

from ._identity import fresh_token

try:
    import fcntl
except ImportError:  # Windows: no such lock, so a killed owner is known by its lease alone.
    fcntl = None

_RING_LIMIT = 4096
"""Bytes of a ring; more than any of ours has."""

_RINGS_KEPT = 8
"""Rings that wait to be heard on Linux; further ones may be lost, as fewer may be elsewhere."""

_SOCKET_PATH_LIMIT = 100
"""Bytes of a socket's path that every system takes (the least limit is 104)."""


class OwnerLock:
    """This process start, as others see it. Enter it before the first claim."""

    def __init__(self, database: Path) -> None:
        self.owner = fresh_token()
        self._database = Path(os.path.realpath(database))
        self._folder = Path(f"{self._database}-owners")
        self._wal = f"{self._database}-wal"
        self._file: int | None = None
        self._socket: trio.socket.SocketType | None = None
        self._known_dead: set[str] = set()
        self._sender: socket.socket | None = None
        self._pid = os.getpid()

    def __enter__(self) -> OwnerLock:
        if fcntl is None:
            return self
        try:
            self._take()
        except OSError:
            # A folder that cannot be written to, or without locks: the lease decides alone.
            return self
        os.register_at_fork(after_in_child=self._forked)
        self._open_doorbell()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is None or os.getpid() != self._pid:
            return
        for closable in (self._socket, self._sender):
            if closable is not None:
                closable.close()
        self._socket = None
        with contextlib.suppress(OSError):
            self._socket_path(self.owner).unlink()
        with contextlib.suppress(OSError):
            self._path(self.owner).unlink()
        os.close(self._file)
        self._file = None
        # The last one out; somebody else's file keeps the folder.
        with contextlib.suppress(OSError):
            self._folder.rmdir()

    def _take(self) -> None:
        assert fcntl is not None
        fresh = self._folder / f"{self.owner}.new"
        file = None
        while file is None:
            with contextlib.suppress(FileExistsError):
                self._folder.mkdir()
            # Gone already, if the last store out was somebody else's.
            with contextlib.suppress(FileNotFoundError):
                file = os.open(fresh, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            # Locked before it has its name, so nobody can find it unlocked while we live.
            fresh.rename(self._path(self.owner))
        except OSError:
            os.close(file)
            fresh.unlink()
            raise
        self._file = file

    def _forked(self) -> None:
        # The lock belongs to the open file, which a forked child shares and would keep alive.
        if self._file is not None:
            os.close(self._file)
            self._file = None

    # -- dead owners ------------------------------------------------------------------------------

    def dead(self) -> set[str]:
        """The other owners whose process has ended, as far as they have left their file."""
        return {owner for owner in self._others() if self._is_dead(owner)}

    def forget(self, owners: Iterable[str]) -> None:
        """Remove the files of dead owners that no claim names any more."""
        for owner in owners:
            self._known_dead.discard(owner)
            for path in (self._socket_path(owner), self._path(owner)):
                with contextlib.suppress(OSError):
                    path.unlink()

    def has_newly_dead(self) -> bool:
        """Whether an owner has died since this was asked last."""
        newly = {
            owner
            for owner in self._others()
            if owner not in self._known_dead and self._is_dead(owner)
        }
        self._known_dead |= newly
        return bool(newly)

    def count(self) -> tuple[int, int]:
        """How many other owners' files are of the living, and how many of the dead."""
        others = self._others()
        dead = sum(map(self._is_dead, others))
        return len(others) - dead, dead

    def _others(self) -> list[str]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return [
            name[: -len(".lock")]
            for name in names
            if name.endswith(".lock") and name != f"{self.owner}.lock"
        ]

    def _is_dead(self, owner: str) -> bool:
        if fcntl is None or "/" in owner:
            return False
        try:
            file = os.open(self._path(owner), os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            # No file tells nothing: somebody may have tidied up. The lease decides.
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(file)

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}.lock"

    # -- changes ----------------------------------------------------------------------------------

    def stamp(self) -> tuple[int, ...]:
        """Something that differs after a commit by anybody, with rare exceptions."""
        stamp: list[int] = []
        for path in (self._wal, self._database):
            try:
                status = os.stat(path)
            except OSError:
                stamp += [0, 0, 0]
            else:
                stamp += [status.st_mtime_ns, status.st_size, status.st_ino]
        return tuple(stamp)

    def ring_others(self, told: str) -> None:
        """Tell the other stores on this file. From any thread; never blocks, never raises."""
        if self._sender is None:
            return
        for owner in self._others():
            # Full: whoever hears it knows. Refused or absent: nobody listens there.
            with contextlib.suppress(OSError):
                self._sender.sendto(told.encode(), self._address(owner))

    async def wait_rung(self) -> set[bytes]:
        """Wait for rings by other stores; says what they tell. Nothing: there is no doorbell.

        So many at once that there may have been more are one empty ring.
        """
        if self._socket is None:
            return set()
        rings = [await self._socket.recv(_RING_LIMIT)]
        with contextlib.suppress(BlockingIOError):
            while True:
                # The raw socket never blocks; Trio's would wait.
                rings.append(os.read(self._socket.fileno(), _RING_LIMIT))
        return set(rings) if len(rings) < _RINGS_KEPT else {b""}

    def _open_doorbell(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            return
        address = self._address(self.owner)
        if len(os.fsencode(address)) > _SOCKET_PATH_LIMIT:
            return
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            _bind(listener, address)
        except OSError:
            # A file system without sockets: the time stamp is looked at instead.
            listener.close()
            return
        self._socket = listener
        self._sender = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sender.setblocking(False)

    def _socket_path(self, owner: str) -> Path:
        # Half of it tells owners apart, and a socket's path has to be short.
        return self._folder / f"{owner[:16]}.ring"

    def _address(self, owner: str) -> str:
        path = str(self._socket_path(owner))
        return path if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT else os.path.relpath(path)


def _bind(listener: trio.socket.SocketType, address: str) -> None:
    # Trio's bind resolves names and so is async; a path needs no resolving.
    raw = socket.socket(fileno=os.dup(listener.fileno()))
    try:
        raw.bind(address)
    finally:
        raw.close()
