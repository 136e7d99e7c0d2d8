"""What the proxy costs, side by side in one run: no proxy between agents and model server, ours,
and LiteLLM's where AGL_LITELLM_VENV names a virtual environment that has `litellm[proxy]`.

    python -m benchmarks.proxy [--seconds 6] [--prompt-tokens 256] [--response-tokens 32]

The model server (a process of its own) answers at once with recorded bytes: ids and log-probs for
who asks for them. Agents are bare connections, each with one call at a time: 1, 16 and 64 of them,
then as many calls a second as half of what the proxy can do. Our proxy records every call.
"""

import argparse
import asyncio
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import orjson
import psutil

CLIENTS = (1, 16, 64)
WARM_UP_SECONDS = 1.0
START_SECONDS = 180.0


def make_answer(prompt_tokens: int, response_tokens: int, *, with_ids: bool) -> bytes:
    """Return a chat completion in vLLM's dialect."""
    entry = {"token": "x", "logprob": -0.5, "bytes": [120], "top_logprobs": []}
    ids = {"token_ids": list(range(response_tokens))} if with_ids else {}
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x" * response_tokens},
        "logprobs": {"content": [entry] * response_tokens} if with_ids else None,
        "finish_reason": "stop",
        **ids,
    }
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": response_tokens,
        "total_tokens": prompt_tokens + response_tokens,
    }
    answer = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    if with_ids:
        answer["prompt_token_ids"] = list(range(prompt_tokens))
    return orjson.dumps(answer)


class _Backend(asyncio.Protocol):
    """Answers each request with the same bytes."""

    def __init__(self, plain: bytes, full: bytes) -> None:
        self._answers = [_with_head(plain), _with_head(full)]
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            total = end + 4 + content_length(bytes(self._buffer[:end]))
            if len(self._buffer) < total:
                return
            wants_ids = b"return_token_ids" in self._buffer[:total]
            del self._buffer[:total]
            self._transport.write(self._answers[wants_ids])


def content_length(head: bytes) -> int:
    """Return the length that the head of a message states; 0 for none."""
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _with_head(content: bytes) -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


async def _serve_backend(port: int, prompt_tokens: int, response_tokens: int) -> None:
    answers = [make_answer(prompt_tokens, response_tokens, with_ids=flag) for flag in (False, True)]
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Backend(*answers), "127.0.0.1", port)
    await server.serve_forever()


def _serve_ours(port: int, backend: str) -> None:
    """Serve as a shard does, with an open attempt for each agent."""
    from agl_core.llm_proxy import ProxyConfig, ProxyServer
    from agl_core.tracer import OtelTracer

    tracer = OtelTracer()
    with ExitStack() as stack:
        for number in range(max(CLIENTS)):
            stack.enter_context(tracer.attempt(f"ro-{number}", "at-1"))
        stack.enter_context(ProxyServer(ProxyConfig(backend_url=backend), tracer, port=port))
        while True:
            time.sleep(3600)


@dataclass(frozen=True)
class Load:
    """What agents measured."""

    num_all: int
    """Calls, those of the warm-up included."""
    seconds: float
    latencies: list[float]
    """In seconds, of the calls after the warm-up."""

    def row(self) -> str:
        """Return calls a second, median and 99th percentile in milliseconds."""
        if not self.latencies:
            return "no call ended"
        ordered = sorted(self.latencies)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        return f"{self.rate():8.0f}/s  median {self.median_ms():7.2f} ms  p99 {p99 * 1e3:7.2f} ms"

    def rate(self) -> float:
        """Return calls a second."""
        return len(self.latencies) / self.seconds

    def median_ms(self) -> float:
        """Return the median in milliseconds."""
        return statistics.median(self.latencies) * 1e3


async def _agent(
    number: int, port: int, path: str, body: bytes, end: float, interval: float | None
) -> list[tuple[float, float]]:
    """Call until the end; return when each call began and how long it took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = (
        f"POST {path.format(number=number)} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json"
        f"\r\nauthorization: Bearer sk-bench\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body
    calls: list[tuple[float, float]] = []
    due = time.perf_counter() + (secrets.randbelow(1000) / 1000 * interval if interval else 0.0)
    while (now := time.perf_counter()) < end:
        if interval:
            if now < due:
                await asyncio.sleep(due - now)
            # An agent that was held up does not make up for it: the rate is what is compared.
            due = max(due + interval, time.perf_counter())
        began = time.perf_counter()
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        content = await reader.readexactly(content_length(head))
        calls.append((began, time.perf_counter() - began))
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"{path}: {head[:80]!r} {content[:300]!r}")
    writer.close()
    return calls


async def _load(
    num_clients: int, port: int, path: str, body: bytes, seconds: float, rate: float | None
) -> Load:
    began = time.perf_counter()
    end = began + WARM_UP_SECONDS + seconds
    interval = num_clients / rate if rate else None
    found = await asyncio.gather(
        *(_agent(number, port, path, body, end, interval) for number in range(num_clients))
    )
    counted = [took for calls in found for at, took in calls if at >= began + WARM_UP_SECONDS]
    return Load(sum(map(len, found)), seconds, counted)


@contextmanager
def _process(*command: str, env: dict[str, str] | None = None) -> Generator[psutil.Process]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, env={**os.environ, **(env or {})}, stdout=log, stderr=log
        )
        try:
            yield psutil.Process(process.pid)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace")[-800:])
            raise
        finally:
            process.terminate()
            process.wait(30)


def _memory_mib(process: psutil.Process) -> float:
    """Return the resident memory of a process and its children."""
    processes = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in processes) / 2**20


def _cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time that a process and its children have used."""
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def _wait_until_served(port: int, path: str, body: bytes, process: psutil.Process) -> None:
    end = time.monotonic() + START_SECONDS
    headers = {"authorization": "Bearer sk-bench", "content-type": "application/json"}
    url = f"http://127.0.0.1:{port}{path.format(number=0)}"
    while True:
        try:
            if httpx.post(url, content=body, headers=headers, timeout=20).status_code == 200:
                return
        except httpx.TransportError:
            pass
        if not process.is_running() or time.monotonic() > end:
            raise SystemExit(f"nothing serves {url}")
        time.sleep(0.3)


@contextmanager
def _litellm(venv: str, backend: str, port: int) -> Generator[psutil.Process]:
    parameters = {"model": "hosted_vllm/m", "api_base": backend, "api_key": "none"}
    config = {
        "model_list": [{"model_name": "m", "litellm_params": parameters}],
        "general_settings": {"master_key": "sk-bench"},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_bytes(orjson.dumps(config))  # JSON is YAML
        command = (f"{venv}/bin/litellm", "--config", str(path), "--port", str(port))
        env = {"PYTHONPATH": "", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"}
        with _process(*command, "--host", "127.0.0.1", env=env) as process:
            yield process


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--response-tokens", type=int, default=32)
    parser.add_argument("--serve", choices=("backend", "ours"), help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve == "backend":
        serving = _serve_backend(options.port, options.prompt_tokens, options.response_tokens)
        asyncio.run(serving)
    elif options.serve == "ours":
        _serve_ours(options.port, options.backend)
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Start everything, measure one after the other, print a line for each."""
    messages = [{"role": "user", "content": "word " * options.prompt_tokens}]
    body = orjson.dumps({"model": "m", "messages": messages, "temperature": 1.0})
    own = "/rollout/ro-{number}/attempt/at-1/v1/chat/completions"
    backend, proxy, litellm = _free_port(), _free_port(), _free_port()
    url = f"http://127.0.0.1:{backend}/v1"
    here = (sys.executable, "-m", "benchmarks.proxy")
    sizes = (
        "--prompt-tokens",
        str(options.prompt_tokens),
        "--response-tokens",
        str(options.response_tokens),
    )
    with ExitStack() as stack:
        start = stack.enter_context
        served = {
            "nothing": (
                backend,
                "/v1/chat/completions",
                start(_process(*here, "--serve", "backend", "--port", str(backend), *sizes)),
            ),
            "ours": (
                proxy,
                own,
                start(_process(*here, "--serve", "ours", "--port", str(proxy), "--backend", url)),
            ),
        }
        if venv := os.environ.get("AGL_LITELLM_VENV"):
            process = start(_litellm(venv, url, litellm))
            served["litellm"] = (litellm, "/v1/chat/completions", process)
        for port, path, process in served.values():
            _wait_until_served(port, path, body, process)
        rates: dict[str, float] = {}
        for num_clients in CLIENTS:
            for name, (port, path, process) in served.items():
                before = _cpu_seconds(process)
                load = asyncio.run(_load(num_clients, port, path, body, options.seconds, None))
                spent = _cpu_seconds(process) - before
                rates[name] = max(rates.get(name, 0.0), load.rate())
                print(
                    f"{num_clients:3d} agents  {name:8s} {load.row()}  CPU "
                    f"{spent * 1e3 / max(load.num_all, 1):6.2f} ms/call  "
                    f"{_memory_mib(process):6.0f} MiB",
                    flush=True,
                )
        half = rates["ours"] / 2
        for name, rate in [
            ("nothing", half),
            ("ours", half),
            ("litellm", rates.get("litellm", 0) / 2),
        ]:
            if name in served:
                port, path, _ = served[name]
                load = asyncio.run(_load(16, port, path, body, options.seconds, rate))
                print(f"at {rate:5.0f}/s {name:8s} {load.row()}", flush=True)
        if "litellm" in rates:
            print(f"ours / litellm, at most: {rates['ours'] / rates['litellm']:.1f}")


if __name__ == "__main__":
    main()
