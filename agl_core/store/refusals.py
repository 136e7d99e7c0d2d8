"""How the store's server answers what fails.

What a caller did wrong is 4xx with one sentence, what another try may get right 503. Anything else
is 500 without details; those are in the log.
"""

import logging

from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from agl_core.errors import TransientError
from agl_core.store.payloads import Changes
from agl_core.utils.request_body import BodyRefused

logger = logging.getLogger(__name__)

_MOST_PROBLEMS = 100
"""Of a malformed request that are told; a large one has millions."""
_UPDATES = {model.__name__ for model in Changes.__subclasses__()}


def answer_to(error: Exception, what: str) -> Response:
    """Return the answer to a call that failed."""
    if isinstance(error, BodyRefused):
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
    if error.error_count() > _MOST_PROBLEMS:
        detail = f"the request is no {error.title}: it has {error.error_count()} problems"
        return JSONResponse({"detail": detail}, 422)
    problems = error.errors(include_url=False, include_context=False)
    text = "; ".join(
        ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))
        for problem in problems
    )
    is_change = error.title in _UPDATES
    if is_change and any(problem["input"] is None for problem in problems):
        return JSONResponse({"detail": f"{text}; leave a field out to keep its value"}, 400)
    return JSONResponse({"detail": text}, 422)
