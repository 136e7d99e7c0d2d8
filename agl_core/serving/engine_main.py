"""The embedded engine as a process: options, socket, address file.

The address is announced once requests are accepted, so whoever starts the process waits for the
file. An address that other machines reach needs a token.
"""

import argparse
import logging
import os
import socket
import sys
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from agl_core.errors import ConfigError
from agl_core.serving.decoding import set_num_threads
from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.utils.foreign_requests import is_loopback

logger = logging.getLogger(__name__)


class _AnnouncedServer(uvicorn.Server):
    """Writes its base URL to a file once it accepts requests."""

    def __init__(self, config: uvicorn.Config, url: str, address_file: Path | None) -> None:
        super().__init__(config)
        self._url = url
        self._address_file = address_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, then announce."""
        await super().startup(sockets)
        logger.info("serving at %s", self._url)
        if self._address_file is not None:
            write_atomically(self._address_file, self._url)


def write_atomically(file: Path, text: str) -> None:
    """Write a small file that readers see whole or not at all."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


def serve(
    app: ASGIApp, host: str = "127.0.0.1", port: int = 0, address_file: Path | None = None
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        app: What answers.
        host: Name or address to bind.
        port: 0 for a free one.
        address_file: Gets the base URL (without `/v1`) once requests are accepted.

    Raises:
        OSError: The address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        # Connections inherit it. asyncio sets it only where the socket names its protocol, which
        # this one does not; without it an answer in two writes takes 40 ms (delayed ACK).
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = f"[{host}]" if ":" in host else host
        url = f"http://{name}:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", backlog=1024
        )
        _AnnouncedServer(config, url, address_file).run(sockets=[listener])


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m agl_core.serving.engine_main", description="Serve a small model over HTTP."
    )
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--version", required=True, help="name it is served under, v000000")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 for a free one")
    parser.add_argument("--address-file", type=Path, help="gets the base URL once it is up")
    parser.add_argument("--token-file", type=Path, help="holds the bearer token to ask for")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--threads", type=int, help="torch threads")
    parser.add_argument("--max-batch-size", type=int, default=64)
    parser.add_argument(
        "--allow-forced-tokens", action="store_true", help="take forced_token_ids; for tests"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the server; return the exit status, 2 where the settings cannot be used."""
    options = _options(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s"
    )
    try:
        token = options.token_file.read_text().strip() if options.token_file else None
        if not token and not is_loopback(options.host):
            raise ConfigError(f"--host {options.host} is open to other machines: give --token-file")
        if options.threads is not None:
            set_num_threads(options.threads)
        engine = Engine(
            options.model,
            options.version,
            max_batch_size=options.max_batch_size,
            device=options.device,
        )
    except (ConfigError, OSError) as error:
        logger.error("%s", error)
        return 2
    try:
        app = create_app(engine, token, allows_forced=options.allow_forced_tokens)
        serve(app, options.host, options.port, options.address_file)
    except KeyboardInterrupt:  # uvicorn has shut down, and raises what it was stopped by
        logger.info("stopped")
    finally:
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
