"""Jobs of rows that the caller's own SQL yields."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import psycopg
import pytest
import trio

from tests.postgres.fixtures import emptied
from trio_watchdog import Client, Job, Recovery, StoreInvalid, open_client
from trio_watchdog._postgres import PARAMETER_LIMIT, open_postgres_store
from trio_watchdog._wishes import EnqueueSelect, ReadJobs

SCHEMA = "selects"

# This machine may be busy; an outage would be ridden out for thirty seconds.
SOON = 10.0


@pytest.fixture
async def client(quick_database: str) -> AsyncIterator[Client]:
    with emptied(quick_database, f"{SCHEMA}.jobs", f"{SCHEMA}.recheck"):
        async with open_client(quick_database, schema=SCHEMA) as client:
            yield client


async def ids(client: Client) -> set[str]:
    return {job.id for job in await client._store.ask(ReadJobs())}


# -- JSON -----------------------------------------------------------------------------------------

DOCUMENTS: dict[str, Any] = {
    '"123"': "123",
    '"true"': "true",
    '"hello"': "hello",
    '"[1]"': "[1]",
    '{"k": "123"}': {"k": "123"},
    "123": 123,
    "1.5": 1.5,
    "null": None,
}


@pytest.mark.parametrize("kind", ["text", "json", "jsonb"])
async def test_json_is_decoded_once(client: Client, kind: str) -> None:
    for number, (document, payload) in enumerate(DOCUMENTS.items()):
        id = f"{kind} {number}"
        (admission,) = await client.enqueue_select(
            f"select 'a' as lane, %s as id, cast(%s as {kind}) as payload", (id, document)
        )
        assert admission.job.payload == payload
        assert type(admission.job.payload) is type(payload)
        assert (await client.enqueue(Job("a", payload, id=id))).status == "duplicate"


@pytest.mark.parametrize("kind", ["text", "json", "jsonb"])
async def test_a_recovery_may_be_json(client: Client, kind: str) -> None:
    (admission,) = await client.enqueue_select(
        f"select 'a' as lane, cast(%s as {kind}) as recovery", ('{"max_recoveries": 2}',)
    )
    assert admission.job.recovery == Recovery(2)


async def test_json_means_its_value_in_every_column_and_in_arrays(client: Client) -> None:
    (admission,) = await client.enqueue_select(
        "select doc->'lane' as lane, doc->'id' as id, doc->'priority' as priority,"
        " array[doc->'id', doc->'more'] as payload from (select cast(%s as jsonb) as doc) as it",
        ('{"lane": "a", "id": "7", "priority": 3, "more": {"k": "8"}}',),
    )
    job = admission.job
    assert (job.lane, job.id, job.priority) == ("a", "7", 3)
    assert job.payload == ["7", {"k": "8"}]


# -- mistakes -------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, Any, str]] = {
    "too many parameters": ("select 'a' as lane, %s as id", ("x", "y"), "2 parameters"),
    "too few parameters": ("select %s as lane, %s as id", ("x",), "1 parameter"),
    "a name that is not given": ("select %(lane)s as lane", {"x": 1}, "parameter missing: lane"),
    "names for a sequence": ("select %(lane)s as lane", ("x",), "mapping"),
    "a placeholder of another kind": ("select %d as lane", (1,), "%d"),
    "a type that is not known": ("select 'a' as lane, %s as payload", ({"a": 1},), "dict"),
    "NUL in a parameter": ("select %s as lane", ("a\0b",), "NUL"),
    "NUL in the SQL": ("select 'a' as lane\0, 1", (), "NUL"),
    "a surrogate in a parameter": ("select %s as lane", ("\ud800",), "surrogates"),
    "a surrogate in the SQL": ("select '\ud800' as lane", (), "surrogates"),
    "parameters without end": ("select 'a' as lane", (1,) * (PARAMETER_LIMIT + 1), "65535"),
    "nothing": ("", (), "yields no rows"),
    "begin": ("begin", (), "yields no rows"),
    "commit": ("commit", (), "yields no rows"),
    "rollback": ("rollback", (), "yields no rows"),
    "a savepoint": ("savepoint here", (), "yields no rows"),
    "a setting": ("set local work_mem = '1MB'", (), "yields no rows"),
    "two statements": ("select 'a' as lane; select 'b' as lane", (), "more than one statement"),
    "a commit behind": ("select 'a' as lane; commit", (), "more than one statement"),
    "another transaction": ("select 'a' as lane; commit; begin", (), "more than one statement"),
    "COPY": ("copy (select 1) to stdout", (), "COPY"),
    "COPY the other way": (f"copy {SCHEMA}.recheck from stdin", (), "COPY"),
    "the end of time": ("select 'a' as lane, timestamptz 'infinity' as not_before", (), "infinity"),
    "a late year": ("select 'a' as lane, timestamptz '20000-01-01' as not_before", (), "20000"),
    "before Christ": ("select 'a' as lane, timestamptz '0044-03-15 BC' as not_before", (), "BC"),
    "a long window": (
        "select 'a' as lane, 1 as max_recoveries, interval '9999999 years' as window",
        (),
        "days",
    ),
}


@pytest.mark.parametrize("what", WRONG)
async def test_a_callers_mistake_is_said_at_once_and_leaves_nothing(
    client: Client, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    text, parameters, words = WRONG[what]
    with trio.fail_after(SOON):
        with pytest.raises(StoreInvalid) as caught:
            await client.enqueue_select(text, parameters)
        assert words in str(caught.value)
        assert await ids(client) == set()
        # The connection is as good as before, and in no transaction.
        assert (await client.enqueue(Job("a", id="j"))).status == "queued"
        (admission,) = await client.enqueue_select("select 'a' as lane, 'k' as id")
        assert admission.status == "queued"
        assert await ids(client) == {"j", "k"}
    assert [each for each in caplog.records if each.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("text", ["commit", "rollback", "begin"])
async def test_sql_that_ends_its_transaction_ends_nobody_elses(
    quick_database: str, text: str
) -> None:
    async with open_postgres_store(quick_database, schema=f"{SCHEMA} {text}") as store:
        good = EnqueueSelect("select 'a' as lane", ())
        first, wrong, last = await store.submit(good, EnqueueSelect(text, ()), good)
        assert isinstance(wrong, StoreInvalid)
        assert [each.status for each in (*first, *last)] == ["queued", "queued"]
        assert len(await store.ask(ReadJobs())) == 2


# -- advice ---------------------------------------------------------------------------------------


async def test_a_missing_table_of_the_callers_is_not_taken_for_ours(
    client: Client, quick_database: str
) -> None:
    with pytest.raises(StoreInvalid, match=r'"nowhere" does not exist') as caught:
        await client.enqueue_select("select lane from nowhere")
    assert "open_client" not in str(caught.value)
    async with open_postgres_store(quick_database, schema=f"{SCHEMA} lost") as store:
        with contextlib.closing(psycopg.connect(quick_database, autocommit=True)) as connection:
            connection.execute(f'drop schema "{SCHEMA} lost" cascade')
        with pytest.raises(StoreInvalid, match="open the database once with open_client"):
            await store.enqueue(Job("a"))
