"""A killed run goes on over a real S3 server; `make test-s3` runs this, `make test` does not."""

import signal
from pathlib import Path

import pytest

from agl_core.config import RolloutSettings
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from tests import s3_servers
from tests.conftest import small_run
from tests.e2e.killable_run import KillableRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("prefect_api"),
    pytest.mark.skipif(s3_servers.NAME == "moto", reason="AGL_TEST_S3 names no server"),
]

DEATHS = [r"chunks/0001-0002.outcomes", r"/update/a1[^/]*/checkpoint/optim", r"/manifest.json"]


def test_a_run_killed_three_times_ends_whole(engine: ModelServer, s3_uri: str, tmp_path: Path):
    rollout = RolloutSettings(flush_rollouts=4, concurrency=4)
    config = small_run(engine.url, s3_uri, run_id="killed", rollout=rollout)
    for dies_at in [*DEATHS, ""]:
        with KillableRun(config, tmp_path / "run.log", dies_at=dies_at) as run:
            assert run.wait(300) == (-signal.SIGKILL if dies_at else 0), dies_at
    ledger = open_run(config.ledger, config.run_id)
    first, _ = ledger.manifests()
    assert first.observed["stages"]["update"]["attempt"] == 2
    assert verify_run(ledger) == []
