import pyarrow as pa
import pytest
from pydantic import ValidationError

from agl_core.ledger.tables import BATCH_ROWS
from agl_core.trajectory.coverage import rollout_coverage, row_coverage, summarise_rewards
from agl_core.types.outcome import Coverage
from tests.builders import make_outcomes, make_rows

OUTCOMES = make_outcomes(
    {"index": 0, "reward": 1.0},
    {"index": 1, "reward": 0.0},
    {"index": 2, "kind": "infra_error", "reward": None, "final": False},
    {"index": 2, "attempt": 2, "kind": "timeout", "reward": None},
    {"index": 3, "reward": 1.0},
)


def test_each_rollout_is_counted_once_with_its_reason():
    rows = make_rows([0, 0, 1, 3], [None, "prompt_too_long", None, "group_too_small"])
    coverage = rollout_coverage(4, OUTCOMES, rows)
    assert coverage == Coverage(
        expected=4,
        trained=2,
        masked=0,
        filtered=1,
        failed=1,
        omitted=0,
        unknown=0,
        reasons={"group_too_small": 1, "timeout": 1},
    )


def test_a_rollout_without_any_record_is_unknown():
    assert rollout_coverage(9, OUTCOMES, make_rows([0, 1, 3], [None] * 3)).unknown == 5


def test_counts_that_do_not_add_up_are_refused():
    with pytest.raises(ValidationError, match="does not add up: expected 3, accounted for 2"):
        Coverage(
            expected=3, trained=1, masked=0, filtered=0, failed=1, omitted=0, unknown=0, reasons={}
        )


def test_rows_are_counted_by_reason():
    rows = row_coverage(make_rows([0, 0, 1], [None, "prompt_too_long", None]))
    assert (rows.built, rows.trained, rows.dropped) == (3, 2, {"prompt_too_long": 1})


def test_a_failed_rollout_is_not_a_reward_of_zero():
    summary = summarise_rewards(
        4,
        OUTCOMES,
        [{"tool": 1.0}, {"tool": 0.0}, {}],
        pass_reward=1.0,
        policy_version="v000000",
    )
    assert summary.rewarded == 3
    assert summary.mean_reward == pytest.approx(2 / 3)
    assert summary.pass_rate == pytest.approx(2 / 3)
    assert summary.failures == {"timeout": 1}
    assert summary.annotations == {"tool": 0.5}


def test_no_rewards_have_no_mean():
    outcomes = make_outcomes({"index": 0, "kind": "no_reward", "reward": None})
    summary = summarise_rewards(1, outcomes, [], pass_reward=1.0, policy_version="v000000")
    assert summary.mean_reward is None
    assert summary.pass_rate is None


def test_a_rollout_whose_rows_have_no_weight_is_masked():
    rows = make_rows([0, 0, 1, 1], [None, None, None, None]).to_pylist()
    masks = [[0, 0], [0], [0], [1]]
    table = pa.Table.from_pylist(
        [row | {"response_mask": mask} for row, mask in zip(rows, masks, strict=True)],
        schema=BATCH_ROWS,
    )
    coverage = rollout_coverage(2, make_outcomes({"index": 0}, {"index": 1}), table)
    assert (coverage.trained, coverage.masked, coverage.filtered) == (1, 1, 0)
