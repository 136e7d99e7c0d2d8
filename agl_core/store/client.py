"""A store in another process or on another machine, with the contract of one in this process.

Each method is a request of the table `wire.OPERATIONS`. A call takes effect once, however often
its request had to be sent: a dequeue whose answer was lost gives the same attempts again. Refusals
come back as the errors that the store raised, in its words.
"""

import functools
import inspect
import logging
import time
import warnings
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx
from pydantic import SecretStr, ValidationError

from agl_core.env_var import store_token
from agl_core.errors import StoreError
from agl_core.store import wire
from agl_core.store.base import UNSET, LightningStore, LightningStoreCapabilities
from agl_core.store.calls import Calls, CallSettings, UnknownRouteError
from agl_core.store.json_text import encode, encode_records
from agl_core.store.older import renew_one_by_one
from agl_core.store.payloads import Resources
from agl_core.store.waiting import check_timeout
from agl_core.types.core import Rollout
from agl_core.types.tracer import Span
from agl_core.utils.shown_url import without_credentials

logger = logging.getLogger(__name__)

_BATCH_CHARACTERS = 4 * 1024 * 1024
_BATCH_SPANS = 5_000
_BY_NAME = {operation.name: operation for operation in reversed(wire.OPERATIONS)}
_REMOTE = (
    "statistics",
    "start_rollout",
    "enqueue_many_rollouts",
    "dequeue_many_rollouts",
    "start_attempt",
    "query_rollouts",
    "get_rollout_by_id",
    "update_rollout",
    "query_attempts",
    "get_latest_attempt",
    "update_attempt",
    "add_resources",
    "update_resources",
    "query_resources",
    "get_resources_by_id",
    "get_latest_resources",
    "query_spans",
    "query_workers",
    "get_worker_by_id",
    "update_worker",
)
"""Methods that are one request each; the contract makes its other ones of these."""
_MADE_BY_STORE = ("rollout_id", "attempt_id")
_FIXED_PATHS = {(one.method, one.path) for one in wire.OPERATIONS if "{" not in one.path}
_RENAMED = {"status": "status_in", "rollout_ids": "rollout_id_in"}


class LightningStoreClient(LightningStore):
    """The store behind a server (`LightningStoreServer`, `agl store`).

    Any thread and event loop may use it, and it pickles. Its connections are closed by the end of
    the event loop that used them, or by `close`.

    Args:
        server_address: `http://host:port`.
        retry_delays: Seconds before each further try; empty for one try.
        health_retry_delays: Seconds between looks at the server's health, which must be well before
            a further try; empty for no look.
        request_timeout: Seconds without a byte of an answer after which a try has failed.
        connection_timeout: The same for a connection.
        token: What the server wants; None for `AGL_STORE_TOKEN`, if it is set.
        run_id: Of the store that is meant, any other refuses; None for any.

    Raises:
        ValueError: The address is not one of HTTP.
    """

    def __init__(
        self,
        server_address: str,
        *,
        retry_delays: Sequence[float] = (1.0, 2.0, 5.0),
        health_retry_delays: Sequence[float] = (0.1, 0.2, 0.5),
        request_timeout: float = 30.0,
        connection_timeout: float = 5.0,
        token: SecretStr | str | None = None,
        run_id: str | None = None,
    ) -> None:
        self.server_address = _checked(server_address).rstrip("/").removesuffix(wire.PREFIX)
        self._settings = CallSettings(
            retry_delays=tuple(retry_delays),
            health_retry_delays=tuple(health_retry_delays),
            request_timeout=request_timeout,
            connection_timeout=connection_timeout,
            token=store_token(token),
            run_id=run_id,
        )
        self._calls = Calls(self.server_address, self._settings)
        self._lacking: set[str] = set()
        """Operations that the server does not have."""

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """All."""
        return LightningStoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=True, otlp_traces=True
        )

    def otlp_traces_endpoint(self) -> str:
        """Return where the server receives OTLP/HTTP traces."""
        return self.server_address + wire.TRACES_PATH

    async def close(self) -> None:
        """Close the connections; the server and its store stay open."""
        await self._calls.close()

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Keep spans and return those that were new; many go in parts (5,000 spans, 4 MiB of JSON).

        Raises:
            ValueError: Rollout or attempt not found; nothing of the part is kept.
        """
        added: list[Span] = []
        for batch, content in _batches(spans):
            if "add_many_spans" in self._lacking:
                added += await self._add_one_by_one(batch)
                continue
            try:
                response = await self._calls.send(wire.ADD_SPANS, wire.ADD_SPANS.path, content)
            except UnknownRouteError:
                self._note_lack(wire.ADD_SPANS, "spans are sent one by one")
                added += await self._add_one_by_one(batch)
                continue
            are_new = _answer(wire.ADD_SPANS, response)
            added += [span for span, is_new in zip(batch, are_new, strict=True) if is_new]
        return added

    async def renew_leases(
        self, worker_id: str, attempts: Sequence[tuple[str, str]]
    ) -> Sequence[str]:
        """Say that a worker still runs these attempts; return the ids of those that must stop."""
        if "renew_leases" not in self._lacking:
            given = {"worker_id": worker_id, "attempts": attempts}
            try:
                return await self._call(_BY_NAME["renew_leases"], given)
            except UnknownRouteError:
                self._note_lack(_BY_NAME["renew_leases"], "each attempt is looked at instead")
        return await renew_one_by_one(self, attempts)

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """Return the next sequence id for each pair of rollout and attempt."""
        if "get_many_span_sequence_ids" not in self._lacking:
            operation = _BY_NAME["get_many_span_sequence_ids"]
            try:
                return await self._call(operation, {"rollout_attempt_ids": rollout_attempt_ids})
            except UnknownRouteError:
                self._note_lack(operation, "sequence ids are asked for one by one")
        return [
            (
                await self._call(
                    wire.NEXT_SPAN, {"rollout_id": rollout_id, "attempt_id": attempt_id}
                )
            )["sequence_id"]
            for rollout_id, attempt_id in rollout_attempt_ids
        ]

    async def _add_one_by_one(self, spans: Sequence[Span]) -> list[Span]:
        """Keep spans at a server of Agent Lightning 0.3, which answers null for a known one."""
        operation = _BY_NAME["add_span"]
        added: list[Span] = []
        for span in spans:
            response = await self._calls.send(operation, operation.path, encode_records(span))
            if _answer(operation, response) is not None:
                added.append(span)
        return added

    def _note_lack(self, operation: wire.Operation, instead: str) -> None:
        logger.info(
            "the store %s has no %s %s (Agent Lightning 0.3 has none): %s",
            self.server_address,
            operation.method,
            operation.path,
            instead,
        )
        self._lacking.add(operation.name)

    async def wait_for_rollouts(
        self,
        *,
        rollout_ids: Sequence[str],
        timeout: float | None = None,  # noqa: ASYNC109 - Agent Lightning's signature
    ) -> list[Rollout]:
        """Wait until these rollouts have ended; the server holds each request for a while."""
        check_timeout(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        ended: dict[str, Rollout] = {}
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            hold = wire.HOLD_SECONDS if left is None else min(left, wire.HOLD_SECONDS)
            asked = [one for one in dict.fromkeys(rollout_ids) if one not in ended]
            content = encode({"rollout_ids": asked, "timeout": hold})
            response = await self._calls.send(wire.WAIT, wire.WAIT.path, content, hold_seconds=hold)
            answer = _answer(wire.WAIT, response)
            ended |= {rollout.rollout_id: rollout for rollout in answer}
            pending = int(response.headers.get(wire.PENDING_HEADER, len(asked) - len(answer)))
            if pending == 0 or (deadline is not None and time.monotonic() >= deadline):
                return [ended[one] for one in dict.fromkeys(rollout_ids) if one in ended]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.server_address!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _connect, (self.server_address, self._settings)

    async def _call(self, operation: wire.Operation, given: dict[str, Any]) -> Any:
        """Ask with a method's arguments and return its result."""
        key = given.pop("idempotency_key", None)
        path = operation.path
        for name in [name for name in given if f"{{{name}}}" in path]:
            value = given.pop(name)
            if not value or ("/" in value and name in _MADE_BY_STORE):
                if operation.method == "GET":
                    return None  # no record has such an id, and no path can name it
                raise StoreError(f"{operation.name}: there is no {name} {value!r}")
            path = path.replace(f"{{{name}}}", _quoted(value))
        if path != operation.path and (operation.method, path) in _FIXED_PATHS:
            raise StoreError(f"{operation.name}: {path} means something else; choose another id")
        content = None
        if operation.method == "POST":
            if operation.arguments is Resources:
                content = encode_records(given["resources"])
            else:
                if operation is wire.ENQUEUE:  # as mappings, so that inputs are looked into
                    given["rollouts"] = [dict(request) for request in given["rollouts"]]
                content = encode(given, f"what {operation.name} is given")
        elif given:
            query = {name: value for name, value in given.items() if value is not None}
            path += f"?{httpx.QueryParams(query)}"
        return _answer(operation, await self._calls.send(operation, path, content, key=key))


def _quoted(value: str) -> str:
    """Return an id as a part of a path; dots alone would be taken for a folder."""
    try:
        quoted = quote(value, safe="")
    except UnicodeEncodeError as error:
        raise StoreError(f"{value!r} cannot be sent: {error}") from error
    return quoted if quoted.strip(".") else quoted.replace(".", "%2E")


def _checked(server_address: str) -> str:
    """Return an address of HTTP, its scheme in lower case."""
    scheme, _, rest = server_address.partition("://")
    address = f"{scheme.lower()}://{rest}"
    try:
        parts = urlsplit(address)
        _ = parts.port, httpx.URL(address)  # ValueError or InvalidURL
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname)
    except (ValueError, httpx.InvalidURL):
        is_address = False
    if not is_address:
        raise ValueError(
            f"the store's address is {without_credentials(server_address)!r}; it is http://host:port"
        )
    return address


def _connect(server_address: str, settings: CallSettings) -> LightningStoreClient:
    return LightningStoreClient(
        server_address,
        retry_delays=settings.retry_delays,
        health_retry_delays=settings.health_retry_delays,
        request_timeout=settings.request_timeout,
        connection_timeout=settings.connection_timeout,
        token=settings.token,
        run_id=settings.run_id,
    )


def _remote(operation: wire.Operation) -> Callable[..., Coroutine[Any, Any, Any]]:
    contract = getattr(LightningStore, operation.name)
    signature = inspect.signature(contract)

    @functools.wraps(contract)
    async def method(self: LightningStoreClient, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        del given["self"]
        if operation.name == "query_rollouts":
            _rename(given)
        return await self._call(  # pyright: ignore[reportPrivateUsage]
            operation, {name: value for name, value in given.items() if value is not UNSET}
        )

    return method


for _name in _REMOTE:
    setattr(LightningStoreClient, _name, _remote(_BY_NAME[_name]))


def _rename(given: dict[str, Any]) -> None:
    """Replace the deprecated arguments of `query_rollouts`."""
    for old, new in _RENAMED.items():
        value = given.pop(old, None)
        if value is not None:
            warnings.warn(f"{old} is deprecated; use {new}", DeprecationWarning, stacklevel=4)
            given.setdefault(new, value)


def _batches(spans: Sequence[Span]) -> Iterator[tuple[Sequence[Span], str]]:
    """Return the spans in parts, each with its payload."""
    start, size = 0, 0
    texts: list[str] = []
    for index, span in enumerate(spans):
        # The model's own JSON is fast, but makes text of bytes; the store refuses those.
        encode(span.attributes, f"span {span.span_id} of rollout {span.rollout_id}")
        text = encode_records(span)
        if texts and (size + len(text) > _BATCH_CHARACTERS or len(texts) == _BATCH_SPANS):
            yield spans[start:index], _payload(texts)
            start, size, texts = index, 0, []
        texts.append(text)
        size += len(text)
    if texts:
        yield spans[start:], _payload(texts)


def _payload(texts: Sequence[str]) -> str:
    return '{"spans":[' + ",".join(texts) + "]}"


def _answer(operation: wire.Operation, response: httpx.Response) -> Any:
    """Return what the server answered as the records that it means."""
    try:
        return operation.answer.validate_json(response.content)
    except ValidationError as error:
        raise StoreError(
            f"the answer to {operation.name} ({operation.method} {wire.PREFIX}{operation.path}) is "
            f"not one of a store ({error.error_count()} differences)"
        ) from error
