"""The command, in processes of its own: what it answers, how it refuses, what signals do to it."""

import contextlib
import io
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from trio_watchdog._cli import main, redact

ROOT = Path(__file__).parents[2]

LANES = """
import pathlib
import sys
import time

import trio

from trio_watchdog import Lanes

lanes = Lanes()
mistake = {"not": "lanes"}
none = Lanes()


@lanes.lane("gate")
async def gate(job):
    # Says that it runs, and runs until the gate opens.
    folder = pathlib.Path(job.payload)
    (folder / "began").touch()
    while not (folder / "open").exists():
        await trio.sleep(0.01)
    (folder / "ended").touch()


@lanes.lane("deaf")
async def deaf(job):
    # Blocks the event loop, so only what needs no loop can end the process.
    pathlib.Path(job.payload, "began").touch()
    while True:
        time.sleep(0.01)
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    plain = {key: value for key, value in os.environ.items() if not key.startswith("TRIO_WATCHDOG")}
    return plain | {"PYTHONPATH": path} | more


class Shell:
    """Runs the command in a folder, on the database ``jobs.db`` there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = environment(TRIO_WATCHDOG_DATABASE=f"sqlite:{folder / 'jobs.db'}")

    def __call__(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Here, for each process costs half a second. `process` does the same in one of its own."""
        output, errors = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, self.environment, clear=True),
            contextlib.chdir(self.folder),
            contextlib.redirect_stdout(output),
            contextlib.redirect_stderr(errors),
        ):
            returned = main(arguments)
        done = subprocess.CompletedProcess(
            arguments, returned, output.getvalue(), errors.getvalue()
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def process(
        self, *arguments: str, stdin: str = "", code: int = 0
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-m", "trio_watchdog", *arguments],
            check=False,
            input=stdin,
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.environment,
            timeout=60,
        )
        assert done.returncode == code, (done.stdout, done.stderr)
        return done

    def json(self, *arguments: str, code: int = 0) -> Any:
        done = self(*arguments, "--json", code=code)
        return json.loads(done.stdout)

    @contextlib.contextmanager
    def start(self, *arguments: str) -> Generator[subprocess.Popen[str]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "trio_watchdog", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self.environment,
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    (tmp_path / "work.py").write_text(LANES)
    return Shell(tmp_path)


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """Runs the command in this process, where many refusals cost little; gives the one line."""
    monkeypatch.delenv("TRIO_WATCHDOG_DATABASE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: str, code: int) -> str:
        assert main(arguments) == code
        output, errors = capsys.readouterr()
        assert output == ""
        assert errors.startswith("trio-watchdog: ")
        assert errors.count("\n") == 1
        return errors

    return run


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "in vain"
        time.sleep(0.01)


def event(process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """The next line of `run --json`, which has to be this event."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()
    found: dict[str, Any] = json.loads(line)
    assert found["event"] == name
    return found


def end_of(process: subprocess.Popen[str], code: int) -> str:
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    return errors


# -- jobs ------------------------------------------------------------------------------------------


def test_a_job_is_admitted_shown_listed_cancelled_and_counted(shell: Shell) -> None:
    admission = shell.json(
        *("enqueue", "mail", '{"to": "ada"}', "--id", "one", "--queue", "ada"),
        *("--priority", "-3", "--not-before", "2100-01-01T00:00:00+01:00"),
        *("--max-recoveries", "2", "--window", "60"),
    )
    assert admission["status"] == "queued"
    job = shell.json("show", "one")
    assert job == admission["job"]
    assert job["payload"] == {"to": "ada"}
    assert (job["lane"], job["queue"], job["priority"]) == ("mail", "ada", -3)
    assert job["recovery"] == {"max_recoveries": 2, "window": 60.0}
    assert job["state"] == "queued"
    assert job["not_before"].startswith("2099-12-31T23:00:00")

    text = shell.process("show", "one").stdout
    assert "recoveries    0 of 2, within 60 s\n" in text
    assert "not before    2099-12-31 23:00:00.000Z\n" in text
    assert shell.json("list", "--lane", "mail", "--state", "queued") == [job]
    assert shell.json("list", "--queue", "grace") == []
    heading, row = shell("list").stdout.splitlines()
    assert heading.split() == ["ID", "LANE", "QUEUE", "STATE", "ATTEMPTS", "NOTE"]
    assert row.split()[:5] == ["one", "mail", "ada", "queued", "0"]

    assert shell.json("cancel", "one", "--cancellation-id", "c")["status"] == "recorded"
    assert shell.json("stats")["counts"][0]["lane"] == "mail"
    assert shell("stats").stdout.splitlines()[-1].split()[0] == "total"
    assert json.loads(shell.process("show", "one", "--json").stdout) == shell.json("show", "one")


def test_the_same_job_twice_is_a_duplicate_and_another_one_a_conflict(shell: Shell) -> None:
    assert shell("enqueue", "mail", "[1]", "--id", "one").stdout == "queued  one\n"
    assert shell("enqueue", "mail", " [ 1 ] ", "--id", "one").stdout == "duplicate  one, queued\n"
    done = shell.process("enqueue", "mail", "[2]", "--id", "one", code=1)
    assert "one" in done.stderr
    assert done.stdout == ""


def test_a_payload_comes_from_standard_input_and_defaults_to_null(shell: Shell) -> None:
    shell.process("enqueue", "mail", "-", "--id", "one", stdin='{"name": "Zoë \\u0000"}')
    assert shell.json("show", "one")["payload"] == {"name": "Zoë \0"}
    id = shell.json("enqueue", "mail")["job"]["id"]
    assert shell.json("show", id)["payload"] is None


def test_lists_show_the_newest_first_and_stop_at_the_limit(shell: Shell) -> None:
    for id in "abc":
        shell.json("enqueue", "mail", "--id", id)
    assert [job["id"] for job in shell.json("list", "--limit", "2")] == ["c", "b"]
    assert shell("list", "--state", "running").stdout == "no jobs\n"


def test_a_cancellation_that_cannot_be_is_refused(shell: Shell) -> None:
    shell.json("enqueue", "mail", "--id", "one")
    assert shell("cancel", "one", "--cancellation-id", "c").stdout == "recorded  one\n"
    assert shell("cancel", "one", "--cancellation-id", "c").stdout.startswith(
        ("replayed  one", "decided  one, cancelled")
    )
    assert shell.json("cancel", "two", code=1) == {"status": "missing", "outcome": None}
    assert "'two'" in shell("cancel", "two", code=1).stderr
    shell.json("enqueue", "mail", "--id", "later", "--not-before", "2100-01-01T00:00:00Z")
    shell("fail-lane", "mail", "--reason", "closed")
    assert "has ended already: failed" in shell("cancel", "later", code=1).stderr


def test_a_lane_is_failed_and_a_queue_purged(shell: Shell) -> None:
    for id in ("a1", "a2"):
        shell.json("enqueue", "mail", "--id", id, "--queue", "ada")
    shell.json("enqueue", "post", "--id", "b1", "--queue", "ada")
    failed = shell.json("fail-lane", "mail", "--reason", "provider gone")
    assert failed == {"lane": "mail", "failed": 2, "jobs": ["a1", "a2"]}
    job = shell.json("show", "a1")
    assert (job["outcome"], job["reason"]) == ("failed", "provider gone")
    assert "reason        provider gone\n" in shell("show", "a1").stdout
    assert shell("purge", "ada").stdout == "deleted 1 queued job of queue ada\n"
    assert shell.json("purge", "ada") == {"queue": "ada", "deleted": 0}
    assert "no job 'b1'" in shell("show", "b1", code=1).stderr


def test_names_cannot_steer_the_terminal(shell: Shell) -> None:
    shell.json("enqueue", "\x1b[2Jmail", "--id", "one\nline")
    for arguments in (("list",), ("stats",), ("show", "one\nline")):
        assert "\x1b" not in shell(*arguments).stdout
    assert len(shell("list").stdout.splitlines()) == 2


def test_a_reader_that_has_seen_enough_is_no_error(shell: Shell) -> None:
    shell.json("enqueue", "mail")
    with shell.start("list") as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no command"),
        (("shwo",), "shwo"),
        (("show",), "ID"),
        (("list", "--limit", "0"), "'0' is not an integer of at least 1"),
        (("list", "--state", "done"), "done"),
        (("enqueue", "mail", "{to: ada}"), "'{to: ada}' is not JSON"),
        (("enqueue", "mail", "NaN"), "nan"),
        (("enqueue", "mail", '"\\ud800"'), "surrogate"),
        (("enqueue", "mail", "1" * 5000), "is not JSON"),
        (("enqueue", "mail", "[" * 100_000), "nested"),
        (("enqueue", ""), "lane has 0 characters; 1 to 256"),
        (("enqueue", "mail", "--id", "x" * 257), "id has 257 characters"),
        (("enqueue", "mail", "--priority", "9007199254740992"), "9007199254740991"),
        (("enqueue", "mail", "--not-before", "soon"), "'soon' is not an ISO 8601 instant"),
        (("enqueue", "mail", "--not-before", "2030-01-01T00:00:00"), "no time zone"),
        (("enqueue", "mail", "--not-before", "1960-01-01T00:00:00Z"), "1970"),
        (("enqueue", "mail", "--window", "5"), "--max-recoveries"),
        (("enqueue", "mail", "--max-recoveries", "1", "--window", "nan"), "'nan'"),
        (("fail-lane", "mail"), "--reason"),
        (("run", "work"), "'work' is not MODULE:LANES"),
        (("run", "work:"), "'work:' is not MODULE:LANES"),
        (("run", "absent.module:lanes"), "no module 'absent'"),
        (("run", "work:mistake"), "has a dict, not Lanes, in 'mistake'; it has lanes, none"),
        (("run", "work:nothing"), "has no 'nothing'; it has lanes, none"),
        (("run", "broken:lanes"), "ZeroDivisionError: division by zero"),
        (("run", "wrong:lanes"), "SyntaxError"),
        (("run", "work:none"), "has no lane; describe one with @none.lane"),
        (("run", "needs:lanes"), "No module named 'something_else'"),
        (("run", "work:lanes", "--lease", "-1"), "'-1'"),
        (("demo", "--path", "nowhere"), "'nowhere' is not a folder"),
        (("demo", "--path", "empty"), "no file"),
        (("demo", "--workers", "0"), "'0'"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(
    refused: Callable[..., str], tmp_path: Path, arguments: Sequence[str], words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "work.py").write_text(LANES)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "wrong.py").write_text("def f(:\n")
    (tmp_path / "needs.py").write_text("import something_else\n")
    named = arguments and arguments[0] not in ("demo", "shwo")
    more = ("--database", "jobs.db") if named else ()
    for module in ("work", "broken", "wrong", "needs"):
        sys.modules.pop(module, None)
    assert words in refused(*arguments, *more, code=2)
    assert not (tmp_path / "jobs.db").exists()


def test_a_database_has_to_be_named_and_to_be_one(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    assert "TRIO_WATCHDOG_DATABASE" in refused("list", code=2)
    for empty in ("", "sqlite:"):
        assert "no database" in refused("list", "--database", empty, code=2)
    assert "mysql" in refused("list", "--database", "mysql://host/db", code=2)
    for uri in ("file:x.db", "sqlite:file:x.db", "sqlite:///x.db"):
        assert "use sqlite:PATH" in refused("enqueue", "a", "--database", uri, code=2)
    assert "name a file" in refused("enqueue", "a", "--database", "sqlite::memory:", code=2)
    # Looking into a mistyped name must not make a database of it.
    assert "'typo.db'" in refused("list", "--database", "sqlite:typo.db", code=3)
    assert not (tmp_path / "typo.db").exists()
    (tmp_path / "text.db").write_text("this is no database, but a text of some length\n" * 100)
    assert "text.db" in refused("list", "--database", "text.db", code=3)
    with contextlib.closing(sqlite3.connect(tmp_path / "foreign.db")) as connection:
        connection.execute("CREATE TABLE watchdog_jobs (something)")
        connection.execute("PRAGMA user_version = 77")
        connection.commit()
    refused("list", "--database", "sqlite:foreign.db", code=3)
    refused("enqueue", "mail", "--database", "sqlite:absent/folder/jobs.db", code=3)


def test_a_missing_driver_is_named_with_its_extra(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "trio_watchdog._postgres", raising=False)
    monkeypatch.delitem(sys.modules, "trio_watchdog._psycopg", raising=False)
    line = refused("list", "--database", "postgresql://ada@127.0.0.1:1/jobs", code=3)
    assert "trio-watchdog[postgres]" in line


def test_a_password_is_never_shown(refused: Callable[..., str]) -> None:
    url = "postgresql://ada:s%40cret@127.0.0.1:1/jobs"
    for arguments, code in ((("show", "one"), 3), (("bogus",), 2), (("list", "--limit", "x"), 2)):
        line = refused(*arguments, "--database", url, code=code)
        assert "s%40cret" not in line
        assert "s@cret" not in line
    assert "cret" not in refused("list", "--database", "mysql://ada:s@cret@host/db", code=2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ada:secret@host/db", "postgresql://ada:***@host/db"),
        ("postgresql://ada:se:c@re/t@host/db is down", "postgresql://ada:***@host/db is down"),
        ("postgresql://ada@host/db", "postgresql://ada@host/db"),
        ("postgresql://host/db?user=a&password=secret&x=1", None),
        ("host=h password='se cret' user=a", "host=h password=*** user=a"),
        ("sqlite:jobs.db", "sqlite:jobs.db"),
    ],
)
def test_passwords_are_cut_out_of_texts(text: str, shown: str | None) -> None:
    shown = shown or "postgresql://host/db?user=a&password=***&x=1"
    assert redact(text) == shown


def test_a_driver_that_quotes_the_decoded_password_is_cut_short() -> None:
    url = "postgresql://ada:p%C3%A4ss%20word@host/db"
    assert redact("no user 'ada' with 'päss word'", url) == "no user 'ada' with '***'"


# -- help ------------------------------------------------------------------------------------------

COMMANDS = (
    *("demo", "run", "enqueue", "show", "list", "cancel", "fail-lane", "purge", "stats"),
    *("doctor", "explain", "migrate", "prune"),
)


def test_every_command_has_help_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "exit codes:" in text
    assert "demo-worker" not in text
    for name in COMMANDS:
        assert f"    {name} " in text
        assert main([name, "--help"]) == 0
        help = capsys.readouterr().out
        assert f"example:\n  trio-watchdog {name}" in help
        assert "--database" in help
        assert max(map(len, help.splitlines())) < 100


def test_the_reference_page_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for name in COMMANDS:
        assert f"## `{name}`" in page
        main([name, "--help"])
        for option in set(re.findall(r"--[a-z-]+", capsys.readouterr().out)):
            assert f"`{option}" in page, (name, option)


def test_importing_the_command_is_light(shell: Shell) -> None:
    code = (
        "import sys, trio_watchdog._cli; "
        "heavy = {'psycopg', 'trio_asyncio', 'asyncio', 'trio_watchdog._demo'} & set(sys.modules); "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        env=shell.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


# -- run -------------------------------------------------------------------------------------------


def test_run_works_until_a_signal_drains_it(shell: Shell) -> None:
    with shell.start("run", "work:lanes", "--json") as process:
        assert event(process, "started")["process"] == process.pid
        shell.json("enqueue", "gate", json.dumps(str(shell.folder)), "--id", "one")
        shell.json("enqueue", "gate", json.dumps(str(shell.folder)), "--id", "two")
        wait_for((shell.folder / "began").exists)
        process.send_signal(signal.SIGTERM)
        assert event(process, "draining")["running"] == ["one"]
        (shell.folder / "open").touch()
        event(process, "stopped")
        end_of(process, 0)
    assert (shell.folder / "ended").exists()
    job = shell.json("show", "one")
    assert (job["state"], job["outcome"]) == ("settled", "completed")
    # Nothing new was started meanwhile.
    assert shell.json("show", "two")["state"] == "queued"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_interrupts_and_costs_the_job_nothing(
    shell: Shell, number: signal.Signals
) -> None:
    shell.json(
        "enqueue", "gate", json.dumps(str(shell.folder)), "--id", "one", "--max-recoveries", "1"
    )
    with shell.start("run", "work:lanes", "--json") as process:
        event(process, "started")
        wait_for((shell.folder / "began").exists)
        process.send_signal(number)
        event(process, "draining")
        process.send_signal(number)
        event(process, "interrupting")
        end_of(process, 128 + number)
    assert not (shell.folder / "ended").exists()
    job = shell.json("show", "one")
    assert (job["state"], job["recovery_count"], job["attempt_count"]) == ("queued", 0, 0)


def test_a_third_signal_exits_even_when_the_event_loop_is_blocked(shell: Shell) -> None:
    shell.json("enqueue", "deaf", json.dumps(str(shell.folder)), "--id", "one")
    with shell.start("run", "work:lanes") as process:
        wait_for((shell.folder / "began").exists)

        def has_ended() -> bool:
            process.send_signal(signal.SIGTERM)
            return process.poll() is not None

        wait_for(has_ended)
        errors = end_of(process, 128 + signal.SIGTERM)
    assert "exits at once" in errors
    assert shell.json("show", "one")["state"] == "running"


def test_a_drain_that_takes_too_long_hands_the_job_back(shell: Shell) -> None:
    shell.json("enqueue", "gate", json.dumps(str(shell.folder)), "--id", "one")
    with shell.start("run", "work:lanes", "--grace", "0.1", "--lease", "9") as process:
        wait_for((shell.folder / "began").exists)
        process.send_signal(signal.SIGTERM)
        errors = end_of(process, 0)
    assert "work:lanes at work" in errors
    assert "draining, 1 job running" in errors
    assert shell.json("show", "one")["state"] == "queued"


def test_a_reader_of_events_that_goes_does_not_stop_the_work(shell: Shell) -> None:
    with shell.start("run", "work:lanes", "--json") as process:
        event(process, "started")
        assert process.stdout is not None
        process.stdout.close()
        shell.json("enqueue", "gate", json.dumps(str(shell.folder)), "--id", "one")
        wait_for((shell.folder / "began").exists)
        process.send_signal(signal.SIGTERM)
        (shell.folder / "open").touch()
        assert process.wait(30) == 0
    assert shell.json("show", "one")["state"] == "settled"


def test_run_says_when_the_database_cannot_be_used(shell: Shell) -> None:
    (shell.folder / "jobs.db").write_text("this is no database, but a text of some length\n" * 100)
    done = shell.process("run", "work:lanes", code=3)
    assert done.stderr.count("\n") == 1
    assert "jobs.db" in done.stderr


# -- examples --------------------------------------------------------------------------------------


def test_the_quick_start_runs_and_a_second_time_does_nothing_twice(shell: Shell) -> None:
    code = (ROOT / "examples" / "quickstart.py").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) < 25

    def run() -> str:
        return subprocess.run(
            [sys.executable, str(ROOT / "examples" / "quickstart.py")],
            cwd=shell.folder,
            env=shell.environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout

    last = "greet-Grace: completed after 1 attempt\n"
    assert run() == f"Hello, Ada!\nHello, Grace!\n{last}"
    assert run() == last


def test_the_example_lanes_run(shell: Shell) -> None:
    readme = shell.folder / "a text.txt"
    readme.write_text("abc")
    shell.json("enqueue", "greet", '{"name": "Ada"}', "--id", "greet")
    shell.json("enqueue", "count", "60", "--id", "slow")
    shell.json("enqueue", "checksum", json.dumps(str(readme)), "--id", "sum")
    shell.json("enqueue", "checksum", '"absent.txt"', "--id", "absent")
    with shell.start("run", "examples.lanes:lanes") as process:

        def states() -> dict[str, str]:
            return {job["id"]: job["state"] for job in shell.json("list")}

        assert process.stdout is not None
        output = ""
        # Not only claimed: a job that is cancelled before it begins says nothing.
        while not all(text in output for text in ("Hello, Ada!", "slow: 1 of 60", "ba7816bf")):
            line = process.stdout.readline()
            assert line, output
            output += line
        wait_for(lambda: sorted(states().values()) == ["running", *["settled"] * 3])
        assert states()["slow"] == "running"
        shell("cancel", "slow")
        wait_for(lambda: states()["slow"] == "settled")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    assert {"Hello, Ada!", "slow: 1 of 60"} < set(output.splitlines())
    assert shell.json("show", "slow")["outcome"] == "cancelled"
    assert "cannot read absent.txt" in shell.json("show", "absent")["reason"]
