"""The file under a SQLite database: what it lies on, whether it is still there, and what to do when
it cannot be used.

SQLite trusts its file. It goes on writing to one that has been deleted or replaced, where nobody
will ever read it, and on a network file system its locks and shared memory do not hold. Neither
is an error to SQLite, so both are looked for here.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
from collections.abc import Callable
from pathlib import Path

from ._errors import StoreInvalid, StoreUnavailable
from ._owners import OwnerLock
from ._store import Vital

try:
    import pwd
except ImportError:  # Windows
    pwd = None

NETWORK_FILE_SYSTEMS = frozenset(
    {
        *("nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "9p", "afs", "coda", "ncpfs"),
        *("ceph", "glusterfs", "lustre", "gpfs", "beegfs", "orangefs", "pvfs2", "gfs2", "ocfs2"),
        # Folders that a virtual machine shares with its host.
        *("vboxsf", "vmhgfs", "prl_fs", "fuse.vmhgfs-fuse", "fuse.grpcfuse", "fuse.osxfs"),
        *("fuse.sshfs", "fuse.smbnetfs", "fuse.curlftpfs", "fuse.davfs", "fuse.rclone"),
        *("fuse.s3fs", "fuse.goofys", "fuse.gcsfuse", "fuse.blobfuse2", "fuse.juicefs"),
        *("fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.mfs", "fuse.gvfsd-fuse"),
    }
)
"""Types of file systems on which other hosts may have the same file open."""

FileSystem = Callable[[Path], "str | None"]
"""Tells the type of the file system that holds a path, if it can be told."""


def file_system(path: Path) -> str | None:
    """The type of the file system that holds ``path``; None where the system does not tell."""
    try:
        mounts = Path("/proc/mounts").read_bytes()
    except OSError:
        return None
    return file_system_among(os.path.realpath(path), os.fsdecode(mounts))


def file_system_among(path: str, mounts: str) -> str | None:
    """The type of the file system that holds an absolute path, by the text of ``/proc/mounts``."""
    found: str | None = None
    length = 0
    for line in mounts.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        # Spaces and the like are written as three octal digits.
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[1])
        # The last one of several on one point is on top.
        holds = path == point or path.startswith(point.rstrip("/") + "/")
        if holds and len(point) >= length:
            found, length = fields[2], len(point)
    return found


def refuse_network(path: Path, kind: str | None) -> None:
    """Raise `StoreInvalid` when the path lies on a network file system."""
    if kind in NETWORK_FILE_SYSTEMS:
        raise StoreInvalid(
            f"{path} is on a network file system ({kind}), where SQLite's locks do not hold and the"
            " file gets damaged: use a local disk, or PostgreSQL for several hosts. If only one"
            " host ever opens it and you accept the risk, give allow_network=True"
        )


class Place:
    """Whether a path still means the file that was opened there."""

    def __init__(self, path: Path) -> None:
        # Resolved now: a change of the current folder changes nothing.
        self.path = Path(os.path.realpath(path))
        self._identity = _identity(self.path)
        self._log = Path(f"{self.path}-wal")
        self._log_identity: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise `StoreInvalid` when the file was deleted or replaced. Costs one `stat`."""
        self._compare(self.path, self._identity)

    def check_all(self) -> None:
        """The same for the write-ahead log, which stays the same while a store has it open."""
        self.check()
        if self._log_identity is None:
            self._log_identity = _identity(self._log)
        else:
            self._compare(self._log, self._log_identity)

    def log_size(self) -> int:
        """Bytes of the write-ahead log."""
        try:
            return os.stat(self._log).st_size
        except OSError:
            return 0

    def _compare(self, path: Path, expected: tuple[int, int] | None) -> None:
        try:
            status = os.stat(path)
        except FileNotFoundError:
            what = "deleted"
        except OSError:
            # Whether SQLite can still use it, it will say itself.
            return
        else:
            if expected is None or (status.st_dev, status.st_ino) == expected:
                return
            what = "replaced by another file"
        raise StoreInvalid(
            f"{path} was {what} while it was in use, so nobody would ever read what is written now:"
            " stop all processes that have the database open before you put the file in order"
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def advice(error: sqlite3.Error, path: Path | None) -> str:
    """What to do about an error of SQLite, if that can be told; begins with a colon."""
    extended = getattr(error, "sqlite_errorcode", 0)
    code = extended & 0xFF
    name = "the database" if path is None else str(path)
    match code:
        case sqlite3.SQLITE_CANTOPEN | sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            hint = "" if path is None else permissions(path) or f"look at {path}"
        case sqlite3.SQLITE_FULL:
            hint = f"make room on the disk of {name}"
        case sqlite3.SQLITE_IOERR:
            hint = f"the disk of {name} is full, or fails"
        case sqlite3.SQLITE_CORRUPT:
            hint = f"{name} is damaged: restore it from a backup, or save what `.recover` finds"
        case sqlite3.SQLITE_NOTADB:
            hint = f"{name} is no SQLite database: give another file"
        case sqlite3.SQLITE_BUSY:
            hint = "another program is writing, or keeps a transaction open"
        case sqlite3.SQLITE_CONSTRAINT if extended == sqlite3.SQLITE_CONSTRAINT_CHECK:
            hint = "a row breaks the table's rules: `trio-watchdog doctor` names it"
        case sqlite3.SQLITE_ERROR if "no such table: watchdog_" in str(error):
            hint = "open the database once with open_client"
        case _:
            hint = ""
    return hint and f"; {hint}"


def permissions(path: Path) -> str:
    """Which right the process lacks to use the file; empty if it has them all."""
    if not os.path.lexists(path) and not os.path.isdir(path.parent):
        return f"the folder {path.parent} is not there"
    folder = os.path.dirname(os.path.abspath(path))
    for file in (f"{path}", f"{path}-wal", f"{path}-shm"):
        if os.path.exists(file) and not os.access(file, os.R_OK | os.W_OK):
            return f"{_user()} needs the right to read and write {file}"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"{_user()} needs the right to write to the folder {folder}, for SQLite's log"
    return ""


def _user() -> str:
    if pwd is None:
        return "this user"
    try:
        return f"user {pwd.getpwuid(os.geteuid()).pw_name!r}"
    except KeyError:
        return f"user {os.geteuid()}"


def make_file(path: Path, *, create: bool) -> None:
    """See that the file is there. A fresh one gets the mode that the umask allows."""
    if path.is_dir():
        raise StoreUnavailable(f"{path} is a folder; give the path of a file in it")
    if not path.parent.is_dir():
        raise StoreUnavailable(f"{path.parent} does not exist; create the folder first")
    if os.path.exists(path):
        return
    if not create:
        raise StoreUnavailable(
            f"there is no database {path}; opening it without create=False would make it"
        )
    try:
        _create(path)
    except OSError as error:
        hint = permissions(path)
        raise StoreUnavailable(
            f"{path} cannot be created: {error.strerror}" + (hint and f"; {hint}")
        ) from error


def _create(path: Path) -> None:
    # SQLite would leave out the group's right to write, whatever the umask says. Never by opening
    # a file that may be in use: closing it again would drop this process's locks on it.
    with contextlib.suppress(FileExistsError):
        try:
            os.mknod(os.path.realpath(path), stat.S_IFREG | 0o666)
        except (AttributeError, PermissionError):
            # Systems on which only root may make a node.
            flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
            os.close(os.open(os.path.realpath(path), flags, 0o666))


# -- health ---------------------------------------------------------------------------------------

WAL_WARNING = 256 * 1024 * 1024
"""Bytes of a write-ahead log that has not been folded back: somebody's reader keeps it."""


def file_vitals(
    connection: sqlite3.Connection, place: Place | None, owners: OwnerLock | None
) -> list[Vital]:
    """The health of a database: of its structure, and of what lies beside its file."""
    # A few lines are enough to tell that there is damage, and where.
    answers = [row[0] for row in connection.execute("pragma quick_check(5)").fetchall()]
    vitals: list[Vital] = [
        ("ok", "file", "the structure of the database is sound")
        if answers == ["ok"]
        else ("fault", "file", "SQLite's own check says: " + "; ".join(answers))
    ]
    if place is None:
        return vitals
    (mode,) = connection.execute("pragma journal_mode").fetchone()
    if mode != "wal":
        vitals.append(("warning", "file", f"journal_mode is {mode}; wal is what is tested"))
    kind = file_system(place.path)
    if kind in NETWORK_FILE_SYSTEMS:
        vitals.append(
            ("warning", "file", f"it is on a network file system ({kind}), which damages it")
        )
    size = place.log_size()
    megabytes = f"the write-ahead log has {size / 2**20:.1f} MiB"
    if size > WAL_WARNING:
        hint = "a transaction that stays open somewhere keeps it from being folded back"
        vitals.append(("warning", "log", f"{megabytes}: {hint}"))
    else:
        vitals.append(("ok", "log", megabytes))
    if owners is not None:
        alive, dead = owners.count()
        text = f"{alive} open stores have a lock beside the file"
        if dead:
            text += f", and {dead} have died without removing theirs; the next watchdog does"
        vitals.append(("note" if dead else "ok", "owners", text))
    return vitals
