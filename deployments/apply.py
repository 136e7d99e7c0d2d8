"""Bring a Prefect server to a plan: read what is there, write only what differs."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import (
    DeploymentScheduleCreate,
    DeploymentUpdate,
    WorkPoolCreate,
    WorkPoolUpdate,
)
from prefect.client.schemas.filters import FlowFilter, FlowFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule
from prefect.events.schemas.automations import Automation, AutomationCore
from prefect.events.schemas.deployment_triggers import DeploymentTriggerTypes
from prefect.exceptions import ObjectNotFound
from prefect.workers.utilities import (
    get_available_work_pool_types,
    get_default_base_job_template_for_infrastructure_type,
)
from pydantic import TypeAdapter

from agl_core.errors import ConfigError
from deployments.plan import Deployment, Json, Plan, Schedule, heartbeat_seconds

_ZOMBIES = "agl-killed-flow-runs"
_MISSED_HEARTBEATS = 3
_PAGE = 200
"""Deployments that Prefect lists at once."""
_Trigger: "TypeAdapter[DeploymentTriggerTypes]" = TypeAdapter(DeploymentTriggerTypes)


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one thing on the server."""

    kind: str
    name: str
    fields: tuple[str, ...] = ()
    """What was changed of a thing that was there."""
    created: bool = False
    paused: bool = False
    """Whether it was created switched off."""

    @property
    def is_none(self) -> bool:
        """Whether it was as it should be."""
        return not self.created and not self.fields

    def __str__(self) -> str:
        if self.created:
            return "created (paused)" if self.paused else "created"
        return f"updated: {', '.join(self.fields)}" if self.fields else "unchanged"


class Reconciler:
    """Applies a plan, or with `dry_run` says what applying it would do."""

    def __init__(self, client: SyncPrefectClient, plan: Plan, *, dry_run: bool = False) -> None:
        self._client = client
        self._plan = plan
        self._writes = not dry_run

    def apply(self) -> Iterator[Change]:
        """Yield one change for each thing, in the order in which they need each other.

        Raises:
            ConfigError: Prefect knows no such pool type, a pool of that name has another one, or
                a heartbeat is not a number.
        """
        slowest_heartbeat = self._slowest_heartbeat()
        for pool in self._plan.pools:
            yield self._pool(pool)
            if self._plan.queue is not None:
                yield self._queue(self._plan.queue, pool)
        for wanted in self._plan.deployments:
            yield from self._deployment(wanted)
        for automation in self._plan.automations:
            if automation["name"] == _ZOMBIES:
                automation["trigger"]["within"] = _MISSED_HEARTBEATS * slowest_heartbeat
            yield self._automation(AutomationCore.model_validate(automation))

    def _slowest_heartbeat(self) -> int:
        """Return the longest interval, in seconds, between heartbeats of any deployment of our
        flows, those of other calls included: one automation waits for all of them.
        """
        wanted = {deployment.full_name: deployment for deployment in self._plan.deployments}
        flows = {deployment.flow_name for deployment in self._plan.deployments}
        seconds = [deployment.heartbeat_seconds for deployment in wanted.values()]
        named = FlowFilter(name=FlowFilterName(any_=sorted(flows)))
        names = {flow.id: flow.name for flow in self._client.read_flows(flow_filter=named)}
        for offset in itertools.count(0, _PAGE):
            page = self._client.read_deployments(flow_filter=named, limit=_PAGE, offset=offset)
            others = {f"{names[found.flow_id]}/{found.name}": found for found in page}
            seconds += [
                heartbeat_seconds(name, found.job_variables or {})
                for name, found in others.items()
                if name not in wanted
            ]
            if len(page) < _PAGE:
                break
        return max(seconds)

    def _pool(self, name: str) -> Change:
        limit = self._plan.pool_limit
        try:
            found = self._client.read_work_pool(name)
        except ObjectNotFound:
            template = asyncio.run(_job_template(self._plan.pool_type))
            if self._writes:
                self._client.create_work_pool(
                    WorkPoolCreate(
                        name=name,
                        type=self._plan.pool_type,
                        base_job_template=template,
                        concurrency_limit=limit,
                    )
                )
            return Change("work pool", name, created=True)
        if found.type != self._plan.pool_type:
            raise ConfigError(
                f"work pool {name} is of type {found.type}, not {self._plan.pool_type}: give "
                f"--type {found.type}, or another name"
            )
        if limit is None or found.concurrency_limit == limit:
            return Change("work pool", name)
        if self._writes:
            self._client.update_work_pool(name, WorkPoolUpdate(concurrency_limit=limit))
        return Change("work pool", name, ("concurrency limit",))

    def _queue(self, name: str, pool: str) -> Change:
        try:
            self._client.read_work_queue_by_name(name, work_pool_name=pool)
        except ObjectNotFound:
            if self._writes:
                self._client.create_work_queue(name, work_pool_name=pool)
            return Change("work queue", f"{pool}/{name}", created=True)
        return Change("work queue", f"{pool}/{name}")

    def _deployment(self, wanted: Deployment) -> Iterator[Change]:
        try:
            found = self._client.read_deployment_by_name(wanted.full_name)
        except ObjectNotFound:
            found = None
        if found is not None:
            old = _fields_of(found, wanted)
            changed = sorted(name for name in wanted.fields if old[name] != wanted.fields[name])
            if changed and self._writes:
                update = {name: wanted.fields[name] for name in changed}
                self._update(found.id, update)
            yield Change("deployment", wanted.full_name, tuple(map(_in_words, changed)))
        elif self._writes:
            flow_id = self._client.create_flow_from_name(wanted.flow_name)
            self._client.create_deployment(flow_id, wanted.name, **wanted.fields)
            yield Change("deployment", wanted.full_name, created=True)
            found = self._client.read_deployment_by_name(wanted.full_name)
        else:
            yield Change("deployment", wanted.full_name, created=True)
        for schedule in wanted.schedules:
            yield self._schedule(schedule, wanted.full_name, found)
        for trigger in wanted.triggers:
            made = _Trigger.validate_python(trigger)
            made.set_deployment_id(found.id if found else UUID(int=0))
            yield self._automation(made.as_automation(), active=wanted.triggers_active)

    def _update(self, deployment_id: UUID, fields: Json) -> None:
        """Send these fields alone: the client's own method sends every default with them."""
        update = DeploymentUpdate(**fields)
        body = update.model_dump(mode="json", include=set(fields))
        path: Any = f"/deployments/{deployment_id}"  # Prefect's routes are literals with places
        self._client.request("PATCH", path, json=body)

    def _schedule(
        self, wanted: Schedule, deployment: str, found: DeploymentResponse | None
    ) -> Change:
        name = f"{deployment}: {wanted.slug}"
        old = next((s for s in found.schedules if s.slug == wanted.slug), None) if found else None
        cron = CronSchedule(**wanted.schedule)
        if old is None:
            create = DeploymentScheduleCreate(
                schedule=cron,
                active=wanted.active,
                parameters=wanted.parameters,
                slug=wanted.slug,
            )
            if found is not None and self._writes:
                self._client.create_deployment_schedules(found.id, [create])
            return Change("schedule", name, created=True, paused=not wanted.active)
        changed: Json = {}
        if wanted.sets_cron and old.schedule != cron:
            changed["schedule"] = cron
        if old.parameters != wanted.parameters:
            changed["parameters"] = wanted.parameters
        if wanted.sets_active and old.active != wanted.active:
            changed["active"] = wanted.active
        if changed and self._writes and found is not None:
            # An update without parameters takes away those that the schedule has.
            values = {"parameters": wanted.parameters, **changed}
            self._client.update_deployment_schedule(found.id, old.id, **values)
        return Change("schedule", name, tuple(sorted(changed)))

    def _automation(self, wanted: AutomationCore, *, active: bool | None = None) -> Change:
        """Make or change an automation.

        Args:
            wanted: What it is to be; one that is switched off keeps what it waited for.
            active: What it is switched to; None leaves one that is there as someone set it.
        """
        found = self._client.read_automations_by_name(wanted.name)
        if not found:
            enabled = active is not False
            if self._writes:
                self._client.create_automation(wanted.model_copy(update={"enabled": enabled}))
            return Change("automation", wanted.name, created=True, paused=not enabled)
        if active is False:
            wanted = wanted.model_copy(update={"trigger": found[0].trigger})
        old, new = _comparable(found[0]), _comparable(wanted)
        changed = tuple(sorted(name for name in new if old[name] != new[name]))
        if changed and self._writes:
            # An update takes no owner.
            values = wanted.model_dump(exclude={"owner_resource"}, exclude_unset=True)
            kept = AutomationCore.model_validate({**values, "enabled": found[0].enabled})
            self._client.update_automation(found[0].id, kept)
        if active not in (None, found[0].enabled):
            changed = ("active", *changed)
            if self._writes:
                switch = self._client.resume_automation if active else self._client.pause_automation
                switch(found[0].id)
        return Change("automation", wanted.name, changed)


async def _job_template(pool_type: str) -> Json:
    found = await get_default_base_job_template_for_infrastructure_type(pool_type)
    if found is None:
        known = ", ".join(await get_available_work_pool_types())
        raise ConfigError(f"Prefect knows no work pools of type {pool_type!r}; use one of {known}")
    return found


def _fields_of(found: DeploymentResponse, wanted: Deployment) -> Json:
    """Return what a deployment on the server has of the fields that are wanted."""
    old: Any = found.model_dump(mode="json")
    limit, options = found.global_concurrency_limit, found.concurrency_options
    old["concurrency_limit"] = limit.limit if limit else None
    old["concurrency_options"] = (
        options.model_dump(mode="json", exclude_none=True) if options else None
    )
    return {name: old.get(name) for name in wanted.fields}


def _in_words(field: str) -> str:
    return field.replace("parameter_openapi_schema", "parameter form").replace("_", " ")


def _comparable(automation: AutomationCore | Automation) -> Json:
    values = automation.model_dump(
        mode="json", include={"description", "tags", "trigger", "actions"}
    )
    trigger: Json = values["trigger"]
    trigger.pop("id", None)
    for name in ("after", "expect", "for_each"):  # sets
        trigger[name] = sorted(trigger.get(name, ()))
    return values
