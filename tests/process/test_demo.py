"""The demo, on small trees: it must pass, be disturbed, and tell what is wrong."""

import contextlib
import errno
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from trio_watchdog._demo import (
    Crew,
    Item,
    Ledger,
    Print,
    decode_name,
    encode_name,
    judge,
    kind_of,
    walk,
)
from trio_watchdog._model import Outcome, SettledJob

ROOT = Path(__file__).parents[2]


class Demo:
    """Starts the demo on a tree, with temporary files where a test can find them."""

    def __init__(self, folder: Path) -> None:
        self.tree = folder / "tree"
        self.tree.mkdir()
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self.environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.temporary)}
        self.started: list[subprocess.Popen[str]] = []

    def fill(self, folders: int = 4, files: int = 6, size: int = 1_500_000) -> None:
        """Files that take a while: what is random does not compress."""
        for folder in range(folders):
            (self.tree / f"folder{folder}").mkdir()
            for file in range(files):
                suffix = ("py", "bin", "png")[file % 3]
                path = self.tree / f"folder{folder}" / f"{file}.{suffix}"
                path.write_bytes(os.urandom(size))

    def command(self, *arguments: str, name: str = "demo") -> list[str]:
        return [sys.executable, "-m", "trio_watchdog", name, *arguments]

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            self.command("--path", str(self.tree), *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, code: int = 0) -> tuple[str, str]:
        return self.finish(self.start(*arguments), code)

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> tuple[str, str]:
        output, errors = process.communicate(timeout=60)
        assert process.returncode == code, (output, errors)
        # Whatever the end: no folder stays, and no worker.
        assert list(self.temporary.iterdir()) == []
        assert self.workers() == []
        return output, errors

    @contextlib.contextmanager
    def held(self) -> Generator[Callable[[], None]]:
        """Workers that are started meanwhile do nothing until this is called, or at its end."""
        folder = self.temporary.with_name("held")
        folder.mkdir()
        gate = folder / "open"
        (folder / "sitecustomize.py").write_text(
            "import os, sys, time\n"
            f"while 'demo-worker' in sys.orig_argv and not os.path.exists({str(gate)!r}):\n"
            "    time.sleep(0.01)\n"
        )
        path = self.environment["PYTHONPATH"]
        self.environment["PYTHONPATH"] = os.pathsep.join([str(folder), path])
        try:
            yield gate.touch
        finally:
            gate.touch()

    def wait_for_a_worker(self) -> None:
        """By then the tree was walked and its files are jobs."""
        end = time.monotonic() + 60
        while not self.workers():
            assert time.monotonic() < end, "no worker was started"
            time.sleep(0.01)

    def workers(self) -> list[int]:
        """Processes that work on this tree; it is named in their arguments."""
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    arguments = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"demo-worker" in arguments and str(self.tree).encode() in arguments:
                    found.append(int(entry.name))
        return found

    def line_of_a_ledger(self, key: str) -> tuple[Path, dict[str, Any]]:
        """The first ledger line with this key, as soon as a worker has written it."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for ledger in self.temporary.glob("*/worker-*.jsonl"):
                for line in ledger.read_text().splitlines(keepends=True):
                    if line.endswith("\n") and key in (found := json.loads(line)):
                        return ledger, found
            time.sleep(0.005)
        raise AssertionError(f"no worker has written {key!r}")


@pytest.fixture
def demo(tmp_path: Path) -> Generator[Demo]:
    demo = Demo(tmp_path)
    yield demo
    # Whatever a failed test has left.
    for process in demo.started:
        process.kill()
        process.communicate()
    for worker in demo.workers():
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_a_worker_is_killed_and_every_file_is_settled_once(demo: Demo) -> None:
    # Twice as large as elsewhere: there has to be work left when a worker is killed.
    demo.fill(size=3_000_000)
    output, errors = demo.run("--json")
    report = json.loads(output)
    assert report["ok"]
    assert report["files"] == report["settled_exactly_once"] == report["digests_equal"] == 24
    assert report["lanes"] == {"python": 8, "media": 8, "other": 8}
    assert report["killed_with"]
    assert report["recovered"] >= len(report["killed_with"])
    assert report["taken_over_after"] > 0
    assert report["wrong"] == report["notes"] == []
    assert report["jobs_per_second"] > 0
    assert "kill -9 worker" in errors
    assert "24 of 24 files read again and compared" in errors


def test_a_tampered_result_is_found(demo: Demo) -> None:
    demo.fill(folders=2, files=6)
    with demo.held() as let_go:
        process = demo.start("--no-kill")
        demo.wait_for_a_worker()
        # So that it does not come to its end before the ledger has been tampered with.
        process.send_signal(signal.SIGSTOP)
        let_go()
        ledger, line = demo.line_of_a_ledger("done")
        with ledger.open("a") as file:
            file.write(json.dumps(line | {"digest": "0" * 64}) + "\n")
        process.send_signal(signal.SIGCONT)
    output, _ = demo.finish(process, code=1)
    assert "digest equal to a fresh reading   11 of 12\n" in output
    assert "a ledger says 000000000000..., a fresh reading" in output
    assert output.endswith("1 fault found.\n")


def test_a_file_that_vanishes_is_noted(demo: Demo) -> None:
    demo.fill(folders=1, files=1)
    second = demo.tree / "folder0" / "1.txt"
    second.write_text("soon gone")
    with demo.held():
        process = demo.start("--no-kill", "--workers", "1")
        demo.wait_for_a_worker()
        second.unlink()
    output, _ = demo.finish(process)
    assert "settled exactly once              2 of 2\n" in output
    assert "folder0/1.txt: cannot be read: No such file or directory" in output


def test_odd_trees_are_walked(demo: Demo) -> None:
    (demo.tree / "empty.txt").touch()
    (demo.tree / "dangling").symlink_to("nowhere")
    os.mkfifo(demo.tree / "pipe")
    folder = os.fsencode(demo.tree) + b"/fold\xff\n\x1b[31m%41"
    os.mkdir(folder)
    with open(folder + b"/\xfe.py", "wb") as file:
        file.write(b"pass\n")
    (demo.tree / "__pycache__").mkdir()
    (demo.tree / "__pycache__" / "a.pyc").touch()
    output, _ = demo.run("--workers", "1", "--no-kill")
    assert "settled exactly once              2 of 2\n" in output
    assert "left out: " in output
    assert "dangling: No such file or directory" in output
    assert "\x1b" not in output


def test_a_database_of_ones_own_keeps_its_jobs_and_is_not_hashed(demo: Demo) -> None:
    # In the tree, and found there: reading it would drop the locks that SQLite holds on it.
    database = f"sqlite:{demo.tree / 'jobs.db'}"
    (demo.tree / "a.py").touch()
    environment = demo.environment | {"TRIO_WATCHDOG_DATABASE": database}

    def ask(*arguments: str) -> Any:
        name, *rest = arguments
        command = demo.command(*rest, "--json", name=name)
        return json.loads(subprocess.check_output(command, env=environment, text=True))

    ask("enqueue", "mail", "--id", "mine")
    for _ in range(2):
        output, _ = demo.run("--database", database, "--no-kill")
        assert "settled exactly once              1 of 1\n" in output
    jobs = ask("list")
    assert [job["state"] for job in jobs] == ["settled", "settled", "queued"]
    assert jobs[2]["id"] == "mine"
    assert jobs[0]["lane"] != jobs[1]["lane"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_takes_the_jobs_back(
    demo: Demo, tmp_path: Path, number: signal.Signals
) -> None:
    # Long enough that the job would not be done before the signal.
    demo.fill(folders=1, files=1, size=60_000_000)
    (demo.tree / "folder0" / "1.txt").touch()
    database = tmp_path / "jobs.db"
    process = demo.start("--database", f"sqlite:{database}", "--no-kill")
    demo.line_of_a_ledger("began")
    process.send_signal(number)
    _, errors = demo.finish(process, code=128 + number)
    assert "interrupted" in errors
    assert "Traceback" not in errors
    command = demo.command("--database", str(database), "--json", name="list")
    jobs = json.loads(subprocess.check_output(command, env=demo.environment, text=True))
    # The running one was handed back, and then deleted with the one behind it.
    assert jobs == []


def test_workers_stop_when_the_conductor_is_killed(demo: Demo) -> None:
    demo.fill(folders=1, files=12)
    process = demo.start("--no-kill", "--workers", "1")
    demo.line_of_a_ledger("done")
    assert demo.workers()
    process.kill()
    process.communicate()
    end = time.monotonic() + 30
    while demo.workers():
        assert time.monotonic() < end
        time.sleep(0.01)


async def test_the_process_list_shows_no_password_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = "postgresql://ada:hunter2@db.example.org/jobs"
    started: list[tuple[list[str], str]] = []

    async def note(command: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append((command, env["TRIO_WATCHDOG_DATABASE"]))
        raise OSError("enough")

    monkeypatch.setattr(trio.lowlevel, "open_process", note)
    state: Any = SimpleNamespace(workers={}, mark="m", total={"text": 1}, root=tmp_path)
    async with trio.open_nursery() as nursery:
        with pytest.raises(OSError, match="enough"):
            await Crew(state, database, tmp_path, nursery).start()
    ((command, handed_over),) = started
    assert "demo-worker" in command
    assert not [argument for argument in command if "hunter2" in argument]
    assert handed_over == database


def test_workers_that_cannot_work_end_the_demo(demo: Demo, tmp_path: Path) -> None:
    demo.fill(folders=1, files=3)
    # Found by the workers only, who are started with it in their environment.
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "sitecustomize.py").write_text(
        "import sys\nif 'demo-worker' in sys.orig_argv: sys.exit('no luck today')\n"
    )
    path = os.pathsep.join([str(broken), demo.environment["PYTHONPATH"]])
    demo.environment["PYTHONPATH"] = path
    _, errors = demo.run(code=1)
    assert errors.startswith("trio-watchdog: 4 workers ended by themselves; the last said: ")


def test_a_terminal_is_drawn_over_and_left_in_order(demo: Demo) -> None:
    demo.fill(folders=2, files=3)
    ours, theirs = pty.openpty()
    environment = demo.environment | {"TERM": "xterm", "COLUMNS": "60", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        demo.command("--path", str(demo.tree)), stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    parts: list[bytes] = []

    def read() -> None:
        # An error is how a terminal says that its last user has gone.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 4096):
                parts.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    assert process.wait(timeout=60) == 0
    reader.join()
    os.close(ours)
    text = b"".join(parts).decode()
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1
    assert text.index("\x1b[?25h") < text.index("Nothing is missing")
    assert "█" in text
    # The last picture may be of the check that follows.
    assert "of 6 settled" in text
    assert "settled exactly once" in text


# -- the check -------------------------------------------------------------------------------------

GOOD = Print("a" * 64, 5, 10, 1000)
OTHER = Print("b" * 64, 5, 10, 1000)
TOUCHED = Print("b" * 64, 5, 10, 2000)
GONE = OSError(errno.ENOENT, "No such file or directory")


def settled(outcome: Outcome, reason: str | None = None) -> SettledJob:
    return SettledJob(
        id="one",
        queue="one",
        lane="lane",
        priority=0,
        payload="a.py",
        not_before=None,
        recovery=None,
        sequence=1,
        cancellation_id=None,
        recovery_count=0,
        attempt_count=1,
        outcome=outcome,
        reason=reason,
        settled_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


DONE = settled(Outcome.COMPLETED)
FAILED = settled(Outcome.FAILED, "cannot be read")


@pytest.mark.parametrize(
    ("shown", "prints", "fresh", "status", "words"),
    [
        ([DONE], [GOOD], GOOD, "equal", ""),
        ([DONE], [GOOD, GOOD], GOOD, "equal", ""),
        ([], [GOOD], GOOD, "wrong", "not at all"),
        ([DONE, DONE], [GOOD], GOOD, "wrong", "2 times"),
        ([DONE], [], GOOD, "wrong", "no ledger has its digest"),
        ([DONE], [OTHER], GOOD, "wrong", "bbbbbbbbbbbb"),
        ([DONE], [GOOD, OTHER], GOOD, "wrong", "bbbbbbbbbbbb"),
        ([DONE], [GOOD], TOUCHED, "excused", "changed"),
        ([DONE], [GOOD], GONE, "excused", "gone before the check"),
        ([FAILED], [], GONE, "excused", "cannot be read"),
        ([FAILED], [], GOOD, "wrong", "settled as failed: cannot be read"),
        ([settled(Outcome.CANCELLED)], [GOOD], GOOD, "wrong", "settled as cancelled"),
    ],
)
def test_a_file_is_judged_by_feed_ledgers_and_a_fresh_reading(
    shown: list[SettledJob],
    prints: list[Print],
    fresh: Print | OSError,
    status: str,
    words: str,
) -> None:
    item = Item("a.py", "python", ".", 10, 1000)
    verdict = judge(item, shown, prints, fresh)
    assert verdict.status == status
    assert words in verdict.text


def test_a_ledger_is_read_on_in_whole_lines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.read()
    line = '{"done": "one", "digest": "aa", "packed": 1, "size": 2, "mtime": 3}'
    ledger.path.write_text('{"began": "token", "job": "one"}\n' + line[:20])
    ledger.read()
    assert ledger.tokens == {"token"}
    assert ledger.prints == []
    with ledger.path.open("a") as file:
        file.write(line[20:] + "\nrubbish\n{}\n")
    ledger.read()
    ledger.read()
    assert ledger.prints == [("one", Print("aa", 1, 2, 3))]
    assert ledger.damaged == 2


@pytest.mark.parametrize(
    "raw", [b"plain name+1.py", b"50%", b"%41", b"\xff\xfe", "zoë/雪".encode(), b"a\nb\x1b[0m"]
)
def test_any_file_name_survives_as_text(raw: bytes) -> None:
    name = encode_name(os.fsdecode(raw))
    assert name.isascii()
    assert name.isprintable()
    assert os.fsencode(decode_name(name)) == raw


@pytest.mark.parametrize(
    ("name", "kind"),
    [("a.py", "python"), ("A.TXT", "text"), ("x.so", "binary"), ("y.png", "media"), ("z", "other")],
)
def test_the_lane_goes_by_the_kind_of_file(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_a_walk_names_what_it_cannot_look_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shut").mkdir()
    (tmp_path / "b").write_text("text")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "c.py").touch()
    scandir: Callable[..., Any] = os.scandir

    def closed(path: str) -> Any:
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    items, troubles = walk(tmp_path, lambda path: False)
    assert [(item.path, item.folder, item.size) for item in items] == [
        ("b", ".", 4),
        ("a/c.py", "a", 0),
    ]
    assert [trouble.rpartition("/")[2] for trouble in troubles] == ["shut: Permission denied"]
