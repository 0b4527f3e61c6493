"""What the doctor finds, and how a job's standing is told, on both kinds of database."""

# ruff: noqa: ASYNC240  (tests may look at files)

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import trio

from tests.upkeep.conftest import ByHand
from trio_watchdog import (
    Client,
    Finding,
    Job,
    Recovery,
    RetryPolicy,
    RunningJob,
    StoreInvalid,
    StoreUnavailable,
    converter,
    open_client,
    open_watchdog,
)
from trio_watchdog import _postgres_vitals as vitals
from trio_watchdog import _sqlite_file as sqlite_file
from trio_watchdog._doctor import duration
from trio_watchdog._model import Outcome
from trio_watchdog._open import open_store
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._rules import Settle
from trio_watchdog._store import Store

DONE = Settle(Outcome.COMPLETED)


async def findings(database: str, **options: Any) -> list[Finding]:
    """What a doctor with no other business finds."""
    async with open_client(database, read_only=True, **options) as client:
        return await client.examine()


def about(found: list[Finding], topic: str) -> list[tuple[str, str]]:
    return [(finding.level, finding.text) for finding in found if finding.topic == topic]


def store_of(client: Client) -> Store:
    return client._store


async def claim(store: Store, lane: str, token: str, lease: int = 60_000) -> None:
    assert (await store.claim(lane, token, lease=lease)).job is not None


# -- health ---------------------------------------------------------------------------------------


async def test_a_database_in_order_is_found_in_order(database: str) -> None:
    async with open_client(database) as client:
        await client.enqueue(Job("a"))
        await claim(store_of(client), "a", "t")
        found = await findings(database)
        assert {"schema", "rows", "claims", "queues"} <= {finding.topic for finding in found}
        assert [finding for finding in found if finding.level != "ok"] == []
        assert about(found, "rows") == [("ok", "1 unsettled job, all readable")]
        for finding in found:
            assert converter.structure(converter.unstructure(finding), Finding) == finding


async def test_a_row_that_breaks_the_grammar_is_a_fault_with_its_id(
    database: str, by_hand: ByHand
) -> None:
    async with open_client(database) as client:
        await client.enqueue_many([Job("a", id=f"{n}") for n in range(1200)])
    by_hand("update {jobs} set token = 'x' where id = '7'")
    by_hand("update {jobs} set payload = '{' where id = '1111'")
    found = about(await findings(database), "rows")
    assert [level for level, _ in found] == ["fault", "fault"]
    assert "'7'" in found[0][1]
    assert "queued" in found[0][1]
    assert "'1111'" in found[1][1]
    assert "not JSON" in found[1][1]


@pytest.mark.parametrize(
    "edit",
    ["state = 'walking'", "payload = '{'", "attempt_count = -3", "outcome = 'lost'", "hint = null"],
)
async def test_a_row_made_nonsense_is_named_and_keeps_nobody_from_working(
    database: str, by_hand: ByHand, edit: str
) -> None:
    async def handler(job: RunningJob) -> None:
        assert job.id != "1"

    async with open_client(database) as client:
        await client.enqueue_many([Job("a", id=f"{n}", priority=-n) for n in range(3)])
        await client.enqueue(Job("a", id="behind", queue="1"))
        by_hand(f"update {{jobs}} set {edit} where id = '1'")
        ((level, text),) = about(await findings(database), "rows")
        assert level == "fault"
        assert text.startswith("the row of job '1' ")
    async with open_watchdog(database) as watchdog:
        await watchdog.start_lane("a", handler)
        for id in ("0", "2"):
            assert (await watchdog.wait_settled(id)).outcome == "completed"


async def test_a_claim_that_nobody_looks_after_is_named(database: str, by_hand: ByHand) -> None:
    async with open_client(database) as client:
        await client.enqueue(Job("mail", id="gone"))
        await claim(store_of(client), "mail", "t", 1)
        await trio.sleep(0.01)
        ((level, text),) = about(await findings(database), "claims")
        assert level == "note"
        assert text.startswith("job 'gone' of lane 'mail' is running, and its lease ended ")
        by_hand("update {jobs} set lease_until = lease_until - 300000")
        ((level, text),) = about(await findings(database), "claims")
        assert level == "warning"
        assert re.search(r"ended 5(\.0\d)? min ago; no watchdog seems to run$", text)


async def test_queues_that_wait_for_a_head_that_is_not_due_are_named(database: str) -> None:
    async with open_client(database) as client:
        soon = datetime.now(UTC) + timedelta(hours=2)
        await client.enqueue(Job("a", id="head", queue="q", not_before=soon))
        await client.enqueue_many([Job("a", queue="q", not_before=soon) for _ in range(3)])
        await client.enqueue(Job("a", id="alone", not_before=soon))
    assert about(await findings(database), "queues") == [
        ("note", "queue 'q' waits for its head 'head', which is due in 2 h; 3 jobs behind it")
    ]


async def test_lanes_that_nobody_seems_to_serve_are_named(database: str) -> None:
    async with open_client(database) as client:
        await client.enqueue_many([Job("idle"), Job("idle"), Job("busy"), Job("busy")])
        await claim(store_of(client), "busy", "t")
    ((level, text),) = about(await findings(database), "lanes")
    assert level == "note"
    assert text.startswith("lane 'idle' has 2 jobs that may be claimable, and none runs;")


async def test_a_lost_job_is_a_fault(database: str, by_hand: ByHand) -> None:
    async with open_client(database) as client:
        await client.enqueue(Job("a", id="lost"))
    by_hand("update {jobs} set hint = 'lowered'")
    ((level, text),) = about(await findings(database), "queues")
    assert (level, text.split(" goes ")[0]) == ("fault", "job 'lost'")


# -- looking only ---------------------------------------------------------------------------------


async def test_nothing_is_made_where_there_is_nothing(database: str, tmp_path: Path) -> None:
    for options in ({"create": False}, {"read_only": True}):
        with pytest.raises((StoreInvalid, StoreUnavailable), match="create=False"):
            async with open_client(database, **options):
                raise AssertionError("it opened")
    if database.startswith("sqlite:"):
        assert list(tmp_path.iterdir()) == []
        path = Path(database.removeprefix("sqlite:"))
        path.touch()
        with pytest.raises(StoreInvalid, match="no tables of trio_watchdog"):
            async with open_client(database, create=False):
                raise AssertionError("it opened")
        assert path.stat().st_size == 0
    else:
        with psycopg.connect(database) as connection:
            sql = "select count(*) from pg_namespace where nspname = 'trio_watchdog'"
            assert connection.execute(sql).fetchone() == (0,)
    async with open_client(database):
        pass
    async with open_client(database, create=False) as client:
        assert (await client.enqueue(Job("a"))).status == "queued"


async def test_looking_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_client(path) as client:
        await client.enqueue(Job("a"))
    before = path.read_bytes()
    with closing(sqlite3.connect(path)) as connection:
        # As after a boot, when the clocks have to be agreed upon anew.
        connection.execute("update watchdog_meta set value = 'other' where name = 'boot_id'")
        connection.commit()
    before = path.read_bytes()
    async with open_client(path, read_only=True) as client:
        await client.examine()
        assert not (tmp_path / "jobs.db-owners").exists()
        with pytest.raises(StoreUnavailable, match="readonly"):
            await store_of(client).enqueue(Job("a"))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["jobs.db"]


async def test_a_doctor_is_in_nobodys_way(database: str) -> None:
    async with open_client(database, poll=0.1) as client:
        await client.enqueue_many([Job("a") for _ in range(50)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(findings, database)
            for n in range(50):
                await claim(store_of(client), "a", f"t{n}")


# -- files ----------------------------------------------------------------------------------------


async def test_damage_in_the_file_is_a_fault_and_hides_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_client(path) as client:
        await client.enqueue_many([Job("a", "x" * 3000, id=f"{n}") for n in range(100)])
        await client.enqueue(
            Job("b", id="later", queue="q", not_before=datetime(9999, 1, 1, tzinfo=UTC))
        )
        await client.enqueue(Job("b", queue="q"))
    with closing(sqlite3.connect(path)) as connection:
        (root,) = connection.execute(
            "select rootpage from sqlite_master where name = 'watchdog_jobs'"
        ).fetchone()
    content = bytearray(path.read_bytes())
    content[4096 * (root - 1) : 4096 * root] = os.urandom(4096)
    path.write_bytes(content)
    found = await findings(str(path))
    assert "fault" in [finding.level for finding in found]
    faults = " ".join(finding.text for finding in found if finding.level == "fault")
    assert "jobs.db is damaged: restore it from a backup" in faults
    assert len(found) >= 4


async def test_a_log_that_grows_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    async with open_client(path) as client:
        await client.enqueue(Job("a"))
        assert [level for level, _ in about(await findings(str(path)), "log")] == ["ok"]
        monkeypatch.setattr(sqlite_file, "WAL_WARNING", 1000)
        ((level, text),) = about(await findings(str(path)), "log")
        assert level == "warning"
        assert "MiB: a transaction that stays open" in text


async def test_owners_are_counted_the_living_and_the_dead(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with open_client(path), open_client(path):
        ((level, text),) = about(await findings(str(path)), "owners")
        assert (level, text) == ("ok", "2 open stores have a lock beside the file")
        code = (
            "import os, sys, trio\nfrom trio_watchdog import open_client\n"
            "async def main():\n    async with open_client(sys.argv[1]):\n        os._exit(0)\n"
            "trio.run(main)"
        )
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        await trio.run_process([sys.executable, "-c", code, str(path)], env=env)
        ((level, text),) = about(await findings(str(path)), "owners")
        assert level == "note"
        assert text.startswith("2 open stores have a lock beside the file, and 1 have died")


async def test_a_network_file_system_is_a_warning_to_who_opens_it_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "jobs.db"
    async with open_client(path):
        pass
    monkeypatch.setattr(sqlite_file, "file_system", lambda _: "nfs4")
    found = about(await findings(str(path), allow_network=True), "file")
    assert ("warning", "it is on a network file system (nfs4), which damages it") in found


# -- servers --------------------------------------------------------------------------------------


async def test_a_clock_that_is_wrong_is_a_warning(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(postgres_database):
        pass
    real = vitals.time.time
    for wrong, level in ((0, "ok"), (4, "ok"), (-7, "warning"), (3600, "warning")):
        took = 1.0
        # The question is answered somewhere between two looks at the clock: close ones, here.
        while took > 0.1:
            looks: list[float] = []

            def look(wrong: float = wrong, looks: list[float] = looks) -> float:
                looks.append(real() + wrong)
                return looks[-1]

            with monkeypatch.context() as patch:
                patch.setattr(vitals.time, "time", look)
                ((found, text),) = about(await findings(postgres_database), "clock")
            took = max(looks) - min(looks)
        assert found == level, (wrong, text)
        if wrong:
            assert ("ahead" if wrong < 0 else "behind") in text
            assert f"{abs(wrong)}." in text or f"{abs(wrong) - 1}.9" in text


async def test_a_transaction_that_stays_open_is_a_warning(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(postgres_database) as client:
        with psycopg.connect(postgres_database, application_name="somebody") as user:
            user.execute("select pg_current_xact_id()")
            user.execute("select pg_sleep(0.05)")
            monkeypatch.setattr(vitals, "TRANSACTION_WARNING", 0.05)
            found = about(await client.examine(), "transactions")
            # The server is shared, and so may have older ones.
            assert any(level == "warning" for level, _ in found)
            assert any("holds back vacuum" in text for _, text in found)


async def test_dead_rows_few_connections_and_read_only_servers_are_warnings(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_client(postgres_database) as client:
        await client.enqueue(Job("a"))
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        for _ in range(20):
            connection.execute("update trio_watchdog.jobs set attempt_count = attempt_count + 1")
        connection.execute("select pg_stat_force_next_flush()")
        name = connection.info.dbname
        connection.execute(f"alter database {name} set default_transaction_read_only = on".encode())
    monkeypatch.setattr(vitals, "DEAD_WARNING", 2)
    monkeypatch.setattr(vitals, "CONNECTIONS_WARNING", 10_000)
    found = await findings(postgres_database)
    ((level, text),) = about(found, "vacuum")
    assert level == "warning"
    assert "dead rows beside" in text
    assert "last vacuum: never" in text
    ((level, text),) = about(found, "connections")
    assert level == "warning"
    assert "connections are left" in text
    ((level, text),) = about(found, "server")
    assert level == "warning"
    assert "default_transaction_read_only is on" in text


async def test_a_notification_that_does_not_arrive_is_a_warning_after_a_while(
    postgres_database: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "ROUND_TRIP_SECONDS", 0.2)
    listening = await TrioConnection[Any].connect(postgres_database, autocommit=True)
    # Notifications stay within a database.
    elsewhere = await TrioConnection[Any].connect(postgres_url, autocommit=True)
    async with listening, elsewhere:
        (level, topic, text), has_others = await vitals.round_trip(listening, elsewhere)
        assert (level, topic, has_others) == ("warning", "notify", False)
        assert "no notification arrived within 0.2 s; behind a pooler" in text
        monkeypatch.undo()
        await listening.execute("listen other")
        await elsewhere.close()
        async with await TrioConnection[Any].connect(postgres_database, autocommit=True) as beside:
            await beside.execute("notify other")
            (level, _, text), has_others = await vitals.round_trip(listening, beside)
            assert (level, has_others) == ("ok", True)
            assert text.endswith(" ms")


async def test_who_does_not_listen_is_not_told_of_notifications(postgres_database: str) -> None:
    async with open_client(postgres_database):
        pass
    found = await findings(postgres_database, listen=False, prepare=False)
    assert about(found, "notify") == []
    assert [level for level, _ in about(found, "server")] == ["ok"]


async def test_an_examination_costs_a_listener_no_notification(postgres_database: str) -> None:
    async with open_client(postgres_database, poll=60) as client:
        await client.enqueue(Job("a", id="j"))
        await claim(store_of(client), "a", "t")
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.wait_settled, "j")
                await trio.sleep(0.2)
                nursery.start_soon(client.examine)
                async with open_client(postgres_database) as other:
                    await store_of(other).decide("j", "t", DONE)


# -- explanations ---------------------------------------------------------------------------------


@pytest.fixture
def explained(database: str) -> Callable[[str], Awaitable[str]]:
    async def explain(id: str) -> str:
        async with open_client(database, read_only=True) as client:
            return await client.explain(id)

    return explain


async def test_it_is_said_why_a_job_does_not_run(
    database: str, explained: Callable[[str], Awaitable[str]]
) -> None:
    async with open_client(database) as client:
        store = store_of(client)
        later = datetime.now(UTC) + timedelta(days=3)
        await client.enqueue(Job("idle", id="first", priority=9))
        await client.enqueue(Job("idle", id="free"))
        assert await explained("free") == (
            "It goes first in its queue and is due, and waits for a free worker of lane 'idle'."
            " There, 1 job may go before it. None of the lane runs now: if it stays so, no process"
            " serves it."
        )
        await claim(store, "idle", "t first")
        assert (await explained("free")).endswith("'idle'. 1 job of the lane run now.")
        assert (await explained("first")).startswith(
            "It is running, under a lease that goes on for"
        )
        await client.enqueue(Job("a", id="later", queue="q", not_before=later))
        await client.enqueue_many([Job("a", id=f"b{n}", queue="q") for n in range(3)])
        assert await explained("later") == (
            "It goes first in its queue and is not due: it may run in 3 d."
        )
        assert await explained("b0") == (
            "It waits in queue 'q' behind 'later', which waits itself."
            " That one is not due: it may run in 3 d."
        )
        assert await explained("b2") == (
            "It waits in queue 'q' behind 'later', which waits itself. In all, 3 jobs of the queue"
            " go before it. That one is not due: it may run in 3 d."
        )
        await client.enqueue(Job("r", id="runs", queue="p"))
        await claim(store, "r", "t runs")
        await client.enqueue(Job("r", id="behind", queue="p", not_before=later))
        assert await explained("behind") == (
            "It waits in queue 'p' behind 'runs', which is running."
            " It is not due itself: it may run in 3 d."
        )
        await client.cancel("behind")
        assert await explained("behind") == (
            "Its cancellation was requested; a watchdog settles it without running it."
        )
        await client.cancel("runs")
        assert (await explained("runs")).endswith("Its cancellation was requested.")


async def test_it_is_said_what_became_of_a_job(
    database: str, explained: Callable[[str], Awaitable[str]], by_hand: ByHand
) -> None:
    async with open_client(database) as client:
        store = store_of(client)
        await client.enqueue_many([Job("a", id=id) for id in ("failed", "done")])
        await claim(store, "a", "t1")
        await store.decide("failed", "t1", Settle(Outcome.FAILED, "no such street"))
        await claim(store, "a", "t2")
        await store.decide("done", "t2", DONE)
        assert (await explained("failed")).endswith(" (no such street).")
        settled = await client.read("done")
        assert settled is not None
        assert settled.state == "settled"
        when = settled.settled_at.isoformat()
        assert await explained("done") == f"It settled as completed at {when}."
        await client.enqueue(Job("h", id="hook"))
        await claim(store, "h", "t3", 1)
        await trio.sleep(0.01)
        assert (await explained("hook")).startswith(
            "Its execution has disappeared: the lease ended"
        )
        await client.enqueue(Job("i", id="orphan"))
        await claim(store, "i", "t4", 60_000)
        await store.decide("orphan", "t4", DONE, has_hook=True)
        said = await explained("orphan")
        assert said.startswith("Its outcome is decided (completed), and the completion hook has")
        assert "takes it over" not in said
        by_hand("update {jobs} set lease_until = lease_until - 60000 where id = 'orphan'")
        assert "takes it over" in await explained("orphan")


async def test_a_retried_job_says_how_often_it_was_tried(
    database: str, explained: Callable[[str], Awaitable[str]]
) -> None:
    async with open_client(database) as client:
        store = store_of(client)
        await client.enqueue(Job("a", id="j", recovery=Recovery(1)))
        claimed = await store.claim("a", "t", counts=False)
        assert claimed.job is not None
        policy = RetryPolicy(5, delay=3600)
        await store.reserve_attempt("j", "t", policy)
        await store.retry("j", "t", policy)
        assert await explained("j") == (
            "It goes first in its queue and is not due: it may run in 1 h, after 1 attempt."
        )


async def test_a_job_that_is_not_there_is_said_not_to_be(database: str) -> None:
    async with open_client(database) as client:
        with pytest.raises(StoreInvalid, match="job 'nobody' is not in this database"):
            await client.explain("nobody")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (-1, "0 ms"),
        (0.0123, "12 ms"),
        (1, "1 s"),
        (59.94, "59.9 s"),
        (90, "1.5 min"),
        (5400, "1.5 h"),
        (86400 * 400, "400 d"),
        (86400 * 36525, "36525 d"),
    ],
)
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_vitals_of_a_store_in_memory_are_few() -> None:
    async with open_store("sqlite::memory:") as store:
        assert await store.vitals() == [("ok", "file", "the structure of the database is sound")]


def test_the_doctor_needs_no_driver_of_the_other_database() -> None:
    code = (
        "import sys, trio, trio_watchdog\n"
        "async def main():\n"
        "    async with trio_watchdog.open_client('sqlite::memory:') as client:\n"
        "        await client.examine()\n"
        "trio.run(main)\n"
        "assert 'psycopg' not in sys.modules"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
