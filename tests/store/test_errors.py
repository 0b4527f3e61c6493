"""Each kind of error, provoked for real and read as a user would: what, which value, what to do."""

# ruff: noqa: ASYNC110, ASYNC240  (tests may look again and at files, and fail in between)

from __future__ import annotations

import logging
import math
import socket
import sqlite3
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args
from urllib.parse import urlsplit

import psycopg
import pytest
import trio

from trio_watchdog import (
    Client,
    ExecutionFailed,
    Fail,
    InvalidJob,
    Job,
    JobConflict,
    LivenessUnavailable,
    Outcome,
    Recovery,
    Retry,
    RetryPolicy,
    RunningJob,
    SettlementRejected,
    StoreInvalid,
    StoreUnavailable,
    WakeUnavailable,
    WatchdogError,
    asyncio_handler,
    open_client,
    open_watchdog,
    transactional,
)
from trio_watchdog import _errors as errors
from trio_watchdog._open import open_store
from trio_watchdog._wishes import Enqueue, EnqueueSelect, ReadJobs


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


async def nothing(job: RunningJob) -> None:
    return None


Act = Callable[[Client], Awaitable[Any]]

PAYLOAD: list[Any] = [1]
PAYLOAD.append({"to": {"name": float("nan")}})
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]

# -- what breaks a limit --------------------------------------------------------------------------

INVALID: dict[str, tuple[Callable[[], Any], str]] = {
    "no lane": (lambda: Job(""), "lane has 0 characters; 1 to 256 are allowed"),
    "a lane of another type": (lambda: Job(5), "lane is 5, not a string"),  # type: ignore[arg-type]
    "a long id": (lambda: Job("a", id="x" * 257), "id has 257 characters; 1 to 256 are allowed"),
    "NUL in a queue": (
        lambda: Job("a", queue="a\0b"),
        r"queue is 'a\x00b': NUL and lone surrogates cannot be stored",
    ),
    "a lone surrogate": (
        lambda: Job("a", id="\ud800"),
        r"id is '\ud800': NUL and lone surrogates cannot be stored",
    ),
    "a priority": (
        lambda: Job("a", priority=2**53),
        "priority is 9007199254740992; -9007199254740991 to 9007199254740991 are allowed",
    ),
    "a priority of another type": (
        lambda: Job("a", priority=True),
        "priority is True, not an integer",
    ),
    "a naive instant": (
        lambda: Job("a", not_before=datetime(2030, 1, 2)),  # noqa: DTZ001
        "not_before is datetime.datetime(2030, 1, 2, 0, 0), a naive datetime; give it a time zone",
    ),
    "an early instant": (
        lambda: Job("a", not_before=datetime(1969, 7, 20, tzinfo=UTC)),
        "not_before is 1969-07-20T00:00:00+00:00; nothing before 1970 is allowed",
    ),
    "a payload with NaN": (
        lambda: Job("a", PAYLOAD),
        "payload[1]['to']['name'] is nan, which JSON does not know",
    ),
    "a payload of objects": (
        lambda: Job("a", {"when": datetime(2030, 1, 1, tzinfo=UTC)}),
        "payload['when'] is of type datetime, which JSON does not know",
    ),
    "a key that is no string": (
        lambda: Job("a", {"n": {1: 2}}),
        "payload['n'] has the key 1, which is not a string",
    ),
    "a deep payload": (
        lambda: Job("a", DEEP),
        "payload is nested deeper than the limit of 100",
    ),
    "recoveries": (
        lambda: Recovery(-1),
        "max_recoveries is -1; 0 to 9007199254740991 are allowed",
    ),
    "a window": (
        lambda: Recovery(1, 0),
        "window is 0 seconds; more than 0 to 253402300799.999 are allowed",
    ),
    "attempts": (
        lambda: RetryPolicy(0),
        "max_attempts is 0; 1 to 9007199254740991 are allowed",
    ),
    "jitter": (lambda: RetryPolicy(1, jitter=1.5), "jitter is 1.5; 0 to 1 are allowed"),
    "a delay": (
        lambda: RetryPolicy(1, delay=-math.inf),
        "delay is -inf seconds; 0 to 253402300799.999 are allowed",
    ),
    "a reason": (lambda: Fail("x" * 201), "reason has 201 characters; 1 to 200 are allowed"),
    "an empty reason": (lambda: Fail(""), "reason has 0 characters; 1 to 200 are allowed"),
    "a time to retry": (
        lambda: Retry(after=-1),
        "after is -1 seconds; 0 to 253402300799.999 are allowed",
    ),
}


@pytest.mark.parametrize("what", INVALID)
def test_a_value_that_breaks_a_limit_is_named_with_the_limit(what: str) -> None:
    make, message = INVALID[what]
    with pytest.raises(InvalidJob) as caught:
        make()
    assert str(caught.value) == message
    assert isinstance(caught.value, ValueError)
    assert caught.value.kind == "store_invalid"


ASKED: dict[str, tuple[Act, str]] = {
    "a large payload": (
        lambda client: client.enqueue(Job("a", "x" * 2000)),
        "payload is 2002 bytes encoded, over the limit of 1000",
    ),
    "a page": (lambda client: client.read_settled(257), "limit is 257; 1 to 256 are allowed"),
    "a cursor": (
        lambda client: client.read_settled(after="yesterday"),
        "after is 'yesterday', not a cursor that `read_settled` returned",
    ),
    "a reason for a lane": (
        lambda client: client.fail_lane("a", ""),
        "reason has 0 characters; 1 to 200 are allowed",
    ),
    "a cancellation id": (
        lambda client: client.cancel("j", cancellation_id="x" * 300),
        "cancellation_id has 300 characters; 1 to 256 are allowed",
    ),
    "columns of a SELECT": (
        lambda client: client.enqueue_select("select 'a' as lane, 1 as colour"),
        "the SELECT yields the columns ['colour']; only ['id', 'lane', 'max_recoveries',"
        " 'not_before', 'payload', 'priority', 'queue', 'recovery', 'window'] are known",
    ),
    "no lane in a SELECT": (
        lambda client: client.enqueue_select("select '1' as id"),
        "the SELECT yields no column `lane`",
    ),
    "JSON in a SELECT": (
        lambda client: client.enqueue_select("select 'a' as lane, '{x' as payload"),
        "payload is '{x', not JSON",
    ),
}


@pytest.mark.parametrize("what", ASKED)
async def test_a_question_that_breaks_a_limit_is_told_so(what: str) -> None:
    ask, message = ASKED[what]
    async with open_client("sqlite::memory:", payload_limit=1000) as client:
        with pytest.raises(InvalidJob) as caught:
            await ask(client)
        assert str(caught.value) == message


# -- store_invalid --------------------------------------------------------------------------------


async def test_a_conflict_says_what_differs() -> None:
    async with open_client("sqlite::memory:") as client:
        await client.enqueue(Job("mail", {"to": "ada"}, id="j", queue="ada", priority=3))
        for job, message in (
            (Job("post", id="j", queue="ada", priority=3), "lane 'mail', not 'post'"),
            (Job("mail", id="j", queue="bob", priority=3), "queue 'ada', not 'bob'"),
            (Job("mail", id="j", queue="ada"), "priority 3, not 0"),
            (
                Job("mail", id="j", queue="ada", priority=3, recovery=Recovery(1)),
                "recovery None, not Recovery(max_recoveries=1, window=None)",
            ),
            (Job("mail", {"to": "bob"}, id="j", queue="ada", priority=3), "another payload"),
        ):
            with pytest.raises(JobConflict) as caught:
                await client.enqueue(job)
            assert str(caught.value) == f"job 'j' is already there with {message}"
            assert caught.value.kind == "store_invalid"


async def test_a_foreign_or_other_schema_says_what_to_do(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table watchdog_jobs (hours)")
        connection.commit()
    with pytest.raises(StoreInvalid) as caught:
        async with open_client(path):
            raise AssertionError("it opened")
    assert str(caught.value) == (
        f"{path} has ['watchdog_jobs'] but not all tables of trio_watchdog; it was made by"
        " something else: use another file"
    )
    other = path.with_name("other.db")
    async with open_client(other):
        pass
    with closing(sqlite3.connect(other)) as connection:
        connection.execute("update watchdog_meta set value = 2 where name = 'schema_version'")
        connection.commit()
    with pytest.raises(StoreInvalid) as caught:
        async with open_client(other):
            raise AssertionError("it opened")
    assert str(caught.value) == (
        f"{other} has schema version 2, and this trio_watchdog needs 1: upgrade trio_watchdog"
    )


async def test_what_is_no_database_says_so(path: Path) -> None:
    path.write_text("this is a text of some length, and no database at all\n" * 50)
    with pytest.raises(StoreInvalid) as caught:
        async with open_client(path):
            raise AssertionError("it opened")
    assert str(caught.value) == (
        f"SQLite, while opening {path}: file is not a database; {path} is no SQLite database:"
        " give another file"
    )
    assert isinstance(caught.value.__cause__, sqlite3.DatabaseError)


@pytest.mark.parametrize(
    ("database", "message"),
    [
        (
            "mysql://ada:hunter2@host/jobs",
            "database has the scheme 'mysql'; give sqlite:PATH, a path, or a postgresql:// URL",
        ),
        ("", "database is empty; give sqlite:PATH, a path, or a postgresql:// URL"),
        ("sqlite:", "database is empty; give sqlite:PATH, a path, or a postgresql:// URL"),
        *(
            (
                name,
                "database begins with 'file:', and is no URI; give sqlite:PATH, a path, or"
                " sqlite::memory: for one in memory",
            )
            for name in ("file:x.db?mode=memory", "file:///x.db", "sqlite:file:x.db")
        ),
        *(
            (
                name,
                "database is no URL with slashes; give sqlite:PATH, such as sqlite:jobs.db or"
                " sqlite:/var/lib/jobs.db",
            )
            for name in ("sqlite://x.db", "sqlite:///x.db", "sqlite:////x.db", "sqlite://")
        ),
    ],
)
async def test_what_is_no_name_of_a_database_says_what_is(database: str, message: str) -> None:
    with pytest.raises(ValueError, match="give sqlite:PATH") as caught:
        async with open_client(database):
            raise AssertionError("it opened")
    assert str(caught.value) == message


async def test_an_option_that_is_not_known_is_named_with_the_kind_of_database(path: Path) -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        for database, message in (
            (path, "'nonsense' is no option of a SQLite file"),
            ("sqlite::memory:", "'nonsense' is no option of a database in memory"),
            (connection, "'nonsense' is no option of a sqlite3 connection"),
            ("postgresql://host/jobs", "'nonsense' is no option of a PostgreSQL database"),
        ):
            for opens in (open_client, open_watchdog):
                with pytest.raises(TypeError) as caught:
                    async with opens(database, nonsense=1):
                        raise AssertionError("it opened")
                assert str(caught.value) == message
    assert not path.exists()


async def test_a_callers_statement_that_fails_is_quoted_by_the_database() -> None:
    async with open_client("sqlite::memory:") as client:
        with pytest.raises(StoreInvalid) as caught:
            await client.enqueue_select("select lane from nowhere")
        assert str(caught.value) == "SQLite, while executing: no such table: nowhere"
        assert isinstance(caught.value.__cause__, sqlite3.OperationalError)


SELECTS: dict[str, tuple[str, Any, str]] = {
    "a large integer": ("select 'a' as lane, ? as payload", (2**70,), "too large"),
    "a surrogate": ("select ? as lane", ("\ud800",), "surrogates"),
    "a surrogate in the SQL": ("select '\ud800' as lane", (), "surrogates"),
    "NUL in the SQL": ("select 'a' as lane\0", (), "null character"),
    "two statements": ("select 'a' as lane; select 'b'", (), "one statement at a time"),
    "a type that is not known": ("select ? as lane", ({},), "type 'dict' is not supported"),
    "a name that is not given": ("select :lane as lane", MappingProxyType({}), ":lane"),
    "nothing": ("-- select", (), "yields no rows"),
    "begin": ("begin", (), "within a transaction"),
    "commit": ("commit", (), "yields no rows"),
    "rollback": ("rollback", (), "yields no rows"),
    "a savepoint": ("savepoint here", (), "yields no rows"),
    "a change": ("update watchdog_meta set value = value", (), "yields no rows"),
    "text that is not UTF-8": ("select cast(x'ff' as text) as lane", (), "decode"),
    "a value without end": ("select 'a' as lane, zeroblob(2e9) as payload", (), "too big"),
}


@pytest.mark.parametrize("what", SELECTS)
async def test_a_mistake_in_a_callers_statement_is_said_at_once(
    path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    text, parameters, words = SELECTS[what]
    async with open_client(path) as client:
        with trio.fail_after(10), pytest.raises(StoreInvalid) as caught:
            await client.enqueue_select(text, parameters)
        assert words in str(caught.value)
        (admission,) = await client.enqueue_select(
            "select 'a' as lane, :id as id", MappingProxyType({"id": "j"})
        )
        assert admission.status == "queued"
    assert not caplog.records


@pytest.mark.parametrize("text", ["commit", "rollback", "begin"])
async def test_a_callers_statement_ends_no_transaction_of_others(path: Path, text: str) -> None:
    async with open_store(path) as store:
        good = EnqueueSelect("select 'a' as lane", ())
        before, select, wrong, after = await store.submit(
            Enqueue(Job("a")), good, EnqueueSelect(text, ()), Enqueue(Job("a"))
        )
        assert isinstance(wrong, StoreInvalid)
        assert [each.status for each in (before, *select, after)] == ["queued"] * 3
        assert len(await store.ask(ReadJobs())) == 3


async def test_what_the_owner_of_a_connection_forbids_is_no_outage() -> None:
    def authorize(action: int, *names: str | None) -> int:
        is_secret = action == sqlite3.SQLITE_READ and names[0] == "secrets"
        return sqlite3.SQLITE_DENY if is_secret else sqlite3.SQLITE_OK

    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute("create table secrets (lane)")
        connection.set_authorizer(authorize)
        async with open_client(connection) as client:
            with trio.fail_after(10), pytest.raises(StoreInvalid, match="prohibited"):
                await client.enqueue_select("select lane from secrets")


async def test_a_job_that_is_not_there_is_named() -> None:
    async with open_client("sqlite::memory:") as client:
        with pytest.raises(StoreInvalid, match=r"^there is no job 'nobody' to wait for$"):
            await client.wait_settled("nobody")


# -- store_unavailable ----------------------------------------------------------------------------


async def test_a_locked_file_says_who_may_hold_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trio_watchdog._sqlite.BUSY_TIMEOUT", 0.01)
    async with open_client(path, retry_for=0) as client:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("begin immediate")
            with pytest.raises(StoreUnavailable) as caught:
                await client.enqueue(Job("a"))
            assert str(caught.value) == (
                "SQLite, while beginning a transaction: database is locked; another program is"
                " writing, or keeps a transaction open"
            )
            assert caught.value.kind == "store_unavailable"
            assert isinstance(caught.value.__cause__, sqlite3.OperationalError)


async def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "no" / "jobs.db", f"{tmp_path / 'no'} does not exist; create the folder first"),
        (tmp_path, f"{tmp_path} is a folder; give the path of a file in it"),
    ):
        with pytest.raises(StoreUnavailable) as caught:
            async with open_client(path):
                raise AssertionError("it opened")
        assert str(caught.value) == message


def unused_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def test_a_server_that_is_down_is_named_by_host_and_port() -> None:
    port = unused_port()
    with pytest.raises(StoreUnavailable) as caught:
        async with open_client(f"postgresql://ada:hunter2@127.0.0.1:{port}/jobs"):
            raise AssertionError("it opened")
    message = str(caught.value)
    assert message.startswith("PostgreSQL, while ")
    assert "127.0.0.1" in message
    assert str(port) in message
    assert "refused" in message
    assert "\n" not in message


async def test_a_database_that_is_not_there_says_what_to_do(postgres_url: str) -> None:
    url = urlsplit(postgres_url)._replace(path="/nowhere").geturl()
    with pytest.raises((StoreInvalid, StoreUnavailable)) as caught:
        async with open_client(url):
            raise AssertionError("it opened")
    assert '"nowhere" does not exist; create the database first' in str(caught.value)


# -- the other kinds ------------------------------------------------------------------------------


async def test_a_projector_that_refuses_is_quoted_with_its_queue() -> None:
    def project(transition: Any, connection: Any) -> None:
        raise LookupError("no such customer")

    async with open_client("sqlite::memory:", project=project) as client:
        with pytest.raises(SettlementRejected) as caught:
            await client.enqueue(Job("a", queue="ada"))
        assert str(caught.value) == (
            "the projector refused a change of queue 'ada': no such customer"
        )
        assert caught.value.kind == "settlement_rejected"
        assert isinstance(caught.value.__cause__, LookupError)


async def test_an_is_alive_that_raises_is_logged_with_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def is_alive(job: RunningJob) -> bool:
        raise ConnectionError("no route to the cluster")

    async with open_watchdog("sqlite::memory:", is_alive=is_alive, poll=0.05) as watchdog:
        store = watchdog._store
        await store.enqueue(Job("gone", id="j"))
        await store.claim("gone", "t", lease=1)
        await watchdog.start_lane("a", nothing)
        with trio.fail_after(10):
            while not caplog.records:
                await trio.sleep(0.01)
    record = caplog.records[0]
    assert record.message == (
        "is_alive raised for job 'j': ConnectionError('no route to the cluster')"
    )
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], LivenessUnavailable)
    assert record.exc_info[1].kind == "liveness_unavailable"


async def test_a_handler_that_cannot_be_run_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "trio_asyncio", None)
    with pytest.raises(ExecutionFailed) as caught:
        await asyncio_handler(nothing)(None)  # type: ignore[arg-type]
    assert "trio-watchdog[asyncio]" in str(caught.value)
    assert caught.value.kind == "execution_failed"


async def test_waking_that_does_not_work_is_logged_with_the_reason(
    postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_watchdog(postgres_database, poll=0.2) as watchdog:
        await watchdog.start_lane("a", nothing)
        await watchdog.wait_idle()
        with psycopg.connect(postgres_database, autocommit=True) as connection:
            connection.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        with trio.fail_after(20):
            while not waking(caplog):
                await trio.sleep(0.01)
        (record, *_) = waking(caplog)
        assert "changes made elsewhere are found by the poll until it works again" in record.message
        assert isinstance(record.args, tuple)
        (error,) = record.args
        assert isinstance(error, WakeUnavailable)
        assert error.kind == "wake_unavailable"
        assert isinstance(error.__cause__, StoreUnavailable)
        # And they are.
        await watchdog.enqueue(Job("a", id="j"))
        await watchdog.wait_settled("j")


def waking(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if "waking by notification" in record.message]


def test_every_kind_has_one_class_and_a_docstring() -> None:
    classes = {
        value.kind: value
        for value in vars(errors).values()
        if isinstance(value, type) and WatchdogError in value.__bases__
    }
    assert set(classes) == set(get_args(errors.ErrorKind))
    for value in classes.values():
        assert value.__doc__


# -- secrets --------------------------------------------------------------------------------------

PASSWORD = "hunter2%2Fsesame"
PLAIN = "hunter2/sesame"


@contextmanager
def closed_to_all(url: str) -> Iterator[None]:
    """A database that has lost its sessions, and lets nobody in."""
    name = urlsplit(url).path[1:]
    switch = f'alter database "{name}" allow_connections '
    with psycopg.connect(urlsplit(url)._replace(path="/postgres").geturl(), autocommit=True) as it:
        it.execute(f"{switch} false".encode())
        try:
            it.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", [name]
            )
            yield
        finally:
            it.execute(f"{switch} true".encode())


@asynccontextmanager
async def silent_server() -> Any:
    """Takes connections, and says nothing."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    try:
        yield listeners[0].socket.getsockname()[1]
    finally:
        for listener in listeners:
            await listener.aclose()


@asynccontextmanager
async def talking_server() -> Any:
    """Takes connections, and answers with what no server of PostgreSQL would say."""

    async def answer(stream: trio.SocketStream) -> None:
        with trio.move_on_after(5):
            await stream.receive_some(1000)
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, answer, 0)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


def everything_said(error: BaseException) -> str:
    """All that a log, a traceback or a debugger might show of an error."""
    said = "".join(traceback.format_exception(error))
    while True:
        said += f"{error!s}\n{error!r}\n{error.args!r}\n{getattr(error, '__notes__', '')}\n"
        following = error.__cause__ or error.__context__
        if following is None:
            return said
        error = following


async def test_no_password_is_in_any_error_or_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []

    async def fail(url: str) -> None:
        try:
            with trio.fail_after(30):
                async with open_client(url, retry_for=0) as client:
                    await client.enqueue(Job("a"))
        except (WatchdogError, ValueError) as error:
            said.append(everything_said(error))
        else:
            raise AssertionError(f"{url} was opened")

    user = f"ada:{PASSWORD}"
    await fail(f"postgresql://{user}@127.0.0.1:{unused_port()}/jobs")
    await fail(f"postgresql://{user}@no.such.host.invalid/jobs?connect_timeout=2")
    await fail(f"postgresql://{user}@127.0.0.1:notaport/jobs")
    await fail(f"postgresql://{user}@127.0.0.1/jobs?nonsense=1")
    await fail(f"postgresql://ada:{PLAIN}@127.0.0.1/jobs")
    await fail(f"postgresql://ada@127.0.0.1:{unused_port()}/jobs?password={PASSWORD}")
    async with silent_server() as port:
        await fail(f"postgresql://{user}@127.0.0.1:{port}/jobs?connect_timeout=2")
    async with talking_server() as port:
        await fail(f"postgresql://{user}@127.0.0.1:{port}/jobs?connect_timeout=2")
    assert len(said) == 8
    logged = "\n".join(
        f"{record.getMessage()} {record.__dict__} {record.exc_text}" for record in caplog.records
    )
    for text in (*said, logged):
        assert "hunter2" not in text
        assert "sesame" not in text


async def test_a_running_store_shows_no_password(
    postgres_database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    password = urlsplit(postgres_database).password
    assert password, "the test server should want a password"
    async with open_store(postgres_database) as store:
        await store.enqueue(Job("a", id="j"))
        assert password not in repr(store)
        with closed_to_all(postgres_database):
            with pytest.raises(StoreUnavailable) as caught:
                await store.read("j")
            assert password not in everything_said(caught.value)
    async with open_client(postgres_database) as client:
        for finding in await client.examine():
            assert password not in finding.text
        assert password not in repr(client)
    with psycopg.connect(postgres_database) as connection:
        assert password not in repr(transactional(connection))
    assert password not in caplog.text


async def test_what_a_handler_says_is_kept_and_what_it_hides_is_not_looked_for() -> None:
    async with open_watchdog("sqlite::memory:") as watchdog:

        async def handler(job: RunningJob) -> None:
            raise ConnectionError("cannot reach postgresql://ada@host")

        await watchdog.start_lane("a", handler)
        await watchdog.enqueue(Job("a", id="j"))
        settled = await watchdog.wait_settled("j")
        assert (settled.outcome, settled.reason) == (
            Outcome.FAILED,
            "ConnectionError: cannot reach postgresql://ada@host",
        )
