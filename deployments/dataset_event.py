"""The event that a version of a dataset was published, and the deployments that it starts."""

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import emit_event
from prefect.events.actions import RunDeployment
from prefect.events.schemas.automations import Automation, EventTrigger
from prefect.events.schemas.events import Resource, ResourceSpecification
from prefect.exceptions import ObjectNotFound

PUBLISHED = "agl.dataset.published"


def tell(name: str, uri: str) -> list[str]:
    """Tell the server of a dataset's version; return the deployments that start a run on it."""
    resource = {"prefect.resource.id": f"agl.dataset.{name}"}
    with get_client(sync_client=True) as client:
        listening = _listening(client, Resource(resource))
    emit_event(PUBLISHED, resource=resource, payload={"uri": uri})
    return listening


def _listening(client: SyncPrefectClient, dataset: Resource) -> list[str]:
    names: set[str] = set()
    for automation in client.read_automations():
        if automation.enabled and _waits_for(automation, dataset):
            names |= _started(client, automation)
    return sorted(names)


def _waits_for(automation: Automation, dataset: Resource) -> bool:
    trigger = automation.trigger
    return (
        isinstance(trigger, EventTrigger)
        and PUBLISHED in trigger.expect
        and ResourceSpecification.model_validate(trigger.match).matches(dataset)
    )


def _started(client: SyncPrefectClient, automation: Automation) -> set[str]:
    """Return the names of the deployments that an automation starts."""
    names: set[str] = set()
    for action in automation.actions:
        if not isinstance(action, RunDeployment) or action.deployment_id is None:
            continue
        try:
            found = client.read_deployment(action.deployment_id)
        except ObjectNotFound:  # deleted without its automation
            continue
        if not found.paused:
            names.add(f"{client.read_flow(found.flow_id).name}/{found.name}")
    return names
