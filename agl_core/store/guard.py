"""Who may talk to the store's server: token and run are checked before anything else.

Without a token the server listens on loopback, and a browser of this machine could still reach it
for any web page. So only requests are served that name a loopback address as their host (a page
could have the browser look up its own name as 127.0.0.1), and that no page of a foreign origin
made: browsers say so in `Origin` and `Sec-Fetch-Site`, which pages cannot change.
"""

import hmac
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from pydantic import SecretStr
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from agl_core.store.wire import PREFIX, RUN_HEADER
from agl_core.utils.threaded_server import LOOPBACK

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
        elif (name := _host_name(headers.get("host", ""))) not in LOOPBACK:
            detail = f"a store without a token is not served under the name {name}"
            return JSONResponse({"detail": detail}, 403)
        elif self._is_foreign_page(headers):
            detail = (
                f"web pages of {headers.get('origin', 'other sites')} may not use this store; "
                "give it a token, or name their origin (cors_allow_origins, --cors-origin)"
            )
            return JSONResponse({"detail": detail}, 403)
        wanted = headers.get(RUN_HEADER)
        if wanted is not None and self._run_id is not None and unquote(wanted) != self._run_id:
            detail = f"this store is that of run {self._run_id}, not of {unquote(wanted)}"
            return JSONResponse({"detail": detail}, 409)
        return None

    def _is_foreign_page(self, headers: Headers) -> bool:
        """Tell whether a web page of an origin that is not allowed had the browser ask."""
        if "*" in self._allow_origins:
            return False
        origin = headers.get("origin")
        if origin is None:
            return headers.get("sec-fetch-site") == "cross-site"
        return origin not in self._allow_origins and _origin_host(origin) not in LOOPBACK


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    host = host.lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _origin_host(origin: str) -> str | None:
    """Return the host of an Origin header; None for "null" and for what is no origin."""
    try:
        return urlsplit(origin).hostname
    except ValueError:
        return None
