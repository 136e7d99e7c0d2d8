"""Real S3 servers for `make test-s3`, each with its own idea of the protocol. `AGL_TEST_S3` names
the one that tests use in place of moto's; `make test-s3` installs them in `.venv-s3`.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

HOME = Path(__file__).parents[1] / ".venv-s3"
NAME = os.environ.get("AGL_TEST_S3", "moto")
KEY = {"s3rver": "S3RVER"}.get(NAME, "test")
"""Access key and secret; s3rver knows one only."""


@contextmanager
def foreign_server() -> Generator[str]:
    """Start the server that `AGL_TEST_S3` names; yields its endpoint."""
    data = Path(tempfile.mkdtemp(prefix="agl-s3-"))
    port = _free_port()
    with (data / "log").open("wb") as log:
        process = subprocess.Popen(_command(data, port), stdout=log, stderr=log, cwd=data)
        try:
            _wait(process, port, data / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            shutil.rmtree(data, ignore_errors=True)


def _command(data: Path, port: int) -> list[str]:
    if NAME == "s3rver":
        program = str(HOME / "node_modules" / ".bin" / "s3rver")
        return [program, "-d", str(data / "data"), "-p", str(port), "-a", "127.0.0.1"]
    if NAME != "seaweedfs":
        raise ValueError(f"AGL_TEST_S3={NAME}: name seaweedfs or s3rver")
    (data / "data").mkdir()
    (data / "s3.json").write_text(
        '{"identities": [{"name": "test", "actions": ["Admin", "Read", "Write", "List"],'
        ' "credentials": [{"accessKey": "test", "secretKey": "test"}]}]}'
    )
    master, volume, filer = _free_port(), _free_port(), _free_port()
    return [
        *(
            str(HOME / "bin" / "weed"),
            f"-logdir={data}",
            "server",
            f"-dir={data / 'data'}",
            "-ip=127.0.0.1",
        ),
        *("-ip.bind=127.0.0.1", "-s3", f"-s3.port={port}", f"-s3.config={data / 's3.json'}"),
        *(f"-master.port={master}", f"-master.port.grpc={_free_port()}"),
        *(f"-volume.port={volume}", f"-volume.port.grpc={_free_port()}"),
        *("-filer", f"-filer.port={filer}", f"-filer.port.grpc={_free_port()}"),
        *(f"-s3.port.grpc={_free_port()}", "-s3.port.iceberg=0"),
        # Each bucket takes several volumes of its own, and each test a bucket.
        *("-master.volumeSizeLimitMB=64", "-volume.max=2000"),
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    url = f"http://127.0.0.1:{port}"
    keys = {"aws_access_key_id": KEY, "aws_secret_access_key": KEY, "region_name": "us-east-1"}
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            boto3.client("s3", endpoint_url=url, **keys).create_bucket(Bucket="is-it-there")
        except (BotoCoreError, ClientError):
            time.sleep(0.5)
        else:
            return
    raise RuntimeError(f"{NAME} did not start:\n{log.read_text(errors='replace')[-3000:]}")
