"""What `agl deploy` wants the Prefect server to have.

`prefect.yaml` says which deployments there are (the project's own unless the folder has one of its
own), `automations.yaml` which automations. Options of the command line replace single values; there
is no other list.
"""

import copy
import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import yaml
from prefect import Flow
from prefect.utilities.templating import apply_values

from agl_core.config import RunConfig
from agl_core.errors import ConfigError
from agl_core.text_formats import read_yaml

Json = dict[str, Any]

_HERE = Path(__file__).parent
_TRAINING_FLOW = "training-run"
_SHARD_FLOW = "rollout-shard"
HEARTBEAT = "PREFECT_FLOWS_HEARTBEAT_FREQUENCY"
_HEARTBEAT_SECONDS = 60
"""Of a deployment whose `prefect.yaml` does not say."""
_PREFECT_HEARTBEAT_SECONDS = 180
"""Prefect's own default, for deployments that `agl deploy` did not make."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; None leaves what `prefect.yaml` or the server has."""

    train_pool: str | None = None
    shard_pool: str | None = None
    pool_type: str = "process"
    queue: str | None = None
    pool_limit: int | None = None
    shard_limit: int | None = None
    shard_folder: str | None = None
    schedule: str | None = None
    """Cron expression; `off` pauses the schedule."""
    timezone: str = "UTC"
    dataset: str | None = None
    """A published version of it starts a run; `off` pauses what any starts."""
    heartbeat_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule of a deployment, found again by its slug."""

    slug: str
    schedule: Json
    parameters: Json
    active: bool
    sets_active: bool
    """Whether one that exists is switched as well; else that is left to the UI."""
    sets_cron: bool
    """Whether one that exists gets these times; not where it is only switched off."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """One deployment with its schedules and the triggers that start it."""

    flow_name: str
    name: str
    fields: Json
    """As in Prefect's API, without those that are left as they are."""
    schedules: tuple[Schedule, ...]
    triggers: tuple[Json, ...]
    triggers_active: bool | None = None
    """What the automations of the triggers are switched to; None leaves that to the UI."""

    @property
    def full_name(self) -> str:
        """Name by which Prefect finds it."""
        return f"{self.flow_name}/{self.name}"

    @property
    def heartbeat_seconds(self) -> int:
        """Seconds between the heartbeats of its flow runs."""
        return heartbeat_seconds(self.full_name, self.fields["job_variables"])


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that the server is to have."""

    pools: tuple[str, ...]
    pool_type: str
    pool_limit: int | None
    queue: str | None
    deployments: tuple[Deployment, ...]
    automations: tuple[Json, ...] = field(default=())


def heartbeat_seconds(deployment: str, job_variables: Json) -> int:
    """Return the seconds between the heartbeats of a deployment's flow runs.

    Raises:
        ConfigError: The variable is not a whole number.
    """
    value = (job_variables.get("env") or {}).get(HEARTBEAT, _PREFECT_HEARTBEAT_SECONDS)
    try:
        return int(value)
    except ValueError as error:
        raise ConfigError(
            f"deployment {deployment}: {HEARTBEAT} is {value!r}, not a whole number of seconds; "
            "correct it in prefect.yaml or on the server"
        ) from error


def make_plan(configs: Sequence[RunConfig], options: Options, folder: Path) -> Plan:
    """Return what a folder's deployments are to be.

    Args:
        configs: A deployment `training-run/<run_id>` for each; none for the one in `prefect.yaml`.
        options: Of the command line.
        folder: Where the flow runs start, and where `prefect.yaml` may be.

    Raises:
        ConfigError: The file cannot be used, or options contradict the configurations.
    """
    _check(configs, options)
    specs = _read_specs(folder)
    training = [spec for spec in specs if _flow(spec).name == _TRAINING_FLOW]
    others = [spec for spec in specs if _flow(spec).name != _TRAINING_FLOW]
    if configs:
        training = [_with_config(training[0], config, options) for config in configs]
    deployments = tuple(_deployment(spec, options, folder) for spec in (*training, *others))
    pools = dict.fromkeys(deployment.fields["work_pool_name"] for deployment in deployments)
    if options.pool_limit == 1 and len(pools) == 1:
        raise ConfigError(
            "--pool-limit 1: a training run takes that one place and its shards wait for ever; "
            "raise it, or give shards a pool of their own with --shard-pool"
        )
    return Plan(
        pools=tuple(pools),
        pool_type=options.pool_type,
        pool_limit=options.pool_limit,
        queue=options.queue,
        deployments=deployments,
        automations=tuple(yaml.safe_load((_HERE / "automations.yaml").read_text())["automations"]),
    )


def _check(configs: Sequence[RunConfig], options: Options) -> None:
    names = [config.run_id for config in configs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"two configurations have the run id {', '.join(twice)}: rename one")
    in_process = [config.run_id for config in configs if config.rollout.deployment is None]
    asked = ("shard_pool", "shard_limit", "shard_folder")
    given = [f"--{name.replace('_', '-')}" for name in asked if getattr(options, name) is not None]
    if given and configs and len(in_process) == len(configs):
        raise ConfigError(
            f"{', '.join(given)}: the shards of {', '.join(in_process)} run in the training "
            "process; set rollout.deployment: rollout-shard/rollout-shard in the configuration"
        )


def _read_specs(folder: Path) -> list[Json]:
    """Return the deployments of our flows as `prefect.yaml` has them."""
    for path in (folder / "prefect.yaml", _HERE / "prefect.yaml"):
        if not path.is_file():
            continue
        values = read_yaml(path, str(path))
        found = values.get("deployments") if isinstance(values, dict) else None
        specs = [s for s in found or () if str(s.get("entrypoint", "")).startswith("flows.")]
        flows = {_flow(spec).name for spec in specs}
        if not flows:  # another project's
            continue
        if missing := {_TRAINING_FLOW, _SHARD_FLOW} - flows:
            raise ConfigError(f"{path} has no deployment of {' and '.join(sorted(missing))}")
        pull = values.get("pull")
        return [{"pull": pull, **spec} if pull else spec for spec in specs]
    raise ConfigError(f"there is no prefect.yaml in {folder} or in {_HERE}")


def _flow(spec: Json) -> "Flow[..., Any]":
    module, _, name = spec["entrypoint"].rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"prefect.yaml: cannot import {spec['entrypoint']}: {error}") from error
    if not isinstance(found, Flow):
        raise ConfigError(f"prefect.yaml: {spec['entrypoint']} is no flow")
    return found


def _with_config(template: Json, config: RunConfig, options: Options) -> Json:
    """Return the deployment of a run, made like the one in `prefect.yaml`."""
    spec = copy.deepcopy(template)
    values = config.model_dump(mode="json", exclude_unset=True)
    spec["name"] = config.run_id
    spec["parameters"] = {**spec.get("parameters", {}), "config": values}
    triggers = spec.get("triggers", []) if options.dataset is not None else []
    for trigger in triggers:
        trigger["name"] = f"{trigger['name']}-{config.run_id}"
        trigger["parameters"] = {**trigger.get("parameters", {}), "config": values}
    spec["triggers"] = triggers
    return spec


def _deployment(spec: Json, options: Options, folder: Path) -> Deployment:
    flow = _flow(spec)
    is_shard = flow.name == _SHARD_FLOW
    os.environ["PWD"] = str(folder)  # a parent may have started us elsewhere
    pool = apply_values(copy.deepcopy(spec["work_pool"]), {})
    variables = pool.get("job_variables", {})
    env = {HEARTBEAT: str(_HEARTBEAT_SECONDS), **variables.get("env", {})}
    if options.heartbeat_seconds is not None:
        env[HEARTBEAT] = str(options.heartbeat_seconds)
    variables["env"] = env
    pull = spec.get("pull")
    if is_shard and options.shard_folder is not None:
        variables["working_dir"] = options.shard_folder
    if not pull:
        start = variables.get("working_dir", str(folder))
        step = "prefect.deployments.steps.set_working_directory"
        pull = [{step: {"directory": start}}]
    limit = spec.get("concurrency_limit")
    limit = {"limit": limit} if isinstance(limit, int) else dict(limit or {})
    if is_shard and options.shard_limit is not None:
        limit |= {"limit": options.shard_limit, "collision_strategy": "ENQUEUE"}
    schema: Any = flow.parameters.model_dump_for_openapi()
    fields: Json = {
        "description": spec.get("description") or flow.description,
        "entrypoint": spec["entrypoint"],
        "parameters": spec.get("parameters", {}),
        "parameter_openapi_schema": json.loads(json.dumps(schema)),
        "enforce_parameter_schema": spec.get("enforce_parameter_schema", True),
        "tags": spec.get("tags") or [],
        "pull_steps": pull,
        "job_variables": variables,
        "work_pool_name": (options.shard_pool if is_shard else options.train_pool) or pool["name"],
        "work_queue_name": options.queue or pool.get("work_queue_name") or "default",
    }
    if limit:
        fields["concurrency_limit"] = limit.pop("limit")
        fields["concurrency_options"] = limit or None
    return Deployment(
        flow_name=flow.name,
        name=spec["name"],
        fields=fields,
        schedules=tuple(_schedule(found, options) for found in spec.get("schedules") or ()),
        triggers=tuple(_trigger(found, options) for found in spec.get("triggers") or ()),
        triggers_active=None if options.dataset is None else options.dataset != "off",
    )


def _schedule(spec: Json, options: Options) -> Schedule:
    if "slug" not in spec or "cron" not in spec:
        raise ConfigError(f"prefect.yaml: a schedule needs a slug and a cron expression: {spec}")
    cron, timezone = spec["cron"], spec.get("timezone", "UTC")
    is_off = options.schedule == "off"
    if options.schedule is not None and not is_off:
        cron, timezone = options.schedule, options.timezone
    try:
        ZoneInfo(timezone)
    except (ZoneInfoNotFoundError, TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"schedule {spec['slug']}: there is no time zone {timezone!r}; give a name such as "
            "Europe/Berlin or UTC"
        ) from error
    return Schedule(
        slug=spec["slug"],
        schedule={"cron": cron, "timezone": timezone, "day_or": spec.get("day_or", True)},
        parameters=spec.get("parameters", {}),
        active=spec.get("active", True) if options.schedule is None else not is_off,
        sets_active=options.schedule is not None,
        sets_cron=not is_off,
    )


def _trigger(spec: Json, options: Options) -> Json:
    if options.dataset in (None, "off"):
        return spec
    return {**spec, "match": {"prefect.resource.id": f"agl.dataset.{options.dataset}"}}
