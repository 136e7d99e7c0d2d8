"""Which failures of a stage are tried again, on a real Prefect engine and a real S3 API."""

import asyncio

import pytest
from prefect import flow

from agl_core.config import S3Settings
from agl_core.errors import LedgerError
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.s3_storage import S3Storage
from tasks.policies import ledger_task
from tests.s3_proxy import Behaviour, Forward, Reply, Request, fails_for, s3_proxy

pytestmark = pytest.mark.usefixtures("prefect_api")


tries: list[int] = []


def loses_two(request: Request, forward: Forward) -> Reply | None:
    """The connection breaks until a stage has given up twice."""
    return forward(request) if len(tries) > 2 else None


def denies(request: Request, forward: Forward) -> Reply | None:
    return fails_for("PUT", 403, "AccessDenied")(request, forward)


@pytest.mark.parametrize(
    ("behave", "completes", "expected"), [(loses_two, True, 3), (denies, False, 1)]
)
def test_a_lost_connection_is_tried_again_and_a_refusal_is_not(
    s3_server: str, s3_uri: str, behave: Behaviour, completes: bool, expected: int
):
    tries.clear()

    @ledger_task(name="writes")
    def writes(endpoint: str) -> str:
        tries.append(1)
        storage = S3Storage(s3_uri, S3Access(S3Settings(endpoint_url=endpoint)))
        storage._fs.patience_seconds = 0.0
        storage.write_once("k", b"one")
        return storage.uri

    @flow
    async def writing(endpoint: str) -> str:
        return writes.with_options(retry_delay_seconds=0)(endpoint)

    with s3_proxy(s3_server, behave) as proxy:
        if completes:
            assert asyncio.run(writing(proxy.url)) == s3_uri
        else:
            with pytest.raises(LedgerError, match="access denied"):
                asyncio.run(writing(proxy.url))
    assert len(tries) == expected
