"""Small records for tests of the store."""

from typing import Any

from agl_core.store import LightningStore
from agl_core.types.core import AttemptedRollout, RolloutConfig
from agl_core.types.resources import LLM, NamedResources, PromptTemplate
from agl_core.types.tracer import Span


def make_span(attempt: AttemptedRollout, sequence_id: int = 1, **fields: Any) -> Span:
    """Return a span of an attempt."""
    values: dict[str, Any] = {"attributes": {"n": sequence_id}, "name": "step", **fields}
    return Span.from_attributes(
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt.attempt_id,
        sequence_id=sequence_id,
        **values,
    )


def make_resources(text: str = "{question}") -> NamedResources:
    """Return a model and a prompt."""
    return {
        "llm": LLM(endpoint="http://localhost:1/v1", model="tiny"),
        "prompt": PromptTemplate(template=text),
    }


async def take(store: LightningStore, worker_id: str | None = None) -> AttemptedRollout:
    """Take a rollout from a queue that is not empty."""
    taken = await store.dequeue_rollout(worker_id)
    assert taken is not None
    return taken


async def begin(
    store: LightningStore, worker_id: str | None = "w", **config: Any
) -> AttemptedRollout:
    """Queue a rollout and take it."""
    queued = await store.enqueue_rollout("task", config=RolloutConfig(**config))
    taken = await take(store, worker_id)
    assert taken.rollout_id == queued.rollout_id
    return taken
