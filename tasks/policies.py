"""The one place for retry, backoff and caching of Prefect tasks."""

from functools import partial
from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.tasks import exponential_backoff

from agl_core.errors import RolloutFailed, TransientError, UpstreamError


async def is_transient(task: Any, task_run: Any, state: Any) -> bool:
    """Say whether another try of a stage may work (Prefect's retry condition)."""
    del task, task_run
    error = await state.aresult(raise_on_failure=False)
    return isinstance(error, TransientError | UpstreamError)


async def has_another_attempt(task: Any, task_run: Any, state: Any) -> bool:
    """Say whether a rollout is tried again, and when (Prefect's retry condition).

    Prefect knows one delay for a task, whatever failed: the task of each rollout is a copy of its
    own, and is given the delay that Prefect reads next.
    """
    del task_run
    error = await state.aresult(raise_on_failure=False)
    if not isinstance(error, RolloutFailed) or error.retry_seconds is None:
        return False
    task.retry_delay_seconds = error.retry_seconds
    return True


# Prefect's cache and result storage are off: the ledger alone says what is done.
ledger_task = partial(
    task,
    retries=2,
    retry_delay_seconds=exponential_backoff(2),
    retry_jitter_factor=0.3,
    retry_condition_fn=is_transient,
    cache_policy=NO_CACHE,
    persist_result=False,
)
