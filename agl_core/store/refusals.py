"""How the store's server answers what fails.

What a caller did wrong is 4xx with one sentence, what another try may get right 503. Anything else
is 500 without details; those are in the log.
"""

import logging

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from agl_core.errors import TransientError
from agl_core.store.payloads import Changes

logger = logging.getLogger(__name__)

_UPDATES = {model.__name__ for model in Changes.__subclasses__()}


class Refusal(Exception):  # noqa: N818 - an answer, raised to leave the handler
    """The server refuses a request itself."""

    def __init__(self, status: int = 400, message: str = "") -> None:
        super().__init__(message)
        self.status = status


def answer_to(error: Exception, what: str) -> Response:
    """Return the answer to a call that failed."""
    if isinstance(error, Refusal):
        return JSONResponse({"detail": str(error)}, error.status)
    if isinstance(error, ValidationError):
        return _malformed(error)
    if isinstance(error, ValueError):
        return JSONResponse({"detail": str(error)}, 400)
    if isinstance(error, NotImplementedError):
        return JSONResponse({"detail": str(error) or f"this store has no {what}"}, 501)
    if isinstance(error, TransientError):
        return JSONResponse({"detail": str(error)}, 503)
    if type(error) is RuntimeError and what == "query_spans":  # evicted, by the contract
        return JSONResponse({"detail": str(error)}, 410)
    logger.error("the store failed: call=%s", what, exc_info=error)
    detail = f"the store failed ({type(error).__name__}); its log says more"
    return JSONResponse({"detail": detail}, 500)


def _malformed(error: ValidationError) -> Response:
    problems = error.errors(include_url=False, include_context=False)
    text = "; ".join(
        ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))
        for problem in problems
    )
    is_change = error.title in _UPDATES
    if is_change and any(problem["input"] is None for problem in problems):
        return JSONResponse({"detail": f"{text}; leave a field out to keep its value"}, 400)
    return JSONResponse({"detail": text}, 422)
