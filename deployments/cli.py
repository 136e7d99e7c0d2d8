"""The command `agl`: run a training campaign, look at its record, serve a store.

Exit status: 0 done, 1 a check or a run failed, 2 the request cannot be carried out as it was made.
Answers go to standard output, everything else to standard error.
"""

import asyncio
import logging
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from agl_core import env_var, progress
from agl_core.algorithm.verl import check_installed
from agl_core.config import RunConfig, S3Settings, check_settings
from agl_core.dataset import publish_dataset
from agl_core.errors import AglError, ConfigError, RunCancelled
from agl_core.ledger.files import hashed
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.storage import open_storage
from agl_core.ledger.verify import find_late, verify_run
from agl_core.lost_output import outlive_output
from agl_core.preflight import prepare_run
from agl_core.prepared import PreparedRun
from agl_core.terminal import RunDisplay, iterations_table
from agl_core.text_formats import read_yaml
from deployments.check_command import check, check_deployment
from deployments.credentials import find_credentials
from deployments.deploy_command import deploy
from deployments.interrupt import ends_promptly
from deployments.proxy_command import proxy
from deployments.store_command import store
from deployments.train_command import train

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
app.command()(check)
app.command()(deploy)
app.command()(store)
app.command()(proxy)
app.command()(train)

STATE_FOLDER = Path(".agl")
_DEMO = Path("examples/calculator/run.yaml")
_FAILED_DRAIN_SECONDS = 15.0
_QUIET_LOGGERS = ("prefect", "EventsWorker", "agl_core.runner.rollout")
_answers = Console(width=None if sys.stdout.isatty() else 100)
_log = Console(stderr=True)

Ledger = Annotated[str, typer.Option(help="A local folder, or s3://bucket/prefix.")]
S3CredentialsName = Annotated[
    str | None,
    typer.Option(help="Prefect block with S3 credentials, such as aws-credentials/NAME."),
]
S3EndpointUrl = Annotated[str | None, typer.Option(help="S3 endpoint, where it is not AWS.")]
S3Region = Annotated[str | None, typer.Option(help="S3 region.")]
RunId = Annotated[str, typer.Argument(help="Name of the run.")]


@app.command()
def run(
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
    allow_changed: Annotated[
        bool, typer.Option(help="Go on with a run whose config, data or code changed; record it.")
    ] = False,
) -> None:
    """Train an agent; a run that was interrupted goes on where its ledger ends.

    Starts a Prefect server of its own unless PREFECT_API_URL names one.

    Example: agl run examples/calculator/run.yaml --run-id my-run algorithm.adv_estimator=rloo
    """
    settings = read_config(config, {"run_id": run_id, "ledger": ledger})
    if overrides:
        settings = with_overrides(settings, overrides)
    if model is not None:
        settings = with_model(settings, model)
    if settings.rollout.deployment is not None:
        check_deployment(settings.rollout.deployment)
    from deployments.server import connected_server, named_server

    named_server()  # a wrong PREFECT_API_URL is found before anything is written
    try:
        prepared = prepare_run(settings, find_credentials(settings.s3), allow_changed=allow_changed)
    except AglError as error:  # whatever it is, nothing has been started
        raise ConfigError(str(error)) from error
    storage = prepared.ledger.storage
    if storage.uri.startswith("s3://") and storage.conditional_put:  # else a warning says it
        _log.print(f"Ledger {storage.uri}: can be written, conditional put is honoured")
    if prepared.algorithm.done(prepared.state_after(prepared.ledger.committed())):
        show_complete(prepared.ledger, config)
        return
    display = RunDisplay(
        _log, settings.run_id, prepared.algorithm.num_iterations(prepared.start_state)
    )
    with (
        ends_promptly(say_interrupted),
        display,
        connected_server(STATE_FOLDER / "prefect", prepared.algorithm.warm_up),
        progress.listen(display),
    ):
        if not _train(prepared, allow_changed=allow_changed):
            _log.print("The Prefect server did not record every task run in time; the ledger did.")
    show(prepared.ledger, settings.run_id)


def _train(prepared: PreparedRun, *, allow_changed: bool) -> bool:
    """Run the flow in this process; say whether the server recorded everything in time.

    Raises:
        KeyboardInterrupt: This process was told to end.
        RunCancelled: The run was cancelled in the UI or by the API.
    """
    from prefect.exceptions import TerminationSignal

    from deployments.server import drain
    from flows.training_run import training_run
    from tasks import context

    started = datetime.now(UTC)
    context.hand_over(prepared)

    async def run_and_drain() -> bool:
        try:
            await training_run(prepared.config, allow_changed=allow_changed)
        except Exception as error:
            if not (isinstance(error, RunCancelled) and error.interrupted):
                # A server of ours stops next; what is still on its way there would be lost.
                await drain(started, deadline_seconds=_FAILED_DRAIN_SECONDS)
            raise
        return await drain(started)

    try:
        return asyncio.run(run_and_drain())
    except TerminationSignal as error:
        raise KeyboardInterrupt from error
    except RunCancelled as error:
        if error.interrupted:
            raise KeyboardInterrupt from error
        raise RunCancelled(f"{error}; the same command goes on where the ledger ends") from error


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
    s3_credentials: S3CredentialsName = None,
    s3_endpoint_url: S3EndpointUrl = None,
    s3_region: S3Region = None,
) -> None:
    """Keep an immutable version of a dataset and tell the Prefect server, which starts the runs of
    deployments that listen to it.

    A deployment listens after `agl deploy my_run.yaml --on-dataset NAME`. The event
    `agl.dataset.published` carries the version's URI.

    Needs PREFECT_API_URL. Example: agl dataset publish calculator new_rows.jsonl
    """
    from deployments.server import require_server

    require_server("agl dataset publish")  # before anything is written
    access = _access(s3_credentials, s3_endpoint_url, s3_region)
    uri = publish_dataset(open_storage(ledger, access), name, data, access)
    from deployments.dataset_event import tell  # prefect takes two seconds

    listeners = tell(name, uri)
    _answers.print(uri, soft_wrap=True)
    if listeners.had_runs:
        runs = ", ".join(f"{known} (flow run {run})" for known, run in listeners.had_runs.items())
        said = (
            f"These rows were published before and have a run of {runs}: nothing is started. "
            f"To train on them again: prefect deployment run {listeners.names[0]} "
            f"--param new_run=true --param train_data={uri}"
        )
    elif listeners.names:
        said = f"A run of it is started by {', '.join(listeners.names)}."
    else:
        said = (
            f"No deployment listens to {name}: agl deploy my_run.yaml --on-dataset {name} sets "
            "one up, for the versions after this one."
        )
    _log.print(said, soft_wrap=True)


@ledger_app.command("show")
def ledger_show(
    run_id: RunId,
    ledger: Ledger = str(STATE_FOLDER / "ledger"),
    s3_credentials: S3CredentialsName = None,
    s3_endpoint_url: S3EndpointUrl = None,
    s3_region: S3Region = None,
) -> None:
    """Show a run's committed iterations.

    Example: agl ledger show calculator
    """
    show(_find(ledger, run_id, _access(s3_credentials, s3_endpoint_url, s3_region)), run_id)


@ledger_app.command("verify")
def ledger_verify(
    run_id: RunId,
    ledger: Ledger = str(STATE_FOLDER / "ledger"),
    s3_credentials: S3CredentialsName = None,
    s3_endpoint_url: S3EndpointUrl = None,
    s3_region: S3Region = None,
) -> None:
    """Hash every file of a run again and compare rows and counts with its manifests.

    Example: agl ledger verify calculator
    """
    found = _find(ledger, run_id, _access(s3_credentials, s3_endpoint_url, s3_region))
    differences = verify_run(found)
    for line in differences:
        _answers.print(line)
    if differences:
        raise typer.Exit(1)
    for key in find_late(found):
        _answers.print(f"{key} arrived after the commit; it is unused", soft_wrap=True)
    committed = found.committed()
    _answers.print(f"Run {run_id}: {committed} iterations, every file as its manifest says.")
    if committed:
        digest = hashed(found.storage, found.iteration(committed - 1).manifest_key).sha256
        _answers.print(
            f"The last manifest vouches for all of it and has sha256 {digest}: keep that elsewhere,"
            " since whoever can write to the ledger could rewrite the whole run.",
            soft_wrap=True,
        )


def read_config(path: Path, overrides: dict[str, Any]) -> RunConfig:
    """Return the configuration in a YAML file; options that are not None replace its values.

    Raises:
        ConfigError: The file is missing, is not YAML, or has unknown or wrong settings.
    """
    if not path.is_file():
        raise ConfigError(f"configuration {path} does not exist")
    values = read_yaml(path, f"configuration {path}")
    if not isinstance(values, dict):
        raise ConfigError(f"configuration {path} must be a mapping of settings")
    values |= {name: value for name, value in overrides.items() if value is not None}
    try:
        return check_settings(RunConfig, values)
    except ConfigError as error:
        raise ConfigError(f"configuration {path}: {error}") from error


def with_model(config: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with another policy to start from.

    Raises:
        ConfigError: The algorithm is not installed here or names its model in its own way, or a
            key of its settings is set twice.
    """
    if config.algorithm.type == "baseline":
        settings = {**config.algorithm.config, "model": str(folder)}
    else:
        model = {"actor_rollout_ref.model.path": str(folder)}
        settings = _verl_settings(config, "--model") | model
    algorithm = config.algorithm.model_copy(update={"config": settings})
    return config.model_copy(update={"algorithm": algorithm})


def with_overrides(config: RunConfig, overrides: list[str]) -> RunConfig:
    """Return the configuration with other keys of VERL, given as `key=value`.

    Raises:
        ConfigError: As for `with_model`, or an override is not in Hydra's grammar.
    """
    settings = _verl_settings(config, "key=value")
    from agl_core.algorithm.verl.overrides import parse_overrides

    settings |= parse_overrides(overrides)
    algorithm = config.algorithm.model_copy(update={"config": settings})
    return config.model_copy(update={"algorithm": algorithm})


def _verl_settings(config: RunConfig, what: str) -> dict[str, Any]:
    if config.algorithm.type != "verl":
        raise ConfigError(
            f"{what} is for VERL's settings, and the algorithm is {config.algorithm.type}: change "
            "algorithm.config in the file"
        )
    check_installed()
    from agl_core.algorithm.verl.overrides import normalise  # hydra takes a moment

    return normalise(config.algorithm.config)


def _access(credentials: str | None, endpoint_url: str | None, region: str | None) -> S3Access:
    """Return the access to S3 that options ask for."""
    values = {"credentials": credentials, "endpoint_url": endpoint_url, "region": region}
    try:
        s3 = check_settings(S3Settings, values)
    except ConfigError as error:
        raise ConfigError(f"S3 options: {error}") from error
    return S3Access(s3, find_credentials(s3))


def _find(ledger: str, run_id: str, access: S3Access) -> RunLedger:
    """Return a run that is there.

    Raises:
        ConfigError: It is not, or the ledger cannot be read.
    """
    found = open_run(ledger, run_id, access)
    try:
        found.record()
    except AglError as error:
        raise ConfigError(str(error)) from error
    return found


def show_complete(ledger: RunLedger, config: Path) -> None:
    """Show a run that has nothing left to do."""
    show(ledger, ledger.run_id)
    demo = " (make demo RUN=NAME)" if config == _DEMO else ""
    said = f"Run {ledger.run_id} is complete. Start another one with --run-id NAME{demo}."
    _answers.print(said, soft_wrap=True)


def show(ledger: RunLedger, run_id: str) -> None:
    """Show a run's committed iterations and where its record is."""
    _answers.print(iterations_table(run_id, ledger.manifests()))
    _answers.print(f"Ledger: {ledger.storage.uri}/{ledger.prefix}", soft_wrap=True)
    if ledger.storage.exists(ledger.plot_key):
        plot = ledger.storage.uri + "/" + ledger.plot_key
        _answers.print(f"Reward plot: {plot}", soft_wrap=True)


def say_interrupted() -> None:
    """Tell the user of a run that was interrupted what to do next."""
    _log.show_cursor()
    _log.print("agl: interrupted; the same command goes on where the ledger ends")


def _log_to_stderr() -> None:
    """Show warnings, also of libraries that set their own loggers to a lower level.

    Not those of single flow runs and rollouts: they are in the Prefect UI and in the ledger, the
    summary of an iteration counts them, and an error that ends the run is shown at its end.
    """
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.addFilter(lambda record: not record.name.startswith(_QUIET_LOGGERS))
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)


def main() -> None:
    """Run the command; a mistake of the user gives one sentence and status 2, not a traceback."""
    _log_to_stderr()
    env_var.bypass_proxies()
    outlive_output()
    sys.path.insert(0, str(Path.cwd()))  # agents are imported from the working directory
    try:
        app()
    except ConfigError as error:
        _log.print(f"agl: {error}", style="red", soft_wrap=True, markup=False)
        sys.exit(2)
    except AglError as error:
        _log.print(f"agl: {error}", style="red", soft_wrap=True, markup=False)
        sys.exit(1)
