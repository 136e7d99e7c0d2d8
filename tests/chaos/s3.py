"""The ledger's bucket behind a proxy that fails for a seeded share of the requests."""

import os
import threading
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import boto3
from moto.server import ThreadedMotoServer

from tests.chaos.model_server import chance
from tests.s3_proxy import Forward, Reply, Request, s3_proxy

S3_FAULTS = ("500", "503", "slow", "half")
_CODES = {"500": "InternalError", "503": "SlowDown"}


@dataclass
class IllBucket:
    """An S3 server with one bucket for each run."""

    url: str
    kinds: tuple[str, ...] = ()
    """What is wrong now."""
    seed: int = 0
    share: float = 0.0
    hits: int = 0
    _count: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def behave(self, request: Request, forward: Forward) -> Reply | None:
        """Answer one request."""
        with self._lock:
            self._count += 1
            is_ill = bool(self.kinds) and chance(self.seed, self._count) < self.share
            self.hits += is_ill
            kind = self.kinds[self._count % len(self.kinds)] if is_ill else ""
        if kind in _CODES:
            body = f"<Error><Code>{_CODES[kind]}</Code><Message>as told</Message></Error>"
            return Reply(int(kind), [("content-type", "application/xml")], body.encode())
        if kind == "slow":
            time.sleep(1.0)
        reply = forward(request)
        if kind != "half":
            return reply
        if not reply.body or request.method == "HEAD":
            return None  # carried out, and nobody hears of it
        reply.num_sent = len(reply.body) // 2
        return reply

    def new_bucket(self) -> str:
        """Return the URI of an empty ledger."""
        bucket = f"ledger-{uuid.uuid4().hex[:12]}"
        boto3.client("s3").create_bucket(Bucket=bucket)
        return f"s3://{bucket}/agl"


@contextmanager
def ill_bucket() -> Generator[IllBucket]:
    """Run the server and its proxy, with the environment that reaches the proxy."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with s3_proxy(f"http://{host}:{port}") as proxy:
            bucket = IllBucket(proxy.url)
            proxy.behave = bucket.behave
            os.environ |= {
                "AWS_ENDPOINT_URL": proxy.url,
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
            yield bucket
    finally:
        server.stop()


def download(uri: str, folder: Path) -> Path:
    """Copy a ledger to a local folder, with the times at which its objects were stored."""
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", []):
            path = folder / entry["Key"].removeprefix(f"{prefix}/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())
            stored = int(entry["LastModified"].timestamp() * 1e9)
            os.utime(path, ns=(stored, stored))
    return folder
