"""Moving unsettled jobs from one database to another, such as from SQLite to PostgreSQL.

Jobs are copied first and removed from their old place afterwards, a page at a time, and a job that
is in its new place already is not copied again: a move that was interrupted is simply started
again. What is settled stays where it is. Nobody may work in the old place meanwhile, for a job
could run in both.
"""

from __future__ import annotations

from attrs import frozen

from ._errors import StoreInvalid
from ._identity import fresh_token
from ._model import CompletingJob, RunningJob
from ._store import Store
from ._wishes import Export, Import, ReadJobs, Remove


@frozen
class Migration:
    """What was moved, and how many of these were in the new place before."""

    moved: int
    duplicates: int


async def migrate(source: Store, target: Store) -> Migration:
    """Move all queued and completing jobs, with their counters, in order of admission.

    Claims in ``source`` that disappeared are decided about first. Raises `StoreInvalid` when a
    job still runs there, before anything is moved.
    """
    after = 0
    while (job := await source.next_running_claim(after)) is not None:
        after = job.sequence
        await source.reconcile(job.id, job.token)
    await source.settle_cancelled()
    token = fresh_token()
    # Completions without an owner; all under one token, which tells them from the live ones.
    while await source.take_completing(token) is not None:
        pass
    for state in ("running", "completing"):
        for job in await source.ask(ReadJobs(state=state)):
            if isinstance(job, (RunningJob, CompletingJob)) and job.token != token:
                raise StoreInvalid(
                    f"job {job.id!r} of lane {job.lane!r} is {job.state} under a lease until"
                    f" {job.lease_until.isoformat()}; stop the workers of the old database first"
                )
    moved = duplicates = 0
    after = 0
    while True:
        exported = await source.ask(Export(after))
        if not exported.rows:
            return Migration(moved, duplicates)
        imported = await target.ask(Import(exported.rows))
        moved += await source.ask(Remove([row[0] for row in exported.rows]))
        duplicates += len(exported.rows) - imported
        after = exported.last
