"""The quick start: one lane, two jobs, one file. Run it twice: a settled job does not run again."""

import trio

from trio_watchdog import Job, RetryPolicy, RunningJob, open_watchdog


async def greet(job: RunningJob) -> None:
    """Run one job."""
    print(f"Hello, {job.payload['name']}!")


async def main() -> None:
    """Admit two jobs and see them through."""
    async with open_watchdog("sqlite:jobs.db") as watchdog:
        await watchdog.start_lane("greet", greet, retry=RetryPolicy(max_attempts=5))
        for name in ("Ada", "Grace"):
            await watchdog.enqueue(Job("greet", {"name": name}, id=f"greet-{name}", queue="door"))
        grace = await watchdog.wait_settled("greet-Grace")
        print(f"{grace.id}: {grace.outcome} after {grace.attempt_count} attempt")


trio.run(main)
