"""The store's methods as HTTP requests: one table that the server serves and the client asks by.

Paths and payloads are Agent Lightning 0.3's (JSON below `/v1/agl`), so its clients work with this
server. Ours are `/leases/renew`, `/spans/batch` and `/spans/next/batch`. Besides, against 0.3:

- A header `Idempotency-Key` marks repetitions of a call; see `Operation.repeats`. It and the run
  are percent-encoded.
- `limit` may be 0, and an attempt's `metadata` null, as in the contract.
- `/waits/rollouts` holds a request up to `HOLD_SECONDS` and says in a header how many are pending.
- Refusals are 4xx with one sentence in `detail`: 400 what the store refused, 401 no token, 409
  another run, 410 evicted spans, 413 too large, 415 not JSON, 422 a payload of another form.

JSON is as in `agl_core.store.json_text`: NaN and infinities stay what they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, TypeAdapter

from agl_core.errors import StoreError
from agl_core.store.payloads import (
    Dequeue,
    Enqueue,
    ManySpans,
    NextSpan,
    NextSpans,
    OneSpan,
    Page,
    RenewLeases,
    Resources,
    ResourcesQuery,
    RolloutQuery,
    SpanQuery,
    StartAttempt,
    StartRollout,
    UpdateAttempt,
    UpdateRollout,
    UpdateWorker,
    Wait,
    WorkerQuery,
)
from agl_core.types.core import Attempt, AttemptedRollout, PaginatedResult, Rollout, Worker
from agl_core.types.resources import ResourcesUpdate
from agl_core.types.tracer import Span

PREFIX = "/v1/agl"
DEFAULT_PORT = 4747
TRACES_PATH = "/v1/traces"
KEY_HEADER = "idempotency-key"
RUN_HEADER = "x-agl-run-id"
"""The run that a client insists on."""
PENDING_HEADER = "x-agl-pending"
"""How many of the rollouts that were waited for have not ended."""
HOLD_SECONDS = 20.0
"""The longest that one request waits for rollouts; clients ask again."""


def header_text(text: str) -> str:
    """Return a text as a header can carry it; `urllib.parse.unquote` undoes it.

    Raises:
        StoreError: It is no Unicode.
    """
    try:
        return quote(text, safe="")
    except UnicodeEncodeError as error:
        raise StoreError(f"{text!r} cannot be sent: {error}") from error


class Repeats(Enum):
    """Who knows that a call with a known key is a repetition."""

    STORE = "store"
    """The store itself (`idempotency_key`), also after a restart."""
    SERVER = "server"
    """The server, while it lives: it gives the first answer again."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of the store as a request."""

    name: str
    """Of the method of `LightningStore`."""
    method: Literal["GET", "POST"]
    path: str
    """Below `PREFIX`; names in braces are arguments."""
    answer: TypeAdapter[Any]
    arguments: type[BaseModel] | None = None
    status: int = 200
    repeats: Repeats | None = None
    """None where a repetition does no harm."""


_ROLLOUT = TypeAdapter[Any](AttemptedRollout | Rollout)
_ROLLOUT_OR_NONE = TypeAdapter[Any](AttemptedRollout | Rollout | None)
_ATTEMPTED = TypeAdapter[Any](AttemptedRollout)
_ATTEMPT_PAGE = TypeAdapter[Any](PaginatedResult[Attempt])
_ROLLOUT_PAGE = TypeAdapter[Any](PaginatedResult[AttemptedRollout | Rollout])
_SPAN_PAGE = TypeAdapter[Any](PaginatedResult[Span])
_WORKER_PAGE = TypeAdapter[Any](PaginatedResult[Worker])
_RESOURCES_PAGE = TypeAdapter[Any](PaginatedResult[ResourcesUpdate])
_RESOURCES = TypeAdapter[Any](ResourcesUpdate)
_RESOURCES_OR_NONE = TypeAdapter[Any](ResourcesUpdate | None)
_ANYTHING = TypeAdapter[Any](dict[str, Any])
_ROLLOUTS = "/rollouts/{rollout_id}"
_ATTEMPTS = "/rollouts/{rollout_id}/attempts"


ENQUEUE = Operation(
    "enqueue_many_rollouts",
    "POST",
    "/queues/rollouts/enqueue",
    TypeAdapter(list[Rollout]),
    Enqueue,
    201,
    Repeats.STORE,
)
WAIT = Operation(
    "wait_for_rollouts",
    "POST",
    "/waits/rollouts",
    TypeAdapter(list[AttemptedRollout | Rollout]),
    Wait,
)
ADD_SPANS = Operation(
    "add_many_spans",
    "POST",
    "/spans/batch",
    TypeAdapter(list[bool]),
    ManySpans,
    201,
    Repeats.SERVER,
)
"""Answers which of the spans were new."""
NEXT_SPAN = Operation(
    "get_next_span_sequence_id",
    "POST",
    "/spans/next",
    TypeAdapter(dict[str, int]),
    NextSpan,
    200,
    Repeats.SERVER,
)
"""Answers `{"sequence_id": n}`."""

# Where a method has two requests, clients of ours send the first.
OPERATIONS: Sequence[Operation] = (
    ENQUEUE,
    Operation(
        "dequeue_many_rollouts",
        "POST",
        "/queues/rollouts/dequeue",
        TypeAdapter(list[AttemptedRollout]),
        Dequeue,
        200,
        Repeats.STORE,
    ),
    Operation("start_rollout", "POST", "/rollouts", _ATTEMPTED, StartRollout, 201, Repeats.STORE),
    Operation("query_rollouts", "POST", "/rollouts/search", _ROLLOUT_PAGE, RolloutQuery),
    Operation("query_rollouts", "GET", "/rollouts", _ROLLOUT_PAGE, RolloutQuery),
    Operation("get_rollout_by_id", "GET", _ROLLOUTS, _ROLLOUT_OR_NONE),
    Operation("update_rollout", "POST", _ROLLOUTS, _ROLLOUT, UpdateRollout, repeats=Repeats.SERVER),
    Operation("start_attempt", "POST", _ATTEMPTS, _ATTEMPTED, StartAttempt, 201, Repeats.SERVER),
    Operation("query_attempts", "POST", f"{_ATTEMPTS}/search", _ATTEMPT_PAGE, Page),
    Operation("query_attempts", "GET", _ATTEMPTS, _ATTEMPT_PAGE, Page),
    Operation("get_latest_attempt", "GET", f"{_ATTEMPTS}/latest", TypeAdapter[Any](Attempt | None)),
    Operation(
        "update_attempt",
        "POST",
        f"{_ATTEMPTS}/{{attempt_id}}",
        TypeAdapter(Attempt),
        UpdateAttempt,
        repeats=Repeats.SERVER,
    ),
    Operation("renew_leases", "POST", "/leases/renew", TypeAdapter(list[str]), RenewLeases),
    WAIT,
    Operation("query_workers", "POST", "/workers/search", _WORKER_PAGE, WorkerQuery),
    Operation("query_workers", "GET", "/workers", _WORKER_PAGE, WorkerQuery),
    Operation("get_worker_by_id", "GET", "/workers/{worker_id}", TypeAdapter[Any](Worker | None)),
    Operation("update_worker", "POST", "/workers/{worker_id}", TypeAdapter(Worker), UpdateWorker),
    Operation("statistics", "GET", "/statistics", _ANYTHING),
    Operation("add_resources", "POST", "/resources", _RESOURCES, Resources, 201, Repeats.STORE),
    Operation("query_resources", "GET", "/resources", _RESOURCES_PAGE, ResourcesQuery),
    Operation("get_latest_resources", "GET", "/resources/latest", _RESOURCES_OR_NONE),
    Operation("get_resources_by_id", "GET", "/resources/{resources_id}", _RESOURCES_OR_NONE),
    Operation(
        "update_resources",
        "POST",
        "/resources/{resources_id}",
        _RESOURCES,
        Resources,
        repeats=Repeats.SERVER,
    ),
    ADD_SPANS,
    Operation(
        "add_span",
        "POST",
        "/spans",
        TypeAdapter[Any](Span | None),
        OneSpan,
        201,
        Repeats.SERVER,
    ),
    Operation("query_spans", "POST", "/spans/search", _SPAN_PAGE, SpanQuery),
    Operation("query_spans", "GET", "/spans", _SPAN_PAGE, SpanQuery),
    NEXT_SPAN,
    Operation(
        "get_many_span_sequence_ids",
        "POST",
        "/spans/next/batch",
        TypeAdapter(list[int]),
        NextSpans,
        200,
        Repeats.SERVER,
    ),
)
