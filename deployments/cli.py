"""The command `agl`: run a training campaign, look at its record, serve a store.

Exit status: 0 done, 1 a check or a run failed, 2 the request cannot be carried out as it was made.
Answers go to standard output, everything else to standard error.
"""

import asyncio
import logging
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from pydantic import ValidationError
from rich.console import Console

from agl_core import progress
from agl_core.config import RunConfig
from agl_core.dataset import publish_dataset
from agl_core.errors import AglError, ConfigError
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.storage import open_storage
from agl_core.ledger.verify import verify_run
from agl_core.preflight import prepare_run
from agl_core.terminal import RunDisplay, iterations_table
from deployments.store_command import store

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train LLM agents as a Prefect pipeline, and look at the record afterwards.",
)
ledger_app = typer.Typer(no_args_is_help=True, help="Look at runs in a ledger and check them.")
app.add_typer(ledger_app, name="ledger")
dataset_app = typer.Typer(no_args_is_help=True, help="Publish versions of datasets.")
app.add_typer(dataset_app, name="dataset")
app.command()(store)

STATE_FOLDER = Path(".agl")
_FAILED_DRAIN_SECONDS = 15.0
_QUIET_LOGGERS = ("prefect", "EventsWorker", "agl_core.runner.rollout")
_answers = Console(width=None if sys.stdout.isatty() else 100)
_log = Console(stderr=True)

Ledger = Annotated[str, typer.Option(help="A local folder, or s3://bucket/prefix.")]
RunId = Annotated[str, typer.Argument(help="Name of the run.")]


@app.command()
def run(
    config: Annotated[Path, typer.Argument(help="YAML file with the run's configuration.")],
    run_id: Annotated[str | None, typer.Option(help="Use this name instead of the file's.")] = None,
    ledger: Annotated[
        str | None, typer.Option(help="Use this ledger instead of the file's.")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Train this Hugging Face folder instead of the file's.")
    ] = None,
) -> None:
    """Train an agent; a run that was interrupted goes on where its ledger ends.

    Starts a Prefect server of its own unless PREFECT_API_URL names one.

    Example: agl run examples/calculator/run.yaml --run-id my-run
    """
    settings = read_config(config, {"run_id": run_id, "ledger": ledger})
    if model is not None:
        settings = with_model(settings, model)
    try:
        prepared = prepare_run(settings)
    except AglError as error:  # whatever it is, nothing has been started
        raise ConfigError(str(error)) from error
    if prepared.algorithm.done(prepared.state_after(prepared.ledger.committed())):
        _show(prepared.ledger, settings.run_id)
        _answers.print(
            f"Run {settings.run_id} is complete. Start another one with --run-id NAME "
            "(make demo RUN=NAME)."
        )
        return
    from deployments.server import connected_server, drain

    display = RunDisplay(
        _log, settings.run_id, prepared.algorithm.num_iterations(prepared.start_state)
    )
    with (
        display,
        connected_server(STATE_FOLDER / "prefect", prepared.algorithm.warm_up),
        progress.listen(display),
    ):
        from flows.training_run import training_run

        started = datetime.now(UTC)

        async def run_and_drain() -> bool:
            try:
                await training_run(settings)
            except Exception:
                # A server of ours stops next; what is still on its way there would be lost.
                await drain(started, deadline_seconds=_FAILED_DRAIN_SECONDS)
                raise
            return await drain(started)

        if not asyncio.run(run_and_drain()):
            _log.print("The Prefect server did not record every task run in time; the ledger did.")
    _show(prepared.ledger, settings.run_id)


@app.command()
def ui(
    port: Annotated[int, typer.Option(help="Port on the loopback address.")] = 4200,
) -> None:
    """Open the Prefect UI on the runs that were recorded here, until Ctrl-C."""
    from deployments.server import prefect_server

    with prefect_server(STATE_FOLDER / "prefect", port=port) as url:
        _answers.print(f"Prefect UI: {url.removesuffix('/api')}/v2/dashboard  (Ctrl-C ends it)")
        try:
            asyncio.run(asyncio.Event().wait())
        except KeyboardInterrupt:
            _log.print("stopped")


@dataset_app.command("publish")
def dataset_publish(
    name: Annotated[str, typer.Argument(help="Name of the dataset.")],
    data: Annotated[str, typer.Argument(help="JSON Lines file, each line one task.")],
    ledger: Ledger = str(STATE_FOLDER / "ledger"),
) -> None:
    """Keep an immutable version of a dataset and tell the Prefect server, which may start a run.

    The event `agl.dataset.published` carries the version's URI; the deployment `training-run` has a
    trigger for it.

    Example: agl dataset publish calculator new_rows.jsonl
    """
    uri = publish_dataset(open_storage(ledger), name, data)
    from prefect.events import emit_event

    emit_event(
        "agl.dataset.published",
        resource={"prefect.resource.id": f"agl.dataset.{name}"},
        payload={"uri": uri},
    )
    _answers.print(uri, soft_wrap=True)


@ledger_app.command("show")
def ledger_show(run_id: RunId, ledger: Ledger = str(STATE_FOLDER / "ledger")) -> None:
    """Show a run's committed iterations.

    Example: agl ledger show calculator
    """
    found = open_run(ledger, run_id)
    found.record()
    _show(found, run_id)


@ledger_app.command("verify")
def ledger_verify(run_id: RunId, ledger: Ledger = str(STATE_FOLDER / "ledger")) -> None:
    """Hash every file of a run again and compare rows and counts with its manifests.

    Example: agl ledger verify calculator
    """
    found = open_run(ledger, run_id)
    found.record()
    differences = verify_run(found)
    for line in differences:
        _answers.print(line)
    if differences:
        raise typer.Exit(1)
    _answers.print(
        f"Run {run_id}: {len(found.manifests())} iterations, every file as its manifest says."
    )


def read_config(path: Path, overrides: dict[str, Any]) -> RunConfig:
    """Return the configuration in a YAML file; options that are not None replace its values.

    Raises:
        ConfigError: The file is missing, is not YAML, or has unknown or wrong settings.
    """
    if not path.is_file():
        raise ConfigError(f"configuration {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"configuration {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path} must be a mapping of settings")
    values |= {name: value for name, value in overrides.items() if value is not None}
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, entry['loc']))}: {entry['msg']}" for entry in error.errors()
        )
        raise ConfigError(f"configuration {path}: {problems}") from error


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with another policy to start from.

    Raises:
        ConfigError: A key of the algorithm's settings is set twice.
    """
    from agl_core.algorithm.verl.config import normalise  # hydra takes a moment

    settings = normalise(config.algorithm.config) | {"actor_rollout_ref.model.path": str(folder)}
    algorithm = config.algorithm.model_copy(update={"config": settings})
    return config.model_copy(update={"algorithm": algorithm})


def _show(ledger: RunLedger, run_id: str) -> None:
    _answers.print(iterations_table(run_id, ledger.manifests()))
    _answers.print(f"Ledger: {ledger.storage.uri}/{ledger.prefix}", soft_wrap=True)
    plot = ledger.storage.local_path(ledger.plot_key)
    if ledger.storage.exists(ledger.plot_key):
        _answers.print(f"Reward plot: {plot or ledger.plot_key}", soft_wrap=True)


def _log_to_stderr() -> None:
    """Show warnings, also of libraries that set their own loggers to a lower level.

    Not those of single flow runs and rollouts: they are in the Prefect UI and in the ledger, the
    summary of an iteration counts them, and an error that ends the run is shown at its end.
    """
    logging.getLogger("agl_core").setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not record.name.startswith(_QUIET_LOGGERS))
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def main() -> None:
    """Run the command; a mistake of the user gives one sentence and status 2, not a traceback."""
    _log_to_stderr()
    sys.path.insert(0, str(Path.cwd()))  # agents are imported from the working directory
    try:
        app()
    except KeyboardInterrupt:
        _log.print("agl: interrupted; the same command goes on where the ledger ends")
        # Servers and engines are stopped. Prefect's exit handlers would wait more than a minute
        # for the server.
        os._exit(130)
    except ConfigError as error:
        _log.print(f"agl: {error}", style="red", soft_wrap=True, markup=False)
        sys.exit(2)
    except AglError as error:
        _log.print(f"agl: {error}", style="red", soft_wrap=True, markup=False)
        sys.exit(1)
