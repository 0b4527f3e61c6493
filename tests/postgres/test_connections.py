"""The server goes away, comes back, refuses, or says nothing; and what it is asked for at first."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import trio
from psycopg import sql as compose

import trio_watchdog._postgres as postgres
from tests.postgres.proxy import Proxy, open_proxy
from tests.postgres.server import PostgresServer
from trio_watchdog import _statements as sql
from trio_watchdog import _wishes as w
from trio_watchdog._borrowed import enqueue_statement, transactional
from trio_watchdog._errors import StoreInvalid, StoreUnavailable, WatchdogError
from trio_watchdog._model import Job, Outcome, Recovery, RetryPolicy, to_milliseconds
from trio_watchdog._postgres import PostgresStore, Session, open_postgres_store
from trio_watchdog._psycopg import TrioConnection
from trio_watchdog._psycopg_errors import is_refusal, store_error
from trio_watchdog._rules import Settle
from trio_watchdog._store import ELSEWHERE, Change, Renewer, Store

COMPLETED = Settle(Outcome.COMPLETED)

# Milliseconds where nothing else runs. What it must not need is any of the limits below.
PROMPT = 20.0

LIMITS = (
    "_postgres.EXCHANGE_SECONDS",
    "_postgres.CHECK_SECONDS",
    "_postgres.CONNECT_SECONDS",
    "_psycopg.WIND_UP_SECONDS",
)


@pytest.fixture(autouse=True)
def long_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long that whatever is prompt, on a busy machine too, has not waited for one."""
    for name in LIMITS:
        monkeypatch.setattr(f"trio_watchdog.{name}", 60)


@contextlib.contextmanager
def impatience() -> Iterator[float]:
    """A silent server counts as gone sooner than in earnest. How long that takes at most.

    For what meets the silence alone: a busy machine takes as long for an answer now and then.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(postgres, "EXCHANGE_SECONDS", 0.5)
        monkeypatch.setattr("trio_watchdog._psycopg.WIND_UP_SECONDS", 0.3)
        yield 0.5 + 0.3


@pytest.fixture
async def proxy(postgres_database: str) -> AsyncIterator[Proxy]:
    async with open_proxy(postgres_database) as proxy:
        yield proxy


def environment() -> dict[str, str]:
    """For processes that import what we import."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


@contextlib.asynccontextmanager
async def renewing(store: Store) -> AsyncIterator[Renewer]:
    """The store's renewer, connected in a thread, as the proxy needs this one."""
    manager = store.open_renewer()
    assert manager is not None
    renew = await trio.to_thread.run_sync(manager.__enter__)
    try:
        yield renew
    finally:
        manager.__exit__(None, None, None)


class Ear:
    """Waits for what a store, which changes nothing itself, reports of others."""

    def __init__(self, store: Store) -> None:
        self._event = trio.Event()
        self.count = 0
        self._last = ELSEWHERE
        store.on_change.append(self)

    def __call__(self, change: Change) -> None:
        self.count += 1
        self._last = change
        self._event.set()

    async def hears(
        self, action: Callable[[], Awaitable[object]], within: float = PROMPT
    ) -> Change:
        self._event = trio.Event()
        await action()
        with trio.fail_after(within):
            await self._event.wait()
        return self._last


async def is_back(store: Store, within: float = 20.0) -> None:
    """Ask until there is an answer."""
    with trio.fail_after(within):
        while True:
            try:
                await store.enqueue(Job("probe"))
                await store.claim("nothing", "t")
                return
            except StoreUnavailable:
                await trio.sleep(0.05)


async def ends(action: Callable[[], Awaitable[object]], within: float) -> StoreUnavailable:
    """The error with which it ends, in time."""
    with trio.fail_after(within):
        with pytest.raises(StoreUnavailable) as caught:
            await action()
    return caught.value


# -- a server that goes away ----------------------------------------------------------------------


async def test_a_killed_server_is_an_error_until_it_is_back(
    start_server: Callable[..., PostgresServer],
) -> None:
    server = start_server()
    async with open_postgres_store(server.url) as store, trio.open_nursery() as nursery:
        await nursery.start(store.watch)
        ear = Ear(store)
        await store.enqueue(Job("l", id="J", recovery=Recovery(1)))
        assert (await store.claim("l", "t")).job is not None
        await trio.to_thread.run_sync(server.stop, "kill")
        for action in (
            lambda: store.enqueue(Job("l")),
            lambda: store.claim("l", "u"),
            lambda: store.decide("J", "t", COMPLETED),
            lambda: store.read("J"),
        ):
            await ends(action, PROMPT)
        await ear.hears(lambda: trio.to_thread.run_sync(server.start), within=30.0)
        # What was committed is there, and nothing was lost of the claim.
        assert (await store.decide("J", "t", COMPLETED)).status == "recorded"
        # It listens again.
        async with open_postgres_store(server.url) as other:
            await ear.hears(lambda: other.enqueue(Job("l")))
        nursery.cancel_scope.cancel()


async def test_an_idle_connection_that_was_cut_is_made_anew_unnoticed(proxy: Proxy) -> None:
    async with open_postgres_store(proxy.url) as store:
        await is_back(store)
        for _ in range(3):
            proxy.cut()
            await trio.sleep(0.05)
            assert (await store.enqueue(Job("l"))).status == "queued"
            assert (await store.claim("l", f"{proxy.connections}")).job is not None


async def test_a_connection_that_is_cut_in_mid_exchange_is_an_error_and_made_anew(
    proxy: Proxy,
) -> None:
    async with open_postgres_store(proxy.url) as store:
        await is_back(store)
        proxy.stop("answers")
        async with trio.open_nursery() as nursery:
            for n in range(5):
                nursery.start_soon(ends, lambda n=n: store.enqueue(Job("l", id=f"{n}")), PROMPT)
            nursery.start_soon(ends, lambda: store.claim("l", "t"), PROMPT)
            await trio.sleep(0.2)
            proxy.cut()
            proxy.forward()
        # Asking again is harmless, whatever became of the first time.
        with trio.fail_after(PROMPT):
            statuses = {(await store.enqueue(Job("l", id=f"{n}"))).status for n in range(5)}
            assert statuses <= {"queued", "duplicate"}
            again = w.Claim("l", "t", store.owner, 1000, again=True)
            first = await store.ask(again)
            second = await store.ask(again)
        assert first.job is not None
        assert second.job is not None
        assert first.job.id == second.job.id


async def test_an_answer_that_was_lost_is_found_by_asking_again(proxy: Proxy) -> None:
    async with open_postgres_store(proxy.url) as store:
        await store.enqueue(Job("l", id="A"))
        for wish, again, expected in (
            (w.Claim("l", "t", "o", 9000), w.Claim("l", "t", "o", 9000, again=True), "A"),
            (w.Decide("A", "t", COMPLETED), w.Decide("A", "t", COMPLETED), "replayed"),
            (w.Enqueue(Job("l", id="B")), w.Enqueue(Job("l", id="B")), "duplicate"),
            (w.Cancel("B", "c"), w.Cancel("B", "c"), "replayed"),
        ):
            # On connections that are there: else the answer held back may be that to a new one.
            await is_back(store)
            proxy.stop("answers")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ends, lambda wish=wish: store.ask(wish), PROMPT)
                with trio.fail_after(PROMPT):
                    await proxy.holds("answers")
                proxy.cut()
            proxy.forward()
            answer = await store.ask(again)
            # The server has done each of them, except where it takes two trips.
            found = answer.job.id if isinstance(answer, w.Claimed) and answer.job else None
            status = found or getattr(answer, "status", None)
            assert status in (expected, "recorded" if isinstance(wish, w.Cancel) else expected)


async def test_a_silent_server_counts_as_gone_and_is_taken_back(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The listener notices by itself.
    monkeypatch.setattr(postgres, "CHECK_SECONDS", 0.3)
    async with open_postgres_store(proxy.url) as store, trio.open_nursery() as nursery:
        assert isinstance(store, PostgresStore)
        await nursery.start(store.watch)
        ear = Ear(store)
        await store.enqueue(Job("l", id="J"))
        await store.claim("l", "t")
        async with renewing(store) as renew:
            wish = w.Renew("J", "t", 60_000)
            (answer,) = await trio.to_thread.run_sync(renew, [wish])
            assert answer.status == "held"
            proxy.stop()
            with impatience() as bound:
                async with trio.open_nursery() as waiting:
                    for action in (
                        lambda: store.enqueue(Job("l")),
                        lambda: store.claim("l", "u"),
                        lambda: trio.to_thread.run_sync(renew, [wish]),
                    ):
                        waiting.start_soon(ends, action, bound + PROMPT)
                # New connections are met with silence as well.
                await ends(lambda: store.read("J"), bound + PROMPT)
            proxy.forward()
        await is_back(store)
        async with renewing(store) as renew:
            (answer,) = await trio.to_thread.run_sync(renew, [wish])
        assert answer.status == "held"
        async with open_postgres_store(proxy.url) as other:
            # The listener has noticed, too.
            await trio.sleep(1)
            await ear.hears(lambda: other.enqueue(Job("l")))
        nursery.cancel_scope.cancel()


async def test_opening_a_silent_server_is_bounded(proxy: Proxy) -> None:
    proxy.stop()

    async def open_it() -> None:
        async with open_postgres_store(proxy.url):
            pass

    with impatience() as bound:
        await ends(open_it, bound + PROMPT)


async def test_sessions_that_an_administrator_ends_are_made_anew(postgres_database: str) -> None:
    async with open_postgres_store(postgres_database) as store, trio.open_nursery() as nursery:
        await nursery.start(store.watch)
        ear = Ear(store)
        await store.claim("l", "t")
        with psycopg.connect(postgres_database, autocommit=True) as administrator:
            await ear.hears(
                lambda: trio.to_thread.run_sync(
                    administrator.execute,
                    # Waits for their ends: one that still works would break off in mid exchange.
                    "select pg_terminate_backend(pid, 60000) from pg_stat_activity"
                    " where datname = current_database() and pid <> pg_backend_pid()",
                )
            )
        assert (await store.enqueue(Job("l"))).status == "queued"
        assert (await store.claim("l", "t")).job is not None
        nursery.cancel_scope.cancel()


async def test_a_fast_restart_is_ridden_out(start_server: Callable[..., PostgresServer]) -> None:
    server = start_server()
    async with open_postgres_store(server.url) as store:
        await is_back(store)
        await trio.to_thread.run_sync(server.restart, "fast")
        # Nothing was on its way, so nobody need notice.
        await store.enqueue(Job("l", id="J"))
        assert (await store.claim("l", "t")).job is not None


# -- notifications --------------------------------------------------------------------------------

ENQUEUE = """
import sys, trio
from trio_watchdog._model import Job
from trio_watchdog._postgres import open_postgres_store

async def main():
    async with open_postgres_store(sys.argv[1]) as store:
        print("ready", flush=True)
        for line in sys.stdin:
            if line.startswith("cancel"):
                await store.cancel(line.split()[1], "c" + line.split()[1])
            else:
                await store.enqueue(Job("l", id=line.split()[1]))

trio.run(main)
"""


async def test_another_process_wakes_this_one_at_once(postgres_database: str) -> None:
    async with open_postgres_store(postgres_database) as store, trio.open_nursery() as nursery:
        await nursery.start(store.watch)
        ear = Ear(store)
        run = functools.partial(
            trio.run_process, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()
        )
        process: trio.Process = await nursery.start(
            run, [sys.executable, "-c", ENQUEUE, postgres_database]
        )
        assert process.stdin is not None
        assert process.stdout is not None
        with trio.fail_after(20):
            await process.stdout.receive_some()
        for n in range(5):
            await ear.hears(lambda n=n: process.stdin.send_all(b"enqueue %d\n" % n))
            # It is there when the notification comes, not a moment later.
            assert await store.read(f"{n}") is not None
            await ear.hears(lambda n=n: process.stdin.send_all(b"cancel %d\n" % n))
            assert (await store.read(f"{n}")).cancellation_id == f"c{n}"  # type: ignore[union-attr]
        await process.stdin.aclose()
        await process.wait()
        nursery.cancel_scope.cancel()


async def test_each_change_that_others_care_for_is_told_once_it_is_committed(
    postgres_database: str,
) -> None:
    async with (
        open_postgres_store(postgres_database) as store,
        open_postgres_store(postgres_database) as other,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(store.watch)
        await nursery.start(other.watch)
        ear = Ear(store)
        policy = RetryPolicy(3, delay=0.001)
        work = Change({"l": 0})
        assert await ear.hears(lambda: other.enqueue(Job("l", id="A", queue="q"))) == work
        later = Job("m", id="L", not_before=datetime(2100, 1, 1, tzinfo=UTC))
        heard = await ear.hears(lambda: other.enqueue(later))
        due = to_milliseconds(later.not_before)
        assert heard == Change({"m": due}, later=due)
        assert await ear.hears(lambda: other.enqueue_many([Job("l", id="B", queue="q")])) == work
        select = "select 'l' as lane, 'C' as id, 'q' as queue"
        assert await ear.hears(lambda: other.enqueue_select(select)) == work
        await other.claim("l", "t")
        assert set((await ear.hears(lambda: other.retry("A", "t", policy))).lanes) == {"l"}
        await trio.sleep(0.01)
        await other.claim("l", "u")
        assert await ear.hears(lambda: other.decide("A", "u", COMPLETED)) == work
        # What a cancellation will find is not known when it is sent.
        assert await ear.hears(lambda: other.cancel("B", "c")) is ELSEWHERE
        assert (await store.read("B")).cancellation_id == "c"  # type: ignore[union-attr]
        assert await ear.hears(other.settle_cancelled) == work
        assert await ear.hears(lambda: other.fail_lane("l", "because")) is ELSEWHERE
        # What concerns nobody is told nobody: a claim, a renewal, a read, a decision that frees
        # nothing.
        await ear.hears(lambda: other.enqueue(Job("l", id="D")))
        count = ear.count
        await other.claim("l", "v")
        await other.renew("D", "v")
        await other.decide("D", "v", COMPLETED)
        await other.read("D")
        await trio.sleep(0.2)
        assert ear.count == count
        nursery.cancel_scope.cancel()


async def test_what_could_not_be_told_is_told_with_the_next(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        open_postgres_store(postgres_database) as store,
        open_postgres_store(postgres_database) as other,
        trio.open_nursery() as nursery,
    ):
        for lane in ("l", "m"):
            await other.enqueue(Job(lane, id=lane))
            assert (await other.claim(lane, f"token {lane}")).job is not None
        await nursery.start(store.watch)
        ear = Ear(store)

        async def refuse(*_: Any, **__: Any) -> None:
            raise StoreUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(other._callers, "step", refuse)
            await other.hand_off("l", "token l")
        heard = await ear.hears(lambda: other.hand_off("m", "token m"))
        assert heard == Change({"l": 0, "m": 0})
        assert ear.count == 1
        nursery.cancel_scope.cancel()


async def test_without_notifications_nothing_listens_and_everything_works(
    postgres_database: str,
) -> None:
    options: dict[str, Any] = {"listen": False, "prepare": False}
    async with open_postgres_store(postgres_database, **options) as store:
        async with trio.open_nursery() as nursery:
            await nursery.start(store.watch)
            await store.enqueue(Job("l"))
            with psycopg.connect(postgres_database) as connection:
                rows = connection.execute(
                    "select query from pg_stat_activity where application_name = 'trio_watchdog'"
                    " and datname = current_database()"
                ).fetchall()
                assert rows
                assert not any("listen" in row[0].lower() for row in rows)
            assert (await store.claim("l", "t")).job is not None
            nursery.cancel_scope.cancel()


async def test_the_listener_gives_way_to_everybody(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "CHECK_SECONDS", 60.0)
    async with open_postgres_store(postgres_database) as store, trio.open_nursery() as nursery:
        assert isinstance(store, PostgresStore)
        await nursery.start(store.watch)
        longest = 0.0

        async def use(action: Callable[[], Awaitable[object]]) -> None:
            nonlocal longest
            for _ in range(60):
                began_at = trio.current_time()
                await action()
                longest = max(longest, trio.current_time() - began_at)

        async with trio.open_nursery() as users:
            users.start_soon(use, lambda: store.enqueue(Job("l")))
            users.start_soon(use, store._send_notification)
            users.start_soon(use, store._look_at_notes)
            users.start_soon(use, lambda: store.read("J"))
        # It would wait for a notification all that time, with the others behind it.
        assert longest < postgres.CHECK_SECONDS / 2
        nursery.cancel_scope.cancel()


async def test_a_process_has_three_connections(postgres_database: str) -> None:
    async with open_postgres_store(postgres_database) as store, trio.open_nursery() as nursery:
        await nursery.start(store.watch)
        await store.enqueue(Job("l", id="J"))
        await store.claim("l", "t")
        with store.open_renewer() as renew:  # type: ignore[union-attr]
            await trio.to_thread.run_sync(renew, [w.Renew("J", "t", 1000)])
            async with trio.open_nursery() as busy:
                for n in range(20):
                    busy.start_soon(store.enqueue, Job("l"))
                    busy.start_soon(store.claim, "l", f"{n}")
            with psycopg.connect(postgres_database) as connection:
                row = connection.execute(
                    # Autovacuum may be there, too.
                    "select count(*) from pg_stat_activity where backend_type = 'client backend'"
                    " and datname = current_database() and pid <> pg_backend_pid()"
                ).fetchone()
        assert row == (3,)
        nursery.cancel_scope.cancel()


# -- poolers --------------------------------------------------------------------------------------


async def everything(store: Store) -> None:
    """A job's life."""
    await store.enqueue_many([Job("l", id=id, queue="q") for id in "AB"])
    await store.claim("l", "t")
    await store.reserve_attempt("A", "t", RetryPolicy(3))
    await store.renew("A", "t")
    await store.cancel("B", "c")
    assert await store.settle_cancelled() == ["B"]
    assert (await store.decide("A", "t", COMPLETED)).status == "recorded"


async def test_no_state_of_a_session_is_needed_behind_a_pooler(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Session._stepped

    async def forgetful(self: Session, connection: Any, *args: Any, **kwargs: Any) -> Any:
        # As when the next transaction gets another of the pooler's servers.
        rows = await original(self, connection, *args, **kwargs)
        await connection.execute("discard all")
        return rows

    monkeypatch.setattr(Session, "_stepped", forgetful)
    async with open_postgres_store(postgres_database, listen=False, prepare=False) as store:
        await everything(store)
    # With prepared statements it cannot work, and says so.
    async with open_postgres_store(postgres_database) as store:
        await store.read("A")
        with pytest.raises(StoreInvalid, match="prepare=False and listen=False"):
            await store.read("A")


async def test_a_role_with_strict_defaults_is_no_trouble(postgres_database: str) -> None:
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        name = urlsplit(postgres_database).path[1:]
        for setting in (
            "default_transaction_isolation = 'serializable'",
            "default_transaction_deferrable = on",
            "enable_indexscan = on",
            "search_path = nowhere",
            "standard_conforming_strings = on",
            "datestyle = 'German'",
            "intervalstyle = 'iso_8601'",
            "bytea_output = 'escape'",
        ):
            connection.execute(f"alter database {name} set {setting}".encode())
    for options in ({}, {"listen": False, "prepare": False}):
        schema = f"strict_{len(options)}"
        async with open_postgres_store(postgres_database, schema=schema, **options) as store:
            await everything(store)


# -- being refused --------------------------------------------------------------------------------


async def failure(url: str, **options: Any) -> WatchdogError:
    with pytest.raises(WatchdogError) as caught:
        async with open_postgres_store(url, **options):
            pass
    return caught.value


async def test_no_error_tells_the_password(
    postgres_database: str, start_server: Callable[..., PostgresServer]
) -> None:
    server = start_server()
    parts = urlsplit(server.url)
    secret = "s3cret-w0rd"
    wrong = parts._replace(netloc=f"postgres:{secret}@127.0.0.1:{parts.port}").geturl()
    nobody = parts._replace(netloc=f"postgres:{secret}@127.0.0.1:1").geturl()
    no_host = parts._replace(netloc=f"postgres:{secret}@host.invalid:1").geturl()
    missing = parts._replace(path="/missing").geturl()
    for url in (wrong, nobody, no_host, missing):
        error = await failure(url)
        assert isinstance(error, StoreUnavailable)
        for text in (secret, server.password):
            assert text not in f"{error} {error!r} {error.__cause__!r}"
    with pytest.raises(ValueError, match="percent-encoded") as caught:
        async with open_postgres_store(f"postgresql://user:{secret}%@host/db"):
            pass
    assert secret not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__context__ is None


async def test_too_many_connections_are_waited_out(
    start_server: Callable[..., PostgresServer],
) -> None:
    server = start_server(max_connections="6", superuser_reserved_connections="0")
    async with open_postgres_store(server.url) as store:
        await store.read("x")
        with contextlib.ExitStack() as others:
            # All but the store's own; one that was closed before may take a moment to go.
            for _ in range(5):
                with trio.fail_after(PROMPT):
                    while True:
                        with contextlib.suppress(psycopg.OperationalError):
                            others.enter_context(psycopg.connect(server.url))
                            break
                        await trio.sleep(0.01)
            # What is connected works on; the second connection cannot be made.
            await store.read("x")
            error = await ends(lambda: store.claim("l", "t"), PROMPT)
            assert "too many clients" in str(error)
            assert "use fewer processes, or a pooler" in str(error)
        await is_back(store)


async def test_a_server_that_turned_read_only_is_unavailable(postgres_database: str) -> None:
    name = urlsplit(postgres_database).path[1:]
    async with open_postgres_store(postgres_database) as store:
        await store.enqueue(Job("l", id="J"))
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        connection.execute(f"alter database {name} set default_transaction_read_only = on".encode())
    async with open_postgres_store(postgres_database) as store:
        assert (await store.read("J")) is not None
        for action in (
            lambda: store.enqueue(Job("l")),
            lambda: store.claim("l", "t"),
            lambda: store.enqueue_many([Job("l"), Job("l")]),
        ):
            assert "read-only" in str(await ends(action, PROMPT))


async def test_missing_privileges_are_named(postgres_database: str) -> None:
    async with open_postgres_store(postgres_database):
        pass
    role = f"{urlsplit(postgres_database).path[1:]}_guest"
    parts = urlsplit(postgres_database)
    guest = parts._replace(netloc=f"{role}:guest@{parts.hostname}:{parts.port}").geturl()
    with psycopg.connect(postgres_database, autocommit=True) as administrator:
        administrator.execute(f"create role {role} login password 'guest'".encode())
        try:
            for schema in ("trio_watchdog", "another"):
                error = await failure(guest, schema=schema)
                assert isinstance(error, StoreInvalid)
                assert "permission denied" in str(error)
                assert "grant the role what the page on PostgreSQL lists" in str(error)
            # All that a worker needs, once the schema is there.
            administrator.execute(f"grant usage on schema trio_watchdog to {role}".encode())
            administrator.execute(
                "grant select, insert, update, delete on all tables in schema trio_watchdog"
                f" to {role}".encode()
            )
            async with open_postgres_store(guest) as store, trio.open_nursery() as nursery:
                await nursery.start(store.watch)
                await everything(store)
                nursery.cancel_scope.cancel()
        finally:
            administrator.execute(f"drop owned by {role}".encode())
            administrator.execute(f"drop role {role}".encode())


# -- schemas --------------------------------------------------------------------------------------

OPEN = """
import sys, trio
from trio_watchdog._postgres import open_postgres_store

async def main():
    async with open_postgres_store(sys.argv[1]) as store:
        await store.read("x")

trio.run(main)
"""


async def test_processes_that_start_together_create_one_schema(postgres_database: str) -> None:
    run = functools.partial(trio.run_process, env=environment())
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(run, [sys.executable, "-c", OPEN, postgres_database])
    for schema in ("a", "b", "c"):

        async def open_it(schema: str = schema) -> None:
            async with open_postgres_store(postgres_database, schema=schema) as store:
                await store.read("x")

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(open_it)


ODD = 'odd "name"; drop -- %s %(x)s :x ?$1 \\ {jobs} \u00fc\U0001f600'


async def test_a_schema_may_have_any_name(postgres_database: str) -> None:
    for options in ({}, {"listen": False, "prepare": False}):
        async with open_postgres_store(postgres_database, schema=ODD, **options) as store:
            await store.enqueue_select(
                "select 'l' as lane, %(id)s as id", {"id": f"{len(options)}"}
            )
            with store.open_renewer() as renew:  # type: ignore[union-attr]
                claimed = (await store.claim("l", "t")).job
                assert claimed is not None
                await trio.to_thread.run_sync(renew, [w.Renew(claimed.id, "t", 1000)])
            await store.decide(claimed.id, "t", COMPLETED)
    with psycopg.connect(postgres_database) as connection:
        assert transactional(connection, schema=ODD).enqueue(Job("l")).status == "queued"
        statement = enqueue_statement(Job("l"), "postgres", schema=ODD, paramstyle="format")
        connection.execute(statement.sql.encode(), statement.parameters)
    async with open_postgres_store(postgres_database, schema=ODD) as store:
        assert len(await store.ask(w.ReadJobs("queued"))) == 2
    for name in ("", "x" * 64, "a\0b"):
        with pytest.raises(ValueError, match="1 to 63 bytes"):
            async with open_postgres_store(postgres_database, schema=name):
                pass


async def test_schemas_do_not_see_each_others_jobs(postgres_database: str) -> None:
    async with (
        open_postgres_store(postgres_database, schema="one") as one,
        open_postgres_store(postgres_database, schema="two") as two,
        trio.open_nursery() as nursery,
    ):
        await nursery.start(one.watch)
        ear = Ear(one)
        await two.enqueue(Job("l", id="J"))
        assert await one.read("J") is None
        assert (await one.claim("l", "t")).job is None
        await trio.sleep(0.1)
        assert ear.count == 0
        nursery.cancel_scope.cancel()


async def test_a_schema_of_another_version_or_of_others_is_refused(postgres_database: str) -> None:
    async with open_postgres_store(postgres_database):
        pass
    with psycopg.connect(postgres_database, autocommit=True) as connection:
        for version, advice in (
            ("0", "give another schema name"),
            ("999", "upgrade trio_watchdog"),
            ("x", "give another schema name"),
        ):
            connection.execute("update trio_watchdog.meta set value = %s", (version,))
            error = await failure(postgres_database)
            assert isinstance(error, StoreInvalid)
            assert f"version {version!r}" in str(error)
            assert advice in str(error)
        connection.execute("delete from trio_watchdog.meta")
        assert "version 'none'" in str(await failure(postgres_database))
        connection.execute("create schema theirs create table something ()")
        error = await failure(postgres_database, schema="theirs")
        assert "holds something else" in str(error)
        # Nothing was added to it.
        tables = connection.execute(
            "select count(*) from pg_tables where schemaname = 'theirs'"
        ).fetchone()
        assert tables == (1,)
        # An empty one that an administrator has made is welcome.
        connection.execute("create schema empty")
        async with open_postgres_store(postgres_database, schema="empty"):
            pass


def server(version: int, encoding: bytes = b"UTF8") -> Any:
    return SimpleNamespace(
        pgconn=SimpleNamespace(server_version=version, parameter_status=lambda _: encoding)
    )


def test_an_old_server_or_another_encoding_is_refused() -> None:
    postgres._check_server(server(140000))
    postgres._check_server(server(190001))
    with pytest.raises(StoreInvalid, match="PostgreSQL 13; 14 or newer is needed"):
        postgres._check_server(server(130022))
    with pytest.raises(StoreInvalid, match="encoding LATIN1; UTF8 is needed"):
        postgres._check_server(server(180000, b"LATIN1"))


async def test_a_database_in_another_encoding_is_refused(postgres_url: str) -> None:
    name = f"latin_{os.getpid()}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(
            compose.SQL(
                "create database {} encoding 'LATIN1' locale 'C' template template0"
            ).format(compose.Identifier(name))
        )
        try:
            url = urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
            assert "UTF8 is needed" in str(await failure(url))
        finally:
            connection.execute(f"drop database {name} with (force)".encode())


async def test_a_client_encoding_in_the_environment_is_no_trouble(
    postgres_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    async with open_postgres_store(postgres_database) as store:
        job = Job("l\u00fc", {"text": "\u20ac \U0001f600"}, id="\u0142")
        await store.enqueue(job)
        stored = await store.read("\u0142")
        assert stored is not None
        assert (stored.payload, stored.lane) == (job.payload, job.lane)


async def test_an_outage_of_the_listener_is_logged_once_for_each_attempt(
    proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_postgres_store(proxy.url) as store, trio.open_nursery() as nursery:
        await nursery.start(store.watch)
        ear = Ear(store)
        # Until it does nothing but listen.
        await trio.sleep(0.3)
        with caplog.at_level(logging.WARNING, "trio_watchdog"):

            async def cut() -> None:
                proxy.cut()

            await ear.hears(cut)
        assert "waking by notification is interrupted" in caplog.text
        assert urlsplit(proxy.url).password not in caplog.text
        nursery.cancel_scope.cancel()


def test_statements_are_rendered_once() -> None:
    dialect = sql.Dialect("postgres", "s", clock_in_sql=True)
    assert dialect.text(sql.CLAIM) is dialect.text(sql.CLAIM)


@pytest.mark.parametrize(
    "state", ["08006", "25P03", "25P04", "57P01", "57P02", "57P03", "57P04", "57P05", "53300"]
)
def test_the_end_of_a_session_is_an_outage(state: str) -> None:
    # Whatever class psycopg files it under: 25P03 is an InternalError to it.
    error = store_error(psycopg.errors.lookup(state)("the session has ended"), "renewing")
    assert isinstance(error, StoreUnavailable), state
    assert not is_refusal(error)


def test_what_the_server_has_not_said_is_an_outage_unless_psycopg_was_misused() -> None:
    # A connection that is lost, or cannot be made, has no SQLSTATE in any of these classes.
    lost = (
        psycopg.OperationalError,
        psycopg.InterfaceError,
        psycopg.InternalError,
        psycopg.DatabaseError,
        psycopg.errors.ConnectionTimeout,
        psycopg.errors.CancellationTimeout,
        psycopg.errors.PipelineAborted,
    )
    for kind in lost:
        assert isinstance(store_error(kind("lost"), "asking"), StoreUnavailable), kind
    for kind in (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError):
        assert isinstance(store_error(kind("misused"), "asking"), StoreInvalid), kind


async def test_a_session_that_was_ended_in_mid_transaction_is_an_outage(
    postgres_database: str,
) -> None:
    """As after a question that was held up in the network for longer than the server waits."""
    async with await TrioConnection.connect(postgres_database, autocommit=True) as connection:
        await connection.execute("begin")
        await connection.execute("set local idle_in_transaction_session_timeout = 10")
        await trio.lowlevel.wait_readable(connection.fileno())
        with pytest.raises(psycopg.Error) as caught:
            await connection.execute("select 1")
    assert isinstance(store_error(caught.value, "asking"), StoreUnavailable)
