"""A file in the wild: deleted, replaced, damaged, pinned, forked, full, forbidden, or far away."""

# ruff: noqa: ASYNC110, ASYNC240, PT012  (tests may look again and at files, and fail late)

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from trio_watchdog import (
    Job,
    Outcome,
    Recovery,
    RunningJob,
    SettledJob,
    StoreInvalid,
    StoreUnavailable,
    open_client,
    open_watchdog,
)
from trio_watchdog import _sqlite as sqlite
from trio_watchdog import _wishes as w
from trio_watchdog._open import open_store
from trio_watchdog._rules import Settle
from trio_watchdog._sqlite_file import NETWORK_FILE_SYSTEMS, Place, file_system, file_system_among
from trio_watchdog.testing import check_invariants

DONE = Settle(Outcome.COMPLETED)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


async def nothing(job: RunningJob) -> None:
    return None


def size_of_log(path: Path) -> int:
    log = Path(f"{path}-wal")
    return log.stat().st_size if log.exists() else 0


async def until(condition: Callable[[], Any], seconds: float = 20) -> None:
    with trio.fail_after(seconds):
        while not condition():
            await trio.sleep(0.01)


def run_script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program in a process of its own, where limits and users can be changed."""
    script = textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


# -- file systems ---------------------------------------------------------------------------------

MOUNTS = r"""
/dev/vda / ext4 rw,relatime 0 0
proc /proc proc rw 0 0
nas:/export /srv nfs4 rw,vers=4.2 0 0
/dev/vdb /srv/local xfs rw 0 0
//nas/jobs /mnt/with\040space cifs rw 0 0
ada@host:/ /home/ada/far fuse.sshfs rw 0 0
drvfs /mnt/c 9p rw 0 0
/dev/vdc /mnt/over ext4 rw 0 0
nas:/over /mnt/over nfs rw 0 0
broken line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/jobs.db", "ext4"),
        ("/srv/jobs.db", "nfs4"),
        ("/srv", "nfs4"),
        ("/srvice/jobs.db", "ext4"),
        ("/srv/local/jobs.db", "xfs"),
        ("/mnt/with space/jobs.db", "cifs"),
        ("/mnt/with/jobs.db", "ext4"),
        ("/home/ada/far/away/jobs.db", "fuse.sshfs"),
        ("/mnt/c/jobs.db", "9p"),
        ("/mnt/over/jobs.db", "nfs"),
    ],
)
def test_the_file_system_of_a_path_is_that_of_the_nearest_mount(path: str, kind: str) -> None:
    assert file_system_among(path, MOUNTS) == kind


def test_without_mounts_nothing_is_known_of_a_path() -> None:
    assert file_system_among("/jobs.db", "") is None


def test_this_machine_has_its_temporary_folder_on_a_local_disk(tmp_path: Path) -> None:
    assert file_system(tmp_path / "jobs.db") not in NETWORK_FILE_SYSTEMS


@pytest.mark.parametrize("kind", ["nfs", "nfs4", "cifs", "9p", "fuse.sshfs"])
async def test_a_network_file_system_is_refused_before_anything_is_made(
    path: Path, kind: str
) -> None:
    asked: list[Path] = []

    def detect(path: Path) -> str:
        asked.append(path)
        return kind

    with pytest.raises(StoreInvalid, match="network file system") as caught:
        async with open_client(path, file_system=detect):
            raise AssertionError("it opened")
    message = str(caught.value)
    assert str(path) in message
    assert f"({kind})" in message
    assert "allow_network=True" in message
    assert asked == [path]
    assert list(path.parent.iterdir()) == []
    async with open_client(path, file_system=detect, allow_network=True) as client:
        assert (await client.enqueue(Job("a"))).status == "queued"


async def test_a_borrowed_connection_to_a_network_file_system_is_refused_too(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "file_system", lambda _: "nfs")
    with closing(sqlite3.connect(path)) as connection:
        with pytest.raises(StoreInvalid, match="network file system"):
            async with open_client(connection):
                raise AssertionError("it opened")
        assert connection.execute("select count(*) from sqlite_master").fetchone() == (0,)
        async with open_client(connection, allow_network=True) as client:
            assert (await client.enqueue(Job("a"))).status == "queued"


# -- deleted and replaced -------------------------------------------------------------------------


def replace(path: Path) -> None:
    """As somebody does who restores a backup while the file is in use."""
    other = path.with_name("backup.db")
    with closing(sqlite3.connect(other)) as connection:
        sqlite.prepare(connection, "backup")
    other.replace(path)


DISASTERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "deleted": (Path.unlink, "was deleted while it was in use"),
    "replaced": (replace, "was replaced by another file while it was in use"),
    "moved": (lambda path: path.rename(path.with_name("away.db")), "was deleted while"),
}


@pytest.mark.parametrize("disaster", DISASTERS)
async def test_nothing_is_written_to_a_file_that_nobody_will_read(
    path: Path, disaster: str
) -> None:
    act, words = DISASTERS[disaster]
    async with open_client(path) as client:
        await client.enqueue(Job("a", id="before"))
        act(path)
        for action in (
            lambda: client.enqueue(Job("a")),
            lambda: client.read("before"),
            lambda: client.cancel("before"),
        ):
            with pytest.raises(StoreInvalid, match=words) as caught:
                await action()
            assert str(path) in str(caught.value)
            assert "stop all processes" in str(caught.value)
    # Nobody has made a fresh file in the place of the old one.
    assert path.exists() == (disaster == "replaced")


@pytest.mark.parametrize("disaster", DISASTERS)
async def test_an_idle_watchdog_notices_and_ends(path: Path, disaster: str) -> None:
    act, words = DISASTERS[disaster]
    with trio.fail_after(20):
        with pytest.raises(StoreInvalid, match=words):
            async with open_watchdog(path, poll=1000) as watchdog:
                await watchdog.start_lane("a", nothing)
                await watchdog.wait_idle()
                act(path)
                await trio.sleep_forever()


@pytest.mark.parametrize("disaster", DISASTERS)
async def test_a_running_handler_is_stopped_and_its_watchdog_ends(
    path: Path, disaster: str
) -> None:
    act, words = DISASTERS[disaster]
    ends: list[str] = []

    async def long(job: RunningJob) -> None:
        act(path)
        try:
            await trio.sleep_forever()
        finally:
            ends.append(f"{job.cancel_reason}")

    with trio.fail_after(20):
        with pytest.raises(StoreInvalid, match=words):
            async with open_watchdog(path) as watchdog:
                await watchdog.start_lane("a", long)
                await watchdog.enqueue(Job("a"))
                await trio.sleep_forever()
    assert ends == ["shutdown"]


async def test_a_log_that_is_deleted_under_a_watchdog_ends_it(path: Path) -> None:
    with trio.fail_after(20):
        with pytest.raises(StoreInvalid, match=r"jobs\.db-wal was deleted while it was in use"):
            async with open_watchdog(path) as watchdog:
                await watchdog.start_lane("a", nothing)
                await watchdog.enqueue(Job("a"))
                await watchdog.wait_idle()
                Path(f"{path}-wal").unlink()
                await trio.sleep_forever()


async def test_the_renewal_thread_does_not_make_a_fresh_file_either(path: Path) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="j"))
        claimed = await store.claim("a", "t")
        assert claimed.job is not None
        renewer = store.open_renewer()
        assert renewer is not None
        path.unlink()
        with pytest.raises(StoreUnavailable, match=r"jobs\.db"):
            with renewer:
                raise AssertionError("it opened")
        assert not path.exists()


async def test_a_borrowed_connection_notices_too(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        async with open_client(connection) as client:
            await client.enqueue(Job("a"))
            path.unlink()
            with pytest.raises(StoreInvalid, match="was deleted"):
                await client.enqueue(Job("a"))


def test_a_place_is_found_again_through_links_and_after_a_change_of_folder(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch()
    link = path.with_name("link.db")
    link.symlink_to(path)
    monkeypatch.chdir(path.parent)
    place = Place(Path("link.db"))
    monkeypatch.chdir("/")
    place.check()
    # Another link to the same file is the same file.
    link.unlink()
    place.check()
    path.unlink()
    with pytest.raises(StoreInvalid, match="was deleted"):
        place.check()


def test_what_cannot_be_looked_at_is_left_to_sqlite(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.touch()
    place = Place(path)

    def refuse(_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "stat", refuse)
    place.check()


# -- damage ---------------------------------------------------------------------------------------


async def test_a_page_that_is_damaged_under_a_watchdog_ends_it(path: Path) -> None:
    async with open_client(path) as client:
        await client.enqueue_many([Job("a", "x" * 500, id=f"{n:04}") for n in range(400)])
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "select rootpage from sqlite_master where name = 'watchdog_jobs_ready'"
        ).fetchone()
    with path.open("r+b") as file:
        file.seek(4096 * (root - 1))
        file.write(bytes(range(256)) * 16)
    with trio.fail_after(20):
        with pytest.raises(StoreInvalid, match="malformed") as caught:
            async with open_watchdog(path) as watchdog:
                await watchdog.start_lane("a", nothing)
                await trio.sleep_forever()
    assert f"{path} is damaged: restore it from a backup" in str(caught.value)
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)


FAILS = ("settled", "failed")
STAYS = ("queued", None)

NONSENSE: dict[str, tuple[str, tuple[str, str | None]]] = {
    # No claim can change it, so there it lies.
    "a blob for an id": ("id = x'ff00'", STAYS),
    "an empty lane": ("lane = ''", STAYS),
    "a blob for a queue": ("queue = x'01'", STAYS),
    "priority": ("priority = 'high'", STAYS),
    "not_before": ("not_before = 'soon'", STAYS),
    "no text for a payload": ("payload = x'00'", STAYS),
    "attempts": ("attempt_count = -3", STAYS),
    "a reason": ("reason = 'because'", STAYS),
    "a hint": ("hint = 'maybe'", STAYS),
    "no hint": ("hint = null", STAYS),
    "an outcome": ("outcome = 'completed'", ("queued", "completed")),
    "state": ("state = 'walking'", ("walking", None)),
    "a running job without a token": ("state = 'running', hint = null", ("running", None)),
    "no outcome": (
        "state = 'settled', hint = null, settled_at = 1, settled_group = 1",
        ("settled", None),
    ),
    "an unknown outcome": (
        "state = 'settled', hint = null, outcome = 'lost', settled_at = 1, settled_group = 1",
        ("settled", "lost"),
    ),
    # It can be claimed, and nobody can read what was claimed.
    "an empty id": ("id = ''", FAILS),
    "a priority beyond": ("priority = 9007199254740993", FAILS),
    "a negative not_before": ("not_before = -5", FAILS),
    "payload": ("payload = '{'", FAILS),
    "a deep payload": ("payload = '" + "[" * 200_000 + "'", FAILS),
    "a number that is too large": ("payload = '1e999'", FAILS),
    "recoveries": ("max_recoveries = -1", FAILS),
    "a window without recoveries": ("recovery_window = 5", FAILS),
    "a window of nothing": ("max_recoveries = 1, recovery_window = 0", FAILS),
    "attempts beyond": ("attempt_count = 9223372036854775807", FAILS),
    "text for attempts": ("attempt_count = 'many'", FAILS),
    # What it was made into is overwritten by whoever comes next.
    "a token": ("token = 'x'", ("settled", "completed")),
    "a cancellation": ("cancellation_id = ''", ("settled", "cancelled")),
}


@pytest.mark.parametrize("nonsense", NONSENSE)
async def test_a_row_edited_into_nonsense_hurts_only_itself(path: Path, nonsense: str) -> None:
    async with open_client(path) as client:
        await client.enqueue_many([Job("a", id=f"{n}", queue=f"q{n}") for n in range(5)])
        await client.enqueue(Job("a", id="late", queue="q2"))
    what, becomes = NONSENSE[nonsense]
    edit(path, f"{what} where id = '2'")
    async with open_client(path) as client:
        # Whoever looks is told which row it is.
        faults = [finding for finding in await client.examine() if finding.level == "fault"]
        assert any(finding.topic == "rows" for finding in faults)
        named = repr(value(path, "id"))
        assert any(f"the row of job {named} " in finding.text for finding in faults)
    async with open_watchdog(path) as watchdog:
        await watchdog.start_lane("a", nothing)
        await watchdog.start_lane("b", nothing)
        await watchdog.enqueue(Job("b", id="other lane"))
        for id in ("0", "1", "3", "4", "other lane"):
            assert (await watchdog.wait_settled(id)).outcome == Outcome.COMPLETED
    assert (value(path, "state"), value(path, "outcome")) == becomes
    if becomes == FAILS:
        assert value(path, "reason").startswith(f"the row of job {named} is invalid: ")


async def test_many_rows_edited_into_nonsense_hide_nothing_behind_them(path: Path) -> None:
    async with open_client(path) as client:
        await client.enqueue_many([Job("a", priority=1) for _ in range(100)])
        await client.enqueue(Job("a", id="good"))
    edit(path, "attempt_count = -5 where priority = 1")
    async with open_watchdog(path) as watchdog:
        await watchdog.start_lane("a", nothing)
        assert (await watchdog.wait_settled("good")).outcome == Outcome.COMPLETED


def edit(path: Path, what: str) -> None:
    """Change rows as somebody does who knows how to get past the checks."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma ignore_check_constraints = on")
        connection.execute(f"update watchdog_jobs set {what}")
        connection.commit()


def value(path: Path, column: str, sequence: int = 3) -> Any:
    """What a job, by itself the third, has there."""
    with closing(sqlite3.connect(path)) as connection:
        query = f"select {column} from watchdog_jobs where sequence = ?"
        return connection.execute(query, (sequence,)).fetchone()[0]


async def test_what_is_asked_of_a_row_made_nonsense_names_it_and_the_doctor(path: Path) -> None:
    async with open_client(path) as client:
        await client.enqueue_many([Job("a", id=f"{n}", queue="q") for n in range(3)])
        edit(path, "priority = 'high' where id = '0'")
        with pytest.raises(StoreInvalid, match="the row of job '0' is invalid: priority is 'high'"):
            await client.read("0")
        with pytest.raises(StoreInvalid) as caught:
            await client.cancel("0")
        assert str(caught.value) == (
            "the row of job '0' breaks the rules of its table, as after an edit by hand:"
            " `trio-watchdog doctor` tells how"
        )
        assert isinstance(caught.value.__cause__, sqlite3.IntegrityError)
        # The others of the lane are failed, and nobody asks for the rest for ever.
        failure = await client.fail_lane("a", "gone")
        assert [job.id for job in failure.jobs] == ["1", "2"]
        assert not failure.more
        # What nobody can read can still be removed.
        assert await client.purge_queue("q") == 1


async def test_a_queue_waits_behind_a_row_made_nonsense_until_it_is_put_right(path: Path) -> None:
    async with open_client(path) as client:
        await client.enqueue_many([Job("a", id=f"{n}", queue="q") for n in range(2)])
    edit(path, "priority = 'high' where id = '0'")
    async with open_watchdog(path) as watchdog:
        await watchdog.start_lane("a", nothing)
        await watchdog.enqueue(Job("a", id="free"))
        await watchdog.wait_settled("free")
        assert (await watchdog.read_queue_head("q")).job_id == "0"
        edit(path, "priority = 0 where id = '0'")
        for id in ("0", "1"):
            assert (await watchdog.wait_settled(id)).outcome == Outcome.COMPLETED
    check_invariants(path)


async def test_a_row_made_nonsense_while_its_job_runs_ends_the_block_and_not_the_next_one(
    path: Path,
) -> None:
    async def spoiling(job: RunningJob) -> None:
        edit(path, "priority = 'high' where id = '0'")

    with pytest.raises(StoreInvalid, match="the row of job '0' breaks the rules of its table"):
        async with open_watchdog(path) as watchdog:
            await watchdog.start_lane("a", spoiling)
            await watchdog.enqueue(Job("a", id="0", recovery=Recovery(5)))
            await trio.sleep_forever()
    assert value(path, "state", 1) == "running"
    edit(path, "lease_until = 0 where id = '0'")
    async with open_watchdog(path) as watchdog:
        await watchdog.start_lane("a", nothing)
        for _ in range(2):
            job = Job("a")
            await watchdog.enqueue(job)
            assert (await watchdog.wait_settled(job.id)).outcome == Outcome.COMPLETED
    assert value(path, "state", 1) == "running"


SPOILED = ("priority = 'high'", "reason = 'because'")
"""What breaks the rules of types, and those of states: few updates get past either."""


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_claims_are_renewed_beside_a_row_made_nonsense(path: Path, spoiled: str) -> None:
    async with open_store(path) as store:
        for id in ("0", "1"):
            await store.enqueue(Job("a", id=id))
            await store.claim("a", f"t{id}")
        edit(path, f"{spoiled} where id = '0'")
        answers = await store.submit(w.Renew("0", "t0", 60_000), w.Renew("1", "t1", 60_000))
        # Asked again until the lease is over, as a row that somebody's transaction holds.
        assert [answer.status for answer in answers] == ["locked", "held"]


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_a_job_settles_in_front_of_a_row_made_nonsense(path: Path, spoiled: str) -> None:
    async with open_store(path) as store:
        await store.enqueue(Job("a", id="0", queue="q"))
        await store.claim("a", "t")
        await store.enqueue(Job("a", id="1", queue="q"))
        edit(path, f"{spoiled} where id = '1'")
        assert (await store.decide("0", "t", DONE)).status == "recorded"


@pytest.mark.parametrize("spoiled", SPOILED)
async def test_deferred_and_blocked_rows_made_nonsense_are_in_no_claims_way(
    path: Path, spoiled: str
) -> None:
    async with open_store(path) as store:
        await store.enqueue_many([Job("a", id=f"{n}") for n in range(2)])
        await store.enqueue_many([Job("a", id=f"q{n}", queue="q") for n in range(3)])
        edit(path, "hint = 'deferred', not_before = 1 where id in ('0', '1')")
        edit(path, "hint = 'ready' where queue = 'q'")
        edit(path, f"{spoiled} where id in ('0', 'q1')")
        claimed = [(await store.claim("a", f"t{n}")).job for n in range(3)]
        # By its priority the spoiled row is first in its queue now: text goes before numbers.
        second = None if "priority" in spoiled else "q0"
        assert sorted(f"{job and job.id}" for job in claimed) == sorted(["1", f"{second}", "None"])


async def test_a_completion_behind_a_row_made_nonsense_is_taken_over(path: Path) -> None:
    async with open_store(path) as store:
        for id in ("0", "1"):
            await store.enqueue(Job("a", id=id))
            await store.claim("a", f"t{id}", lease=60_000)
            assert (await store.decide(id, f"t{id}", DONE, has_hook=True)).status == "recorded"
        edit(path, "lease_until = 0")
        edit(path, "reason = 'because' where id = '0'")
        job = await store.take_completing("t")
        assert job is not None
        assert job.id == "1"
        assert await store.take_completing("t") is None


async def test_a_settled_row_made_nonsense_is_named_and_does_not_hide_the_rest(
    path: Path,
) -> None:
    async with open_watchdog(path) as watchdog:
        await watchdog.start_lane("a", nothing)
        await watchdog.enqueue_many([Job("a", id=f"{n}") for n in range(4)])
        await watchdog.wait_idle()
        order = [job.id for job in (await watchdog.read_settled()).jobs]
        edit(path, f"outcome = 'x' where id = '{order[2]}'")
        assert [
            finding.text for finding in await watchdog.examine() if finding.topic == "rows"
        ] == [f"the row of job '{order[2]}' is invalid: 'x' is not a valid Outcome"]
        page = await watchdog.read_settled()
        assert [job.id for job in page.jobs] == order[:2]
        with pytest.raises(StoreInvalid, match=f"the row of job {order[2]!r} is invalid"):
            await watchdog.read_settled(after=page.cursor)
        assert isinstance(await watchdog.read(order[3]), SettledJob)


# -- the write-ahead log --------------------------------------------------------------------------


async def test_the_log_stays_small_whatever_is_written(path: Path) -> None:
    async with open_client(path) as client:
        for n in range(60):
            await client.enqueue(Job("a", "x" * 500_000, id=f"{n}"))
        # SQLite folds it back every thousand pages, and begins anew.
        assert size_of_log(path) < 3 * sqlite.LOG_LIMIT
        assert path.stat().st_size > 20_000_000


async def test_a_log_that_a_reader_pinned_is_given_back_when_all_is_quiet(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "LOG_LIMIT", 100_000)
    monkeypatch.setattr(sqlite, "TIDY_INTERVAL", 0.1)
    tried: list[None] = []
    real = sqlite.truncate_log

    def truncate(connection: sqlite3.Connection) -> None:
        tried.append(None)
        real(connection)

    monkeypatch.setattr(sqlite, "truncate_log", truncate)
    async with open_watchdog(path) as watchdog:
        with closing(sqlite3.connect(path, isolation_level=None)) as reader:
            reader.execute("begin")
            reader.execute("select count(*) from watchdog_jobs").fetchone()
            for n in range(40):
                await watchdog.enqueue(Job("a", "x" * 200_000, id=f"{n}"))
            pinned = size_of_log(path)
            assert pinned > 8_000_000
            await until(lambda: len(tried) > 2)
            # However often it is tried meanwhile, nobody waits for it, and the reader is safe.
            await watchdog.enqueue(Job("a", id="between"))
            assert size_of_log(path) >= pinned
            assert reader.execute("select count(*) from watchdog_jobs").fetchone() == (0,)
            tried.clear()
        await until(lambda: size_of_log(path) == 0)
        # It is still the log that everybody has open.
        await watchdog.enqueue(Job("a", id="after"))
        assert await watchdog.read("39") is not None
    check_invariants(path)


class Stamps:
    """Stands for the owner lock: a file that changes as often as it is looked at."""

    is_busy = True
    looks = 0

    def stamp(self) -> tuple[int, ...]:
        self.looks += self.is_busy
        return (self.looks,)

    def has_newly_dead(self) -> bool:
        return False

    async def wait_rung(self) -> set[bytes]:
        await trio.sleep_forever()
        raise AssertionError("unreachable")


async def test_a_log_is_not_folded_back_while_somebody_works(autojump_clock: MockClock) -> None:
    stamps = Stamps()
    folded: list[float] = []

    async def tidy(*, is_idle: bool) -> None:
        if is_idle:
            folded.append(trio.current_time())

    async def is_changed() -> bool:
        return True

    async with open_store("sqlite::memory:") as store, trio.open_nursery() as nursery:
        nursery.start_soon(sqlite.watch_file, store, is_changed, stamps, tidy)
        await trio.sleep(10 * sqlite.TIDY_INTERVAL)
        assert folded == []
        stamps.is_busy = False
        quiet_since = trio.current_time()
        await trio.sleep(2.5 * sqlite.TIDY_INTERVAL)
        assert len(folded) == 2
        assert folded[0] >= quiet_since + sqlite.TIDY_INTERVAL - sqlite.CHANGE_INTERVAL
        nursery.cancel_scope.cancel()


# -- forks ----------------------------------------------------------------------------------------

FORKING = """
import os, sys, trio
from trio_watchdog import Job, StoreInvalid, open_watchdog

async def child(client):
    try:
        with trio.fail_after(5):
            await client.enqueue(Job("a", id="child's"))
    except StoreInvalid as error:
        return 0 if "fork" in str(error) else 2
    return 3

async def main():
    ran = []
    forked = trio.Event()
    async def handler(job):
        ran.append(job.id)
        if job.id == "running":
            await forked.wait()
    async with open_watchdog(sys.argv[1]) as watchdog:
        await watchdog.start_lane("a", handler)
        await watchdog.enqueue(Job("a", id="running"))
        while not ran:
            await trio.sleep(0.01)
        pid = os.fork()
        if pid == 0:
            code = 9
            try:
                # In a run of its own, as programs do that were begun by `multiprocessing`.
                import threading
                def run():
                    nonlocal code
                    code = trio.run(child, watchdog)
                thread = threading.Thread(target=run)
                thread.start()
                thread.join()
            finally:
                if sys.argv[2] == "exit":
                    import atexit, gc
                    gc.collect()
                    sys.stdout.flush()
                os._exit(code)
        _, status = await trio.to_thread.run_sync(os.waitpid, pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0, status
        forked.set()
        await watchdog.enqueue(Job("a", id="after"))
        assert (await watchdog.wait_settled("running")).outcome == "completed"
        assert (await watchdog.wait_settled("after")).outcome == "completed"
        assert await watchdog.read("child's") is None

trio.run(main)
"""


@pytest.mark.parametrize("end", ["at once", "exit"])
def test_a_fork_is_refused_and_its_parent_unharmed(path: Path, end: str) -> None:
    done = run_script(FORKING, str(path), end)
    assert done.returncode == 0, done.stderr
    check_invariants(path)


# -- rights ---------------------------------------------------------------------------------------

OPENING = """
import os, sys, trio
import trio_watchdog._sqlite
from trio_watchdog import Job, StoreUnavailable, open_client

async def main():
    try:
        async with open_client(sys.argv[1], retry_for=0) as client:
            await client.enqueue(Job("a", id="j"))
    except StoreUnavailable as error:
        print(error)
        return
    print("fine")

if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
trio.run(main)
"""


@pytest.fixture
def common() -> Iterator[Path]:
    """A folder that other users can reach."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def opened_by_another(path: Path) -> str:
    done = run_script(OPENING, str(path))
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


async def test_who_may_not_use_the_file_is_told_what_is_missing(common: Path) -> None:
    path = common / "jobs.db"
    async with open_client(path):
        pass
    mode = path.stat().st_mode
    for forbidden in (0o000, 0o444):
        path.chmod(forbidden)
        message = opened_by_another(path)
        assert str(path) in message
        assert "needs the right to read and write" in message
        assert "user " in message
    path.chmod(mode | 0o666)
    # What a narrower past has left beside it is in the way, too.
    assert f"needs the right to read and write {path}-" in opened_by_another(path)
    for name in ("-wal", "-shm"):
        Path(f"{path}{name}").unlink()
    assert opened_by_another(path) == "fine"


async def test_who_may_not_use_the_folder_is_told_what_is_missing(common: Path) -> None:
    folder = common / "inner"
    folder.mkdir()
    path = folder / "jobs.db"
    for exists in (False, True):
        if exists:
            folder.chmod(0o755)
            async with open_client(path):
                pass
            path.chmod(0o666)
        folder.chmod(0o555)
        message = opened_by_another(path)
        assert str(path) in message
        assert f"needs the right to write to the folder {folder}" in message
    folder.chmod(0o777)
    assert opened_by_another(path) == "fine"


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o027, 0o077])
async def test_files_are_as_wide_as_the_umask_allows_and_no_wider(
    tmp_path: Path, umask: int
) -> None:
    path = tmp_path / "jobs.db"
    before = os.umask(umask)
    try:
        async with open_watchdog(path) as watchdog:
            await watchdog.start_lane("a", nothing)
            await watchdog.enqueue(Job("a"))
            await watchdog.wait_idle()
            modes = {
                str(file.relative_to(tmp_path)): stat.S_IMODE(file.stat().st_mode)
                for file in tmp_path.rglob("*")
            }
    finally:
        os.umask(before)
    assert {name.split("/")[0] for name in modes} == {
        *("jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db-owners"),
    }
    for name, mode in modes.items():
        assert mode & umask == 0, (name, oct(mode))
    # A group that may write shares the database, and not only the folder.
    assert modes["jobs.db"] == modes["jobs.db-wal"] == modes["jobs.db-shm"] == 0o666 & ~umask


async def test_an_existing_file_keeps_its_mode(path: Path) -> None:
    path.touch(mode=0o600)
    async with open_client(path) as client:
        await client.enqueue(Job("a"))
        for name in ("", "-wal", "-shm"):
            assert stat.S_IMODE(Path(f"{path}{name}").stat().st_mode) == 0o600
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


# -- a full disk ----------------------------------------------------------------------------------

FULL = """
import contextlib, os, resource, sqlite3, sys, trio
from pathlib import Path
from trio_watchdog import Job, RunningJob, SettledJob, StoreUnavailable, open_watchdog
from trio_watchdog._sqlite import Engine
from trio_watchdog._wishes import Decide
from trio_watchdog.testing import check_invariants

path, kind = Path(sys.argv[1]), sys.argv[2]
filler = path.with_name("filler")
refused_decisions = []
perform = Engine.perform

def watched(engine, asked):
    try:
        return perform(engine, asked)
    except StoreUnavailable:
        refused_decisions.extend(wish for wish in asked if isinstance(wish, Decide))
        raise

Engine.perform = watched

def fill():
    if kind == "limit":
        size = max(path.stat().st_size, Path(f"{path}-wal").stat().st_size) + 100_000
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        # All but a little, so that the log can still grow a bit.
        while os.statvfs(path.parent).f_bavail * 4096 > 100_000:
            file.write(bytes(4096))

def make_room():
    if kind == "limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    else:
        filler.unlink()

async def main():
    ends = trio.Event()
    runs = []
    async def handler(job):
        runs.append(job.id)
        if job.id == "holds":
            await ends.wait()
    async with open_watchdog(path, retry_for=0) as watchdog:
        await watchdog.start_lane("a", handler)
        await watchdog.enqueue(Job("a", id="holds"))
        while not runs:
            await trio.sleep(0.01)
        fill()
        admitted, refused = [], None
        for n in range(1000):
            id = f"{n}"
            try:
                await watchdog.enqueue(Job("b", "x" * 20_000, id=id))
            except StoreUnavailable as error:
                refused, message = id, str(error)
                break
            admitted.append(id)
        assert refused is not None, "the disk never got full"
        print(message)
        # A small one may still fit in; fill up what is left.
        with contextlib.suppress(StoreUnavailable):
            for n in range(5000):
                await watchdog.enqueue(Job("b", n, id=f"small {n}"))
                admitted.append(f"small {n}")
        with open_file() as connection:
            assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
            there = {row[0] for row in connection.execute("select id from watchdog_jobs")}
        assert there == {"holds", *admitted}, there ^ {"holds", *admitted}
        # Its decision cannot be written, and is not lost.
        ends.set()
        while not refused_decisions:
            await trio.sleep(0.01)
        job = await watchdog.read("holds")
        assert isinstance(job, RunningJob), job
        make_room()
        with trio.fail_after(30):
            settled = await watchdog.wait_settled("holds")
        assert settled.outcome == "completed"
        assert runs == ["holds"]
        await watchdog.enqueue(Job("a", id="afterwards"))
        assert (await watchdog.wait_settled("afterwards")).outcome == "completed"
        assert await watchdog.read(refused) is None
    check_invariants(path)

def open_file():
    return contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True))

trio.run(main)
"""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of three megabytes in memory."""
    point = folder / "small"
    point.mkdir()
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None:
        pytest.skip("only root may mount")
    mounted = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(point)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)


def test_a_limit_on_the_size_of_files_loses_nothing(path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    done = run_script(FULL, str(path), "limit")
    assert done.returncode == 0, done.stderr
    assert f"the disk of {path} is full, or fails" in done.stdout


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path) as folder:
        done = run_script(FULL, str(folder / "jobs.db"), "disk")
    assert done.returncode == 0, done.stderr
    assert "full" in done.stdout
    assert str(tmp_path / "small" / "jobs.db") in done.stdout
