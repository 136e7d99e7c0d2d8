"""A Prefect server of our own: started on a free port, with a home of its own, drained before it is
stopped.

Where `PREFECT_API_URL` names a running server, that one is used instead.
"""

import asyncio
import fcntl
import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

from agl_core import env_var
from agl_core.errors import ConfigError, TransientError
from agl_core.lifeline import spawn
from agl_core.utils.shown_url import without_credentials

logger = logging.getLogger(__name__)

# Batch settings measured with Prefect 3.9.1: about three times fewer CPU-seconds for each task run
# than by default.
SERVER_SETTINGS = {
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_BATCH_SIZE": "500",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_SERVICES_TRIGGERS_READ_BATCH_SIZE": "200",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "DO_NOT_TRACK": "1",
}

# Errors go to the caller as exceptions and to the server with the run's logs, not to the console.
CLIENT_SETTINGS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_LEVEL": "WARNING",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "agl_core,flows",
    # The proxy and other threads log outside any flow run.
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_CLI_PROMPT": "false",
    # Prefect's shortest (its default is 180): where `agl deploy` has installed the automations, a
    # flow run is marked Crashed after three times the interval of the deployed ones.
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
}

_START_SECONDS = 180.0
DRAIN_SECONDS = 90.0
_POLL_SECONDS = 0.5
_QUIET_POLLS = 3


@contextmanager
def prefect_server(
    home: Path, port: int | None = None, while_starting: Callable[[], object] = lambda: None
) -> Generator[str]:
    """Run a Prefect server of our own on the loopback address, and yield its API's URL.

    Args:
        home: Folder of the server's database and log; recorded runs stay there.
        port: None takes a free one.
        while_starting: Work to do while the server starts (20 to 30 s with a new home).

    Raises:
        ConfigError: Something else listens on the port.
        TransientError: The server did not answer in time; the message holds the end of its log.
    """
    env_var.bypass_proxies()
    home = home.resolve()
    port = port or free_port()
    if not _is_free(port):
        raise ConfigError(f"port {port} of 127.0.0.1 is in use: choose another one")
    url = f"http://127.0.0.1:{port}/api"
    env = os.environ | SERVER_SETTINGS | {"PREFECT_HOME": str(home), "PREFECT_API_URL": url}
    env["PREFECT_SERVER_UI_API_URL"] = url  # the browser's way to it
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1"]
    with ExitStack() as stack:
        with _starting_alone(home):
            server = stack.enter_context(
                spawn([*command, "--port", str(port)], home / "server.log", env)
            )
            while_starting()
            deadline = time.monotonic() + _START_SECONDS
            while not _is_healthy(url):
                if not server.is_running or time.monotonic() > deadline:
                    raise TransientError(f"the Prefect server did not start:\n{server.log_tail()}")
                time.sleep(0.25)
        yield url


@contextmanager
def _starting_alone(home: Path, deadline_seconds: float = 2 * _START_SECONDS) -> Generator[None]:
    """Hold the lock of a home while its server starts: two servers must not both create, or
    migrate, its database. A process that ends releases the lock, however it ends.

    Raises:
        TransientError: Another process held the lock until the deadline.
    """
    home.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + deadline_seconds
    with (home / "starting.lock").open("ab") as lock:
        is_told = False
        while not _is_locked(lock.fileno()):
            if not is_told:
                logger.warning("waiting for another process that starts a server in %s", home)
                is_told = True
            if time.monotonic() > deadline:
                raise TransientError(
                    f"another process has been starting a Prefect server in {home} for "
                    f"{deadline_seconds:g} s; end that process, or start this one in another folder"
                )
            time.sleep(0.25)
        yield


def _is_locked(descriptor: int) -> bool:
    """Take the lock; False if another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def connected_server(home: Path, while_starting: Callable[[], object]) -> Generator[str]:
    """Point this process at the server that `PREFECT_API_URL` names, or at one that is started.

    Prefect reads its settings when it is imported: call this before.

    Raises:
        ConfigError: The named server does not answer.
        TransientError: The started one did not.
    """
    if url := named_server():
        while_starting()
        yield url
        return
    with prefect_server(home, while_starting=while_starting) as url:
        os.environ |= {"PREFECT_HOME": str(home.resolve()), "PREFECT_API_URL": url}
        yield url


def named_server(*, is_needed: bool = False) -> str | None:
    """Return the URL in `PREFECT_API_URL` once its server answers; None where it is not set.

    Sets this process up as a client: call it before Prefect is imported.

    Args:
        is_needed: Whether a server of our own would not do.

    Raises:
        ConfigError: The server does not answer.
    """
    env_var.bypass_proxies()
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    url = os.environ.get("PREFECT_API_URL", "").strip().rstrip("/")
    if not url:
        os.environ.pop("PREFECT_API_URL", None)
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"PREFECT_API_URL={without_credentials(url)} does not begin with http:// or https://; "
            "write http://HOST:4200/api"
        )
    os.environ["PREFECT_API_URL"] = url
    if "PREFECT_HOME" not in os.environ:
        _check_home()
    if not _is_healthy(url):
        if _is_healthy(api := f"{url}/api"):
            raise ConfigError(
                f"PREFECT_API_URL={without_credentials(url)} has no API: set it to "
                f"{without_credentials(api)}"
            )
        otherwise = "set PREFECT_API_URL to one that runs" if is_needed else "unset the variable"
        raise ConfigError(
            f"PREFECT_API_URL={without_credentials(url)} does not answer: start that server, or "
            f"{otherwise}"
        )
    return url


def _check_home() -> None:
    """Return if Prefect finds a home folder for its settings.

    Raises:
        ConfigError: It does not.
    """
    try:
        Path.home()
    except RuntimeError as error:
        raise ConfigError(
            f"HOME is not set and user {os.getuid()} has no home folder: set HOME, or PREFECT_HOME "
            "to a folder for Prefect's settings"
        ) from error


def require_server(who: str) -> None:
    """Return if `PREFECT_API_URL` names a server that answers.

    Args:
        who: What needs it: a command, or a setting that names what the server has.

    Raises:
        ConfigError: It names none, or one that does not answer.
    """
    if not named_server(is_needed=True):
        raise ConfigError(
            f"{who} needs a Prefect server: set PREFECT_API_URL to its address, "
            "http://HOST:4200/api (prefect server start makes a new one)"
        )


async def drain(since: datetime, deadline_seconds: float = DRAIN_SECONDS) -> bool:
    """Wait until the server has recorded the end of every task run of flow runs that were started
    since then; False if the deadline passed first.

    Task-run rows and states arrive as events, after the flow has ended: recorded is what has no
    unfinished task run and has not grown for a while.
    """
    from prefect.client.orchestration import get_client

    flow_runs = {"expected_start_time": {"after_": since.isoformat()}}
    unfinished = {"state": {"type": {"any_": ["PENDING", "RUNNING", "SCHEDULED"]}}}
    deadline = time.monotonic() + deadline_seconds
    seen, quiet_polls = -1, 0
    async with get_client() as client:
        while quiet_polls < _QUIET_POLLS:
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(_POLL_SECONDS)
            left = await _count_task_runs(client, flow_runs, unfinished)
            total = await _count_task_runs(client, flow_runs, {})
            quiet_polls = quiet_polls + 1 if (left, total) == (0, seen) else 0
            seen = total
    return True


async def _count_task_runs(
    client: Any, flow_runs: dict[str, Any], task_runs: dict[str, Any]
) -> int:
    body = {"flow_runs": flow_runs, "task_runs": task_runs}
    answer = await client.request("POST", "/task_runs/count", json=body)
    return int(answer.text)


def free_port() -> int:
    """Return a TCP port of the loopback address that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            listener.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _is_healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2.0).is_success
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
