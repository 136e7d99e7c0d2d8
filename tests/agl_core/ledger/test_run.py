import json
from pathlib import Path

import pytest

from agl_core.config import RunConfig
from agl_core.errors import ConfigError
from agl_core.ledger.run import RunRecord, open_run


@pytest.mark.parametrize("run_id", ["", "..", "../other", "a/b", "Upper", "line\n"])
def test_an_id_that_no_run_has_is_refused(tmp_path: Path, run_id: str):
    with pytest.raises(ConfigError, match="use lowercase letters, digits and dashes"):
        open_run(str(tmp_path), run_id)


def test_a_record_of_version_1_is_read_with_its_retries_at_their_new_place():
    config = RunConfig.model_validate(
        {
            "run_id": "old",
            "ledger": "l",
            "agent": "a:b",
            "train_data": "t",
            "algorithm": {"config": {}},
        }
    ).model_dump(mode="json", exclude={"failures"})
    old = {"max_attempts": 3, "retry": ["timeout"], "retry_delay_seconds": 2.0}
    config["rollout"] |= old
    policy = {"version": "v000000", "weights_digest": "sha256:aa", "path": "/nowhere"}
    base = {"policy": policy, "tokenizer_digest": "", "chat_template_digest": None, "licence": "x"}
    values = {
        "schema_version": 1,
        "run_id": "old",
        "config": config,
        "datasets": {},
        "base": base,
        "code": {},
        "packages": {},
        "conditional_put": True,
        "created": 0.0,
    }
    record = RunRecord.model_validate_json(json.dumps(values))
    failures = record.config.failures
    assert {kind.value: policy.attempts for kind, policy in failures.policies().items()} == {
        "agent_error": 1,
        "timeout": 3,
        "infra_error": 1,
        "no_trace": 1,
        "no_reward": 1,
    }
    assert failures.longest_wait_seconds() == 3.0 * 2
    assert failures.min_success_fraction == 0.0
    again = RunRecord.model_validate_json(record.model_dump_json())
    assert again == record
    assert again.schema_version == 2
