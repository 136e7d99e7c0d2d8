"""Who may talk to the store's server: token and run are checked before anything else.

Without a token the server listens on loopback, and only requests that name a loopback address as
their host are served: a web page could have the browser look up its own name as 127.0.0.1.
"""

import hmac

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.store.wire import PREFIX, RUN_HEADER
from agl_core.utils.threaded_server import LOOPBACK

HEALTH_PATH = f"{PREFIX}/health"


class Guard:
    """Refuses requests without the token (401), by a foreign name (403), or for another run (409);
    not the health check.

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
        elif (name := _host_name(headers.get("host", ""))) not in LOOPBACK:
            detail = f"a store without a token is not served under the name {name}"
            return JSONResponse({"detail": detail}, 403)
        wanted = headers.get(RUN_HEADER)
        if wanted is not None and self._run_id is not None and wanted != self._run_id:
            detail = f"this store is that of run {self._run_id}, not of {wanted}"
            return JSONResponse({"detail": detail}, 409)
        return None


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
