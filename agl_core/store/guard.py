"""Who may talk to the store's server: token and run are checked before anything else."""

import hmac

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.store.wire import PREFIX, RUN_HEADER

HEALTH_PATH = f"{PREFIX}/health"


class Guard:
    """Refuses requests without the token (401) or for another run (409); not the health check.

    Args:
        app: What is guarded.
        token: What clients must send as bearer token; None for no check.
        run_id: Of the store; clients that name another one are refused.
    """

    def __init__(self, app: ASGIApp, token: SecretStr | None, run_id: str | None) -> None:
        self._app = app
        self._token = token
        self._run_id = run_id

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
        wanted = headers.get(RUN_HEADER)
        if wanted is not None and self._run_id is not None and wanted != self._run_id:
            detail = f"this store is that of run {self._run_id}, not of {wanted}"
            return JSONResponse({"detail": detail}, 409)
        return None
