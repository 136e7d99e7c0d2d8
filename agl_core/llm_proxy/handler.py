"""Serves one model call: checks it, records it, forwards it, answers in the agent's dialect."""

import logging
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agl_core.errors import TraceError, TransientError
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.accounts import Accounts
from agl_core.llm_proxy.answer_shape import MALFORMED, check_answer
from agl_core.llm_proxy.attribution import Attribution, find_attribution
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.content import check_is_text
from agl_core.llm_proxy.dialect import Dialect
from agl_core.llm_proxy.exchange import check_token, read_body, safe_header, send_on
from agl_core.llm_proxy.gate import Gate
from agl_core.llm_proxy.record import CallRecord
from agl_core.llm_proxy.refusal import Refusal, json_response
from agl_core.llm_proxy.relay import StreamedResponse
from agl_core.llm_proxy.sampling import fill_in, find_unsupported
from agl_core.llm_proxy.store_calls import StoreCalls
from agl_core.llm_proxy.stream import find_hole
from agl_core.llm_proxy.upstream import Upstream, UpstreamReply, UpstreamStream
from agl_core.llm_proxy.upstream_error import describe_refusal
from agl_core.sampling import state_fields, without_strict_tools
from agl_core.tracer.base import ModelCall

logger = logging.getLogger(__name__)

_NOT_READ = (408, 413)
"""The request was not read to its end, so nothing else can follow on its connection."""
_PASSED_HEADERS = ("retry-after", "x-request-id")


class CallSource(Protocol):
    """Where calls are recorded; every tracer is one."""

    def start_call(self, rollout_id: str, attempt_id: str) -> ModelCall:
        """Start the span of a call.

        Raises:
            TraceError: The attempt is not one that is recorded here.
            TransientError: It cannot be recorded now.
        """
        ...


class CallHandler:
    """Serves model calls.

    Args:
        config: How.
        calls: Where they are recorded.
        upstream: Where they go.
        gate: What every call passes.
        accounts: Where they are counted.
    """

    def __init__(
        self,
        config: ProxyConfig,
        calls: CallSource,
        upstream: Upstream,
        gate: Gate,
        accounts: Accounts,
    ) -> None:
        self._config = config
        self._calls = calls
        self._upstream = upstream
        self._gate = gate
        self._accounts = accounts
        self._sampling = {mode: config.sampling_for(mode) for mode in (None, "train", "val")}
        self._sampling["test"] = self._sampling["val"]

    async def serve(self, dialect: Dialect, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a call, its stream to the end."""
        request = Request(scope, receive)
        if not self._gate.enter():
            wait = self._gate.retry_after_seconds or 1.0
            message = f"the model's weights are being swapped; come again in {wait:g} s"
            refusal = Refusal(429, message, "weights_are_swapped")
            response = _refused(dialect, refusal)
            response.headers["retry-after"] = f"{wait:g}"
            await response(scope, receive, send)
            return
        try:
            response = await self._respond(dialect, request)
            await response(scope, receive, send)
        finally:
            self._gate.leave()

    async def _respond(self, dialect: Dialect, request: Request) -> Response:
        """Return the answer to a call; its record has ended unless it is a stream."""
        try:
            check_token(request.headers, self._config.token)
            whose = find_attribution(request.scope["path"], request.headers)
            call = self._calls.start_call(whose.rollout_id, whose.attempt_id)
        except Refusal as refusal:
            return _refused(dialect, refusal)
        except TraceError as error:
            return _refused(dialect, Refusal(404, str(error), "attempt_not_running"))
        except TransientError as error:
            return _refused(dialect, Refusal(503, str(error), "not_recorded"))
        record = CallRecord(call, whose.rollout_id, self._accounts)
        response: Response | None = None
        try:
            response = await self._forward(dialect, request, record, whose)
            return response
        except Refusal as refusal:
            record.fail(refusal.message)
            record.status(refusal.status)
            return _refused(dialect, refusal)
        except Exception as error:
            logger.exception("a call could not be served: rollout=%s", whose.rollout_id)
            message = f"the proxy failed: {type(error).__name__}"
            record.fail(message)
            return _refused(dialect, Refusal(500, message, "proxy_error"))
        except BaseException as error:
            record.fail(f"the call was interrupted: {type(error).__name__}")
            raise
        finally:
            if not isinstance(response, StreamedResponse):  # it ends its record when it has ended
                record.end()

    async def _forward(
        self, dialect: Dialect, request: Request, record: CallRecord, whose: Attribution
    ) -> Response:
        """Forward one call and record it."""
        config = self._config
        body = await read_body(request, config.max_request_bytes, config.request_seconds)
        rollout_seed = await self._rollout_seed(whose.rollout_id)
        asked = fill_in(dialect.ask(body), self._sampling[whose.mode])
        check_is_text(asked)
        reason = find_unsupported(asked)
        if reason is None:
            asked = without_strict_tools(state_fields(asked))
            asked = dialect.add_recording(asked, capture.call_seed(rollout_seed, record.call.index))
        record.ask(dialect.request_attributes(asked))
        if reason is not None:
            raise Refusal(400, reason, "unsupported")
        num_choices = asked.get("n") or 1
        reply = await send_on(self._upstream, dialect.upstream_path, asked, request.receive)
        try:
            self._check_reply(reply, asked, record)
            if isinstance(reply, UpstreamStream):
                headers = _passed_headers(reply)
                return StreamedResponse(reply, dialect, body, num_choices, record, headers)
        except BaseException:
            if isinstance(reply, UpstreamStream):
                await reply.close()
            raise
        if reply.status != 200:
            record.fail(describe_refusal(reply.status, reply.content))
            return _passed_error(dialect, reply)
        if asked.get("stream"):
            raise Refusal(502, "the model server's answer is not an event stream", "bad_answer")
        answer = _parse_answer(reply, num_choices)
        try:
            recorded = capture.response_attributes(dialect.as_chat(answer), reply.headers)
            record.answer(recorded, capture.find_defect(recorded) or find_hole(recorded))
            response = json_response(dialect.answer(answer, body))
            response.headers.update(_passed_headers(reply))
            return response
        except MALFORMED as error:
            message = f"the model server's answer is not one of a completion: {error!r}"
            raise Refusal(502, message, "bad_answer") from error

    def _check_reply(
        self, reply: UpstreamReply | UpstreamStream, asked: JsonObject, record: CallRecord
    ) -> None:
        """Refuse the answer of other weights than the rollout's."""
        record.status(reply.status)
        policy = self._config.policy
        if policy is None:
            return
        model = asked.get("model")
        if reason := capture.find_other_policy(policy, model, reply.status, reply.headers):
            # 503: neither the agent's mistake nor for ever.
            raise Refusal(503, reason, "other_policy")

    async def _rollout_seed(self, rollout_id: str) -> int | str:
        """Return what the calls of a rollout are seeded by."""
        if not isinstance(self._calls, StoreCalls):
            return self._config.rollout_seeds.get(rollout_id, rollout_id)
        try:
            return await self._calls.rollout_seed(rollout_id)
        except Exception as error:  # whatever a store raises where it is away
            raise Refusal(503, str(error), "not_recorded") from error


def _parse_answer(reply: UpstreamReply, num_choices: int) -> JsonObject:
    """Return the backend's answer; refuse what is no completion."""
    try:
        answer: Any = orjson.loads(reply.content)
    except orjson.JSONDecodeError as error:
        raise Refusal(
            502, f"the model server's answer is not JSON: {error}", "bad_answer"
        ) from error
    if reason := check_answer(answer, num_choices):
        raise Refusal(502, f"the model server: {reason}", "bad_answer")
    return answer


def _refused(dialect: Dialect, refusal: Refusal) -> Response:
    response = json_response(dialect.error(refusal), refusal.status)
    if refusal.status in _NOT_READ:
        response.headers["connection"] = "close"
    return response


def _passed_error(dialect: Dialect, reply: UpstreamReply) -> Response:
    content = dialect.upstream_error(reply.status, reply.content)
    media_type = safe_header(reply.headers, "content-type") or "application/json"
    return Response(content, reply.status, _passed_headers(reply), media_type)


def _passed_headers(reply: UpstreamReply | UpstreamStream) -> dict[str, str]:
    found = {name: safe_header(reply.headers, name) for name in _PASSED_HEADERS}
    return {name: value for name, value in found.items() if value is not None}
