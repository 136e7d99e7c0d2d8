"""Errors in Anthropic's shape."""

from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.refusal import Refusal
from agl_core.llm_proxy.upstream_error import describe_refusal

NO_THREADS = "thread_unsupported_request"
"""The code by which clients know that they have to send the whole conversation; they do."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def refusal_body(refusal: Refusal) -> JsonObject:
    """Return an error of the proxy's own."""
    body = _body(refusal.status, refusal.message)
    if refusal.code == NO_THREADS:
        body["error"]["details"] = {"error_code": NO_THREADS}
    return body


def upstream_body(status: int, content: bytes) -> JsonObject:
    """Return an error of the model server, whatever its shape is."""
    return _body(status, describe_refusal(status, content))


def _body(status: int, message: str) -> JsonObject:
    default = "api_error" if status >= 500 else "invalid_request_error"
    return {"type": "error", "error": {"type": _TYPES.get(status, default), "message": message}}
