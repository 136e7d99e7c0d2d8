"""N iterations of one run, continued from where the ledger ends."""

import logging
from functools import partial

from prefect import flow, tags
from prefect.runtime import flow_run
from pydantic import BaseModel, ConfigDict

from agl_core import progress
from agl_core.config import RunConfig, check_settings
from agl_core.preflight import CheckResult, Checks, prepare_run
from agl_core.prepared import PreparedRun
from agl_core.terminal import plain_line
from flows.canary import check_live
from flows.failure import fails_in_one_sentence
from flows.patience import patiently
from flows.pool_check import check_pool
from flows.training_iteration import training_iteration
from tasks import context
from tasks.context import IterationRef
from tasks.credentials import s3_credentials
from tasks.logs import show_logs
from tasks.plot import plot

logger = logging.getLogger(__name__)


class RunSummary(BaseModel):
    """How a run ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    ledger: str
    iterations: int


def _run_id() -> str:
    """Return the run's id, by the parameters of the flow run; its name in the UI too."""
    parameters = flow_run.parameters
    config = parameters["config"]
    run_id = config["run_id"] if isinstance(config, dict) else config.run_id
    if parameters.get("new_run"):
        return f"{run_id}-{flow_run.scheduled_start_time.strftime('%Y%m%d-%H%M%S')}"
    return run_id


@flow(name="training-run", flow_run_name=_run_id, persist_result=False)
@fails_in_one_sentence
async def training_run(
    config: RunConfig,
    train_data: str | None = None,
    new_run: bool = False,
    automatic: bool = False,
    allow_changed: bool = False,
) -> RunSummary:
    """Train until the algorithm is done; committed iterations are found and not repeated.

    Args:
        config: What to train.
        train_data: Train on this dataset instead of the configuration's (for event triggers).
        new_run: Make each scheduled or triggered start a run of its own: its scheduled time is
            appended to the run id. Started again (a retry), it is the same run.
        automatic: An automation starts it; such starts are counted and, beyond
            `config.max_automatic_starts` in a row, refused.
        allow_changed: Go on although configuration, data or code differ from what the run began
            with; the manifests say so from then on.

    Raises:
        ConfigError: The configuration cannot be used, the run exists with another one, a living
            process carries it on, or automations started it too often.
        RunCancelled: The run was cancelled, in the UI for example.
    """
    show_logs()
    changes = {"run_id": _run_id()} | ({"train_data": train_data} if train_data else {})
    config = check_settings(RunConfig, config.model_dump() | changes)
    if config.rollout.deployment is not None:
        await check_pool(config.rollout.deployment, needs_worker=not automatic)
    run = context.handed_over(config)
    if run is None:
        run = prepare_run(config, s3_credentials(config.s3), allow_changed=allow_changed)
    committed = run.ledger.committed()
    logger.info(
        "run=%s ledger=%s/%s: %d iterations, %d of them committed before",
        run.ledger.run_id,
        run.ledger.storage.uri,
        run.ledger.prefix,
        run.algorithm.num_iterations(run.start_state),
        committed,
    )
    for number in range(committed):
        progress.report(progress.IterationCommitted(run.ledger.manifest(number)))
    with tags(run.ledger.run_id):
        if not run.algorithm.done(run.state_after(committed)):
            async with context.opened(run, automatic=automatic):
                await check_live(run, Checks(_log_check))
                committed = await _iterate(run, committed)
        await patiently(lambda: plot(run.ledger))
    return RunSummary(run_id=run.ledger.run_id, ledger=run.ledger.storage.uri, iterations=committed)


def _log_check(result: CheckResult) -> None:
    if not result.problem:
        logger.info("preflight: %s (%.1f s)", result.name, result.seconds)


async def _iterate(run: PreparedRun, committed: int) -> int:
    """Run iterations until the last committed state is the end; return how many are committed."""
    while not run.algorithm.done(run.state_after(committed)):
        ref = IterationRef(
            ledger=run.ledger.storage.uri,
            s3=run.config.s3,
            run_id=run.ledger.run_id,
            iteration=committed,
        )
        await patiently(partial(training_iteration, ref))
        logger.info("%s", plain_line(run.ledger.manifest(committed)))
        committed += 1
    return committed
