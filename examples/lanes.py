"""Lanes for the command line: ``trio-watchdog run examples.lanes:lanes --database sqlite:jobs.db``.

Then, from elsewhere, give them something to do::

    trio-watchdog enqueue greet '{"name": "Ada"}'
    trio-watchdog enqueue count 60 --id slow --max-recoveries 3
    trio-watchdog enqueue checksum '"README.md"'
    trio-watchdog cancel slow
"""

import hashlib
import pathlib

import trio

from trio_watchdog import Fail, Lanes, RetryPolicy, RunningJob, thread_handler

lanes = Lanes()


@lanes.lane("greet", retry=RetryPolicy(max_attempts=3))
async def greet(job: RunningJob) -> None:
    """Say hello to the payload's ``name``."""
    print(f"Hello, {job.payload['name']}!", flush=True)


@lanes.lane("count")
async def count(job: RunningJob) -> None:
    """Count the payload's number of seconds: a job to cancel, drain or kill."""
    for second in range(job.payload):
        print(f"{job.id}: {second + 1} of {job.payload}", flush=True)
        await trio.sleep(1)


@lanes.lane("checksum", workers=2)
@thread_handler
def checksum(job: RunningJob) -> Fail | None:
    """Hash the file that the payload names, in a thread."""
    digest = hashlib.sha256()
    try:
        with pathlib.Path(job.payload).open("rb") as file:
            while block := file.read(1024 * 1024):
                job.checkpoint()
                digest.update(block)
    except OSError as error:
        return Fail(f"cannot read {job.payload}: {error.strerror}"[:200])
    print(f"{digest.hexdigest()}  {job.payload}", flush=True)
    return None
