"""Whatever is given as a database or as a command line ends in an exit code or a known error."""

# ruff: noqa: PT017  (an error is allowed here, and so is none)

from __future__ import annotations

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.fuzz.tools import examples, texts
from trio_watchdog import Job, WatchdogError, open_client
from trio_watchdog._cli import main
from trio_watchdog._postgres import _completed


@pytest.fixture(scope="module", autouse=True)
def inside() -> Iterator[Path]:
    """A folder of our own: any text is the name of a file."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield Path(folder)
        finally:
            os.chdir(before)


def stays_inside(name: str) -> bool:
    """Whether a name means something below the current folder."""
    path = name.removeprefix("sqlite:")
    if "\0" in path:
        return True
    try:
        # Two folders up are still in the temporary one.
        return os.path.realpath(path).startswith(os.getcwd() + os.sep)
    except (ValueError, OSError):
        return False


names = st.one_of(
    texts,
    texts.map(lambda text: f"sqlite:{text}"),
    st.builds(lambda scheme, rest: f"{scheme}://{rest}", texts, texts),
    st.sampled_from(
        [
            *(
                "",
                "sqlite:",
                "sqlite::memory:",
                ":memory:",
                "sqlite:///x",
                ".",
                "a/b.db",
                "mysql://x",
            ),
            *("SQLITE:x.db", "file:x.db?mode=memory", "x" * 300, "folder/" * 900 + "x.db", "~"),
        ]
    ),
)


@examples(60)
@given(name=names)
def test_any_database_is_opened_or_refused(name: str) -> None:
    assume(not name.startswith(("postgres:", "postgresql:")))
    assume(stays_inside(name))

    async def look() -> None:
        try:
            async with open_client(name, retry_for=0) as client:
                await client.enqueue(Job("a"))
        except (WatchdogError, ValueError) as error:
            text = str(error)
            assert text
            text.encode("utf-8", "surrogateescape")

    trio.run(look)


SECRET = "hunter2-secret"

servers = st.one_of(
    st.builds("postgresql://{}".format, texts),
    st.builds(
        "postgresql://{}:{}@{}:{}/{}?{}={}".format,
        *(texts, st.just(SECRET), texts, st.one_of(st.integers(), texts), texts, texts, texts),
    ),
    st.builds("postgres:{}".format, texts),
)


@examples(180)
@given(url=servers)
def test_any_url_of_a_server_is_understood_or_refused_without_its_password(url: str) -> None:
    try:
        conninfo = _completed(url)
    except ValueError as error:
        assert SECRET not in str(error)
        assert SECRET not in repr(error)
        assert error.__cause__ is None or SECRET not in str(error.__cause__)
        return
    assert "application_name" in conninfo


# -- command lines --------------------------------------------------------------------------------

COMMANDS = (
    *("enqueue", "show", "list", "cancel", "fail-lane", "purge", "stats", "doctor", "explain"),
    *("prune", "migrate"),
)

OPTIONS = (
    *("--json", "--id", "--queue", "--priority", "--not-before", "--max-recoveries", "--window"),
    *("--state", "--lane", "--limit", "--cancellation-id", "--only-if-queued", "--reason"),
    *(
        "--older-than",
        "--keep",
        "--from",
        "--to",
        "--help",
        "--version",
        "-V",
        "--",
        "-",
        "--bogus",
    ),
)

words = st.one_of(
    texts,
    st.sampled_from(["a", "j", "null", "[1]", '{"a": 1}', "1", "-1", "0", "30d", "running", "q"]),
    st.sampled_from(["2030-01-01T00:00:00Z", "9999-12-31T23:59:59-23:59", "1e400", "jobs.db"]),
    st.integers().map(str),
)

lines = st.builds(
    lambda command, arguments: [command, *arguments],
    st.sampled_from(COMMANDS),
    st.lists(st.one_of(st.sampled_from(OPTIONS), words), max_size=7),
)


@examples(90)
@given(line=st.one_of(lines, st.lists(words, max_size=4)))
def test_any_command_line_ends_with_a_code_and_at_most_one_complaint(line: list[str]) -> None:
    assume(not any("postgres" in word for word in line))
    # These would go on for long, or import what they are told to.
    assume(not {"run", "demo", "demo-worker"} & set(line))
    assume(all(stays_inside(word) for word in line if word))
    output, errors = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"[2]"), encoding="utf-8"))
        patch.setenv("TRIO_WATCHDOG_DATABASE", "sqlite:fuzz.db")
        code = main(line)
    assert code in (0, 1, 2, 3)
    complaint = errors.getvalue()
    assert complaint.count("\n") <= 1
    assert all(c.isprintable() for c in complaint.rstrip("\n"))
    if code in (2, 3):
        assert complaint.startswith("trio-watchdog: ")
    if code == 0 and "--json" in line and output.getvalue() and not is_help(line):
        json.loads(output.getvalue())


def is_help(line: list[str]) -> bool:
    return any(word in ("--help", "-h", "--version", "-V") for word in line)
