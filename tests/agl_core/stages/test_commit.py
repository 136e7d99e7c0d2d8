from agl_core.ledger.run import RunLedger
from agl_core.ledger.storage import Storage
from agl_core.stages.commit import most_frequent_failure
from tests.builders import make_outcomes


def test_the_failure_that_most_rollouts_ended_with_is_one_line(local_storage: Storage):
    iteration = RunLedger(local_storage, "run").iteration(0)
    timeout = {"kind": "timeout", "message": "60 s"}
    error = {"kind": "agent_error", "message": "ValueError: no\nnumber"}
    ends = [{}, timeout, error, error]
    with iteration.stage("collect") as stage:
        outcomes = make_outcomes(*({"index": index, **end} for index, end in enumerate(ends)))
        stage.put_table("outcomes", outcomes)
    said = "2 of 3 failures: agent_error: ValueError: no number"
    assert most_frequent_failure(iteration) == said


def test_without_failures_nothing_is_said(local_storage: Storage):
    iteration = RunLedger(local_storage, "run").iteration(0)
    with iteration.stage("collect") as stage:
        stage.put_table("outcomes", make_outcomes({"index": 0}))
    assert most_frequent_failure(iteration) == ""
