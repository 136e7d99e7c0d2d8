"""Fixtures shared by the suite.

One S3 server, one Prefect server, one model engine and one VERL process for each test run, each
started by the first test that asks for it. Prefect reads its settings when it is imported, so the
address of the server is chosen here, before any test module is.
"""

import asyncio
import logging
import os
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from deployments.server import CLIENT_SETTINGS, prefect_server


def _reserve() -> socket.socket:
    """Bind a socket to a port that no connection gets then; a server may listen there later."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
    place.bind(("127.0.0.1", 0))
    return place


_PREFECT_HOME = tempfile.TemporaryDirectory(prefix="agl-tests-prefect-")
_PLACES = [_reserve(), _reserve()]
_PREFECT_PORT, MORTAL_PREFECT_PORT = (place.getsockname()[1] for place in _PLACES)
"""The first is of everyone's server, the second of the one that the chaos tests kill."""
os.environ |= CLIENT_SETTINGS | {
    "PREFECT_HOME": _PREFECT_HOME.name,
    "PREFECT_API_URL": f"http://127.0.0.1:{_PREFECT_PORT}/api",
    "OMP_NUM_THREADS": "1",
}

import boto3  # noqa: E402
import hypothesis  # noqa: E402
import pytest  # noqa: E402
from moto.server import ThreadedMotoServer  # noqa: E402

from agl_core.config import RunConfig, ServingSettings  # noqa: E402
from agl_core.identity import base_model  # noqa: E402
from agl_core.ledger.run import RunLedger, open_run  # noqa: E402
from agl_core.ledger.s3_access import S3Access  # noqa: E402
from agl_core.ledger.storage import Storage, open_storage  # noqa: E402
from agl_core.serving.launch import ModelServer  # noqa: E402
from deployments.cli import read_config  # noqa: E402
from tasks.credentials import s3_credentials  # noqa: E402
from tests import s3_servers  # noqa: E402

# A busy machine may take long over an example; what counts is what comes out.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

CALCULATOR = Path("examples/calculator")
OWN_ENVIRONMENT = {"vllm": "make test-vllm", "frameworks": "make test-frameworks"}
"""Markers of tests that need an environment of their own, and what makes it and runs them."""


def pytest_configure(config: pytest.Config) -> None:
    """Overlook sockets to Prefect servers: its client leaves some open after an event loop, or to a
    server that was killed, and they are found in a later test.

    Started in a shell's background, this process ignores Ctrl-C, and so would what tests interrupt.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    peer = rf"raddr=\('127.0.0.1', ({_PREFECT_PORT}|{MORTAL_PREFECT_PORT})\)"
    config.addinivalue_line("filterwarnings", f"ignore:unclosed <socket.*{peer}:ResourceWarning")
    # The same of its event subscriber; such a transport does not say where it is connected to.
    transport = "unclosed transport <_SelectorSocketTransport"
    config.addinivalue_line("filterwarnings", f"ignore:{transport}:ResourceWarning")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs an environment of its own where it is not asked for by its marker."""
    for marker, command in OWN_ENVIRONMENT.items():
        if marker in config.option.markexpr:
            continue
        for item in items:
            if item.get_closest_marker(marker):  # a keyword would be a folder of that name too
                item.add_marker(pytest.mark.skip(reason=f"needs packages of its own: {command}"))


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A real S3 API over HTTP; yields its endpoint."""
    if s3_servers.NAME != "moto":
        with s3_servers.foreign_server() as url:
            yield url
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_uri(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty bucket, with the environment that reaches it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_servers.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_servers.KEY)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    bucket = f"ledger-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=bucket)
    return f"s3://{bucket}/agl"


@pytest.fixture
def local_storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "ledger"))


@pytest.fixture(params=["local", "s3"])
def storage(request: pytest.FixtureRequest) -> Storage:
    """The same claims for every backend."""
    if request.param == "s3":
        storage = open_storage(request.getfixturevalue("s3_uri"))
        if s3_servers.NAME != "moto":
            storage.probe()
        return storage
    return request.getfixturevalue("local_storage")


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[str]:
    """A real Prefect server; yields its API's URL."""
    with prefect_server(Path(_PREFECT_HOME.name), port=_PREFECT_PORT) as url:
        yield url


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A real engine server in a process of its own, at first with the calculator's policy."""
    base = base_model(str(CALCULATOR / "policy")).policy
    with ModelServer.start(ServingSettings(), base, tmp_path_factory.mktemp("engine")) as server:
        yield server


def small_run(engine_url: str, ledger: str, **overrides: object) -> RunConfig:
    """Return the calculator's run made small: 2 iterations of 4 x 4 rollouts, 8 to validate.

    Overrides replace top-level settings.
    """
    config = read_config(CALCULATOR / "run.yaml", {"ledger": ledger, "run_id": "small"})
    verl = config.algorithm.config | {
        "data.train_batch_size": 4,
        "data.val_max_samples": 8,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "trainer.total_training_steps": 2,
    }
    values = config.model_dump() | {
        "algorithm": {"type": "verl", "config": verl},
        "serving": {"url": engine_url},
        "preflight": {"canary": False},  # tests count model calls
        **overrides,
    }
    return RunConfig.model_validate(values)


def train(config: RunConfig) -> RunLedger:
    """Run the flow in this process and return the run's ledger."""
    from flows.training_run import training_run  # prefect: only where a test needs it

    asyncio.run(training_run(config))
    return open_run(config.ledger, config.run_id, S3Access(config.s3, s3_credentials(config.s3)))


@pytest.fixture(scope="session")
def trained(
    prefect_api: str, engine: ModelServer, tmp_path_factory: pytest.TempPathFactory
) -> RunLedger:
    """A finished small run at temperature 1; tests read it and leave it as it is."""
    return train(small_run(engine.url, str(tmp_path_factory.mktemp("ledger")), run_id="trained"))
