import pyarrow as pa

from agl_core.ledger import files
from agl_core.ledger.rollout_set import Claim, RolloutSet
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.storage import Storage
from tests.builders import POLICY, make_call, make_outcomes, make_requests, make_spans


def open_set(storage: Storage, count: int = 4) -> RolloutSet:
    rollouts = RolloutSet(IterationLedger(storage, "run", 0), "train")
    rollouts.write_requests(make_requests(count), POLICY, {"temperature": 1.0})
    return rollouts


def put(rollouts: RolloutSet, claim: int, number: int, *indices: int) -> None:
    spans = make_spans(*(make_call(index, span_id=bytes([claim] * 8)) for index in indices))
    outcomes = make_outcomes(*({"index": index, "started": claim} for index in indices))
    rollouts.put_chunk(claim, number, spans, outcomes)


def final_claims(rollouts: RolloutSet) -> dict[int, float]:
    table = rollouts.outcomes()
    final = table.filter(table["final"])
    return dict(zip(final["index"].to_pylist(), final["started"].to_pylist(), strict=True))


def test_everything_is_unfinished_before_anything_ran(storage: Storage):
    assert open_set(storage).unfinished() == [0, 1, 2, 3]


def test_only_flushed_rollouts_are_finished(storage: Storage):
    rollouts = open_set(storage)
    assert rollouts.claim([0, 1, 2, 3]).number == 1
    put(rollouts, 1, 1, 0, 2)
    assert rollouts.unfinished() == [1, 3]


def test_spans_without_their_outcomes_do_not_count(storage: Storage):
    rollouts = open_set(storage)
    rollouts.claim([0, 1])
    put(rollouts, 1, 1, 0)
    key = f"{rollouts.prefix}chunks/0001-0002.spans.parquet"
    storage.write_once(key, storage.read(f"{rollouts.prefix}chunks/0001-0001.spans.parquet"))
    assert rollouts.unfinished() == [1, 2, 3]
    assert sum(len(table) for table in rollouts.iter_spans()) == 1


def test_the_latest_claim_decides_over_a_zombies_late_result(storage: Storage):
    rollouts = open_set(storage)
    rollouts.claim([0, 1, 2, 3])
    put(rollouts, 1, 1, 0, 1)
    rollouts.claim([2, 3])
    put(rollouts, 2, 1, 2)
    put(rollouts, 1, 2, 2, 3)  # the first shard was only slow
    assert final_claims(rollouts) == {0: 1.0, 1: 1.0, 2: 2.0}
    assert rollouts.unfinished() == [3]
    spans = pa.concat_tables(rollouts.iter_spans())
    assert spans["index"].to_pylist() == [0, 1, 2]
    assert spans["span_id"][2].as_py() == bytes([2] * 8)


def test_a_superseded_result_is_kept_unused(storage: Storage):
    rollouts = open_set(storage)
    rollouts.claim([0])
    rollouts.claim([0])
    put(rollouts, 1, 1, 0)
    put(rollouts, 2, 1, 0)
    table = rollouts.outcomes()
    assert table["index"].to_pylist() == [0, 0]
    assert table["final"].to_pylist() == [False, True]


def test_requests_are_written_once(storage: Storage):
    open_set(storage, count=4)
    assert len(open_set(storage, count=9).read_requests()) == 4


def test_claims_are_ordered_by_number_beyond_four_digits(local_storage: Storage):
    rollouts = open_set(local_storage)
    for number in (9_999, 10_000):
        claim = Claim(number=number, indices=(0,), created=0.0, host="h", pid=1)
        key = f"{rollouts.prefix}claims/{number:04d}.json"
        files.put_json(local_storage, key, claim.model_dump(mode="json"))
    assert rollouts.deciding_claims() == {0: 10_000}
    assert rollouts.claim([0]).number == 10_001


def test_a_flush_that_was_written_twice_counts_once(storage: Storage):
    rollouts = open_set(storage)
    rollouts.claim([0, 1, 2])
    put(rollouts, 1, 1, 0, 1)  # written, but the shard was never told
    put(rollouts, 1, 2, 0, 1, 2)
    assert rollouts.outcomes()["index"].to_pylist() == [0, 1, 2]
    assert pa.concat_tables(rollouts.iter_spans())["index"].to_pylist() == [0, 1, 2]


def test_failed_rollouts_are_unfinished_where_they_are_asked_for(storage: Storage):
    rollouts = open_set(storage)
    rollouts.claim([0, 1, 2])
    outcomes = make_outcomes(
        {"index": 0},
        {"index": 1, "kind": "timeout", "reward": None, "final": False},
        {"index": 1, "attempt": 2},
        {"index": 2, "kind": "agent_error", "reward": None},
    )
    rollouts.put_chunk(1, 1, make_spans(), outcomes)
    assert rollouts.unfinished() == [3]
    assert rollouts.unfinished(include_failed=True) == [2, 3]
    rollouts.claim([2])
    assert rollouts.unfinished() == [2, 3], "a later claim decides, although it has nothing yet"


def test_what_is_left_of_a_claim_is_told_from_its_own_flushes(storage: Storage):
    rollouts = open_set(storage)
    first, second = rollouts.claim([0, 1]), rollouts.claim([2, 3])
    put(rollouts, 1, 1, 0)
    put(rollouts, 2, 1, 2, 3)
    assert rollouts.unfinished_of(first) == [1]
    assert rollouts.unfinished_of(second) == []


def test_a_retried_shard_takes_what_is_unfinished_or_failed_and_not_replaced(storage: Storage):
    rollouts = open_set(storage)
    rollouts.claim([0, 1, 2, 3])
    failed = {"index": 1, "kind": "timeout", "reward": None}
    rollouts.put_chunk(1, 1, make_spans(), make_outcomes({"index": 0}, failed))
    rollouts.claim([3])  # the living iteration replaced the shard in part
    retry = rollouts.claim_rest(1)
    assert retry is not None
    assert (retry.number, retry.indices, retry.retry_of) == (3, (1, 2), 1)
    put(rollouts, 3, 1, 1)
    again = rollouts.claim_rest(1)
    assert again is not None
    assert again.indices == (2,)
    put(rollouts, 4, 1, 2)
    assert rollouts.claim_rest(1) is None
    assert rollouts.unfinished() == [3]
