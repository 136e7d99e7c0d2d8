"""Algorithms other than VERL go through the same stages, records and counts."""

from typing import Any

import pytest

from agl_core.errors import ConfigError
from agl_core.ledger.run import RunLedger
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from tests.conftest import CALCULATOR, small_run, train

pytestmark = pytest.mark.usefixtures("prefect_api")

POLICY = str(CALCULATOR / "policy")


class OnlyRuns:
    """No iterative algorithm."""


def run_with(engine: ModelServer, ledger: str, algorithm: dict[str, Any], **rest: Any) -> RunLedger:
    return train(small_run(engine.url, ledger, algorithm=algorithm, **rest))


def test_baseline_scores_every_row_and_learns_nothing(engine, tmp_path):
    train_data = tmp_path / "train.jsonl"
    lines = (CALCULATOR / "data/train.jsonl").read_text().splitlines()[:20]
    train_data.write_text("\n".join(lines) + "\n")
    config = {"model": POLICY, "batch_size": 8, "n_epochs": 2, "max_tokens": 16}
    ledger = run_with(
        engine,
        str(tmp_path / "ledger"),
        {"type": "baseline", "config": config},
        run_id="baseline",
        train_data=str(train_data),
    )
    manifests = ledger.manifests()
    assert [manifest.coverage.expected for manifest in manifests] == [8, 8, 4, 8, 8, 4]
    for manifest in manifests:
        assert manifest.coverage.trained == 0
        assert manifest.coverage.masked + manifest.coverage.failed == manifest.coverage.expected
        assert manifest.policy_out is None
        assert manifest.update == {}
    assert list(manifests[0].validation) == ["v000000"]
    assert all(manifest.validation == {} for manifest in manifests[1:])
    assert verify_run(ledger) == []


def test_a_users_own_algorithm_is_named_by_its_path(engine, tmp_path):
    algorithm = {"type": "tests.algorithms:OddRows", "config": {"model": POLICY}}
    ledger = run_with(engine, str(tmp_path), algorithm, run_id="odd", val_data=None)
    first, second = ledger.manifests()
    assert (first.coverage.expected, second.coverage.expected) == (4, 4)
    assert verify_run(ledger) == []


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"type": "tests.flows.test_algorithms:OnlyRuns"}, "is no subclass of agl_core.Iterative"),
        ({"type": "tests.flows.test_algorithms:None_"}, "cannot be imported: AttributeError"),
        ({"type": "no.such:Thing"}, "cannot be imported: ModuleNotFoundError"),
        ({"type": "baseline"}, "of baseline: missing a required argument: 'model'"),
        ({"type": "baseline", "config": {"model": POLICY, "m": 1}}, "unexpected keyword argument"),
        ({"type": "baseline", "config": {"model": POLICY, "n": 0}}, "n=0: at least 1"),
        (
            {"type": "baseline", "config": {"model": POLICY, "batch_size": 10**6}},
            "batch_size=1000000 is above the",
        ),
    ],
)
def test_an_algorithm_that_cannot_be_used_is_refused(engine, tmp_path, algorithm, message: str):
    with pytest.raises(ConfigError, match=message):
        run_with(engine, str(tmp_path), algorithm, run_id="wrong")
    assert not list(tmp_path.iterdir())
