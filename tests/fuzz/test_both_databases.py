"""Whatever is asked, both databases say the same."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.tools import anything, examples, instants, numbers, texts
from trio_watchdog import Client, Job, WatchdogError, converter, open_client


@pytest.fixture(scope="module")
def server(postgres_url: str) -> Iterator[str]:
    """One database for all examples; each has a schema of its own."""
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_url, autocommit=True) as connection:
        connection.execute(f"create database {name}".encode())
        try:
            yield urlsplit(postgres_url)._replace(path=f"/{name}").geturl()
        finally:
            connection.execute(f"drop database {name} with (force)".encode())


names = st.one_of(st.sampled_from(["a", "j", "q"]), texts)
text = st.one_of(names, anything)
number = st.one_of(st.sampled_from([0, 1, 2, 100]), numbers)

jobs = st.fixed_dictionaries(
    {"lane": names},
    optional={
        "payload": anything,
        "queue": names,
        "priority": st.one_of(st.integers(-3, 3), numbers),
        "not_before": instants,
    },
)

questions = st.one_of(
    st.tuples(st.just("enqueue"), st.tuples(names, jobs)),
    st.tuples(st.just("enqueue_many"), st.lists(st.tuples(names, jobs), max_size=3)),
    st.tuples(st.just("read"), text),
    st.tuples(st.just("cancel"), st.tuples(names, names, st.booleans())),
    st.tuples(st.just("read_queue_head"), text),
    st.tuples(st.just("read_latest_settled"), text),
    st.tuples(st.just("list_jobs"), st.tuples(st.none() | names, st.none() | names, number)),
    st.tuples(st.just("fail_lane"), st.tuples(names, names)),
    st.tuples(st.just("purge_queue"), text),
    st.tuples(st.just("prune"), number),
    st.tuples(st.just("release_settled"), text),
)


def made(id: str, fields: dict[str, Any]) -> Job:
    return Job(
        fields["lane"],
        fields.get("payload"),
        id=id,
        queue=fields.get("queue", "q"),
        priority=fields.get("priority", 0),
        not_before=fields.get("not_before"),
    )


async def asked(client: Client, kind: str, about: Any) -> Any:
    match kind:
        case "enqueue":
            return await client.enqueue(made(*about))
        case "enqueue_many":
            return await client.enqueue_many([made(*each) for each in about])
        case "cancel":
            id, cancellation_id, only_if_queued = about
            return await client.cancel(
                id, cancellation_id=cancellation_id, only_if_queued=only_if_queued
            )
        case "list_jobs":
            lane, queue, limit = about
            return await client.list_jobs(lane=lane, queue=queue, limit=limit)
        case "fail_lane":
            failure = await client.fail_lane(*about)
            return [job.id for job in failure.jobs]
        case "prune":
            return await client.prune(keep=about)
        case _:
            return await getattr(client, kind)(about)


def gist(answer: Any) -> Any:
    """What must be the same: all but instants and places of this database."""
    if isinstance(answer, list | tuple):
        return [gist(each) for each in answer]
    plain = converter.unstructure(answer)
    if isinstance(plain, dict):
        job = plain.get("job", plain)
        for name in ("sequence", "settled_at"):
            job.pop(name, None)
    return plain


async def said(client: Client, kind: str, about: Any) -> Any:
    try:
        answer = await asked(client, kind, about)
    except WatchdogError as error:
        return type(error).__name__, str(error)
    return gist(answer)


@examples(15)
@given(asked=st.lists(questions, min_size=1, max_size=8))
def test_both_databases_say_the_same(server: str, asked: list[tuple[str, Any]]) -> None:
    schema = f"fuzz_{secrets.token_hex(6)}"

    async def main() -> None:
        async with (
            open_client("sqlite::memory:", retry_for=0) as file,
            open_client(server, schema=schema, retry_for=0, listen=False) as other,
        ):
            for kind, about in asked:
                expected = await said(file, kind, about)
                assert await said(other, kind, about) == expected, (kind, about)

    try:
        trio.run(main)
    finally:
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f"drop schema if exists {schema} cascade".encode())
