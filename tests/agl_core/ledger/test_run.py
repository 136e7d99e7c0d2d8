import json
from pathlib import Path
from typing import Any

import pytest

from agl_core.config import RunConfig
from agl_core.errors import ConfigError
from agl_core.ledger.run import BaseModelRecord, RunLedger, RunRecord, open_run
from agl_core.ledger.storage import Storage
from tests.builders import POLICY
from tests.conftest import small_run


@pytest.mark.parametrize(
    "run_id", ["", "..", "../other", "a/b", "Upper", "line\n", "a b", "a+b", "a%2fb", "ä", "a_b"]
)
def test_an_id_that_no_run_has_is_refused(tmp_path: Path, run_id: str):
    with pytest.raises(ConfigError, match="63 lowercase letters, digits and dashes"):
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


CODE = {"agent_sha256": "aa", "git_commit": "c1", "git_dirty": False, "package_version": "1"}


def make_record(ledger: RunLedger, code: dict[str, Any] | None = None, **changes: Any) -> RunRecord:
    config = small_run("http://127.0.0.1:1", ledger.storage.uri, **changes)
    return RunRecord(
        run_id=ledger.run_id,
        config=config,
        datasets={},
        base=BaseModelRecord(
            policy=POLICY, tokenizer_digest="t", chat_template_digest=None, licence="mit"
        ),
        code=CODE | (code or {}),
        packages={},
        conditional_put=True,
        created=0.0,
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"code": {"git_commit": "c2"}}, "code.git_commit was 'c1', now 'c2'"),
        ({"code": {"git_dirty": True}}, "code.git_dirty was False, now True"),
        ({"code": {"agent_sha256": "bb"}}, "code.agent_sha256 was 'aa', now 'bb'"),
        ({"seed": 7}, "config.seed was 1, now 7"),
    ],
)
def test_another_identity_is_refused_or_recorded_where_it_is_allowed(
    local_storage: Storage, change: dict[str, Any], sentence: str
):
    ledger = RunLedger(local_storage, "run")
    first, changed = make_record(ledger), make_record(ledger, **change)
    ledger.start(first)
    before = local_storage.list(ledger.prefix)
    with pytest.raises(ConfigError) as refused:
        ledger.start(changed)
    assert sentence in str(refused.value)
    assert "--allow-changed" in str(refused.value)
    assert local_storage.list(ledger.prefix) == before

    assert ledger.start(changed, allow_changed=True) == changed
    assert ledger.record() == changed
    assert ledger.first_record() == first
    assert [str(item) for item in ledger.changes()[0].differences] == [sentence]
    ledger.start(changed)  # once allowed, it is what the run is
    with pytest.raises(ConfigError):
        ledger.start(first)


@pytest.mark.parametrize(
    "change",
    [
        {"code": {"git_commit": None, "git_dirty": None}},  # not in a repository there
        {"code": {"package_version": "2"}},
        {"rollout": {"concurrency": 3, "max_in_flight": 5}},
        {"max_automatic_starts": 9},
    ],
)
def test_where_and_how_fast_a_run_goes_on_may_change(
    local_storage: Storage, change: dict[str, Any]
):
    ledger = RunLedger(local_storage, "run")
    ledger.start(make_record(ledger, rollout={"timeout_seconds": 120.0}))
    ledger.start(make_record(ledger, **{"rollout": {}, **change}))
    assert ledger.changes() == []
