"""Anthropic's `POST /v1/messages/count_tokens`, counted by the model server's own tokenizer.

A request is translated as the call itself would be; vLLM's `POST /tokenize`, which our engine has
too, applies the chat template and counts. Nothing is sampled, so nothing is recorded.
"""

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from agl_core.llm_proxy import capture
from agl_core.llm_proxy.attribution import find_attribution
from agl_core.llm_proxy.backends import TOKENIZE_PATH
from agl_core.llm_proxy.config import ProxyConfig
from agl_core.llm_proxy.dialect import Dialect
from agl_core.llm_proxy.exchange import check_token, read_body, send_on
from agl_core.llm_proxy.refusal import Refusal, json_response
from agl_core.llm_proxy.upstream import Upstream, UpstreamReply

_COUNTED = ("model", "messages", "tools")


class TokenCounter:
    """Counts the tokens of prompts.

    Args:
        config: How the proxy serves.
        upstream: Where it asks.
        dialect: What agents speak.
    """

    def __init__(self, config: ProxyConfig, upstream: Upstream, dialect: Dialect) -> None:
        self._config = config
        self._upstream = upstream
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        try:
            response = await self._count(Request(scope, receive))
        except Refusal as refusal:
            response = json_response(self._dialect.error(refusal), refusal.status)
        await response(scope, receive, send)

    async def _count(self, request: Request) -> Response:
        check_token(request.headers, self._config.token)
        find_attribution(request.scope["path"], request.headers)
        config = self._config
        body = await read_body(request, config.max_request_bytes, config.request_seconds)
        asked = self._dialect.ask(body)
        asked = {name: asked[name] for name in _COUNTED if name in asked}
        reply = await send_on(self._upstream, TOKENIZE_PATH, asked, request.receive)
        assert isinstance(reply, UpstreamReply), "no stream was asked for"
        policy, status = self._config.policy, reply.status
        if policy is not None and (
            reason := capture.find_other_policy(policy, asked.get("model"), status, reply.headers)
        ):
            raise Refusal(503, reason, "other_policy")
        if status != 200:
            content = self._dialect.upstream_error(status, reply.content)
            return Response(content, status, media_type="application/json")
        return json_response({"input_tokens": _count_of(reply.content)})


def _count_of(content: bytes) -> int:
    """Return the count in an answer of `/tokenize`."""
    try:
        count = orjson.loads(content)["count"]
    except (orjson.JSONDecodeError, KeyError, TypeError) as error:
        raise Refusal(502, f"the model server gave no count: {error!r}", "bad_answer") from error
    if type(count) is not int:
        raise Refusal(502, f"the model server gave {count!r} as a count", "bad_answer")
    return count
