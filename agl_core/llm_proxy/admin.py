"""What trainers ask of a proxy in another process, below `/admin`, with a token of its own.

GET  /admin/status      model servers with state and load, calls that are served, usage in total
GET  /admin/usage       calls, tokens and cost by rollout
PUT  /admin/backends    {"urls": [...]}: calls go to these from now on, with the keys and model
                        names that are known
POST /admin/pause       {"retry_after_seconds": 1, "drain_seconds": 60}: no more calls (429);
                        answers once those under way have ended; 504 if they do not, and calls are
                        let in again
POST /admin/resume      calls are let in again
"""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from agl_core.errors import ConfigError, TransientError
from agl_core.llm_proxy.accounts import Accounts
from agl_core.llm_proxy.backends import Backends
from agl_core.llm_proxy.capture import JsonObject
from agl_core.llm_proxy.exchange import check_token, read_body
from agl_core.llm_proxy.gate import Gate
from agl_core.llm_proxy.refusal import Refusal, error_response, json_response


class AdminRoutes:
    """The routes below `/admin`."""

    def __init__(self, token: str, gate: Gate, backends: Backends, accounts: Accounts) -> None:
        self._token = token
        self._gate = gate
        self._backends = backends
        self._accounts = accounts

    def routes(self) -> list[Route]:
        """Return the one route, which finds out what is asked."""
        methods = ["GET", "PUT", "POST"]
        return [Route("/admin/{what}", self._serve, methods=methods)]

    async def _serve(self, request: Request) -> Response:
        try:
            check_token(request.headers, self._token)
            return json_response(await self._answer(request))
        except Refusal as refusal:
            return error_response(refusal)
        except ConfigError as error:
            return error_response(Refusal(400, str(error), "invalid_request"))
        except TransientError as error:
            return error_response(Refusal(504, str(error), "not_drained"))

    async def _answer(self, request: Request) -> JsonObject:
        match request.method, request.path_params["what"]:
            case "GET", "status":
                return self._status()
            case "GET", "usage":
                return self._accounts.rollouts()
            case "PUT", "backends":
                self._backends.readdress(_urls(await read_body(request)))
                return self._status()
            case "POST", "pause":
                return await self._pause(await read_body(request))
            case "POST", "resume":
                self._gate.open()
                return self._status()
            case method, what:
                raise Refusal(404, f"{method} /admin/{what} is not served here", "unknown_path")

    def _status(self) -> JsonObject:
        return {
            "backends": self._backends.status(),
            "calls_in_flight": self._gate.num_inside,
            "is_paused": self._gate.retry_after_seconds is not None,
            "usage": self._accounts.usage(),
        }

    async def _pause(self, body: JsonObject) -> JsonObject:
        seconds = {"retry_after_seconds": 1.0, "drain_seconds": 60.0}
        if others := sorted(body.keys() - seconds):
            raise Refusal(400, f"{', '.join(others)} is not known", "invalid_request")
        for name, value in body.items():
            if not isinstance(value, int | float) or not 0 <= value <= 3600:
                raise Refusal(400, f"{name}={value!r} is no number of seconds", "invalid_request")
        seconds |= body
        self._gate.close(seconds["retry_after_seconds"])
        try:
            await asyncio.to_thread(self._gate.wait_until_empty, seconds["drain_seconds"])
        except BaseException:
            self._gate.open()
            raise
        return self._status()


def _urls(body: JsonObject) -> list[str]:
    urls = body.get("urls")
    if not isinstance(urls, list) or not all(isinstance(url, str) for url in urls):
        raise Refusal(400, "urls is not a list of base URLs", "invalid_request")
    return urls
