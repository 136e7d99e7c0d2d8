"""The whole run against an S3 API over HTTP."""

import logging
from pathlib import Path
from typing import Any

import pytest

from agl_core.config import RolloutSettings
from agl_core.ledger.run import RunLedger
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from tests.conftest import small_run, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_api")]


class RequestCount(logging.Handler):
    """Counts the requests that the S3 server logs."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += " HTTP/1.1" in record.getMessage()


def run_on_s3(engine: ModelServer, uri: str, run_id: str, samples: int) -> tuple[RunLedger, int]:
    """Train one iteration of 4 groups; return its ledger and the number of requests it took."""
    config = small_run(
        engine.url,
        uri,
        run_id=run_id,
        rollout=RolloutSettings(flush_seconds=600, flush_rollouts=1000),
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


def test_a_finished_run_on_s3_is_found_again(engine: ModelServer, s3_uri: str):
    ledger, _ = run_on_s3(engine, s3_uri, "again", samples=2)
    before: Any = ledger.storage.list(ledger.prefix)
    ledger, _ = run_on_s3(engine, s3_uri, "again", samples=2)
    assert ledger.storage.list(ledger.prefix) == before
