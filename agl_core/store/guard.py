"""Who may talk to the store's server: token, run and, without a token, where a request comes from.

They are checked before anything else. What a web page of this machine's browser may ask is in
`agl_core.utils.foreign_requests`.
"""

import hmac
from collections.abc import Sequence
from urllib.parse import unquote

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.store.wire import PREFIX, RUN_HEADER
from agl_core.utils.foreign_requests import find_foreign

HEALTH_PATH = f"{PREFIX}/health"


class Guard:
    """Refuses requests without the token (401), for another run (409), and, where there is no
    token, by a foreign name or from a foreign page (403); not the health check.

    Args:
        app: What is guarded.
        token: What clients must send as bearer token; None for no check.
        run_id: Of the store; clients that name another one are refused.
        allow_origins: Of web pages that may ask, besides those of this machine; "*" for any.
    """

    def __init__(
        self,
        app: ASGIApp,
        token: SecretStr | None,
        run_id: str | None,
        allow_origins: Sequence[str] = (),
    ) -> None:
        self._app = app
        self._token = token
        self._run_id = run_id
        self._allow_origins = allow_origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        refusal = None
        if scope["type"] == "http" and scope["path"] != HEALTH_PATH:
            refusal = self._refusal(Headers(scope=scope))
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, headers: Headers) -> JSONResponse | None:
        if self._token is not None:
            scheme, _, sent = headers.get("authorization", "").partition(" ")
            expected = self._token.get_secret_value().encode()
            if scheme.lower() != "bearer" or not hmac.compare_digest(sent.encode(), expected):
                return JSONResponse(
                    {"detail": "this store wants its token (AGL_STORE_TOKEN, or token=...)"},
                    401,
                    {"www-authenticate": "Bearer"},
                )
        elif reason := find_foreign(headers, self._allow_origins):
            if "web pages" in reason:
                reason += "; name their origin to allow them (cors_allow_origins, --cors-origin)"
            return JSONResponse({"detail": reason}, 403)
        wanted = headers.get(RUN_HEADER)
        if wanted is not None and self._run_id is not None and unquote(wanted) != self._run_id:
            detail = f"this store is that of run {self._run_id}, not of {unquote(wanted)}"
            return JSONResponse({"detail": detail}, 409)
        return None
