"""The whole run against an S3 API over HTTP."""

import asyncio
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, LogFilter
from prefect_aws.credentials import AwsCredentials

from agl_core.config import RolloutSettings, S3Settings
from agl_core.errors import ConfigError
from agl_core.ledger.run import RunLedger
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from flows.training_iteration import training_iteration
from tasks.context import IterationRef
from tests.conftest import CALCULATOR, small_run, train
from tests.deployments.test_cli import agl

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_api")]


class RequestCount(logging.Handler):
    """Counts the requests that the S3 server logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += " HTTP/1.1" in record.getMessage()


def run_on_s3(
    engine: ModelServer, uri: str, run_id: str, samples: int, **overrides: Any
) -> tuple[RunLedger, int]:
    """Train one iteration of 4 groups; return its ledger and the number of requests it took."""
    config = small_run(
        engine.url,
        uri,
        run_id=run_id,
        rollout=RolloutSettings(flush_seconds=600, flush_rollouts=1000),
        **overrides,
    )
    verl = config.algorithm.config | {
        "trainer.total_training_steps": 1,
        "actor_rollout_ref.rollout.n": samples,
    }
    algorithm = config.algorithm.model_copy(update={"config": verl})
    logger, counter = logging.getLogger("werkzeug"), RequestCount()
    logger.addHandler(counter)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        ledger = train(config.model_copy(update={"algorithm": algorithm}))
    finally:
        logger.removeHandler(counter)
        logger.setLevel(level)
    return ledger, counter.count


def test_a_run_on_s3_is_complete_and_its_requests_do_not_grow_with_rollouts(
    engine: ModelServer, s3_uri: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-must-not-leak")
    small, small_requests = run_on_s3(engine, s3_uri, "small", samples=2)
    large, large_requests = run_on_s3(engine, s3_uri, "large", samples=8)
    for ledger, expected in [(small, 8), (large, 32)]:
        (manifest,) = ledger.manifests()
        assert manifest.coverage.expected == expected
        assert manifest.coverage.unknown == 0
        assert manifest.identity["conditional_put"] is True
        assert verify_run(ledger) == []
    assert small_requests > 0
    assert large_requests <= small_requests * 1.1

    for key in large.storage.list(large.prefix):
        assert b"a-secret-that-must-not-leak" not in large.storage.read(key)
    assert not Path(s3_uri).exists()


@pytest.mark.long
def test_a_finished_run_on_s3_is_found_again(engine: ModelServer, s3_uri: str):
    ledger, _ = run_on_s3(engine, s3_uri, "again", samples=2)
    before: Any = ledger.storage.list(ledger.prefix)
    ledger, _ = run_on_s3(engine, s3_uri, "again", samples=2)
    assert ledger.storage.list(ledger.prefix) == before


async def said_to_prefect(since: datetime, block: str) -> tuple[str, int]:
    """Return everything that the server knows of runs since then, as one text, and how many name
    the block in parameters.
    """
    after = {"after_": since.isoformat()}
    async with get_client() as client:
        runs = await client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate({"start_time": after}), limit=200
        )
        logs = await client.read_logs(LogFilter.model_validate({"timestamp": after}), limit=200)
        artifacts = await client.read_artifacts()
    parameters = [str(run.parameters) for run in runs]
    text = "\n".join(map(repr, [*runs, *logs, *artifacts]))
    return text, sum(block in one for one in parameters)


@pytest.mark.long
def test_credentials_of_a_block_reach_every_process_and_are_written_nowhere(
    engine: ModelServer,
    s3_server: str,
    s3_uri: str,
    prefect_api: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}")
    secret, block = "a-secret-of-a-block", "aws-credentials/ledger"
    AwsCredentials(
        aws_access_key_id="from-the-block",
        aws_secret_access_key=secret,  # type: ignore[arg-type]
        aws_client_parameters={"endpoint_url": s3_server},  # type: ignore[arg-type]
    ).save("ledger", overwrite=True)
    options = ["--ledger", s3_uri, "--s3-credentials", block]
    caplog.set_level(logging.DEBUG)
    started = datetime.now(UTC)

    data = str(CALCULATOR / "data" / "val.jsonl")
    published = agl("dataset", "publish", "sums", data, *options, PREFECT_API_URL=prefect_api)
    assert published.returncode == 0, published.stderr
    s3 = S3Settings(credentials=block, region="us-east-1")
    ledger, _ = run_on_s3(
        engine, s3_uri, "block", samples=2, s3=s3, train_data=published.stdout.strip()
    )
    assert ledger.committed() == 1
    ref = IterationRef(ledger=s3_uri, s3=s3, run_id="block", iteration=0)
    with pytest.raises(ConfigError, match="iteration 0 of run 'block' is committed"):
        asyncio.run(training_iteration(ref))  # reads the ledger by the block, too

    shown = agl("ledger", "show", "block", *options, PREFECT_API_URL=prefect_api)
    verified = agl("ledger", "verify", "block", *options, PREFECT_API_URL=prefect_api)
    for done in (shown, verified):
        assert done.returncode == 0, done.stderr
    assert "1 iterations, every file as its manifest says" in verified.stdout

    said, named = asyncio.run(said_to_prefect(started, block))
    assert named >= 4, "the run, its iteration and its shards name the block"
    streams = [done.stdout + done.stderr for done in (published, shown, verified)]
    for text in [said, caplog.text, *streams]:
        assert secret not in text
    for key in ledger.storage.list(""):
        assert secret.encode() not in ledger.storage.read(key)
