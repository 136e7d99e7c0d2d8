"""The command `agl check`."""

import asyncio
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agl_core.config import RunConfig
from agl_core.errors import AglError, ConfigError
from agl_core.preflight import CheckResult, Checks, examine
from agl_core.prepared import PreparedRun
from deployments.credentials import find_credentials

_answers = Console(width=None if sys.stdout.isatty() else 100)
_STATE_FOLDER = Path(".agl")
_FAILED = 2
_SERVER = "Prefect server answers"


def check(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's configuration.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...", help="Keys of VERL instead of the file's, in Hydra's grammar."
        ),
    ] = None,
    run_id: Annotated[str | None, typer.Option(help="Use this name instead of the file's.")] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Use this ledger instead of the file's.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Train this Hugging Face folder instead of the file's.")
    ] = None,
    deployment: Annotated[
        str | None,
        typer.Option(
            help="Check with the shards on this deployment instead of the file's "
            "rollout.deployment, such as rollout-shard/rollout-shard."
        ),
    ] = None,
    canary: Annotated[
        bool, typer.Option(help="Start the model server and run one rollout, as a run would.")
    ] = True,
) -> None:
    """Check everything that can go wrong with a run before it trains, cheap things first.

    Shows each check with its result and ends with status 2 at the first one that fails. The
    rollout is a real one (by the work pool where shards run there); it is recorded as a run of its
    own, check-TIME, in the ledger.

    Example: agl check my_run.yaml
    """
    from deployments import cli  # which imports this module

    settings = cli.read_config(config, {"run_id": run_id, "ledger": ledger})
    if overrides:
        settings = cli.with_overrides(settings, overrides)
    if model is not None:
        settings = cli.with_model(settings, model)
    if deployment is not None:
        rollout = settings.rollout.model_copy(update={"deployment": deployment})
        settings = settings.model_copy(update={"rollout": rollout})
    results: list[CheckResult] = []
    try:
        _run_checks(settings, Checks(results.append), canary=canary)
    except AglError as error:
        if not any(result.problem for result in results):
            results.append(CheckResult("services of the run", 0.0, str(error)))
    _answers.print(_table(results))
    if any(result.problem for result in results):
        raise typer.Exit(_FAILED)
    options = {"--run-id": run_id, "--ledger": ledger, "--model": model}
    given = [shlex.quote(text) for text in overrides or ()]
    given += [f"{name} {shlex.quote(str(value))}" for name, value in options.items() if value]
    _answers.print(_next_step(settings, config, given), soft_wrap=True)


def _next_step(settings: RunConfig, file: Path, given: list[str]) -> str:
    options = "".join(f" {option}" for option in given)
    can_start = f"Run {settings.run_id} can start: "
    if settings.rollout.deployment is None:
        return f"{can_start}agl run {file}{options}"
    options = "".join(f" {option}" for option in given if option.startswith("--ledger "))
    return (
        f"{can_start}prefect deployment run training-run/{settings.run_id} "
        f"(agl deploy {file}{options} makes that deployment)"
    )


def check_deployment(deployment: str) -> None:
    """Return if the shards of a run would be started on its work pool.

    Raises:
        ConfigError: They would not, or no server is named that could have the deployment.
    """
    from deployments.server import require_server

    require_server(f"rollout.deployment {deployment}")
    from flows.pool_check import check_pool

    try:
        asyncio.run(check_pool(deployment))
    except AglError as error:
        raise ConfigError(str(error)) from error


def _run_checks(settings: RunConfig, checks: Checks, *, canary: bool) -> None:
    """Run checks until one fails, cheap ones first.

    Raises:
        AglError: It did.
    """
    from deployments.server import require_server

    answered, credentials = False, None
    if settings.s3.credentials is not None:  # needed to read
        with checks(_SERVER):
            require_server(f"Prefect block {settings.s3.credentials}")
        answered = True
        with checks("credentials of the ledger are there"):
            credentials = find_credentials(settings.s3)
    run = examine(settings, credentials, checks)
    if run.ledger.exists():
        with checks("run is the one in the ledger"):
            run.ledger.start(run.record)  # writes nothing where there is one
    if settings.rollout.deployment is not None:
        if not answered:
            with checks(_SERVER):
                require_server(f"rollout.deployment {settings.rollout.deployment}")
        answered = True
        with checks("work pool starts shards"):
            check_deployment(settings.rollout.deployment)
    if canary and settings.preflight.canary:
        _run_canary(run, checks, answered=answered)


def _run_canary(run: PreparedRun, checks: Checks, *, answered: bool) -> None:
    """Start the run's services and run one rollout.

    Args:
        run: What was examined.
        checks: Is told of each check.
        answered: Whether a Prefect server is named and has answered.
    """
    from deployments.server import connected_server

    with ExitStack() as stack:
        with checks("libraries of the algorithm can be loaded" if answered else _SERVER):
            server = connected_server(_STATE_FOLDER / "prefect", run.algorithm.warm_up)
            stack.enter_context(server)
        from flows.check import check_services  # prefect reads its settings when imported

        asyncio.run(check_services(run, checks))


def _table(results: list[CheckResult]) -> Table:
    table = Table("check", "result", "s")
    for result in results:
        text = Text(result.problem, style="red") if result.problem else Text("ok", style="green")
        table.add_row(result.name, text, f"{result.seconds:.1f}")
    return table
