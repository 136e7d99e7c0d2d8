"""Fixtures shared by the suite: one S3 server for each test run, ledgers in temporary folders."""

import logging
import uuid
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from agl_core.ledger.storage import Storage, open_storage


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A real S3 API over HTTP; yields its endpoint."""
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
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
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
        return open_storage(request.getfixturevalue("s3_uri"))
    return request.getfixturevalue("local_storage")
