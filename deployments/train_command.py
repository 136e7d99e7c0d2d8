"""The command `agl train`: the same run as `agl run`, by a Trainer and without Prefect."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agl_core import progress
from agl_core.algorithm.build import build_algorithm
from agl_core.algorithm.run_settings import check_run_settings
from agl_core.config import RunConfig
from agl_core.dataset import read_jsonl
from agl_core.ledger.run import open_run
from agl_core.ledger.s3_access import S3Access
from agl_core.litagent.decorator import load_agent
from agl_core.preflight import prepare_run
from agl_core.terminal import RunDisplay
from agl_core.trainer.trainer import Trainer

_log = Console(stderr=True)
_POLL_SECONDS = 0.5


class Strategy(StrEnum):
    """Where the runners are."""

    SHM = "shm"
    CS = "cs"


def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="The run's YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Keys of VERL instead of the file's."),
    ] = None,
    strategy: Annotated[
        Strategy, typer.Option(help="Runners as processes (cs) or threads of this one (shm).")
    ] = Strategy.CS,
    runners: Annotated[int, typer.Option(min=1, help="How many there are.")] = 1,
    port: Annotated[
        int, typer.Option(min=0, help="Of the store's server (cs); 0 for a free one.")
    ] = 0,
    run_id: Annotated[str | None, typer.Option(help="Use this name instead of the file's.")] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Use this ledger instead of the file's.")
    ] = None,
    allow_changed: Annotated[
        bool, typer.Option(help="Go on with a run whose config, data or code changed; record it.")
    ] = False,
) -> None:
    """Train an agent without Prefect; a run that was interrupted goes on where its ledger ends.

    Takes the files of `agl run` and writes the same ledger. Settings of the work pool are refused.

    Example: agl train -c examples/calculator/run.yaml --strategy shm --run-id mine
    """
    from deployments import cli  # which imports this module

    settings = cli.read_config(config, {"run_id": run_id, "ledger": ledger})
    if overrides:
        settings = cli.with_overrides(settings, overrides)
    check_run_settings(settings)
    algorithm = build_algorithm(settings)
    algorithm.run_settings = settings
    algorithm.allow_changed = allow_changed
    access = S3Access(settings.s3)
    found = open_run(settings.ledger, settings.run_id, access)
    if found.exists() and _is_complete(settings, allow_changed=allow_changed):
        cli.show_complete(found, config)
        return
    rows = [json.loads(row) for row in read_jsonl(settings.train_data, access)]
    val_rows = None
    if settings.val_data is not None:
        val_rows = [json.loads(row) for row in read_jsonl(settings.val_data, access)]
    trainer = Trainer(
        algorithm=algorithm,
        strategy=_strategy(strategy, runners, port),
        runner=_runner(settings),
    )
    display = RunDisplay(_log, settings.run_id)
    try:
        with display, progress.listen(display):
            trainer.fit(load_agent(settings.agent), rows, val_dataset=val_rows)
    except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
        cli.say_interrupted()
        raise
    cli.show(found, settings.run_id)


def _is_complete(settings: RunConfig, *, allow_changed: bool) -> bool:
    """Say whether a run that has begun has nothing left to do."""
    run = prepare_run(settings, allow_changed=allow_changed)
    return run.algorithm.done(run.state_after(run.ledger.committed()))


def _strategy(strategy: Strategy, runners: int, port: int) -> dict[str, Any]:
    """Return the strategy; the algorithm stays in this thread, which shows what it does."""
    if strategy is Strategy.SHM:
        return {"type": "shm", "n_runners": runners, "main_thread": "algorithm"}
    return {"type": "cs", "n_runners": runners, "server_port": port}


def _runner(settings: RunConfig) -> dict[str, Any]:
    return {
        "concurrency": settings.rollout.concurrency,
        "max_leaked_threads": settings.rollout.max_leaked_threads,
        "poll_interval": _POLL_SECONDS,
        "heartbeat_launch_mode": "thread",
    }
