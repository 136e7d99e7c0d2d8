"""Stores with Agent Lightning 0.3's contract, used as one of ours: without our later arguments and
methods.

    idempotency_key    left out: such a store cannot tell a repeated call
    lease_seconds      left out: it has no leases
    failure_kind       added to the attempt's metadata, with failure_message
    renew_leases       a look at each attempt, and its `last_heartbeat_time`
    ..._many_...       one call for each, where the store has only that
"""

import inspect
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, wraps
from typing import Any

from agl_core.store.base import UNSET, LightningStore, LightningStoreCapabilities, Unset
from agl_core.store.status import is_finished
from agl_core.types.core import (
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Rollout,
)
from agl_core.types.tracer import Span

_ENDED = ("failed", "succeeded", "timeout", "cancelled")
"""Of an attempt; an unresponsive one may go on."""


def with_later_methods(store: LightningStore) -> LightningStore:
    """Return the store, or where it has only 0.3's arguments and methods, one around it."""
    return OlderStore(store) if _is_older(type(store)) else store


async def renew_one_by_one(
    store: LightningStore, attempts: Sequence[tuple[str, str]]
) -> Sequence[str]:
    """Do what `renew_leases` does, by calls that Agent Lightning 0.3 has.

    Args:
        store: Where the attempts are.
        attempts: Rollout id and attempt id of each.
    """
    ended: list[str] = []
    for rollout_id, attempt_id in attempts:
        rollout = await store.get_rollout_by_id(rollout_id)
        latest = getattr(rollout, "attempt", None)
        if (
            rollout is None
            or is_finished(rollout.status)
            or (latest is not None and latest.attempt_id != attempt_id)
            or (latest is not None and latest.status in _ENDED)
        ):
            ended.append(attempt_id)
        else:
            await store.update_attempt(rollout_id, attempt_id, last_heartbeat_time=time.time())
    return ended


class OlderStore(LightningStore):
    """A store of 0.3's contract, with the later arguments and methods.

    Args:
        store: What is asked.
    """

    def __init__(self, store: LightningStore) -> None:
        self.store = store

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Those of the store."""
        return self.store.capabilities

    def otlp_traces_endpoint(self) -> str:
        """Return the store's."""
        return self.store.otlp_traces_endpoint()

    async def renew_leases(
        self, worker_id: str, attempts: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        """Look at each attempt, and give it a time of its last sign of life."""
        if _overrides(type(self.store), "renew_leases"):
            return await self.store.renew_leases(worker_id, attempts)
        return await renew_one_by_one(self.store, attempts)

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: dict[str, Any] | Unset | None = UNSET,
        **failure: Any,
    ) -> Attempt:
        """Change the given fields; why it failed is in the metadata."""
        said = {name: value for name, value in failure.items() if value not in (None, UNSET)}
        if said:
            known = {} if metadata is UNSET or metadata is None else metadata
            metadata = {**known, **{name: str(value) for name, value in said.items()}}
        return await self.store.update_attempt(
            rollout_id, attempt_id, status, worker_id, last_heartbeat_time, metadata
        )

    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest], **_: Any
    ) -> Sequence[Rollout]:
        """Queue rollouts in their order."""
        if _overrides(type(self.store), "enqueue_many_rollouts"):
            return await self.store.enqueue_many_rollouts(rollouts)
        return [await self.store.enqueue_rollout(**dict(request)) for request in rollouts]

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None, **_: Any
    ) -> Sequence[AttemptedRollout]:
        """Take up to `limit` queued rollouts."""
        if _overrides(type(self.store), "dequeue_many_rollouts"):
            return await self.store.dequeue_many_rollouts(limit=limit, worker_id=worker_id)
        taken: list[AttemptedRollout] = []
        while len(taken) < limit:
            rollout = await self.store.dequeue_rollout(worker_id)
            if rollout is None:
                break
            taken.append(rollout)
        return taken

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep spans and return those that were new."""
        if _overrides(type(self.store), "add_many_spans"):
            return await self.store.add_many_spans(spans)
        added = [await self.store.add_span(span) for span in spans]
        return [span for span in added if span is not None]


@cache
def _is_older(kind: type[LightningStore]) -> bool:
    """Say whether a method of the class has not all arguments of the contract."""
    return any(_later_arguments(kind, name) for name in _METHODS if _overrides(kind, name)) or (
        not _overrides(kind, "renew_leases")
    )


@cache
def _later_arguments(kind: type[LightningStore], name: str) -> frozenset[str]:
    """Return the arguments of a method's contract that the class's method does not take."""
    taken = inspect.signature(getattr(kind, name)).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return frozenset()
    contract = inspect.signature(getattr(LightningStore, name)).parameters
    later = ("idempotency_key", "lease_seconds", "failure_kind", "failure_message")
    return frozenset(one for one in later if one in contract and one not in taken)


def _overrides(kind: type[LightningStore], name: str) -> bool:
    return getattr(kind, name) is not getattr(LightningStore, name)


def _pass_on(name: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    @wraps(getattr(LightningStore, name))
    async def method(self: OlderStore, *args: Any, **kwargs: Any) -> Any:
        later = _later_arguments(type(self.store), name)
        known = {key: value for key, value in kwargs.items() if key not in later}
        return await getattr(self.store, name)(*args, **known)

    return method


_METHODS = [name for name, _ in inspect.getmembers(LightningStore, inspect.iscoroutinefunction)]
for _name in _METHODS:
    if _name not in vars(OlderStore):
        setattr(OlderStore, _name, _pass_on(_name))
