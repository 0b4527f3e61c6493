"""The demo: a tree of real files, worker processes, one ``kill -9``, and the check of every digest.

One process, the conductor, walks the tree, admits a job for each file, starts the workers and looks
on. It shares nothing with them but the database and a folder of *ledgers*: each worker appends a
JSON line to its own when a handler begins and when it has a digest. A ledger line is an effect in
the outside world, as a mail or a payment would be, and so it happens at least once; that the *job*
settles exactly once is what the settled feed must show. The check at the end compares the feed, the
ledgers and a fresh reading of each file.

The victim of the kill is frozen first (SIGSTOP). What it holds is then looked up in the database,
and only a worker that does hold jobs is killed; otherwise it goes on, and is asked again later.

All names carry the run's own mark, so that two demos, and the jobs of others, never meet.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import stat
import sys
import sysconfig
import tempfile
import zlib
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar
from urllib.parse import quote, unquote

import trio
from attrs import Factory, define, frozen

from ._client import Client, open_client
from ._handlers import thread_handler
from ._model import Complete, Fail, Job, Outcome, Recovery, RunningJob, SettledJob
from ._watchdog import open_watchdog

KINDS = {"python": 2, "text": 1, "binary": 1, "media": 1, "other": 1}
"""The lanes, and how many threads a worker process gives to each."""

LEASE = 5.0
"""Seconds. Short, since on a server's database a killed worker's jobs wait until it has ended."""

BLOCK = 256 * 1024
"""Bytes between two looks at whether the job should stop: a few milliseconds of compression."""

LEVEL = 8
"""Slow compression, so that there is something to watch."""

CHUNK = 200
"""Jobs in one admission."""

KILL_AT = 0.35
"""The part of the jobs that has been settled when a worker is killed."""

STUCK = 60.0
"""Seconds without any job that runs or settles, after which the demo gives up."""

RESTARTS = 3
"""Workers that may end by themselves before the demo gives up."""

_SKIPPED = {"__pycache__", "site-packages", "dist-packages"}

_SUFFIXES = {
    "python": "py pyi pyw",
    "text": "txt rst md html css js json toml xml cfg ini yaml yml csv dectest bat sh c h in pem",
    "binary": "so a o pyd dll dylib exe zip whl gz bz2 xz tar pyc pck pickle db sqlite",
    "media": "png gif jpg jpeg ico icns svg bmp webp tiff xbm ppm wav au aif aiff aifc mp3 ogg ttf",
}
_KIND_OF = {f".{suffix}": kind for kind, all in _SUFFIXES.items() for suffix in all.split()}

# Names in jobs are text, file names are bytes; this keeps any of them whole, and readable.
_PLAIN = "".join(map(chr, range(32, 127))).replace("%", "")


class DemoError(Exception):
    """The demo ends with this message."""


class Unusable(DemoError):
    """The demo cannot begin with what it was given."""


class Broken(DemoError):
    """The demo cannot go on."""


@frozen
class Plan:
    """What to do."""

    root: Path | None
    database: str | None
    shown: str
    workers: int
    kill: bool


@frozen
class Item:
    """One file of the tree."""

    path: str
    kind: str
    folder: str
    size: int
    mtime: int


# -- the tree --------------------------------------------------------------------------------------


def encode_name(path: str) -> str:
    """A path as text that every database and terminal takes."""
    return quote(os.fsencode(path), safe=_PLAIN)


def decode_name(name: str) -> str:
    """The path again, with whatever bytes it had."""
    return unquote(name, errors="surrogateescape")


def kind_of(name: str) -> str:
    """The lane for a file of this name."""
    return _KIND_OF.get(os.path.splitext(name)[1].lower(), "other")


def walk(root: Path, without: Callable[[str], bool]) -> tuple[list[Item], list[str]]:
    """The regular files below ``root``, folder by folder, and what could not be looked at."""
    items: list[Item] = []
    troubles: list[str] = []

    def note(error: OSError) -> None:
        troubles.append(f"{encode_name(os.fsdecode(error.filename))}: {error.strerror}")

    for folder, folders, names in os.walk(root, onerror=note):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for name in sorted(names):
            path = os.path.join(folder, name)
            if without(path):
                continue
            try:
                found = os.stat(path)
            except OSError as error:
                note(error)
                continue
            # A pipe or a device has no end, or nobody at the other one.
            if stat.S_ISREG(found.st_mode):
                relative = os.path.relpath(path, root)
                top, below, _ = relative.partition(os.sep)
                folder_name = encode_name(top) if below else "."
                items.append(
                    Item(
                        encode_name(relative),
                        kind_of(name),
                        folder_name,
                        found.st_size,
                        found.st_mtime_ns,
                    )
                )
    return items, troubles


# -- a worker --------------------------------------------------------------------------------------


def lane_of(mark: str, kind: str) -> str:
    """The lane's name in this run."""
    return f"demo-{mark}-{kind}"


def queue_of(mark: str, folder: str) -> str:
    """The queue's name in this run, within the limit; a shared queue only costs concurrency."""
    return f"demo-{mark}/{folder}"[:256]


@frozen
class Print:
    """What a reading of a file found: enough to know it again."""

    digest: str
    packed: int
    size: int
    mtime: int


def press(path: str, checkpoint: Callable[[], None], *, pack: bool = True) -> Print:
    """Hash a file, and compress it; ``checkpoint`` is called between blocks. Raises OSError."""
    digest = hashlib.sha256()
    packer = zlib.compressobj(LEVEL)
    packed = size = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            checkpoint()
            size += len(block)
            digest.update(block)
            if pack:
                packed += len(packer.compress(block))
        packed += len(packer.flush())
        mtime = os.fstat(file.fileno()).st_mtime_ns
    return Print(digest.hexdigest(), packed, size, mtime)


async def work(database: str, mark: str, kinds: Sequence[str], root: Path, ledger: Path) -> None:
    """A worker process: run this demo's lanes until standard input ends."""
    file = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(**line: Any) -> None:
        # One write, so that a kill leaves a line whole or not at all.
        os.write(file, json.dumps(line).encode() + b"\n")

    def handle(job: RunningJob) -> Complete | Fail:
        write(began=job.token, job=job.id)
        path = os.path.join(root, decode_name(job.payload))
        try:
            seen = press(path, job.checkpoint)
        except OSError as error:
            return Fail(f"cannot be read: {error.strerror}")
        write(
            done=job.id,
            digest=seen.digest,
            packed=seen.packed,
            size=seen.size,
            mtime=seen.mtime,
        )
        return Complete()

    async def interrupt(received: AsyncIterator[int], scope: trio.CancelScope) -> None:
        async for _ in received:
            scope.cancel()

    async with trio.open_nursery() as nursery:
        with trio.open_signal_receiver(signal.SIGTERM) as received, trio.CancelScope() as scope:
            nursery.start_soon(interrupt, received, scope)
            async with open_watchdog(database, lease=LEASE, heartbeat=1.0, grace=5.0) as watchdog:
                for kind in kinds:
                    lane = lane_of(mark, kind)
                    await watchdog.start_lane(lane, thread_handler(handle), workers=KINDS[kind])
                # The conductor asks for a drain by closing the pipe, or dies, and the system does.
                async with trio.lowlevel.FdStream(0) as standard_input:
                    while await standard_input.receive_some():
                        pass
        nursery.cancel_scope.cancel()


# -- what the conductor knows ----------------------------------------------------------------------


class Ledger:
    """The lines that one worker has written so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: set[str] = set()
        self.prints: list[tuple[str, Print]] = []
        self.damaged = 0
        self._offset = 0

    def read(self) -> None:
        """Take in the whole lines that are new."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            # The worker is still starting.
            return
        data = data[: data.rfind(b"\n") + 1]
        self._offset += len(data)
        for line in data.splitlines():
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError):
                self.damaged += 1

    def _take(self, line: dict[str, Any]) -> None:
        if "began" in line:
            self.tokens.add(line["began"])
        else:
            seen = Print(line["digest"], line["packed"], line["size"], line["mtime"])
            self.prints.append((line["done"], seen))


@define(eq=False)
class Worker:
    """One worker process, as the conductor sees it."""

    number: int
    process: trio.Process
    ledger: Ledger
    errors: Path
    status: str = "at work"
    held: int = 0


@define(eq=False)
class State:
    """What is shown, and what the check starts from."""

    plan: Plan
    mark: str
    root: Path
    items: dict[str, Item]
    phase: str = "admitting jobs"
    admitted: int = 0
    workers: list[Worker] = Factory(list[Worker])
    running: dict[str, list[RunningJob]] = Factory(dict[str, "list[RunningJob]"])
    settled: dict[str, SettledJob] = Factory(dict[str, SettledJob])
    shown_twice: set[str] = Factory(set[str])
    done: Counter[str] = Factory(Counter[str])
    total: Counter[str] = Factory(Counter[str])
    recovered: set[str] = Factory(set[str])
    checked: int = 0
    victims: list[str] = Factory(list[str])
    taken_over: float | None = None
    all_taken_over: trio.Event = Factory(trio.Event)
    events: list[tuple[float, str]] = Factory(list[tuple[float, str]])
    restarts: int = 0
    began: float = Factory(trio.current_time)
    work_began: float | None = None
    work_ended: float | None = None
    samples: deque[tuple[float, int]] = Factory(deque[tuple[float, int]])

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return trio.current_time() - self.began

    def note(self, event: str) -> None:
        """Something happened that the viewer should see."""
        self.events.append((self.elapsed, event))

    def sample(self) -> None:
        """Write down how many jobs are settled now."""
        now = trio.current_time()
        self.samples.append((now, len(self.settled)))
        while len(self.samples) > 2 and self.samples[1][0] < now - 2:
            self.samples.popleft()

    def rate(self) -> float:
        """Jobs per second, over the last two seconds."""
        if not self.samples:
            return 0.0
        since, before = self.samples[0]
        until, now = self.samples[-1]
        return (now - before) / (until - since) if until > since else 0.0


@frozen
class Report:
    """How the demo ended; what ``--json`` prints."""

    ok: bool
    path: str
    files: int
    bytes: int
    compressed: int
    settled_exactly_once: int
    digests_equal: int
    recovered: int
    killed_with: list[str]
    """The jobs that the killed worker held."""
    taken_over_after: float | None
    """Seconds from the kill until the last of them was in other hands or settled."""
    run_again: int
    """Files with more than one finished run: effects are at least once."""
    seconds: float
    jobs_per_second: float
    notes: list[str]
    wrong: list[str]
    lanes: dict[str, int]


# -- the conductor ---------------------------------------------------------------------------------


async def run(plan: Plan, screen: Screen) -> Report | None:
    """The whole demo. None if a signal ended it; ``screen.signal`` then says which."""
    report: Report | None = None
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # The receiver stays to the end, so that impatience cannot keep us from cleaning up.
    with (
        trio.open_signal_receiver(*signals) as received,
        tempfile.TemporaryDirectory(prefix="trio-watchdog-demo-") as folder,
    ):
        async with trio.open_nursery() as nursery:
            with trio.CancelScope() as scope:
                nursery.start_soon(_obey, received, screen, scope)
                report = await _conduct(plan, screen, Path(folder))
            nursery.cancel_scope.cancel()
    return report


async def _obey(received: AsyncIterator[int], screen: Screen, scope: trio.CancelScope) -> None:
    async for number in received:
        if not screen.signal:
            screen.interrupt(number)
            scope.cancel()


async def _conduct(plan: Plan, screen: Screen, folder: Path) -> Report:
    root = plan.root or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise Unusable(f"{str(root)!r} is not a folder; --path takes the one to walk")
    root = root.absolute()
    database = plan.database or f"sqlite:{folder / 'jobs.db'}"
    # Abandoned when cancelled: nobody misses what it reads.
    items, troubles = await trio.to_thread.run_sync(
        walk, root, _foreign(database, folder), abandon_on_cancel=True
    )
    if not items:
        raise Unusable(f"there is no file to hash under {str(root)!r}")
    mark = secrets.token_hex(3)
    by_id = {f"demo-{mark}-{number:06}": item for number, item in enumerate(items, 1)}
    state = State(plan, mark, root, by_id)
    kinds = Counter(item.kind for item in items)
    state.total.update({kind: kinds[kind] for kind in KINDS if kinds[kind]})
    for trouble in troubles[:3]:
        state.note(f"left out: {trouble}")
    if len(troubles) > 3:
        state.note(f"left out: {len(troubles) - 3} more")
    async with open_client(database) as client:
        with screen.showing(state):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(screen.paint)
                try:
                    report = await _perform(state, client, database, folder)
                except BaseException:
                    if plan.database is not None:
                        await _withdraw(state, client)
                    raise
                nursery.cancel_scope.cancel()
        screen.conclude(state, report)
    return report


def _foreign(database: str, folder: Path) -> Callable[[str], bool]:
    """Whether a path is the demo's own: its database or its working folder.

    More than tidiness: a process that opens and closes a SQLite file by itself drops the locks
    that SQLite holds on it.
    """
    own = [os.path.realpath(folder) + os.sep]
    if "://" not in database:
        own.append(os.path.realpath(database.removeprefix("sqlite:")))

    def without(path: str) -> bool:
        real = os.path.realpath(path)
        return any(real.startswith(one) for one in own)

    return without


async def _perform(state: State, client: Client, database: str, folder: Path) -> Report:
    jobs = [
        Job(
            lane_of(state.mark, item.kind),
            item.path,
            queue=queue_of(state.mark, item.folder),
            id=id,
            recovery=Recovery(3),
        )
        for id, item in state.items.items()
    ]
    for start in range(0, len(jobs), CHUNK):
        admissions = await client.enqueue_many(jobs[start : start + CHUNK])
        state.admitted += len(admissions)
    state.phase = "working"
    state.work_began = trio.current_time()
    async with trio.open_nursery() as nursery:
        crew = Crew(state, database, folder, nursery)
        try:
            for _ in range(state.plan.workers):
                await crew.start()
            if state.plan.kill:
                nursery.start_soon(_kill, state, client, crew)
            await _follow(state, client)
            state.work_ended = trio.current_time()
            if state.victims:
                # All are settled; whoever measures only has to notice.
                with trio.move_on_after(5):
                    await state.all_taken_over.wait()
        except BaseException:
            await crew.stop(hurry=True)
            raise
        await crew.stop()
        nursery.cancel_scope.cancel()
    state.phase = "checking"
    return await _check(state, client)


async def _withdraw(state: State, client: Client) -> None:
    """Take the jobs that nobody will run out of a database that is not the demo's own."""
    with trio.move_on_after(10, shield=True):
        for folder in sorted({item.folder for item in state.items.values()}):
            await client.purge_queue(queue_of(state.mark, folder))


class Crew:
    """The worker processes: started, watched, replaced, and in the end asked to stop."""

    def __init__(self, state: State, database: str, folder: Path, nursery: trio.Nursery) -> None:
        self._state = state
        self._folder = folder
        self._nursery = nursery
        self._stopping = False
        # In the environment, since everybody on the host can read the arguments.
        self._environment = os.environ | {"TRIO_WATCHDOG_DATABASE": database}

    async def start(self) -> None:
        """Start one more worker."""
        state = self._state
        number = len(state.workers) + 1
        ledger = self._folder / f"worker-{number}.jsonl"
        errors = self._folder / f"worker-{number}.log"
        command = [sys.executable, "-m", "trio_watchdog", "demo-worker", "--run", state.mark]
        command += ["--kinds", ",".join(state.total), "--root", str(state.root)]
        command += ["--ledger", str(ledger)]
        with errors.open("wb") as log:
            # A group of its own: Ctrl-C is for the conductor, who then stops the workers.
            process = await trio.lowlevel.open_process(
                command,
                stdin=-1,
                stdout=log,
                stderr=log,
                env=self._environment,
                process_group=0,
            )
        worker = Worker(number, process, Ledger(ledger), errors)
        state.workers.append(worker)
        self._nursery.start_soon(self._tend, worker)

    async def _tend(self, worker: Worker) -> None:
        await worker.process.wait()
        if self._stopping or worker.status != "at work":
            return
        state = self._state
        worker.status = f"ended with {worker.process.returncode}"
        lines = worker.errors.read_text(errors="replace").strip().splitlines()
        last = encode_name(lines[-1]) if lines else "it left no message"
        state.restarts += 1
        if state.restarts > RESTARTS:
            raise Broken(f"{state.restarts} workers ended by themselves; the last said: {last}")
        state.note(f"worker {worker.number} ended by itself: {last}")
        await self.start()

    async def stop(self, *, hurry: bool = False) -> None:
        """Ask all workers to drain, or in a hurry to hand off their jobs; kill who does not."""
        self._stopping = True
        self._state.phase = "stopping"
        with trio.CancelScope(shield=True):
            alive = [one.process for one in self._state.workers if one.process.poll() is None]
            for process in alive:
                assert process.stdin is not None
                await process.stdin.aclose()
                if hurry:
                    process.terminate()
            with trio.move_on_after(8):
                for process in alive:
                    await process.wait()
            for process in alive:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        for worker in self._state.workers:
            worker.held = 0
            if worker.status == "at work":
                worker.status = "stopped"


async def _running(state: State, client: Client) -> list[RunningJob]:
    """The jobs of this demo that run now."""
    found: list[RunningJob] = []
    for kind in state.total:
        jobs = await client.list_jobs(state="running", lane=lane_of(state.mark, kind))
        found += [job for job in jobs if isinstance(job, RunningJob)]
    return found


async def _follow(state: State, client: Client) -> None:
    """Read the settled feed, and who runs what, until every job is settled."""
    cursors: dict[str, str | None] = dict.fromkeys(state.total)
    quiet_since = trio.current_time()
    while True:
        before = len(state.settled)
        state.sample()
        for kind in cursors:
            jobs, cursors[kind] = await _feed(client, lane_of(state.mark, kind), cursors[kind])
            for job in jobs:
                if job.id in state.settled:
                    state.shown_twice.add(job.id)
                else:
                    state.done[kind] += 1
                state.settled[job.id] = job
                if job.recovery_count:
                    state.recovered.add(job.id)
        if len(state.settled) >= len(state.items):
            state.running = {}
            return
        running = await _running(state, client)
        state.running = {kind: [] for kind in state.total}
        for job in running:
            state.running[job.lane.rpartition("-")[2]].append(job)
            if job.recovery_count:
                state.recovered.add(job.id)
        for worker in state.workers:
            worker.ledger.read()
            worker.held = sum(job.token in worker.ledger.tokens for job in running)
        if running or len(state.settled) > before:
            quiet_since = trio.current_time()
        elif trio.current_time() > quiet_since + STUCK:
            left = len(state.items) - len(state.settled)
            raise Broken(f"{left} jobs are left, and none has run for {STUCK:.0f} s")
        await trio.sleep(0.1)


async def _kill(state: State, client: Client, crew: Crew) -> None:
    """Kill a worker that certainly holds jobs, put another in its place, see its jobs run again."""
    # By the ledgers, which are nearer than the feed when the tree is small.
    while sum(len(one.ledger.prints) for one in state.workers) < KILL_AT * len(state.items):
        await trio.sleep(0.01)
        for worker in state.workers:
            worker.ledger.read()
    victim: Worker | None = None
    held: list[RunningJob] = []
    while victim is None:
        for worker in sorted(state.workers, key=lambda one: -one.held):
            held = await _freeze(state, client, worker)
            if held:
                victim = worker
                break
        await trio.sleep(0.01)
    fell = trio.current_time()
    await victim.process.wait()
    names = ", ".join(state.items[job.id].path for job in held)
    state.victims = [job.id for job in held]
    state.note(f"kill -9 worker {victim.number}, which held {_count(len(held))}: {names}")
    await crew.start()
    waiting = {job.id: job.token for job in held}
    while waiting:
        for id, token in list(waiting.items()):
            job = await client.read(id)
            # In other hands, or done by them.
            if job is None or (job.state != "queued" and getattr(job, "token", "") != token):
                del waiting[id]
        await trio.sleep(0.01)
    state.taken_over = round(trio.current_time() - fell, 3)
    state.all_taken_over.set()
    state.note(f"others took over all of them within {state.taken_over:.2f} s")


async def _freeze(state: State, client: Client, worker: Worker) -> list[RunningJob]:
    """Stop a worker; if it then holds jobs, kill it and say which, else let it go on."""
    if worker.status != "at work" or worker.process.poll() is not None:
        return []
    worker.process.send_signal(signal.SIGSTOP)
    held: list[RunningJob] = []
    try:
        # A server may still be busy with the last statement that it was sent.
        await trio.sleep(0.02)
        worker.ledger.read()
        # Frozen in a bad moment it may be what keeps the answer from us.
        with trio.move_on_after(1):
            running = await _running(state, client)
            held = [job for job in running if job.token in worker.ledger.tokens]
    finally:
        if held:
            worker.status = "killed"
            worker.held = 0
            worker.process.kill()
        else:
            worker.process.send_signal(signal.SIGCONT)
    return held


async def _feed(
    client: Client, lane: str, after: str | None = None
) -> tuple[list[SettledJob], str | None]:
    """The settled jobs of a lane after a cursor, and the cursor after them."""
    jobs: list[SettledJob] = []
    while True:
        page = await client.read_settled(after=after, lane=lane)
        if not page.jobs:
            return jobs, after
        jobs += page.jobs
        after = page.cursor


# -- the check -------------------------------------------------------------------------------------


@frozen
class Verdict:
    """What the check says of one file."""

    status: Literal["equal", "excused", "wrong"]
    """``excused``: the file itself is the reason, since it changed or cannot be read."""
    text: str = ""


def judge(
    item: Item, shown: Sequence[SettledJob], prints: Sequence[Print], fresh: Print | OSError
) -> Verdict:
    """Compare a file, read once more, with the job's part of the feed and with the ledgers."""
    if len(shown) != 1:
        return Verdict("wrong", f"the settled feed shows it {_times(len(shown))}")
    (job,) = shown
    if job.outcome == Outcome.FAILED and isinstance(fresh, OSError):
        return Verdict("excused", f"{job.reason}, and still cannot")
    if job.outcome != Outcome.COMPLETED:
        reason = "" if job.reason is None else f": {job.reason}"
        return Verdict("wrong", f"settled as {job.outcome}{reason}")
    if not prints:
        return Verdict("wrong", "completed, but no ledger has its digest")
    if isinstance(fresh, OSError):
        return Verdict("excused", f"hashed, but gone before the check: {fresh.strerror}")
    if all(seen.digest == fresh.digest for seen in prints):
        return Verdict("equal")
    if (fresh.size, fresh.mtime) != (item.size, item.mtime):
        return Verdict("excused", "changed while the demo ran")
    other = next(seen.digest for seen in prints if seen.digest != fresh.digest)
    return Verdict("wrong", f"a ledger says {other:.12}..., a fresh reading {fresh.digest:.12}...")


async def _check(state: State, client: Client) -> Report:
    shown: dict[str, list[SettledJob]] = {id: [] for id in state.items}
    for kind in state.total:
        jobs, _ = await _feed(client, lane_of(state.mark, kind))
        for job in jobs:
            shown.setdefault(job.id, []).append(job)
    prints: dict[str, list[Print]] = {}
    damaged = 0
    for worker in state.workers:
        worker.ledger.read()
        damaged += worker.ledger.damaged
        for id, seen in worker.ledger.prints:
            prints.setdefault(id, []).append(seen)
    equal = 0
    notes: list[str] = []
    wrong = [f"{id}: in this run's lanes, but not a job of it" for id in shown.keys() - state.items]
    wrong += [f"{state.items[id].path}: settled twice" for id in state.shown_twice]
    if damaged:
        wrong.append(f"{damaged} lines of the ledgers cannot be read")
    for batch in _batches(list(state.items.items()), 50):
        paths = [os.path.join(state.root, decode_name(item.path)) for _, item in batch]
        fresh = await trio.to_thread.run_sync(_read_again, paths, abandon_on_cancel=True)
        for (id, item), read in zip(batch, fresh, strict=True):
            verdict = judge(item, shown[id], prints.get(id, ()), read)
            equal += verdict.status == "equal"
            if verdict.status != "equal":
                text = f"{item.path}: {verdict.text}"
                (wrong if verdict.status == "wrong" else notes).append(text)
        state.checked += len(batch)
    assert state.work_began is not None
    assert state.work_ended is not None
    seconds = state.work_ended - state.work_began
    return Report(
        ok=not wrong,
        path=encode_name(str(state.root)),
        files=len(state.items),
        bytes=sum(item.size for item in state.items.values()),
        compressed=sum(found[0].packed for found in prints.values()),
        settled_exactly_once=sum(len(shown[id]) == 1 for id in state.items)
        - len(state.shown_twice),
        digests_equal=equal,
        recovered=sum(any(job.recovery_count for job in jobs) for jobs in shown.values()),
        killed_with=[state.items[id].path for id in state.victims],
        taken_over_after=state.taken_over,
        run_again=sum(len(found) > 1 for found in prints.values()),
        seconds=round(seconds, 3),
        jobs_per_second=round(len(state.items) / seconds, 1),
        notes=notes,
        wrong=wrong,
        lanes=dict(state.total),
    )


def _read_again(paths: Iterable[str]) -> list[Print | OSError]:
    found: list[Print | OSError] = []
    for path in paths:
        try:
            found.append(press(path, lambda: None, pack=False))
        except OSError as error:
            found.append(error)
    return found


T = TypeVar("T")


def _batches(values: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), size):
        yield values[start : start + size]


# -- the screen ------------------------------------------------------------------------------------

Line = list[tuple[str, str]]
"""A line to show: pieces of text, each with its style, a key of `_STYLES`."""

_STYLES = {"": "", "bold": "\x1b[1m", "dim": "\x1b[2m", "good": "\x1b[32m", "bad": "\x1b[31m"}

BAR = 24
"""Width of a lane's bar."""


class Screen:
    """Shows the state: drawn over and over on a terminal, or as plain lines elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self.signal = 0
        """The signal that ended the demo."""
        self._stream = stream
        terminal = os.environ.get("TERM", "")
        self._live = stream.isatty() and terminal not in ("", "dumb")
        self._colour = self._live and not os.environ.get("NO_COLOR")
        try:
            "█░·…".encode(stream.encoding)
            self._full, self._empty, self._cut = "█", "░", "…"
        except UnicodeEncodeError:
            self._full, self._empty, self._cut = "#", "-", "..."
        self._drawn: list[int] = []
        """Widths of the lines that the next picture is drawn over."""
        self._told = 0
        self._state: State | None = None
        self._is_watched = True

    @contextmanager
    def showing(self, state: State) -> Generator[None]:
        """Show the state within. In the end the last picture stays, and the cursor is back."""
        self._state = state
        for line in _heading(state):
            self._write(self._text(line) + "\n")
        if self._live:
            self._write("\x1b[?25l")
        try:
            yield
        finally:
            self._draw(last=True)
            if self._live:
                self._write("\x1b[?25h")

    async def paint(self) -> None:
        """Draw until cancelled."""
        while True:
            self._draw()
            await trio.sleep(0.1 if self._live else 2)

    def conclude(self, state: State, report: Report) -> None:
        """The result, and what to think of it."""
        for line in _conclusion(state, report):
            self._write(self._text(line) + "\n")

    def interrupt(self, number: int) -> None:
        """A signal ends the demo: say so at once, for stopping takes a moment."""
        self.signal = number
        if self._state is not None:
            self._state.note(f"{signal.Signals(number).name}: stopping the workers")
            self._draw()

    def _draw(self, *, last: bool = False) -> None:
        state = self._state
        assert state is not None
        if not self._live:
            for when, event in state.events[self._told :]:
                self._write(f"{when:6.1f} s  {event}\n")
            self._told = len(state.events)
            self._write(f"{state.elapsed:6.1f} s  {_summary(state)}\n")
            return
        columns, rows = shutil.get_terminal_size()
        lines = self._picture(state)
        # What is higher than the window could not be drawn over.
        lines = lines if last else lines[-max(1, rows - 2) :]
        # Up to the first line of the last picture; clear to the end of each line and of the screen.
        # A window that became narrower has wrapped what was drawn before.
        height = sum(max(1, -(-width // columns)) for width in self._drawn)
        up = f"\x1b[{height}A" if height else ""
        body = "".join(f"{self._text(line, columns - 1)}\x1b[K\n" for line in lines)
        self._write(f"{up}\r{body}\x1b[J")
        widths = [sum(len(text) for _, text in line) for line in lines]
        self._drawn = [] if last else [min(width, columns - 1) for width in widths]

    def _picture(self, state: State) -> list[Line]:
        lines: list[Line] = [[]]
        for kind, total in state.total.items():
            done = state.done[kind]
            full = BAR * done // total
            bar = self._full * full + self._empty * (BAR - full)
            jobs = state.running.get(kind, [])
            current = ", ".join(state.items[job.id].path for job in jobs)
            style = "good" if done == total else ""
            lines.append(
                [
                    ("", f"  {kind:<8}"),
                    (style, bar),
                    ("", f" {done:>6} of {total:<6} "),
                    ("dim", current),
                ]
            )
        lines.append([])
        for worker in state.workers:
            style = "" if worker.status in ("at work", "stopped") else "bad"
            text = _count(worker.held) + " in hand" if worker.status == "at work" else ""
            lines.append(
                [
                    ("", f"  worker {worker.number:<3} process {worker.process.pid:<9}"),
                    (style, f"{worker.status:<9} "),
                    ("dim", text),
                ]
            )
        lines += [[], [("bold", f"  {_summary(state)}")]]
        lines += [[("dim", f"  {when:6.1f} s  "), ("", event)] for when, event in state.events[-6:]]
        return lines

    def _text(self, line: Line, width: int | None = None) -> str:
        """The line with its styles, cut to ``width`` characters."""
        left = sum(len(text) for _, text in line) if width is None else width
        parts: list[str] = []
        for style, text in line:
            room = max(0, left - len(self._cut))
            piece = text if len(text) <= left else text[:room] + self._cut[:left]
            left -= len(piece)
            parts.append(f"{_STYLES[style]}{piece}\x1b[0m" if self._colour and style else piece)
        return "".join(parts)

    def _write(self, text: str) -> None:
        if self._is_watched:
            try:
                self._stream.write(text)
                self._stream.flush()
            except OSError:
                # The terminal or the reader has gone. The demo goes on: its exit code tells.
                self._is_watched = False


def _heading(state: State) -> Iterator[Line]:
    size = _size(sum(item.size for item in state.items.values()))
    yield [("bold", "trio-watchdog demo"), ("", f"  {len(state.items)} files, {size}")]
    yield [("dim", f"  {'files':<9}"), ("", encode_name(str(state.root)))]
    yield [("dim", f"  {'jobs':<9}"), ("", state.plan.shown)]


def _summary(state: State) -> str:
    if state.phase == "admitting jobs":
        return f"{state.admitted} of {len(state.items)} jobs admitted"
    if state.phase == "stopping":
        return f"{len(state.settled)} of {len(state.items)} settled; the workers stop"
    if state.phase == "checking":
        return f"{state.checked} of {len(state.items)} files read again and compared"
    return (
        f"{len(state.settled)} of {len(state.items)} settled   {state.rate():.0f} jobs/s   "
        f"{len(state.recovered)} recovered   {state.elapsed:.1f} s"
    )


def _conclusion(state: State, report: Report) -> Iterator[Line]:
    def row(name: str, value: str, style: str = "") -> Line:
        return [("", f"  {name:<34}"), (style, value)]

    def share(name: str, count: int) -> Line:
        all_of_them = count == report.files
        return row(name, f"{count} of {report.files}", "good" if all_of_them else "bad")

    yield []
    yield share("settled exactly once", report.settled_exactly_once)
    yield share("digest equal to a fresh reading", report.digests_equal)
    if report.killed_with:
        took = report.taken_over_after
        text = "" if took is None else f", in other hands after {took:.2f} s"
        yield row("held by the killed worker", f"{_count(len(report.killed_with))}{text}")
    elif state.plan.kill:
        yield row("killed", "nobody; the work was done too soon")
    more = report.recovered - len(report.killed_with)
    text = f", {more} of them claimed but not begun" if report.killed_with and more > 0 else ""
    yield row("recovered", f"{_count(report.recovered)}{text}")
    if report.run_again:
        yield row("hashed more than once", f"{_count(report.run_again)}; effects are at least once")
    yield row("compressed", f"{_size(report.bytes)} to {_size(report.compressed)}")
    yield row("time", f"{report.seconds:.1f} s, {report.jobs_per_second:.0f} jobs/s")
    for style, title, texts in (("", "note", report.notes), ("bad", "wrong", report.wrong)):
        for text in texts[:8]:
            yield row(title, text, style)
        if len(texts) > 8:
            yield row(title, f"and {len(texts) - 8} more; --json has all", style)
    if state.plan.database is not None:
        yield row("look at the jobs", f"trio-watchdog list --lane {lane_of(state.mark, 'python')}")
    yield []
    if report.ok:
        yield [("good", "Nothing is missing, and nothing is wrong.")]
    else:
        count = len(report.wrong)
        yield [("bad", f"{count} {'fault' if count == 1 else 'faults'} found.")]


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _count(jobs: int) -> str:
    return f"{jobs} job" if jobs == 1 else f"{jobs} jobs"


def _times(count: int) -> str:
    return "not at all" if count == 0 else f"{count} times"
