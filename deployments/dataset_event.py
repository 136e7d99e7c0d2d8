"""The event that a version of a dataset was published, and the deployments that it starts."""

from dataclasses import dataclass
from itertools import count
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterDeploymentId
from prefect.events import emit_event
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation, EventTrigger
from prefect.events.schemas.events import Resource, ResourceSpecification
from prefect.exceptions import ObjectNotFound

PUBLISHED = "agl.dataset.published"
_PAGE = 200


@dataclass(frozen=True, slots=True)
class Listeners:
    """The deployments that listen to a dataset."""

    names: tuple[str, ...]
    had_runs: dict[str, str]
    """By deployment, its flow run on the version; where there is one, nothing was started."""


def tell(name: str, uri: str) -> Listeners:
    """Tell the server of a dataset's version, unless a deployment that listens has a run on it: the
    same rows, published again, start nothing.
    """
    resource = {"prefect.resource.id": f"agl.dataset.{name}"}
    with get_client(sync_client=True) as client:
        listening = _listening(client, Resource(resource))
        found = {known: _run_on(client, key, uri) for known, key in listening.items()}
    had_runs = {known: run for known, run in found.items() if run is not None}
    if not had_runs:
        emit_event(PUBLISHED, resource=resource, payload={"uri": uri})
    return Listeners(tuple(sorted(listening)), had_runs)


def _run_on(client: SyncPrefectClient, deployment: UUID, uri: str) -> str | None:
    """Return the name of a deployment's flow run on the rows of a version, wherever they lie; None
    where the server has none.
    """
    version = _version(uri)
    only = FlowRunFilter(deployment_id=FlowRunFilterDeploymentId(any_=[deployment]))
    for offset in count(step=_PAGE):
        runs = client.read_flow_runs(flow_run_filter=only, limit=_PAGE, offset=offset)
        for run in runs:
            data = run.parameters.get("train_data")
            if isinstance(data, str) and _version(data) == version:
                return run.name
        if len(runs) < _PAGE:
            return None
    raise AssertionError("count does not end")


def _version(uri: str) -> str:
    """Return `name/digest.jsonl` of a version's URI."""
    return "/".join(uri.split("/")[-2:])


def _listening(client: SyncPrefectClient, dataset: Resource) -> dict[str, UUID]:
    """Return the ids of the deployments that start on a dataset, by name."""
    found: dict[str, UUID] = {}
    for automation in client.read_automations():
        if automation.enabled and _waits_for(automation, dataset):
            found |= _started(client, automation)
    return found


def _waits_for(automation: Automation, dataset: Resource) -> bool:
    trigger = automation.trigger
    return (
        isinstance(trigger, EventTrigger)
        and PUBLISHED in trigger.expect
        and ResourceSpecification.model_validate(trigger.match).matches(dataset)
    )


def _started(client: SyncPrefectClient, automation: Automation) -> dict[str, UUID]:
    """Return the ids of the deployments that an automation starts, by name."""
    started: dict[str, UUID] = {}
    for action in automation.actions:
        if not isinstance(action, RunDeployment) or action.deployment_id is None:
            continue
        try:
            found = client.read_deployment(action.deployment_id)
        except ObjectNotFound:  # deleted without its automation
            continue
        if not found.paused:
            started[f"{client.read_flow(found.flow_id).name}/{found.name}"] = found.id
    return started
