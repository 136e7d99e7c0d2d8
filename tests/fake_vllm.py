"""vLLM's OpenAI server as far as policies are served with it, without a model.

Its routes and their answers are those of 0.32. A folder with a file `DEADLY` ends the process when
its weights are loaded into it, as weights that cannot be loaded do there.
"""

import argparse
import asyncio
import importlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route


class FakeVllm:
    """One server; attributes say what happened to it."""

    def __init__(self, model: str, weights: str, logprobs_mode: str = "processed_logprobs") -> None:
        self.model = model
        self.weights = weights
        self.weight_version = "default"
        self.is_paused = False
        self.events: list[str] = []
        self.adapters: dict[str, str] = {}
        self.gives_token_ids = True
        self.can_set_version = True
        self.gate: asyncio.Event | None = None
        """What each chat completion waits for."""
        routes = [
            Route("/health", self._ok),
            Route("/pid", self._pid),
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/collective_rpc", self._rpc, methods=["POST"]),
            Route("/update_weight_version", self._set_version, methods=["POST"]),
            Route("/weight_info", self._version),
            Route("/v1/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)
        config = SimpleNamespace(model_config=SimpleNamespace(logprobs_mode=logprobs_mode))
        self.app.state.vllm_config = config

    async def _ok(self, _: Request) -> Response:
        return Response()

    async def _pid(self, _: Request) -> Response:
        return Response(str(os.getpid()))

    async def _pause(self, request: Request) -> Response:
        assert request.query_params["mode"] == "wait"
        self.is_paused = True
        self.events.append("pause")
        return JSONResponse({"status": "paused"})

    async def _resume(self, _: Request) -> Response:
        self.is_paused = False
        self.events.append("resume")
        return JSONResponse({"status": "resumed"})

    async def _rpc(self, request: Request) -> Response:
        body = await request.json()
        assert self.is_paused
        if body["method"] == "pack_tied_heads":
            return JSONResponse({"results": [None]})
        assert body["method"] == "reload_weights"
        path = body["kwargs"]["weights_path"]
        _fail_for(path)
        self.weights = path
        self.events.append(f"reload {Path(path).name}")
        return JSONResponse({"results": [None]})

    async def _set_version(self, request: Request) -> Response:
        if self.can_set_version:
            self.weight_version = (await request.json())["new_version"]
        return JSONResponse({"success": True, "new_version": self.weight_version})

    async def _version(self, _: Request) -> Response:
        return JSONResponse({"weight_version": self.weight_version})

    async def _load_adapter(self, request: Request) -> Response:
        body = await request.json()
        assert body["lora_name"] not in self.adapters or body.get("load_inplace")
        self.adapters[body["lora_name"]] = body["lora_path"]
        return Response("Success: LoRA adapter added successfully.")

    async def _chat(self, request: Request) -> Response:
        body = await request.json()
        if self.gate is not None:
            await self.gate.wait()
        name = body["model"]
        path = self.weights if name == self.model else self.adapters[name]
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": Path(path).name},
            "finish_reason": "stop",
            "logprobs": {"content": [{"token": "a", "logprob": -0.5, "bytes": [97]}]},
        }
        answer: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion", "model": name}
        if body.get("return_token_ids") and self.gives_token_ids:
            answer["prompt_token_ids"] = [1, 2]
            choice["token_ids"] = [3]
        usage = {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
        return JSONResponse({**answer, "choices": [choice], "usage": usage})


def _fail_for(path: str) -> None:
    if Path(path, "DEADLY").exists():
        os._exit(1)
    if Path(path, "BROKEN").exists():
        raise RuntimeError("Worker failed")


def main() -> None:
    """Serve, as `python -m vllm.entrypoints.openai.api_server` does."""
    parser = argparse.ArgumentParser()
    for name in ("model", "served-model-name", "host", "middleware", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--worker-extension-cls", required=True)
    parser.add_argument("--generation-config", required=True, choices=["vllm"])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--no-token-ids", action="store_true")
    parser.add_argument("--fail", action="store_true")
    options = parser.parse_args()
    if options.fail:
        raise SystemExit("no memory for the key-value cache")
    fake = FakeVllm(options.served_model_name, options.model, options.logprobs_mode)
    fake.gives_token_ids = not options.no_token_ids
    module, _, name = options.middleware.rpartition(".")
    fake.app.add_middleware(getattr(importlib.import_module(module), name))
    uvicorn.run(fake.app, host=options.host, port=options.port, log_level="warning")
