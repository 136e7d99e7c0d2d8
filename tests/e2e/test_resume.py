"""A run that is killed goes on where its ledger ends: real processes, real SIGKILL."""

import hashlib
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from agl_core.config import RolloutSettings, RunConfig
from agl_core.ledger.rollout_set import RolloutSet
from agl_core.ledger.run import RunLedger, open_run
from agl_core.ledger.stages import STAGES
from agl_core.ledger.verify import verify_run
from agl_core.serving.attached import CONVERSATIONS
from agl_core.serving.launch import ModelServer
from examples.calculator.agent import MAX_CALLS
from tests.conftest import small_run
from tests.e2e.killable_run import KillableRun

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_api")]

ROLLOUT, UPDATE = STAGES.index("rollout"), STAGES.index("update")


def records(stages: Sequence[str]) -> list[str]:
    return [f"/000000/stages/{stage}.json" for stage in stages]


# Where the run dies, one start after the other: before each stage's record is written (so between
# a stage's outputs and its record), within rollouts and within an update, and before the manifest.
DEATHS = [
    *records(STAGES[:ROLLOUT]),
    r"/000000/rollouts/train/chunks/0001-0002.outcomes",  # one flush done, the next half written
    r"/000000/rollouts/train/chunks/0002-0001.spans",  # the replacement dies before its first flush
    *records(STAGES[ROLLOUT:UPDATE]),
    r"/000000/update/a1/checkpoint/optim",
    *records(STAGES[UPDATE:]),
    r"/000000/manifest.json",
]


def start(config: RunConfig, folder: Path, dies_at: str) -> int:
    """Run until the end or until it dies; return the exit status."""
    with KillableRun(config, folder / "run.log", dies_at=dies_at) as run:
        return run.wait(300)


def digests(ledger: RunLedger) -> dict[str, str]:
    return {
        key: hashlib.sha256(ledger.storage.read(key)).hexdigest()
        for key in ledger.storage.list(ledger.prefix)
    }


def unfinished(ledger: RunLedger) -> int:
    """Rollouts that were claimed in iteration 0 and have no finished record."""
    iteration = ledger.iteration(0)
    names = {
        key.removeprefix(f"{iteration.prefix}rollouts/").split("/")[0]
        for key in ledger.storage.list(f"{iteration.prefix}rollouts/")
        if "/claims/" in key
    }
    return sum(len(RolloutSet(iteration, name).unfinished()) for name in names)


@pytest.fixture
def config(engine: ModelServer, tmp_path: Path) -> RunConfig:
    return small_run(
        engine.url,
        str(tmp_path / "ledger"),
        rollout=RolloutSettings(flush_rollouts=4, concurrency=4),
    )


def calls(engine: ModelServer) -> int:
    return engine.metrics()["requests_total"]


def test_a_run_killed_in_every_stage_ends_as_if_undisturbed(
    engine: ModelServer, config: RunConfig, tmp_path: Path
):
    before = calls(engine)
    undisturbed_config = config.model_copy(update={"run_id": "undisturbed"})
    assert start(undisturbed_config, tmp_path, "") == 0
    undisturbed = calls(engine) - before

    ledger = open_run(config.ledger, config.run_id)
    before, repeated = calls(engine), 0
    kept: dict[str, str] = {}
    for dies_at in DEATHS:
        assert start(config, tmp_path, dies_at) == -signal.SIGKILL, dies_at
        now = digests(ledger)
        assert kept.items() <= now.items(), "what was written has changed"
        kept = now
        repeated += unfinished(ledger)
    assert start(config, tmp_path, "") == 0
    preflights = len(DEATHS) * 2 * len(CONVERSATIONS)  # at two temperatures, where need be
    assert calls(engine) - before <= undisturbed + preflights + repeated * MAX_CALLS

    assert kept.items() <= digests(ledger).items()
    assert verify_run(ledger) == []
    killed, clean = ledger.manifests(), open_run(config.ledger, "undisturbed").manifests()
    assert len(killed) == len(clean) == 2
    assert killed[0].observed["stages"]["update"]["attempt"] == 3
    for left, right in zip(killed, clean, strict=True):
        assert left.coverage == right.coverage
        assert left.rewards == right.rewards
        assert left.rows == right.rows


def test_a_finished_rollout_is_not_run_again(
    engine: ModelServer, config: RunConfig, tmp_path: Path
):
    death = r"/000000/rollouts/train/chunks/0001-0002.spans"
    assert start(config, tmp_path, death) == -signal.SIGKILL
    rollouts = RolloutSet(open_run(config.ledger, config.run_id).iteration(0), "train")
    finished = set(range(16)) - set(rollouts.unfinished())
    assert 4 <= len(finished) < 16
    assert start(config, tmp_path, r"/000000/stages/rollout.json") == -signal.SIGKILL
    assert set(rollouts.read_claim(2).indices) == set(range(16)) - finished
    table = rollouts.outcomes()
    assert sorted(table.filter(table["final"])["index"].to_pylist()) == list(range(16))
