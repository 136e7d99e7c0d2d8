"""A shard whose flow run is started again by itself, from the UI: only what is left runs."""

import logging

from agl_core.errors import ConfigError, NothingToRetryError, UpstreamError
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import open_run
from agl_core.ledger.s3_access import S3Access, S3Credentials
from agl_core.runner.shard import ShardRef
from agl_core.serving.launch import check_server

logger = logging.getLogger(__name__)

_ROLLOUT_STAGES = ("rollout_base", "rollout", "rollout_new")


def retry_shard(ref: ShardRef, credentials: S3Credentials | None = None) -> ShardRef | None:
    """Claim what is unfinished or failed of a shard's rollouts; None where nothing is left, or
    another shard has replaced it.

    The next start of the run, or its iteration if that lives, finds the results.

    Raises:
        NothingToRetryError: The set's rollouts are recorded, so nothing would use the results.
        ConfigError: The model server that the shard was started with is gone.
    """
    access = S3Access(ref.s3, credentials)
    ledger = open_run(ref.ledger, ref.run_id, access, conditional_put=ref.conditional_put)
    iteration = ledger.iteration(ref.iteration)
    for stage in _ROLLOUT_STAGES:
        record = iteration.record(stage)
        if record is not None and record.values["rollout_set"] == ref.rollout_set:
            raise NothingToRetryError(
                f"shard {ref.name} cannot be retried: stage {stage} of iteration {ref.iteration} "
                "has its record. Before the commit, retry the iteration; after it, look at it with "
                f"`agl ledger show {ref.run_id}`, or start another run under another run id"
            )
    try:
        for url in ref.model_servers:
            check_server(url)
    except UpstreamError as error:
        raise ConfigError(
            f"shard {ref.name} cannot be retried by itself: its model server is gone ({error}). "
            "Retry the iteration or the run, which start one"
        ) from error
    claim = RolloutSet(iteration, ref.rollout_set).claim_rest(ref.claim)
    if claim is None:
        logger.info("shard=%s: nothing is left of it, or another shard replaced it", ref.name)
        return None
    latest = ledger.starts.latest()
    start = latest.number if latest else ref.start
    logger.info("shard=%s runs %d rollouts again", ref.name, len(claim.indices))
    return ref.model_copy(update={"claim": claim.number, "start": start})
