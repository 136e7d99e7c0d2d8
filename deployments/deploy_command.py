"""The command `agl deploy`."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from agl_core.config import RunConfig
from agl_core.errors import ConfigError

_answers = Console(width=None if sys.stdout.isatty() else 100)
_POOL = "agl"


def deploy(
    configs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[CONFIG]...",
            help="Run configurations; each becomes the deployment training-run/RUN_ID. Without "
            "any, the one in prefect.yaml is deployed.",
        ),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Work pool of everything; prefect.yaml's (agl) unless given.")
    ] = None,
    train_pool: Annotated[
        str | None, typer.Option(help="Work pool of training runs, where it is another one.")
    ] = None,
    shard_pool: Annotated[
        str | None, typer.Option(help="Work pool of the shards of rollouts.")
    ] = None,
    pool_type: Annotated[
        str, typer.Option("--type", help="Type of pools that are created: process, docker, ...")
    ] = "process",
    queue: Annotated[
        str | None, typer.Option(help="Work queue of these pools; the default one unless given.")
    ] = None,
    pool_limit: Annotated[
        int | None, typer.Option(min=1, help="Flow runs at once in each pool.")
    ] = None,
    shard_limit: Annotated[
        int | None, typer.Option(min=1, help="Shards at once, over all training runs.")
    ] = None,
    shard_folder: Annotated[
        str | None,
        typer.Option(
            help="Folder on the shards' machines from which agents are imported; this one's "
            "working directory unless given."
        ),
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Use this ledger instead of the configurations'.")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            metavar="CRON",
            help="Start each as a new run at these times, such as '0 2 * * *'; 'off' pauses it.",
        ),
    ] = None,
    timezone: Annotated[str, typer.Option(help="Time zone of --schedule.")] = "UTC",
    dataset: Annotated[
        str | None,
        typer.Option(
            "--on-dataset",
            metavar="NAME",
            help="Start a new run on each version that `agl dataset publish NAME` publishes; "
            "'off' pauses that.",
        ),
    ] = None,
    heartbeat: Annotated[
        int | None,
        typer.Option(
            min=30,
            help="Seconds between the heartbeats of flow runs (60 unless given); one that misses "
            "three is marked Crashed, and a training run is started again.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
) -> None:
    """Set up the Prefect server: work pools, deployments, schedules, limits, automations.

    Give it again at any time: what is as it should be stays, what differs is changed, and the table
    says which. Options are not remembered: without one, what prefect.yaml says counts again (pools,
    queue, folder, times, heartbeat), and what it does not say stays (limits, --on-dataset).
    Schedules and automations that were switched on or off in the UI stay so. Flow runs start in the
    working directory of this command.

    Needs PREFECT_API_URL. Example:

        agl deploy my_run.yaml --train-pool gpu --shard-pool cpu --schedule "0 2 * * *"
    """
    from deployments.server import require_server

    require_server("agl deploy")
    found = [_read(path, ledger) for path in configs or ()]
    _check_options(found, ledger, schedule)

    from deployments.plan import Options, make_plan  # prefect takes two seconds

    options = Options(
        train_pool=train_pool or pool,
        shard_pool=shard_pool or pool,
        pool_type=pool_type,
        queue=queue,
        pool_limit=pool_limit,
        shard_limit=shard_limit,
        shard_folder=shard_folder,
        schedule=schedule,
        timezone=timezone,
        dataset=dataset,
        heartbeat_seconds=heartbeat,
    )
    plan = make_plan(found, options, Path.cwd())

    from prefect.client.orchestration import get_client

    from deployments.apply import Reconciler

    table = Table("thing", "name", "would be" if dry_run else "now")
    num_changes = 0
    with get_client(sync_client=True) as client:
        for change in Reconciler(client, plan, dry_run=dry_run).apply():
            num_changes += not change.is_none
            table.add_row(change.kind, change.name, str(change))
    _answers.print(table)
    if num_changes == 0:
        _answers.print("Everything is as it should be; nothing was changed.")
    elif dry_run:
        _answers.print(f"{num_changes} of these would change; nothing was changed.")
    for name in plan.pools:
        _answers.print(
            f"Worker: prefect worker start --pool {shlex.quote(name)} --type {pool_type}",
            soft_wrap=True,
        )
    for deployment in plan.deployments:
        if deployment.flow_name == "training-run":
            _answers.print(f"Start:  prefect deployment run {deployment.full_name}", soft_wrap=True)


def _read(path: Path, ledger: str | None) -> RunConfig:
    """Return a configuration whose agent can be imported from here."""
    from agl_core.litagent.decorator import load_agent
    from deployments.cli import read_config  # the command line imports this module

    config = read_config(path, {"ledger": ledger})
    load_agent(config.agent)
    return config


def _check_options(configs: list[RunConfig], ledger: str | None, schedule: str | None) -> None:
    if ledger is not None and not configs:
        raise ConfigError("--ledger replaces that of configurations: name at least one")
    if schedule not in (None, "off"):
        from prefect.client.schemas.schedules import CronSchedule
        from pydantic import ValidationError

        try:
            CronSchedule(cron=schedule)
        except ValidationError as error:
            raise ConfigError(
                f"--schedule {schedule!r} is no cron expression: use five fields such as "
                "'0 2 * * *', or 'off'"
            ) from error
