"""The command ``trio-watchdog``: arguments in, one line or one JSON document out, an exit code.

Each sub-command is a function from its parsed arguments to an exit code. It stops early by raising
`_Stop`; `main` alone turns that, and every error of the package, into a line on stderr. What is
heavy (trio, a database driver, the demo) is imported by the sub-command that needs it, so that
``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast
from urllib.parse import unquote

from ._errors import InvalidJob, JobConflict, StoreInvalid, StoreUnavailable, WatchdogError

if TYPE_CHECKING:
    import logging
    from types import FrameType

    import trio

    from ._client import Client
    from ._doctor import Finding
    from ._lane import Lanes
    from ._migrate import Migration
    from ._model import StoredJob

DONE = 0
REFUSED = 1
"""The database was asked and said no: missing, conflict, already decided."""
USAGE = 2
"""Nothing was asked: the command or one of its values is wrong."""
STORE = 3
"""The database cannot be used: unreachable, locked, foreign, corrupt."""

DATABASE = "TRIO_WATCHDOG_DATABASE"

PATIENCE = 30.0
"""Seconds for a command that asks once: longer than a busy writer, shorter than a person."""

R = TypeVar("R")


class _Stop(Exception):
    """End the command with ``code`` and one line."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


# -- the database's name and its secrets -----------------------------------------------------------


def redact(text: str, database: str | None = None) -> str:
    """The text without passwords: those of ``database``, and any that a URL in it spells out."""
    for secret in _secrets(database or ""):
        text = text.replace(secret, "***")
    # Greedy up to the last @, since a password that nobody encoded may hold one itself.
    text = re.sub(r"(\w://[^/?#\s:@]*):\S*@", r"\1:***@", text)
    return re.sub(r"(password\s*=\s*)('[^']*'|[^\s&]+)", r"\1***", text, flags=re.IGNORECASE)


def _secrets(database: str) -> list[str]:
    found = re.findall(r"\w://[^/?#\s:@]*:(\S*)@", database)
    found += re.findall(r"password=([^\s&]+)", database, flags=re.IGNORECASE)
    # A driver may quote what it decoded. The longest first: one may hold another.
    return sorted({form for one in found for form in (one, unquote(one)) if form}, key=len)[::-1]


def _sqlite_path(database: str) -> Path | None:
    """The file that the database argument means, or None for a server's URL."""
    if database.startswith("sqlite:"):
        return Path(database.removeprefix("sqlite:"))
    return None if "://" in database else Path(database)


def _named_database(arguments: argparse.Namespace) -> str | None:
    given: str | None = arguments.database
    return os.environ.get(DATABASE) if given is None else given


def _database(arguments: argparse.Namespace, *, must_exist: bool = False) -> str:
    return _checked(_named_database(arguments), must_exist=must_exist)


def _checked(database: str | None, *, must_exist: bool = False) -> str:
    if not database or database == "sqlite:":
        raise _Stop(USAGE, f"no database; give --database sqlite:PATH or set {DATABASE}")
    if database.removeprefix("sqlite:") == ":memory:":
        raise _Stop(USAGE, f"{database} ends with this command; name a file: sqlite:jobs.db")
    scheme, colon, _ = database.partition("://")
    is_uri = database.removeprefix("sqlite:").startswith("file:")
    if is_uri or (colon and scheme not in ("postgresql", "postgres")):
        raise _Stop(USAGE, f"{database} is no database; use sqlite:PATH or postgresql://...")
    path = _sqlite_path(database)
    if must_exist and path is not None and not path.exists():
        # Opening would create it, and a mistyped name would look like an empty database.
        raise _Stop(
            STORE,
            f"there is no database {str(path)!r}; `run` or `enqueue` creates one",
        )
    return database


# -- output ---------------------------------------------------------------------------------------


def _printable(text: str) -> str:
    """The text on one line; what could steer a terminal is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _plain(value: Any) -> Any:
    from ._converter import converter

    return converter.unstructure(value)


def _say(arguments: argparse.Namespace, data: Any, text: str) -> None:
    """Print the answer: ``data`` as JSON when asked, else ``text``."""
    if arguments.json:
        print(json.dumps(data, ensure_ascii=False))
    elif text:
        print(text)


def _complain(message: str, database: str | None) -> None:
    line = redact(" ".join(message.split("\n")), database)
    print(f"trio-watchdog: {_printable(line)}", file=sys.stderr)


def _table(rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Rows under their heading; columns as wide as their widest cell."""
    cells = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _instant(value: datetime) -> str:
    return value.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")


# -- asking the database ---------------------------------------------------------------------------


def _ask(
    database: str,
    question: Callable[[Client], Awaitable[R]],
    *,
    patience: float = PATIENCE,
    **options: Any,
) -> R:
    """One question to the database, with an end to waiting."""
    import trio

    from ._client import open_client

    async def ask() -> R:
        with trio.move_on_after(patience):
            async with open_client(database, retry_for=PATIENCE, **options) as client:
                return await question(client)
        raise StoreUnavailable(f"no answer within {PATIENCE:.0f} s; is the database up, or locked?")

    return trio.run(ask)


def _enqueue(arguments: argparse.Namespace) -> int:
    from ._model import Job, Recovery

    if arguments.window is not None and arguments.max_recoveries is None:
        raise _Stop(USAGE, "--window needs --max-recoveries: it limits recoveries per window")
    recovery = (
        None
        if arguments.max_recoveries is None
        else Recovery(arguments.max_recoveries, arguments.window)
    )
    job = Job(
        arguments.lane,
        _payload(arguments.payload),
        queue=arguments.queue,
        id=arguments.id,
        priority=arguments.priority,
        not_before=arguments.not_before,
        recovery=recovery,
    )
    admission = _ask(_database(arguments), lambda client: client.enqueue(job))
    state = f", {_state(admission.job)}" if admission.status == "duplicate" else ""
    _say(arguments, _plain(admission), f"{admission.status}  {_printable(job.id)}{state}")
    return DONE


def _payload(text: str | None) -> Any:
    if text is None:
        return None
    try:
        given = sys.stdin.buffer.read().decode() if text == "-" else text
    except UnicodeDecodeError as error:
        raise _Stop(USAGE, f"payload on stdin is not UTF-8: {error}") from None
    try:
        return json.loads(given)
    except RecursionError:
        raise _Stop(USAGE, "payload is nested too deeply") from None
    except ValueError as error:
        part = given if len(given) <= 60 else given[:60] + "..."
        raise _Stop(
            USAGE, f"payload {part!r} is not JSON: {error}; a plain text needs quotes: '\"text\"'"
        ) from None


def _show(arguments: argparse.Namespace) -> int:
    database = _database(arguments, must_exist=True)
    job = _ask(database, lambda client: client.read(arguments.id), create=False)
    if job is None:
        raise _Stop(REFUSED, f"no job {arguments.id!r} in {database}; `list` shows what is there")
    _say(arguments, _plain(job), _description(job))
    return DONE


def _state(job: StoredJob) -> str:
    if job.state == "settled" or job.state == "completing":
        return f"{job.state}: {job.outcome}"
    return job.state


def _description(job: StoredJob) -> str:
    """Everything about one job, a line for each thing that is so."""
    lines = [
        ("id", job.id),
        ("state", _state(job)),
        ("lane", job.lane),
        ("queue", job.queue if job.queue != job.id else "its own"),
        ("priority", str(job.priority)),
        ("attempts", str(job.attempt_count)),
    ]
    if job.recovery is None:
        lines.append(("recoveries", "none allowed"))
    else:
        window = job.recovery.window
        per = "" if window is None else f", within {window:g} s"
        lines.append(("recoveries", f"{job.recovery_count} of {job.recovery.max_recoveries}{per}"))
    if job.state == "queued" and job.not_before is not None:
        lines.append(("not before", _instant(job.not_before)))
    if job.state == "running" or job.state == "completing":
        lines.append(("lease until", _instant(job.lease_until)))
    if job.cancellation_id is not None:
        lines.append(("cancellation", job.cancellation_id))
    if job.state == "settled":
        lines.append(("settled at", _instant(job.settled_at)))
    if (job.state == "settled" or job.state == "completing") and job.reason is not None:
        lines.append(("reason", job.reason))
    lines.append(("payload", json.dumps(job.payload, ensure_ascii=False)))
    return "\n".join(f"{name:<13} {_printable(value)}" for name, value in lines)


def _list(arguments: argparse.Namespace) -> int:
    database = _database(arguments, must_exist=True)
    jobs = _ask(
        database,
        lambda client: client.list_jobs(
            state=arguments.state,
            lane=arguments.lane,
            queue=arguments.queue,
            limit=arguments.limit,
        ),
        create=False,
    )
    rows = [("ID", "LANE", "QUEUE", "STATE", "ATTEMPTS", "NOTE")]
    for job in jobs:
        queue = job.queue if job.queue != job.id else "-"
        rows.append((job.id, job.lane, queue, _state(job), str(job.attempt_count), _note(job)))
    text = _table(rows, right=frozenset({4})) if jobs else "no jobs"
    _say(arguments, [_plain(job) for job in jobs], text)
    return DONE


def _note(job: StoredJob) -> str:
    notes: list[str] = []
    if (job.state == "settled" or job.state == "completing") and job.reason is not None:
        notes.append(job.reason)
    if job.state == "queued" and job.not_before is not None:
        notes.append(f"not before {_instant(job.not_before)}")
    if job.recovery_count:
        notes.append(f"recovered {job.recovery_count}x")
    if job.cancellation_id is not None and job.state != "settled":
        notes.append("cancellation requested")
    return ", ".join(notes)


def _cancel(arguments: argparse.Namespace) -> int:
    database = _database(arguments, must_exist=True)
    id: str = arguments.id
    result = _ask(
        database,
        lambda client: client.cancel(
            id,
            cancellation_id=arguments.cancellation_id,
            only_if_queued=arguments.only_if_queued,
        ),
        create=False,
    )
    refusals = {
        "missing": f"no job {id!r} in {database}; `list` shows what is there",
        "conflict": f"job {id!r} is left alone: {_conflict(arguments)}; `show` tells more",
        "decided": f"job {id!r} has ended already: {result.outcome}",
    }
    # Asked for a cancelled job, and it is one.
    done = result.status in ("recorded", "replayed") or result.outcome == "cancelled"
    if arguments.json or done:
        outcome = f", {result.outcome}" if result.outcome else ""
        _say(arguments, _plain(result), f"{result.status}  {_printable(id)}{outcome}")
    if not done:
        raise _Stop(REFUSED, refusals[result.status])
    return DONE


def _conflict(arguments: argparse.Namespace) -> str:
    """What a conflict can mean, given what was asked."""
    reasons = ["it runs"] if arguments.only_if_queued else []
    reasons.append("a cancellation with another id is recorded for it already")
    if arguments.cancellation_id is not None:
        reasons.append(f"{arguments.cancellation_id!r} is used on another job")
    return ", or ".join(reasons)


def _fail_lane(arguments: argparse.Namespace) -> int:
    lane: str = arguments.lane

    async def fail_all(client: Client) -> list[str]:
        failed: list[str] = []
        while True:
            failure = await client.fail_lane(lane, arguments.reason)
            failed += [job.id for job in failure.jobs]
            if not failure.more:
                return failed

    failed = _ask(_database(arguments, must_exist=True), fail_all, create=False)
    data = {"lane": lane, "failed": len(failed), "jobs": failed}
    _say(arguments, data, f"failed {len(failed)} {_jobs(failed)} of lane {_printable(lane)}")
    return DONE


def _jobs(counted: Sequence[Any] | int) -> str:
    return "job" if (counted if isinstance(counted, int) else len(counted)) == 1 else "jobs"


def _purge(arguments: argparse.Namespace) -> int:
    queue: str = arguments.queue
    database = _database(arguments, must_exist=True)
    count = _ask(database, lambda client: client.purge_queue(queue), create=False)
    text = f"deleted {count} queued {_jobs(count)} of queue {_printable(queue)}"
    _say(arguments, {"queue": queue, "deleted": count}, text)
    return DONE


def _stats(arguments: argparse.Namespace) -> int:
    async def look(client: Client) -> tuple[list[tuple[str, str, str | None, int]], Any]:
        return await client.count_jobs(), await client.wake_state()

    counts, wake = _ask(_database(arguments, must_exist=True), look, create=False)
    names = ("lane", "state", "outcome", "count")
    data = {
        "counts": [dict(zip(names, row, strict=True)) for row in counts],
        "wake": _plain(wake),
    }
    _say(arguments, data, _statistics(counts))
    return DONE


def _statistics(counts: Sequence[tuple[str, str, str | None, int]]) -> str:
    """A row for each lane, a column for each state, and for each outcome of the settled."""
    from ._model import Outcome

    columns = ["queued", "running", "completing", *(outcome.value for outcome in Outcome)]
    lanes: dict[str, dict[str, int]] = {}
    for lane, state, outcome, count in counts:
        # A completing job has its outcome already, but is counted by its state.
        column = outcome if state == "settled" and outcome is not None else state
        row = lanes.setdefault(lane, {})
        row[column] = row.get(column, 0) + count
    if not lanes:
        return "no jobs"
    total = {column: sum(row.get(column, 0) for row in lanes.values()) for column in columns}
    table = [["LANE", *(column.upper().replace("_", " ") for column in columns)]]
    table += [
        [lane, *(str(row.get(column, 0)) for column in columns)]
        for lane, row in [*sorted(lanes.items()), ("total", total)]
    ]
    return _table(table, right=frozenset(range(1, len(columns) + 1)))


# -- upkeep ---------------------------------------------------------------------------------------


def _looking(database: str) -> dict[str, Any]:
    """Options for commands that only look, and should be able to look at everything."""
    only: dict[str, Any] = {"read_only": True}
    return only if _sqlite_path(database) is None else {**only, "allow_network": True}


def _doctor(arguments: argparse.Namespace) -> int:
    database = _database(arguments, must_exist=True)
    findings = _ask(
        database, lambda client: client.examine(), patience=math.inf, **_looking(database)
    )
    # The server's own words may be among them.
    rows = [(finding.level, finding.topic, redact(finding.text, database)) for finding in findings]
    data = [dict(zip(("level", "topic", "text"), row, strict=True)) for row in rows]
    _say(arguments, data, f"{_table(rows)}\n\n{_verdict(findings)}")
    return DONE if _are_well(findings) else REFUSED


def _are_well(findings: Sequence[Finding]) -> bool:
    return all(finding.level in ("ok", "note") for finding in findings)


def _verdict(findings: Sequence[Finding]) -> str:
    if _are_well(findings):
        return "all is well"
    counts = {level: sum(f.level == level for f in findings) for level in ("fault", "warning")}
    return ", ".join(
        f"{count} {level}{'' if count == 1 else 's'}" for level, count in counts.items() if count
    )


def _explain(arguments: argparse.Namespace) -> int:
    database = _database(arguments, must_exist=True)
    id: str = arguments.id

    async def look(client: Client) -> str | None:
        return None if await client.read(id) is None else await client.explain(id)

    text = _ask(database, look, **_looking(database))
    if text is None:
        raise _Stop(REFUSED, f"no job {id!r} in {database}; `list` shows what is there")
    _say(arguments, {"id": id, "explanation": text}, _printable(text))
    return DONE


def _migrate(arguments: argparse.Namespace) -> int:
    import trio

    from ._migrate import SourceInUse, migrate
    from ._open import open_store

    target = _checked(arguments.target or _named_database(arguments))
    if arguments.source is None:
        _ask(target, lambda client: client.wake_state())
        _say(arguments, {"database": redact(target)}, f"{redact(target)} has all its tables")
        return DONE
    source = _checked(arguments.source, must_exist=True)
    progress = _Progress("moved", "job")

    async def move() -> Migration:
        async with open_store(source, create=False) as old, open_store(target) as new:
            return await migrate(old, new, progress)

    try:
        result = trio.run(move)
    except BaseException as error:
        leaf = _leaves(error)[0]
        if isinstance(leaf, SourceInUse):
            raise _Stop(REFUSED, str(leaf)) from error
        if isinstance(leaf, ValueError) and not isinstance(leaf, StoreInvalid):
            raise _Stop(USAGE, str(leaf)) from error
        raise
    finally:
        progress.end()
    there = f", {result.duplicates} of them there already" if result.duplicates else ""
    _say(arguments, _plain(result), f"moved {result.moved} {_jobs(result.moved)}{there}")
    if result.left:
        shown = "; ".join(f"{id!r}: {why}" for id, why in result.left[:5])
        more = f"; and {len(result.left) - 5} more" if len(result.left) > 5 else ""
        raise _Stop(REFUSED, f"{len(result.left)} {_jobs(result.left)} stayed: {shown}{more}")
    return DONE


def _prune(arguments: argparse.Namespace) -> int:
    if arguments.older_than is None and arguments.keep is None:
        raise _Stop(USAGE, "give --older-than or --keep; with both, what is both goes")
    if arguments.lane is not None and arguments.queue is not None:
        raise _Stop(USAGE, "give --lane or --queue, not both")
    database = _database(arguments, must_exist=True)
    count = _ask(
        database,
        lambda client: client.prune(
            older_than=arguments.older_than,
            keep=arguments.keep,
            lane=arguments.lane,
            queue=arguments.queue,
        ),
        patience=math.inf,
        create=False,
    )
    _say(arguments, {"deleted": count}, f"deleted {count} settled {_jobs(count)}")
    return DONE


class _Progress:
    """How far a long command has come: a line on stderr, on a terminal always the same one."""

    INTERVAL = 2.0

    def __init__(self, verb: str, noun: str) -> None:
        self._verb = verb
        self._noun = noun
        self._is_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._told_at = time.monotonic()
        self._is_drawn = False

    def __call__(self, count: int) -> None:
        now = time.monotonic()
        if now < self._told_at + (0.1 if self._is_terminal else self.INTERVAL):
            return
        self._told_at = now
        text = f"{self._verb} {count} {self._noun}s so far"
        self._is_drawn = self._is_terminal
        print(
            f"\r{text}" if self._is_terminal else text,
            end="" if self._is_terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def end(self) -> None:
        """Leave the line to others."""
        if self._is_drawn:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# -- run ------------------------------------------------------------------------------------------


def _load_lanes(name: str) -> Lanes:
    """The `Lanes` object that ``MODULE:LANES`` names. Imports that module and nothing else."""
    import importlib

    from ._lane import Lanes

    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise _Stop(USAGE, f"{name!r} is not MODULE:LANES, for example examples.lanes:lanes")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Theirs, whatever it is; but a module that is simply not there is a mistyped name.
        absent = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{module_name}.".startswith(f"{absent}."):
            text = f"no module {absent!r} to import; run from the folder that holds it ({folder})"
        else:
            text = f"importing {module_name!r} failed: {_origin(error)}"
        raise _Stop(USAGE, text) from error
    value: Any = module
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if isinstance(value, Lanes):
        if not len(value):
            raise _Stop(USAGE, f"{name} has no lane; describe one with @{attribute}.lane(...)")
        return value
    found = [key for key, held in vars(module).items() if isinstance(held, Lanes)]
    advice = f"it has {', '.join(found)}" if found else "write `lanes = Lanes()` there"
    what = "has no" if value is None else f"has a {type(value).__name__}, not Lanes, in"
    raise _Stop(USAGE, f"module {module_name!r} {what} {attribute!r}; {advice}")


def _origin(error: BaseException) -> str:
    """The error in one line, with the last place in a file that raised it."""
    import traceback

    text = traceback.format_exception_only(error)[-1].strip()
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and frame.filename != __file__
    ]
    frames = [frame for frame in frames if "importlib" not in Path(frame.filename).parts]
    if frames and not isinstance(error, SyntaxError):
        return f"{text} ({frames[-1].filename}, line {frames[-1].lineno})"
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}, line {error.lineno})"
    return text


class _Signals:
    """What SIGTERM and Ctrl-C ask for: the first drains, the second interrupts, the third exits.

    Plain signal handlers, rather than Trio's receiver, since the third signal is for a loop that
    no longer runs.
    """

    def __init__(self) -> None:
        self.count = 0
        self.last = 0
        self._token: trio.lowlevel.TrioToken | None = None
        self._act: Callable[[int], None] | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        import trio

        self.count += 1
        self.last = number
        if self.count >= 3:
            os.write(2, b"trio-watchdog: exits at once; leases run out, recovery decides\n")
            os._exit(128 + number)
        if self._token is not None and self._act is not None:
            act, count = self._act, self.count
            # Nothing is left to drain or interrupt then.
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(act, count)

    def listen(self, act: Callable[[int], None]) -> None:
        """Call ``act`` on the loop with the number of signals so far, also for earlier ones."""
        import trio

        self._act = act
        self._token = trio.lowlevel.current_trio_token()
        if self.count:
            act(self.count)


def _run(arguments: argparse.Namespace) -> int:
    import logging
    import signal

    import trio

    database = _database(arguments)
    lanes = _load_lanes(arguments.lanes)
    handler = logging.StreamHandler()
    handler.setFormatter(_formatter(database))
    # The module named may have set up logging of its own; then this changes nothing.
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    signals = _Signals()
    before = {
        number: signal.signal(number, signals.receive) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        trio.run(_serve, arguments, database, lanes, signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + signals.last if signals.count >= 2 else DONE


def _formatter(database: str) -> logging.Formatter:
    """Log lines as `run` writes them: with the time, without the database's password."""
    import logging

    class Redacting(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return redact(super().format(record), database)

    return Redacting("%(asctime)s %(levelname)s %(message)s")


async def _serve(
    arguments: argparse.Namespace, database: str, lanes: Lanes, signals: _Signals
) -> None:
    """Run the lanes until a signal, or until the database is found to be unusable."""
    import trio

    from ._watchdog import open_watchdog

    def announce(event: str, text: str, **data: Any) -> None:
        # Whoever reads this may have gone, which is no reason to stop working.
        with contextlib.suppress(OSError):
            if arguments.json:
                print(json.dumps({"event": event, **data}, ensure_ascii=False), flush=True)
            else:
                print(f"trio-watchdog: {text}", file=sys.stderr, flush=True)

    drain = trio.Event()
    interrupt = trio.CancelScope()
    is_open = False

    def act(count: int) -> None:
        if count >= 2:
            announce("interrupting", "interrupted; running jobs are queued again, at no cost")
            interrupt.cancel()
        elif is_open:
            drain.set()
        else:
            interrupt.cancel()

    options: dict[str, Any] = {}
    if arguments.grace is not None:
        options["grace"] = arguments.grace
    if arguments.lease is not None:
        options["lease"] = arguments.lease
        # A renewal has to be able to fail, and then to fail again.
        options["heartbeat"] = min(10.0, arguments.lease / 4)
    signals.listen(act)
    with interrupt:
        async with open_watchdog(database, **options) as watchdog:
            await watchdog.start_lanes(lanes)
            is_open = True
            text = f"{arguments.lanes} at work, process {os.getpid()}; Ctrl-C drains"
            announce("started", text, lanes=arguments.lanes, process=os.getpid())
            await drain.wait()
            running = [job.id for job in watchdog.running()]
            text = f"draining, {len(running)} {_jobs(running)} running; again interrupts"
            announce("draining", text, running=running)
    if not interrupt.cancel_called:
        announce("stopped", "stopped; nothing is left running")


# -- demo -----------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    import trio

    from . import _demo as demo

    # Not from the environment: a demo in the database of a service should be somebody's wish.
    database: str | None = arguments.database
    if database is not None:
        database = _database(arguments)
    plan = demo.Plan(
        root=arguments.path,
        database=database,
        shown="a temporary SQLite file" if database is None else redact(database, database),
        workers=arguments.workers,
        kill=not arguments.no_kill,
    )
    # Standard output belongs to the JSON document.
    screen = demo.Screen(sys.stderr if arguments.json else sys.stdout)
    try:
        report = trio.run(demo.run, plan, screen)
    except BaseException as error:
        leaf = _leaves(error)[0]
        if isinstance(leaf, demo.DemoError):
            raise _Stop(USAGE if isinstance(leaf, demo.Unusable) else REFUSED, str(leaf)) from error
        raise
    if report is None:
        raise _Stop(
            128 + screen.signal, "interrupted; the workers have stopped, their jobs are gone"
        )
    if arguments.json:
        print(json.dumps(_plain(report), ensure_ascii=False))
    return DONE if report.ok else REFUSED


def _demo_worker(arguments: argparse.Namespace) -> int:
    import trio

    from . import _demo as demo

    kinds = tuple(arguments.kinds.split(","))
    database = _database(arguments)
    trio.run(demo.work, database, arguments.run, kinds, arguments.root, arguments.ledger)
    return DONE


# -- the arguments ---------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise _Stop(USAGE, f"{message}; see `{self.prog} --help`")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with room for the names at the left, and with descriptions as they were written."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=90)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds, above 0 and below 1e9"
        )
    return value


def _grace(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _seconds(text)


def _integer(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
        return value

    return parse


_UNITS = {"": 1, "s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _duration(text: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([a-z]*)", text)
    unit = None if match is None else _UNITS.get(match[2])
    value = -1.0 if match is None or unit is None else float(match[1]) * unit
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration, such as 90s, 15min, 12h, 30d or 4w"
        )
    return value


def _instant_argument(text: str) -> datetime:
    try:
        value = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an ISO 8601 instant, such as 2030-01-31T09:00:00Z"
        ) from None
    if value.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; append Z or +02:00")
    # As the store keeps it, so that the answer reads as `show` will; the last day may not fit.
    with contextlib.suppress(OverflowError):
        value = value.astimezone(UTC)
    return value


_EXIT_CODES = """\
exit codes:
  0  done
  1  refused, or not there: no such job, conflict, already ended, a worker in the way of a
     migration; or a doctor or demo that found something wrong
  2  the command or one of its values is wrong; nothing was asked
  3  the database is unavailable, or invalid
  130, 143  interrupted by Ctrl-C or SIGTERM (one signal drains `run`, which then ends with 0)
"""


def _parser() -> argparse.ArgumentParser:
    from ._model import PRIORITY_LIMIT

    parser = _Parser(
        prog="trio-watchdog",
        description="Durable jobs for Trio: run lanes, and look after the jobs in a database.",
        epilog=f"example:\n  trio-watchdog demo\n\n{_EXIT_CODES}",
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="store_true", help="print the version and stop")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", dest="name")

    def command(
        name: str,
        act: Callable[[argparse.Namespace], int],
        help: str | None,
        example: str,
        description: str = "",
        database: str = f"sqlite:PATH, a path, or postgresql://...; else ${DATABASE}",
    ) -> argparse.ArgumentParser:
        shown: dict[str, Any] = {} if help is None else {"help": help}
        added = commands.add_parser(
            name,
            **shown,
            description=description or (help or "").capitalize() + ".",
            epilog=f"example:\n  {example}",
            formatter_class=_Help,
            allow_abbrev=False,
        )
        added.set_defaults(act=act)
        added.add_argument("--database", metavar="DATABASE", help=database)
        added.add_argument("--json", action="store_true", help="print the answer as JSON")
        return added

    demo = command(
        "demo",
        _demo,
        "hash every file of a tree, kill a worker, check the result",
        "trio-watchdog demo --path ~/src --workers 3",
        "Make a job for each file of a tree, hash and compress the files in worker processes,\n"
        "kill one of them with SIGKILL in the middle, and check every digest against a fresh\n"
        "reading.",
        "where the jobs live; a temporary SQLite file if not given",
    )
    demo.add_argument(
        "--path", type=Path, metavar="DIR", help="the tree; the standard library if not given"
    )
    demo.add_argument(
        "--workers", type=_integer(1), default=2, metavar="N", help="worker processes (2)"
    )
    demo.add_argument("--no-kill", action="store_true", help="leave the workers alone")

    run = command(
        "run",
        _run,
        "run the lanes of a module until stopped",
        "trio-watchdog run examples.lanes:lanes --database sqlite:jobs.db",
        "Run the lanes of a Lanes object. The first SIGTERM or Ctrl-C drains: nothing new starts,\n"
        "and running jobs finish, within --grace. The second interrupts: running jobs are\n"
        "cancelled and queued again, at no cost. The third exits at once.",
    )
    run.add_argument("lanes", metavar="MODULE:LANES", help="a Lanes object, and where it is")
    run.add_argument("--grace", type=_grace, metavar="S", help="seconds that a drain may take (30)")
    run.add_argument("--lease", type=_seconds, metavar="S", help="seconds that a claim lasts (120)")

    enqueue = command(
        "enqueue",
        _enqueue,
        "admit a job",
        """trio-watchdog enqueue mail '{"to": "ada@example.org"}' --queue ada""",
        "Admit a job. The same job under the same --id is admitted once; the second time the\n"
        "answer is `duplicate`, and another job under that --id is refused.",
    )
    enqueue.add_argument("lane", metavar="LANE", help="the lane that will run it")
    enqueue.add_argument(
        "payload", metavar="PAYLOAD_JSON", nargs="?", help="any JSON value (null); - reads stdin"
    )
    enqueue.add_argument("--id", help="an id of your choice, 1 to 256 characters")
    enqueue.add_argument("--queue", help="jobs of one queue run one after another (its own)")
    enqueue.add_argument(
        "--priority",
        type=_integer(-PRIORITY_LIMIT),
        default=0,
        metavar="N",
        help="higher first (0)",
    )
    enqueue.add_argument(
        "--not-before", type=_instant_argument, metavar="ISO", help="when it may first run"
    )
    enqueue.add_argument(
        "--max-recoveries",
        type=_integer(0),
        metavar="N",
        help="how often it may run again after its execution disappeared (never)",
    )
    enqueue.add_argument(
        "--window", type=_seconds, metavar="S", help="seconds that --max-recoveries counts within"
    )

    show = command("show", _show, "show one job", "trio-watchdog show mail-1 --json")
    show.add_argument("id", metavar="ID", help="the job")

    listing = command(
        "list",
        _list,
        "list jobs, newest first",
        "trio-watchdog list --state running --lane mail",
    )
    listing.add_argument(
        "--state", choices=("queued", "running", "completing", "settled"), help="only these"
    )
    listing.add_argument("--lane", help="only jobs of this lane")
    listing.add_argument("--queue", help="only jobs of this queue")
    listing.add_argument(
        "--limit", type=_integer(1), default=100, metavar="N", help="at most so many (100)"
    )

    cancel = command(
        "cancel",
        _cancel,
        "ask that a job stop, or never start",
        "trio-watchdog cancel mail-1 --only-if-queued",
    )
    cancel.add_argument("id", metavar="ID", help="the job")
    cancel.add_argument(
        "--cancellation-id", metavar="ID", help="asking again with the same one changes nothing"
    )
    cancel.add_argument(
        "--only-if-queued", action="store_true", help="leave the job alone if it runs"
    )

    fail_lane = command(
        "fail-lane",
        _fail_lane,
        "settle all jobs of a lane as failed",
        "trio-watchdog fail-lane mail --reason 'provider closed our account'",
        "Settle all unsettled jobs of a lane as failed. Running handlers are cancelled.",
    )
    fail_lane.add_argument("lane", metavar="LANE", help="the lane")
    fail_lane.add_argument("--reason", required=True, metavar="TEXT", help="1 to 200 characters")

    purge = command(
        "purge",
        _purge,
        "delete the queued jobs of a queue",
        "trio-watchdog purge ada",
        "Delete the queued jobs of a queue. Running and settled ones stay.",
    )
    purge.add_argument("queue", metavar="QUEUE", help="the queue")

    command("stats", _stats, "count the jobs of each lane", "trio-watchdog stats --json")

    command(
        "doctor",
        _doctor,
        "look for what is wrong",
        "trio-watchdog doctor --database sqlite:jobs.db",
        "Look for what is wrong with a database: its rows, claims and queues, and the file or the\n"
        "server. Changes nothing. Exit code 1 when there is a warning or a fault.",
    )

    explain = command(
        "explain",
        _explain,
        "say why a job is not running",
        "trio-watchdog explain mail-1",
        "Say in words why a job is not running, or what became of it.",
    )
    explain.add_argument("id", metavar="ID", help="the job")

    migrate = command(
        "migrate",
        _migrate,
        "move the unsettled jobs to another database",
        "trio-watchdog migrate --from sqlite:jobs.db --to postgresql://ada@localhost/jobs",
        "Move the jobs that have not ended to another database, with their counters. Stop the\n"
        "workers of the old one first. What was interrupted is simply started again. Without\n"
        "--from, make the tables of the database, or check those that are there.",
        f"the new database, if --to is not given; else ${DATABASE}",
    )
    migrate.add_argument(
        "--from", dest="source", metavar="DATABASE", help="the old database, to be emptied"
    )
    migrate.add_argument("--to", dest="target", metavar="DATABASE", help="the new database")

    prune = command(
        "prune",
        _prune,
        "delete old settled jobs",
        "trio-watchdog prune --older-than 30d",
        "Delete settled jobs that are old, or beyond a count, or with both options those that are\n"
        "both; a few hundred at a time. What a reader of the feed has protected and not read yet\n"
        "stays.",
    )
    prune.add_argument(
        "--older-than", type=_duration, metavar="DURATION", help="such as 90s, 15min, 12h, 30d, 4w"
    )
    prune.add_argument(
        "--keep", type=_integer(0), metavar="N", help="what is beyond the newest N goes"
    )
    prune.add_argument("--lane", help="only jobs of this lane")
    prune.add_argument("--queue", help="only jobs of this queue")

    worker = command("demo-worker", _demo_worker, None, "", "A worker process of the demo.")
    worker.add_argument("--run", required=True)
    worker.add_argument("--kinds", required=True)
    worker.add_argument("--root", type=Path, required=True)
    worker.add_argument("--ledger", type=Path, required=True)
    return parser


# -- the entry ------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; ``argv`` defaults to the process's arguments."""
    for stream in (sys.stdout, sys.stderr):
        if reconfigure := getattr(stream, "reconfigure", None):
            # A name that the terminal's encoding lacks is no reason to fail.
            reconfigure(errors="backslashreplace")
    given = sys.argv[1:] if argv is None else list(argv)
    database: str | None = None
    code = DONE
    try:
        arguments = _parse(given)
        if arguments is not None:
            named = (getattr(arguments, name, None) for name in ("source", "target"))
            # All that may hold a password.
            database = " ".join(filter(None, (_named_database(arguments), *named)))
            code = arguments.act(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read us has seen enough. Python would complain once more while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code
    except _Stop as stop:
        _complain(str(stop), database)
        return stop.code
    except BaseException as error:
        leaves = _leaves(error)
        if all(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            return 130
        if isinstance(error, ModuleNotFoundError) and error.name == "psycopg":
            advice = "python -m pip install 'trio-watchdog[postgres]'"
            _complain(f"a postgresql:// database needs psycopg; {advice}", database)
            return STORE
        faults = [leaf for leaf in leaves if isinstance(leaf, WatchdogError)]
        if len(faults) < len(leaves):
            # A mistake of ours, or of a module that was run: the traceback tells most.
            raise
        _complain("; ".join(dict.fromkeys(map(str, faults))), database)
        return max(map(_code, faults))


def _parse(given: Sequence[str]) -> argparse.Namespace | None:
    """The arguments, or None when help or the version was what they asked for."""
    parser = _parser()
    try:
        arguments = parser.parse_args(given)
    except SystemExit:
        # Help. Errors raise `_Stop`.
        return None
    if arguments.version:
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(version("trio-watchdog"))
        except PackageNotFoundError:
            raise _Stop(REFUSED, "a checkout that is not installed has no version") from None
        return None
    if arguments.name is None:
        raise _Stop(USAGE, "no command; see `trio-watchdog --help`, or try `trio-watchdog demo`")
    return arguments


def _leaves(error: BaseException) -> list[BaseException]:
    """The errors in a group of groups, as nurseries make them; or the error itself."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    group = cast("BaseExceptionGroup[BaseException]", error)
    return [leaf for one in group.exceptions for leaf in _leaves(one)]


def _code(error: WatchdogError) -> int:
    if isinstance(error, JobConflict):
        return REFUSED
    if isinstance(error, InvalidJob):
        return USAGE
    return STORE if isinstance(error, (StoreUnavailable, StoreInvalid)) else REFUSED
