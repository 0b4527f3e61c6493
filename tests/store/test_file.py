"""The store on a file: many processes, sudden deaths, and files that are not ours."""

# ruff: noqa: ASYNC110, ASYNC222, ASYNC240  (tests may block, and look again)

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from trio_watchdog import _wishes as w
from trio_watchdog._borrowed import transactional
from trio_watchdog._errors import StoreInvalid, StoreUnavailable
from trio_watchdog._model import Job, Outcome, Recovery
from trio_watchdog._open import open_store
from trio_watchdog._owners import OwnerLock
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite import BUSY_TIMEOUT, FileStore, HostClock, prepare
from trio_watchdog._store import ELSEWHERE, Change, Store
from trio_watchdog.testing import check_invariants

HOUR = 3_600_000
DONE = Settle(Outcome.COMPLETED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


def files(folder: Path) -> list[str]:
    """What lies in a folder, and in the folders in it."""
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


# -- another process ------------------------------------------------------------------------------

PROCESS = """
import os, signal, sys, time
import trio
from trio_watchdog._model import *
from trio_watchdog._open import open_store
from trio_watchdog._rules import Settle

def say(*words):
    print(*words, flush=True)

async def hear():
    return (await trio.to_thread.run_sync(sys.stdin.readline)).strip()

async def main():
    async with open_store(sys.argv[1]) as store:
        say("open", store.owner)
        while (line := await hear()) != "close":
            exec("async def do(store):\\n    " + line, globals())
            say("did", await do(store))
    say("closed")

trio.run(main)
"""


class Process:
    """A process with a store on the file, which does one line of code after another."""

    def __init__(self, path: Path) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self.owner = self.line().split()[1]

    def line(self) -> str:
        assert self.popen.stdout is not None
        return self.popen.stdout.readline().strip()

    def tell(self, code: str) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(code + "\n")
        self.popen.stdin.flush()

    def do(self, code: str) -> str:
        self.tell(code)
        line = self.line()
        assert line.startswith("did "), line
        return line[4:]

    def close(self) -> None:
        self.tell("close")
        assert self.line() == "closed"
        assert self.popen.wait(60) == 0

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


@contextmanager
def process(path: Path) -> Iterator[Process]:
    """A process that is gone afterwards, however the test ends."""
    other = Process(path)
    try:
        yield other
    finally:
        for stream in (other.popen.stdin, other.popen.stdout):
            assert stream is not None
            stream.close()
        other.kill()


# -- opening --------------------------------------------------------------------------------------


async def with_patience(path: Path, do: Callable[[Store], Awaitable[object]]) -> None:
    """Open a store and do something, again if others kept it waiting for its full time.

    Being refused at once is not that: whoever comes at the same moment has to wait its turn.
    """
    while True:
        began = trio.current_time()
        try:
            async with open_store(path, synchronous="normal") as store:
                await do(store)
        except StoreUnavailable:
            assert trio.current_time() - began > BUSY_TIMEOUT * 0.9
        else:
            return


def test_many_open_a_fresh_file_at_once(path: Path) -> None:
    failures: list[BaseException] = []

    async def open_and_enqueue(fresh: Path, barrier: threading.Barrier, m: int) -> None:
        barrier.wait()
        await with_patience(fresh, lambda store: store.enqueue(Job("a", m, id=f"{m}")))

    def run(fresh: Path, barrier: threading.Barrier, m: int) -> None:
        try:
            trio.run(open_and_enqueue, fresh, barrier, m)
        except BaseException as error:
            failures.append(error)

    for n in range(4):
        fresh = path.with_name(f"{n}.db")
        barrier = threading.Barrier(8)
        threads = [threading.Thread(target=run, args=(fresh, barrier, m)) for m in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        with closing(sqlite3.connect(fresh)) as connection:
            assert connection.execute("select count(*) from watchdog_jobs").fetchone() == (8,)
            check_invariants(connection)


def test_processes_open_a_fresh_file_at_once(path: Path) -> None:
    code = (
        "import sys, trio\n"
        "from pathlib import Path\n"
        "from tests.store.test_file import with_patience\n"
        "from trio_watchdog._model import Job\n"
        "job = Job('a')\n"
        "path = Path(sys.argv[1])\n"
        "trio.run(with_patience, path, lambda store: store.enqueue(job))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    others = [subprocess.Popen([sys.executable, "-c", code, str(path)], env=env) for _ in range(4)]
    assert [other.wait(60) for other in others] == [0] * 4
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("select count(*) from watchdog_jobs").fetchone() == (4,)


def test_stores_open_and_close_beside_each_other_all_the_time(path: Path) -> None:
    failures: list[BaseException] = []

    async def open_often() -> None:
        for _ in range(25):
            await with_patience(path, lambda store: store.dead_owners())

    def run() -> None:
        try:
            trio.run(open_often)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert files(path.parent) == ["jobs.db"]


def test_owners_come_and_go_beside_each_other_all_the_time(path: Path) -> None:
    failures: list[BaseException] = []

    async def come_and_go() -> None:
        for _ in range(300):
            with OwnerLock(path) as lock:
                lock.ring_others("")

    def run() -> None:
        try:
            trio.run(come_and_go)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert files(path.parent) == []


async def test_a_folder_that_cannot_be_written_to_costs_no_more_than_the_owner_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        assert (await store.claim("a", "t", lease=HOUR)).job is not None
        monkeypatch.setattr(Path, "mkdir", refuse)
        monkeypatch.setattr(fcntl, "flock", refuse)
        async with open_store(path) as other:
            # It has an identity all the same, and its claims live by their leases.
            assert other.owner != store.owner
            await other.enqueue(Job("b", id="k"))
            assert (await other.claim("b", "u", lease=HOUR)).job is not None
            assert await store.dead_owners() == await other.dead_owners() == ()
    assert files(path.parent) == ["jobs.db"]


@pytest.mark.parametrize(
    ("version", "advice"),
    [(2, "upgrade trio_watchdog"), (0, "new file"), ("1", "new file"), (None, "new file")],
)
async def test_a_schema_of_another_version_is_refused_with_advice(
    path: Path, version: Any, advice: str
) -> None:
    with closing(sqlite3.connect(path)) as connection:
        prepare(connection, "x")
        connection.execute("update watchdog_meta set value = 0")
        if version is None:
            connection.execute("delete from watchdog_meta where name = 'schema_version'")
        else:
            connection.execute(
                "update watchdog_meta set value = ? where name = 'schema_version'", (version,)
            )
        connection.commit()
    before = path.read_bytes()
    with pytest.raises(StoreInvalid, match=advice) as caught:
        async with open_store(path):
            raise AssertionError("it opened")
    assert repr(version) in str(caught.value)
    assert "jobs.db" in str(caught.value)
    # Refused, and left as it was.
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma journal_mode = delete")
    assert len(path.read_bytes()) == len(before)


async def test_a_foreign_schema_is_refused_and_a_foreign_table_is_not(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table customers (name)")
        connection.commit()
    async with open_store(path) as store:
        await store.enqueue(Job("a"))
    other = path.with_name("other.db")
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("create table watchdog_jobs (dog, hours)")
        connection.commit()
    with pytest.raises(StoreInvalid, match="another file"):
        async with open_store(other):
            raise AssertionError("it opened")


@pytest.mark.parametrize("content", [b"not a database" * 100, os.urandom(8192), b"SQLite format 3"])
async def test_what_is_not_a_database_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(StoreInvalid, match=r"jobs\.db") as caught:
        async with open_store(path):
            raise AssertionError("it opened")
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)
    assert path.read_bytes() == content
    assert files(path.parent) == ["jobs.db"]


async def test_an_empty_file_is_a_fresh_database(path: Path) -> None:
    path.touch()
    async with open_store(path) as store:
        assert (await store.enqueue(Job("a"))).status == "queued"


async def test_a_corrupt_database_is_invalid_and_not_merely_unavailable(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue_many([Job("a", "x" * 500) for _ in range(200)])
    content = bytearray(path.read_bytes())
    content[4096:] = os.urandom(len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreInvalid):
        async with open_store(path) as store:
            await store.claim("a", "t")


async def test_a_missing_folder_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="does not exist"):
        async with open_store(tmp_path / "no" / "jobs.db"):
            raise AssertionError("it opened")
    with pytest.raises(StoreUnavailable, match="is a folder"):
        async with open_store(tmp_path):
            raise AssertionError("it opened")
    assert files(tmp_path) == []


async def test_a_read_only_database_can_be_read(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", {"n": 1}, id="j"))
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
    with closing(connection):
        async with open_store(connection) as store:
            job = await store.read("j")
            assert job is not None
            assert job.payload == {"n": 1}
            assert (await store.read_queue_head(job.queue)).job_id == "j"
            for write in (store.enqueue(Job("a")), store.claim("a", "t"), store.cancel("j", "c")):
                with pytest.raises(StoreUnavailable, match="readonly"):
                    await write


@pytest.mark.parametrize(("synchronous", "level"), [("full", 2), ("normal", 1), (None, 2)])
async def test_each_commit_survives_a_power_failure_unless_told_otherwise(
    path: Path, synchronous: Any, level: int
) -> None:
    options = {} if synchronous is None else {"synchronous": synchronous}
    async with open_store(path, **options) as store:
        connection = cast("FileStore", store)._engine.connection
        assert connection.execute("pragma synchronous").fetchone() == (level,)
        assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
        renewer = store.open_renewer()
        assert renewer is not None
        with renewer:
            pass


async def test_an_unknown_option_is_refused_by_name(path: Path) -> None:
    with pytest.raises(ValueError, match="'off'"):
        async with open_store(path, synchronous="off"):
            raise AssertionError("it opened")
    assert files(path.parent) == []


@pytest.mark.parametrize("name", ["a b%20#é?.db", "x" * 150 + ".db", "'quoted'.db"])
async def test_any_name_of_a_file_will_do(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    async with open_store(file) as store, open_store(f"sqlite:{file}") as other:
        await store.enqueue(Job("a", id="j"))
        assert await other.read("j") is not None
        async with trio.open_nursery() as nursery:
            heard = trio.Event()
            other.on_change.append(lambda change: heard.set())
            await nursery.start(other.watch)
            await store.enqueue(Job("a"))
            # Also where the name is too long for a socket.
            with trio.fail_after(30):
                await heard.wait()
            nursery.cancel_scope.cancel()
    assert files(tmp_path) == [name]


async def test_a_relative_path_means_the_same_file_after_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    monkeypatch.chdir(tmp_path / "one")
    async with open_store("jobs.db") as store, open_store("jobs.db") as other:
        await store.enqueue(Job("a"))
        job = (await store.claim("a", "t")).job
        assert job is not None
        monkeypatch.chdir(tmp_path / "two")
        renewer = store.open_renewer()
        assert renewer is not None
        with renewer as renew:
            assert [each.status for each in renew([w.Renew(job.id, "t", HOUR)])] == ["held"]
        async with trio.open_nursery() as nursery:
            heard = trio.Event()
            other.on_change.append(lambda change: heard.set())
            await nursery.start(other.watch)
            await store.enqueue(Job("a"))
            with trio.fail_after(30):
                await heard.wait()
            nursery.cancel_scope.cancel()
    assert files(tmp_path) == ["one", "one/jobs.db", "two"]


# -- closing --------------------------------------------------------------------------------------


async def test_a_clean_close_leaves_nothing_beside_the_database(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a"))
        async with open_store(path) as other:
            await other.claim("a", "t")
            assert len(files(path.parent)) > 3
        assert any(name.endswith(".lock") for name in files(path.parent))
    assert files(path.parent) == ["jobs.db"]


async def test_an_error_in_the_block_closes_as_cleanly(path: Path) -> None:
    async def fail() -> None:
        async with open_store(path) as store:
            await store.enqueue(Job("a"))
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    with trio.CancelScope() as scope:
        async with open_store(path):
            scope.cancel()
            await trio.sleep_forever()
    assert files(path.parent) == ["jobs.db"]
    assert threads_of_stores() == []


def threads_of_stores() -> list[str]:
    """Writer threads that have not ended, give or take a moment."""
    for _ in range(2000):
        names = [t.name for t in threading.enumerate() if t.name.startswith("trio_watchdog")]
        if not names:
            break
        time.sleep(0.01)
    return names


async def test_what_was_committed_survives_a_close_and_a_kill(path: Path) -> None:
    with process(path) as other:
        other.do("return len(await store.enqueue_many([Job('a', n) for n in range(100)]))")
        other.do("return (await store.claim('a', 't', lease=3600000)).job.payload")
        other.kill()
    async with open_store(path) as store:
        jobs = await store.ask(w.ReadJobs())
        assert [job.payload for job in jobs[::-1]] == list(range(100))
        assert jobs[-1].state == "running"
        check_invariants(store)
    async with open_store(path) as store:
        assert len(await store.ask(w.ReadJobs())) == 100


# -- a busy file ----------------------------------------------------------------------------------


async def test_a_writer_in_the_way_makes_the_store_unavailable_for_a_while(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        with closing(sqlite3.connect(path, isolation_level=None)) as busy:
            busy.execute("begin immediate")
            began = trio.current_time()
            with pytest.raises(StoreUnavailable, match="locked") as caught:
                await store.enqueue(Job("a"))
            assert 0.7 < trio.current_time() - began < 20
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)
            # Reading needs no turn.
            assert await store.read("j") is not None
            assert (await store.wake_state()).pending
            began = trio.current_time()
            renewer = store.open_renewer()
            assert renewer is not None
            with renewer as renew, pytest.raises(StoreUnavailable):
                await trio.to_thread.run_sync(renew, [w.Renew("j", "t", HOUR)])
            assert trio.current_time() - began < 20
            busy.execute("rollback")
        claimed = await store.claim("a", "t")
        assert claimed.job is not None


async def test_a_short_wait_for_another_writer_is_no_outage(path: Path) -> None:
    async with open_store(path) as store:
        busy = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        with closing(busy):
            busy.execute("begin immediate")
            threading.Timer(0.1, lambda: busy.execute("rollback")).start()
            assert (await store.enqueue(Job("a"))).status == "queued"


async def test_a_fresh_file_that_is_locked_is_unavailable_and_not_invalid(path: Path) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as busy:
        busy.execute("create table t (n)")
        busy.execute("begin exclusive")
        with pytest.raises(StoreUnavailable):
            async with open_store(path):
                raise AssertionError("it opened")
        busy.execute("rollback")
    async with open_store(path) as store:
        assert (await store.enqueue(Job("a"))).status == "queued"


async def test_a_reader_that_stays_open_is_in_nobodys_way(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("begin")
            reader.execute("select * from watchdog_jobs").fetchall()
            for _ in range(20):
                await store.enqueue(Job("a"))
            assert (await store.claim("a", "t")).job is not None


# -- forks ----------------------------------------------------------------------------------------


async def test_a_forked_child_cannot_use_its_parents_store(path: Path) -> None:
    async with open_store(path) as store:
        engine = cast("FileStore", store)._engine
        child = os.fork()
        if child == 0:
            # No way back into pytest from here.
            try:
                engine.perform([w.Read("j")])
            except StoreInvalid as error:
                os._exit(0 if "fork" in str(error) else 2)
            except BaseException:
                os._exit(3)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert (await store.enqueue(Job("a"))).status == "queued"


async def test_a_fork_that_lives_on_does_not_keep_its_dead_parent_alive(path: Path) -> None:
    with process(path) as other:
        other.do("return (await store.enqueue(Job('a', id='j', recovery=Recovery(1)))).status")
        other.do("return (await store.claim('a', 't', lease=3600000)).job.id")
        fork = "pid = os.fork(); return pid or time.sleep(60) or os._exit(0)"
        child = int(other.do(fork))
        try:
            other.kill()
            async with open_store(path) as store:
                assert await store.dead_owners() == (other.owner,)
                assert (await store.reconcile("j", "t")).status == "queued"
        finally:
            os.kill(child, signal.SIGKILL)


# -- owners ---------------------------------------------------------------------------------------


async def test_a_killed_owner_is_known_dead_at_once(path: Path) -> None:
    async with open_store(path) as store:
        heard: list[Change] = []
        with process(path) as other:
            other.do("return len(await store.enqueue_many([Job(x, id=x) for x in 'abc']))")
            for lane in "abc":
                other.do(f"return (await store.claim('{lane}', 't{lane}', lease=3600000)).job.id")
            done = "return (await store.decide('b', 'tb', Settle('completed'), has_hook=True))"
            other.do(done)
            assert await store.dead_owners() == ()
            assert await store.next_running_claim() is None
            # A process that is merely frozen is not dead: its lease decides.
            other.popen.send_signal(signal.SIGSTOP)
            assert await store.dead_owners() == ()
            async with trio.open_nursery() as nursery:
                store.on_change.append(heard.append)
                await nursery.start(store.watch)
                heard.clear()
                other.kill()
                # Its lease is an hour.
                with trio.fail_after(20):
                    while ELSEWHERE not in heard:
                        await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
            assert await store.dead_owners() == (other.owner,)
            job = await store.next_running_claim()
            assert job is not None
            assert job.id == "a"
            assert (await store.reconcile("a", "ta")).status == "settled"
            taken = await store.take_completing("new")
            assert taken is not None
            assert taken.id == "b"
            await store.finish_completing("b", "new")
            assert (await store.reconcile("c", "tc")).status == "settled"
            # Nobody names it any more, so its traces go.
            assert await store.dead_owners() == ()
            assert not any(other.owner in name for name in files(path.parent))
    assert files(path.parent) == ["jobs.db"]


async def test_an_owner_that_closed_is_left_to_its_lease(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j", recovery=Recovery(1)))
        async with open_store(path) as other:
            assert (await other.claim("a", "t", lease=HOUR)).job is not None
        # It said goodbye, so nothing is known of its claim but the lease.
        assert await store.dead_owners() == ()
        assert (await store.reconcile("j", "t")).status == "untouched"


async def test_a_store_never_takes_itself_for_dead(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        assert (await store.claim("a", "t", lease=HOUR)).job is not None
        async with open_store(path) as other:
            for _ in range(3):
                assert await store.dead_owners() == await other.dead_owners() == ()


# -- changes made elsewhere -----------------------------------------------------------------------


async def is_heard_within(seconds: float, store: Store, commit: Any, *, count: int = 9) -> None:
    """A change made elsewhere is reported so soon after its commit, by the median.

    If the machine was busy it is given time to come to rest; what is slow by itself stays so.
    """
    found: list[float] = []
    heard = trio.Event()

    store.on_change.append(lambda _: heard.set())
    async with trio.open_nursery() as nursery:
        await nursery.start(store.watch)
        while len(found) < count or statistics.median(found[-count:]) > seconds:
            assert len(found) < 10 * count, found
            # A few turns later, so that nothing of the last change is still on its way.
            await trio.sleep(0.12)
            heard = trio.Event()
            began = trio.current_time()
            await trio.to_thread.run_sync(commit)
            with trio.fail_after(20):
                await heard.wait()
            found.append(trio.current_time() - began)
        nursery.cancel_scope.cancel()


async def test_a_commit_in_another_process_is_reported_at_once(path: Path) -> None:
    async with open_store(path) as store:
        with process(path) as other:
            await is_heard_within(
                0.1, store, lambda: other.do("return (await store.enqueue(Job('a'))).status")
            )
            other.close()


async def test_a_foreign_connections_commit_is_reported_soon(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        foreign = sqlite3.connect(path, check_same_thread=False)
        with closing(foreign):

            def commit() -> None:
                foreign.execute("update watchdog_jobs set priority = priority + 1")
                foreign.commit()

            await is_heard_within(0.2, store, commit)


async def test_other_stores_are_told_what_a_commit_concerns(path: Path) -> None:
    send, heard = trio.open_memory_channel[Change](100)
    async with (
        open_store(path) as store,
        open_store(path) as other,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(store.watch)
        store.on_change.append(send.send_nowait)

        async def is_heard(change: Change) -> None:
            # Whoever looks at the file's time stamp hears that something has changed as well.
            with trio.fail_after(20):
                while await heard.receive() != change:
                    pass

        await other.enqueue(Job("a", id="j"))
        await is_heard(Change({"a": 0}))
        await other.enqueue(Job("b", not_before=datetime(2100, 1, 1, tzinfo=UTC)))
        await is_heard(Change({"b": 4102444800000}, later=4102444800000))
        assert (await other.claim("a", "t")).job is not None
        await other.cancel("j", "c")
        await is_heard(Change({}, cancelled=True, claims=frozenset("j")))
        nursery.cancel_scope.cancel()


async def test_so_many_rings_that_some_may_be_lost_are_any_change(path: Path) -> None:
    with OwnerLock(path) as lock, OwnerLock(path) as other:
        for told in ("a", "b", "b"):
            other.ring_others(told)
        assert await lock.wait_rung() == {b"a", b"b"}
        for n in range(100):
            other.ring_others(f"{n}")
        assert await lock.wait_rung() == {b""}
        other.ring_others("again")
        assert await lock.wait_rung() == {b"again"}


async def test_a_stores_own_commits_are_not_reported_as_somebody_elses(path: Path) -> None:
    async with open_store(path) as store:
        heard: list[Change] = []
        async with trio.open_nursery() as nursery:
            await nursery.start(store.watch)
            store.on_change.append(heard.append)
            for _ in range(5):
                await store.enqueue(Job("a"))
                await trio.sleep(0.06)
            nursery.cancel_scope.cancel()
        assert len(heard) == 5
        assert ELSEWHERE not in heard


# -- renewals from another thread -----------------------------------------------------------------


async def test_the_renewal_thread_needs_neither_the_loop_nor_the_writer(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue_many([Job(f"{n}", id=f"{n}") for n in range(3)])
        for n in range(3):
            assert (await store.claim(f"{n}", f"t{n}", lease=HOUR)).job is not None
        await store.cancel("1", "c")
        renewer = store.open_renewer()
        assert renewer is not None
        renewals: list[Any] = []

        def renew() -> None:
            with renewer as ask:
                wishes = [w.Renew(f"{n}", f"t{n}", 2 * HOUR) for n in range(3)]
                renewals.extend(ask([*wishes, w.Renew("1", "stolen", HOUR)]))

        # On the loop's own thread the whole time, so that nothing of Trio can run meanwhile.
        thread = threading.Thread(target=renew)
        thread.start()
        thread.join()
        assert [(each.status, each.cancellation_requested) for each in renewals] == [
            ("held", False),
            ("held", True),
            ("held", False),
            ("lost", False),
        ]
        job = await store.read("0")
        assert (cast("Any", job).lease_until.timestamp() - time.time()) > 1.9 * HOUR / 1000


# -- clocks ---------------------------------------------------------------------------------------


async def test_a_wall_clock_an_hour_off_neither_steals_nor_keeps_a_claim(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j", recovery=Recovery(1)))
        assert (await store.claim("a", "t", lease=60_000)).job is not None
        true_time = time.time_ns
        for wrong in (3600, -3600):
            monkeypatch.setattr(time, "time_ns", lambda w=wrong: true_time() + w * 10**9)
            # One that was open before the clock jumped, and one that opens with it.
            async with open_store(path) as other:
                for each in (store, other):
                    assert (await each.inspect("j", "t")).status == "held"
                    assert await each.next_running_claim() is None
                    assert (await each.reconcile("j", "t")).status == "untouched"
        assert (await store.renew("j", "t", lease=60_000)).status == "held"


async def test_all_stores_of_a_boot_agree_on_the_clock_of_leases(path: Path) -> None:
    async with open_store(path) as store, open_store(path) as other:
        one, two = cast("FileStore", store).clock, cast("FileStore", other).clock
        assert isinstance(one, HostClock)
        assert isinstance(two, HostClock)
        assert one.offset == two.offset
        assert abs(one.lease_now() - time.time_ns() // 1_000_000) < 60_000
    # After a reboot the time since boot begins anew, and the offset with it.
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(
            "update watchdog_meta set value = 'an earlier one' where name = 'boot_id'"
        )
        connection.execute("update watchdog_meta set value = 5 where name = 'boot_offset'")
        connection.commit()
    async with open_store(path) as store:
        clock = cast("FileStore", store).clock
        assert abs(clock.lease_now() - time.time_ns() // 1_000_000) < 60_000


# -- borrowed connections on a file ---------------------------------------------------------------


async def test_a_connection_inside_a_transaction_of_its_owner_has_to_wait(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        async with open_store(connection) as store:
            connection.execute("create table mine (n)")
            connection.execute("insert into mine values (1)")
            with pytest.raises(StoreUnavailable, match="inside a transaction"):
                await store.enqueue(Job("a"))
            connection.commit()
            assert (await store.enqueue(Job("a"))).status == "queued"
        connection.execute("insert into mine values (2)")
        with pytest.raises(StoreUnavailable, match="inside a transaction"):
            async with open_store(connection):
                raise AssertionError("it opened")
        # The owner's transaction is the owner's.
        connection.commit()
        assert connection.execute("select count(*) from mine").fetchone() == (2,)


async def test_a_borrowed_connection_stays_its_owners(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        async with open_store(connection) as store:
            await store.enqueue(Job("a"))
        assert connection.row_factory is sqlite3.Row
        assert connection.isolation_level == ""
        assert not connection.in_transaction
        assert connection.execute("select 1 as one").fetchone()["one"] == 1
    assert files(path.parent) == ["jobs.db"]


async def test_a_connection_that_makes_bytes_of_text_is_refused(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = bytes
        with pytest.raises(StoreInvalid, match="text_factory"):
            async with open_store(connection):
                raise AssertionError("it opened")


async def test_a_transaction_is_refused_before_it_begins_where_text_is_not_str(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        with closing(sqlite3.connect(path)) as connection:
            transaction = transactional(connection)
            connection.text_factory = bytes
            for ask in (
                lambda: transaction.enqueue(Job("a", {"x": 1})),
                lambda: transaction.cancel("j"),
                lambda: transaction.read_queue_head("j"),
                lambda: transactional(connection).enqueue(Job("a")),
            ):
                with pytest.raises(StoreInvalid, match="text_factory is <class 'bytes'>"):
                    ask()
                assert not connection.in_transaction
            # One that makes str is as good as any.
            connection.text_factory = bytes.decode
            assert transaction.enqueue(Job("a", {"x": 1})).status == "queued"
            connection.commit()
        assert len(await store.ask(w.ReadJobs())) == 2


def test_a_transaction_on_a_database_without_our_tables_says_what_to_do(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        with pytest.raises(StoreInvalid, match=r"open the database once with open_client$"):
            transactional(connection).enqueue(Job("a"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="autocommit came with 3.12")
async def test_a_connection_that_is_always_in_a_transaction_is_refused(path: Path) -> None:
    connect: Any = sqlite3.connect
    with closing(connect(path, autocommit=False)) as connection:
        with pytest.raises(StoreInvalid, match="autocommit"):
            async with open_store(connection):
                raise AssertionError("it opened")
    with closing(connect(path, autocommit=True)) as connection:
        async with open_store(connection) as store:
            assert (await store.enqueue(Job("a"))).status == "queued"


async def test_a_select_admits_rows_of_the_applications_own_tables(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table orders (number integer primary key, total, customer)")
        connection.executemany(
            "insert into orders (total, customer) values (?, ?)",
            [(n, f"customer {n % 2}") for n in range(10)],
        )
        connection.commit()
    select = """select 'invoice' as lane, 'invoice ' || number as id, customer as queue,
        json_object('total', total) as payload from orders where total > """
    async with open_store(path) as store:
        for parameters, where in (((6,), "?"), ({"least": 6}, ":least")):
            admissions = await store.enqueue_select(select + where, parameters)
            assert [each.job.payload for each in admissions] == [{"total": n} for n in (7, 8, 9)]
            assert {each.job.queue for each in admissions} == {"customer 0", "customer 1"}
        assert {each.status for each in admissions} == {"duplicate"}
        with pytest.raises(StoreInvalid, match="binding"):
            await store.enqueue_select(select + "?")


async def test_a_copy_of_the_file_is_a_database_of_its_own(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
    shutil.copy(path, path.with_name("copy.db"))
    async with open_store(path.with_name("copy.db")) as copy, open_store(path) as store:
        assert (await copy.claim("a", "t")).job is not None
        assert (await store.claim("a", "t")).job is not None
