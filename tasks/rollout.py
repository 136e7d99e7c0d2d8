"""One task run for one rollout; its Prefect retries are its attempts."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.runtime import task_run

from agl_core.config import RolloutSettings
from agl_core.errors import RolloutFailed
from agl_core.runner.shard import current_shard
from agl_core.types.outcome import FailureKind
from tasks.policies import retries_kinds


@task(name="rollout", task_run_name="rollout-{index}", cache_policy=NO_CACHE, persist_result=False)
async def rollout(index: int, rollout_id: str) -> float | None:
    """Run one attempt in the shard of this process and return its reward.

    Raises:
        RolloutFailed: The attempt did not succeed; Prefect runs another one where the kind's policy
        says so.
    """
    outcome = await current_shard().run_attempt(index, attempt=task_run.run_count or 1)
    if outcome.kind is not FailureKind.SUCCEEDED:
        raise RolloutFailed(f"{rollout_id} {outcome.kind}: {outcome.message}", outcome.kind.value)
    return outcome.reward


def rollout_task(settings: RolloutSettings) -> Any:
    """Return the rollout task with the retry policy of a run."""
    return rollout.with_options(
        retries=settings.max_attempts - 1,
        retry_delay_seconds=settings.retry_delay_seconds,
        retry_jitter_factor=0.5,
        retry_condition_fn=retries_kinds(frozenset(kind.value for kind in settings.retry)),
    )
