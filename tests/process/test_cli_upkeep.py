"""The commands that look after a database: what they find, move and delete, and how they refuse."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest

from tests.process.test_cli import LANES, Shell, event, refused, wait_for
from trio_watchdog._cli import main
from trio_watchdog._sqlite import prepare

__all__ = ["refused"]


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "work.py").write_text(LANES)
    return Shell(tmp_path)


def levels(findings: list[dict[str, str]]) -> dict[str, str]:
    return {finding["topic"]: finding["level"] for finding in findings}


def execute(path: Path, text: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("pragma ignore_check_constraints = on")
        connection.execute(text)
        connection.commit()


# -- doctor and explain ----------------------------------------------------------------------------


def test_the_doctor_finds_a_fresh_database_in_order(shell: Shell) -> None:
    shell.json("enqueue", "mail", "--id", "one", "--not-before", "2100-01-01T00:00:00Z")
    lines = shell("doctor").stdout.splitlines()
    assert lines[-2:] == ["", "all is well"]
    assert {line.split()[0] for line in lines[:-2]} == {"ok"}
    assert "1 unsettled job, all readable" in lines[1]
    found = shell.json("doctor")
    assert levels(found)["file"] == levels(found)["owners"] == "ok"
    assert all(set(finding) == {"level", "topic", "text"} for finding in found)


def test_the_doctor_ends_with_1_when_something_is_wrong(shell: Shell) -> None:
    for id in ("one", "two"):
        shell.json("enqueue", "mail", "--id", id)
    path = shell.folder / "jobs.db"
    # A note is no reason to wake anybody.
    assert levels(shell.json("doctor"))["lanes"] == "note"
    execute(path, "update watchdog_jobs set reason = 'x' where id = 'one'")
    execute(path, "update watchdog_jobs set hint = 'lowered' where id = 'two'")
    done = shell.process("doctor", code=1)
    # A row, a queue, and SQLite's own check, which looks at rows too.
    assert done.stdout.splitlines()[-1] == "3 faults"
    assert "'one'" in done.stdout
    assert done.stderr == ""
    assert [f["level"] for f in shell.json("doctor", code=1)].count("fault") == 3


def test_the_doctor_makes_nothing_and_changes_nothing(shell: Shell) -> None:
    assert "there is no database" in shell.process("doctor", code=3).stderr
    assert "there is no database" in shell("explain", "one", code=3).stderr
    assert [file.name for file in shell.folder.iterdir()] == ["work.py"]
    shell.json("enqueue", "mail", "--id", "one")
    before = (shell.folder / "jobs.db").read_bytes()
    shell("doctor")
    shell("explain", "one")
    assert (shell.folder / "jobs.db").read_bytes() == before
    assert sorted(file.name for file in shell.folder.iterdir()) == ["jobs.db", "work.py"]


def test_the_doctor_looks_at_a_server_too(postgres_database: str) -> None:
    url = postgres_database
    assert main(["doctor", "--database", url]) == 3
    with psycopg.connect(url) as connection:
        sql = "select count(*) from pg_namespace where nspname = 'trio_watchdog'"
        assert connection.execute(sql).fetchone() == (0,)
    assert main(["migrate", "--database", url]) == 0
    assert main(["doctor", "--database", url]) in (0, 1)


def test_a_look_into_a_server_without_jobs_makes_no_tables(
    postgres_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (("list",), ("stats",), ("show", "x"), ("cancel", "x"), ("purge", "q")):
        assert main([*arguments, "--database", postgres_database]) == 3
        assert "schema 'trio_watchdog' is not in this database" in capsys.readouterr().err


def test_it_is_explained_why_a_job_does_not_run(shell: Shell) -> None:
    shell.json("enqueue", "mail", "--id", "one", "--queue", "q")
    shell.json("enqueue", "mail", "--id", "two", "--queue", "q")
    assert shell("explain", "two").stdout.startswith("It waits in queue 'q' behind 'one', which ")
    answer = shell.json("explain", "one")
    assert answer["id"] == "one"
    assert "waits for a free worker of lane 'mail'" in answer["explanation"]
    assert "no job 'three'" in shell("explain", "three", code=1).stderr


def test_what_is_explained_cannot_steer_the_terminal(shell: Shell) -> None:
    shell.json("enqueue", "mail\x1b[2J", "--id", "one", "--queue", "q\x1b[2J")
    shell.json("enqueue", "mail", "--id", "two", "--queue", "q\x1b[2J")
    for id in ("one", "two"):
        assert "\x1b" not in shell("explain", id).stdout
    assert "\x1b" not in shell("doctor").stdout


# -- prune -----------------------------------------------------------------------------------------


def settle(shell: Shell, *ids: str, lane: str = "mail") -> None:
    for id in ids:
        shell.json("enqueue", lane, "--id", id)
    shell.json("fail-lane", lane, "--reason", "for the test")


def test_old_jobs_are_pruned_by_age_count_lane_and_queue(shell: Shell) -> None:
    settle(shell, "a", "b", "c")
    settle(shell, "x", "y", lane="other")
    path = shell.folder / "jobs.db"
    execute(path, "update watchdog_jobs set settled_at = settled_at - 86400000 where id = 'a'")
    assert shell.json("prune", "--older-than", "2d") == {"deleted": 0}
    assert shell("prune", "--older-than", "12h").stdout == "deleted 1 settled job\n"
    assert shell.json("prune", "--keep", "1", "--lane", "mail") == {"deleted": 1}
    assert shell.json("prune", "--keep", "0", "--queue", "x") == {"deleted": 1}
    assert shell.json("prune", "--keep", "0", "--older-than", "1h") == {"deleted": 0}
    assert sorted(job["id"] for job in shell.json("list")) == ["c", "y"]
    assert shell("prune", "--older-than", "0").stdout == "deleted 2 settled jobs\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("prune",), "give --older-than or --keep"),
        (("prune", "--keep", "-1"), "'-1' is not an integer of at least 0"),
        (("prune", "--older-than", "soon"), "'soon' is not a duration, such as 90s"),
        (("prune", "--older-than=-1d"), "'-1d' is not a duration"),
        (("prune", "--older-than", "1y"), "'1y' is not a duration"),
        (("prune", "--older-than", "99999w"), "'99999w' is not a duration"),
        (("prune", "--keep", "1", "--lane", "a", "--queue", "b"), "--lane or --queue, not both"),
        (("migrate", "--from", "mysql://a@b/c"), "mysql"),
        (("migrate", "--from", "sqlite::memory:"), "name a file"),
        (("migrate", "--from", "jobs.db", "--to", "./jobs.db"), "name two databases"),
        (("explain",), "ID"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    refused: Callable[..., str], tmp_path: Path, arguments: tuple[str, ...], words: str
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as connection:
        prepare(connection, "jobs.db")
    assert words in refused(*arguments, "--database", "jobs.db", code=2)


# -- migrate ---------------------------------------------------------------------------------------


def test_jobs_are_moved_and_a_second_time_nothing_is(shell: Shell, postgres_database: str) -> None:
    settle(shell, "settled")
    for id in ("one", "two"):
        shell.json("enqueue", "mail", json.dumps(id), "--id", id)
    source = shell.environment["TRIO_WATCHDOG_DATABASE"]
    move = ("migrate", "--from", source, "--to", postgres_database)
    assert shell(*move).stdout == "moved 2 jobs\n"
    assert shell.json(*move) == {"moved": 0, "duplicates": 0, "left": []}
    assert [job["id"] for job in shell.json("list")] == ["settled"]
    listing = shell.json("list", "--database", postgres_database)
    assert [(job["id"], job["payload"]) for job in listing] == [("two", "two"), ("one", "one")]


def test_the_database_that_is_named_otherwise_is_the_new_one(shell: Shell) -> None:
    old = f"sqlite:{shell.folder / 'old.db'}"
    shell("enqueue", "mail", "--id", "one", "--database", old)
    assert shell("migrate", "--from", old).stdout == "moved 1 job\n"
    assert shell.json("show", "one")["state"] == "queued"


def test_without_a_source_the_tables_are_made_or_checked(shell: Shell) -> None:
    for _ in range(2):
        assert shell("migrate").stdout.endswith("jobs.db has all its tables\n")
    assert shell.json("list") == []
    path = shell.folder / "jobs.db"
    execute(path, "update watchdog_meta set value = 99 where name = 'schema_version'")
    assert "99" in shell("migrate", code=3).stderr


def test_a_source_that_is_not_there_is_not_made(shell: Shell) -> None:
    done = shell("migrate", "--from", "sqlite:typo.db", code=3)
    assert "there is no database 'typo.db'" in done.stderr
    assert not (shell.folder / "typo.db").exists()


def test_a_worker_in_the_way_is_refused_and_what_stays_is_named(shell: Shell) -> None:
    new = f"sqlite:{shell.folder / 'new.db'}"
    old = shell.environment["TRIO_WATCHDOG_DATABASE"]
    folder = json.dumps(str(shell.folder))
    shell.json("enqueue", "gate", folder, "--id", "one", "--max-recoveries", "1")
    shell.json("enqueue", "mail", "1", "--id", "two")
    with shell.start("run", "work:lanes", "--json") as process:
        event(process, "started")
        wait_for((shell.folder / "began").exists)
        done = shell("migrate", "--from", old, "--to", new, code=1)
        assert "job 'one' of lane 'gate' is running under a lease until" in done.stderr
        process.send_signal(signal.SIGKILL)
        process.wait()
    shell("enqueue", "mail", "2", "--id", "two", "--database", new)
    # The worker is known to be dead, so its job is recovered first, and then moved.
    done = shell("migrate", "--from", old, "--to", new, "--json", code=1)
    answer = json.loads(done.stdout)
    assert (answer["moved"], answer["duplicates"]) == (1, 0)
    assert [id for id, _ in answer["left"]] == ["two"]
    assert done.stderr == (
        "trio-watchdog: 1 job stayed: 'two': job 'two' is already there with another payload\n"
    )
    job = shell.json("show", "one", "--database", new)
    assert (job["state"], job["recovery_count"]) == ("queued", 1)


def test_progress_is_told_on_stderr_when_it_takes_long(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from trio_watchdog import _cli

    monkeypatch.setattr(_cli._Progress, "INTERVAL", 0.0)
    old, new = (str(shell.folder / name) for name in ("old.db", "new.db"))
    assert main(["migrate", "--database", old]) == 0
    with contextlib.closing(sqlite3.connect(old)) as connection:
        connection.executemany(
            "insert into watchdog_jobs (id, queue, lane, priority, not_before, payload, hint)"
            " values (?, 'q', 'a', 0, 0, 'null', 'ready')",
            [(f"{n}",) for n in range(1200)],
        )
        connection.commit()
    capsys.readouterr()
    assert main(["migrate", "--from", old, "--to", new, "--json"]) == 0
    output, errors = capsys.readouterr()
    assert json.loads(output)["moved"] == 1200
    assert errors.splitlines() == [f"moved {n} jobs so far" for n in (500, 1000, 1200)]


def test_no_password_of_any_database_is_shown(
    refused: Callable[..., str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    secret = "s%40cret"
    server = f"postgresql://ada:{secret}@127.0.0.1:1/jobs?connect_timeout=2"
    main(["migrate", "--database", str(tmp_path / "old.db")])
    assert capsys.readouterr().err == ""
    for arguments in (
        ("migrate", "--from", server, "--to", "new.db"),
        ("migrate", "--from", "old.db", "--to", server),
        ("migrate", "--database", server),
        ("doctor", "--database", server),
        ("explain", "x", "--database", server),
        ("prune", "--keep", "1", "--database", server),
    ):
        line = refused(*arguments, code=3)
        assert not re.search("s(%40|@)cret", line), line
