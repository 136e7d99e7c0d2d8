import math
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agl_core.store import CollectionBasedLightningStore as Store
from agl_core.types.core import (
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
)
from agl_core.types.outcome import FailureKind
from tests.agl_core.store.builders import begin, make_resources, make_span, take
from tests.agl_core.store.conftest import Clock


async def test_an_enqueued_rollout_waits_without_an_attempt(store: Store, clock: Clock):
    rollout = await store.enqueue_rollout({"q": 1}, mode="val", metadata={"row": 3})
    assert re.fullmatch(r"ro-[0-9a-f]{12}", rollout.rollout_id)
    assert type(rollout) is Rollout
    assert (rollout.status, rollout.mode, rollout.input) == ("queuing", "val", {"q": 1})
    assert rollout.metadata == {"row": 3}
    assert (rollout.start_time, rollout.end_time) == (clock.now, None)
    assert await store.get_latest_attempt(rollout.rollout_id) is None


async def test_a_started_rollout_is_prepared_with_attempt_one_past_the_queue(store: Store):
    started = await store.start_rollout("task", worker_id="w")
    assert (started.status, started.attempt.sequence_id) == ("preparing", 1)
    assert re.fullmatch(r"at-[0-9a-f]{8}", started.attempt.attempt_id)
    assert await store.dequeue_rollout() is None
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("busy", started.attempt.attempt_id)


async def test_the_config_is_a_copy(store: Store):
    config = RolloutConfig(max_attempts=2)
    rollout = await store.enqueue_rollout("task", config=config)
    config.max_attempts = 5
    config.retry_condition.append("failed")
    assert rollout.config == RolloutConfig(max_attempts=2)
    kept = await store.get_rollout_by_id(rollout.rollout_id)
    assert kept is not None
    assert kept.config == RolloutConfig(max_attempts=2)


async def test_returned_records_are_copies(store: Store):
    rollout = await store.enqueue_rollout({"q": [1]}, metadata={})
    rollout.input["q"].append(2)
    assert rollout.metadata is not None
    rollout.metadata["x"] = 1
    rollout.status = "failed"
    kept = await store.get_rollout_by_id(rollout.rollout_id)
    assert kept is not None
    assert (kept.input, kept.metadata, kept.status) == ({"q": [1]}, {}, "queuing")


async def test_a_rollout_is_given_the_latest_resources(store: Store):
    assert (await store.enqueue_rollout("task")).resources_id is None
    await store.add_resources(make_resources())
    latest = await store.add_resources(make_resources())
    assert (await store.enqueue_rollout("task")).resources_id == latest.resources_id
    assert (await store.start_rollout("task")).resources_id == latest.resources_id


async def test_unknown_resources_are_refused_and_nothing_is_queued(store: Store):
    good = EnqueueRolloutRequest(input=1)
    with pytest.raises(ValueError, match="Resources rs-0 not found"):
        await store.enqueue_many_rollouts(
            [good, EnqueueRolloutRequest(input=2, resources_id="rs-0")]
        )
    with pytest.raises(ValueError, match="Resources rs-0 not found"):
        await store.start_rollout("task", resources_id="rs-0")
    assert (await store.query_rollouts()).total == 0
    rollout = await store.enqueue_rollout("task")
    with pytest.raises(ValueError, match="Resources rs-0 not found"):
        await store.update_rollout(rollout.rollout_id, resources_id="rs-0")


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (object(), "object has no form in JSON"),
        (b"abc", "bytes has no form in JSON"),
        ([{1, 2}], "set has no form in JSON"),
        ({"n": [2**64]}, "an integer is not from"),
        (-(2**63) - 1, "an integer is not from"),
        ({1: "a", "1": "b"}, "two keys become the same text, '1'"),
        ({1.5: "a"}, "the key 1.5 is no text"),
        ("\ud800", "surrogates"),
    ],
)
async def test_an_input_without_a_form_in_json_is_refused(store: Store, value: object, why: str):
    for call in (store.enqueue_rollout(value), store.start_rollout({"value": value})):
        with pytest.raises(ValueError, match=f"cannot be kept as JSON: .*{why}"):
            await call
    assert (await store.query_rollouts()).total == 0


@pytest.mark.parametrize(
    "value",
    [None, 0, 1.5, float("inf"), "x", [1, [None]], {"a": {"b": [1e300, 2**64 - 1, -(2**63)]}}, ""],
)
async def test_an_input_comes_back_as_it_was(store: Store, value: object):
    rollout = await store.enqueue_rollout(value)
    assert rollout.input == value
    assert (await take(store)).input == value


class Point(BaseModel):
    x: float
    y: float | None = None


@dataclass
class Pair:
    x: float
    point: Point


@pytest.mark.parametrize("nested", [False, True])
async def test_models_and_dataclasses_keep_infinities(store: Store, nested: bool):
    pair = Pair(x=math.inf, point=Point(x=-math.inf))
    rollout = await store.enqueue_rollout({"pair": pair} if nested else pair)
    found = rollout.input["pair"] if nested else rollout.input
    assert found == {"x": math.inf, "point": {"x": -math.inf, "y": None}}


async def test_values_that_only_resemble_json_come_back_as_it(store: Store):
    value = {1: (1, 2), "day": date(2026, 1, 2), "path": Path("a/b"), "sort": FailureKind.TIMEOUT}
    rollout = await store.enqueue_rollout(value)
    kind = FailureKind.TIMEOUT.value
    assert rollout.input == {"1": [1, 2], "day": "2026-01-02", "path": "a/b", "sort": kind}


async def test_what_is_nested_too_deep_is_refused_and_what_is_kept_can_be_taken(store: Store):
    kept = 0
    for depth in (100, 190, 250, 500, 5000):
        value: Any = math.inf
        for _ in range(depth):
            value = [value]
        try:
            await store.enqueue_rollout(value)
            kept += 1
        except ValueError:
            pass
    assert len(await store.dequeue_many_rollouts(limit=9)) == kept >= 1


@pytest.mark.parametrize("field", ["timeout_seconds", "unresponsive_seconds"])
def test_a_limit_is_above_zero(field: str):
    for seconds in (0, -1, math.nan):
        with pytest.raises(ValueError, match="greater than 0"):
            RolloutConfig.model_validate({field: seconds})


async def test_infinity_is_no_limit(store: Store, clock: Clock):
    config = RolloutConfig(timeout_seconds=math.inf, unresponsive_seconds=math.inf)
    started = await store.start_rollout("task", config=config)
    clock.sleep(1e6)
    found = await store.get_rollout_by_id(started.rollout_id)
    assert found is not None
    assert (found.status, found.config) == ("preparing", config)


async def test_a_model_as_input_comes_back_as_an_object(store: Store):
    rollout = await store.enqueue_rollout(RolloutConfig(max_attempts=3))
    assert rollout.input["max_attempts"] == 3


# Queries.


async def three(store: Store) -> list[str]:
    """Return the ids of a running, a cancelled and a queued rollout."""
    rollouts = [await store.enqueue_rollout(n) for n in range(3)]
    await take(store)
    await store.update_rollout(rollouts[1].rollout_id, status="cancelled")
    return [rollout.rollout_id for rollout in rollouts]


async def test_rollouts_are_found_by_status(store: Store):
    ids = await three(store)
    page = await store.query_rollouts(status_in=["cancelled", "queuing"])
    assert [rollout.rollout_id for rollout in page] == ids[1:]
    assert (await store.query_rollouts(status_in=[])).total == 0


async def test_rollouts_are_found_by_id_and_by_part_of_it(store: Store):
    ids = await three(store)
    page = await store.query_rollouts(rollout_id_in=[ids[2], ids[0], "ro-unknown"])
    assert [rollout.rollout_id for rollout in page] == [ids[0], ids[2]]
    page = await store.query_rollouts(rollout_id_contains=ids[1][4:])
    assert [rollout.rollout_id for rollout in page] == [ids[1]]


async def test_conditions_are_joined_by_and_or_by_or(store: Store):
    ids = await three(store)
    conditions = {"status_in": ["queuing"], "rollout_id_contains": ids[0]}
    assert (await store.query_rollouts(**conditions)).total == 0  # pyright: ignore[reportArgumentType]
    either = await store.query_rollouts(**conditions, filter_logic="or")  # pyright: ignore[reportArgumentType]
    assert [rollout.rollout_id for rollout in either] == [ids[0], ids[2]]
    either = await store.query_rollouts(
        rollout_id_in=[ids[1]], rollout_id_contains=ids[0], filter_logic="or"
    )
    assert [rollout.rollout_id for rollout in either] == ids[:2]


async def test_deprecated_arguments_warn_and_the_new_ones_win(store: Store):
    ids = await three(store)
    with pytest.warns(DeprecationWarning, match="status_in"):
        assert (await store.query_rollouts(status=["queuing"])).total == 1
    with pytest.warns(DeprecationWarning, match="rollout_id_in"):
        page = await store.query_rollouts(rollout_ids=[ids[0]], rollout_id_in=[ids[1]])
    assert [rollout.rollout_id for rollout in page] == [ids[1]]
    with pytest.warns(DeprecationWarning, match="status_in"):
        page = await store.query_rollouts(status=["queuing"], status_in=["cancelled"])
    assert [rollout.rollout_id for rollout in page] == [ids[1]]


async def test_filter_sort_and_page_go_together(store: Store, clock: Clock):
    for number in range(6):
        clock.sleep(1)
        await store.enqueue_rollout(number, mode="train" if number % 2 else "val")
    await store.update_rollout((await take(store)).rollout_id, status="failed")
    page = await store.query_rollouts(
        status_in=["queuing"], sort_by="start_time", sort_order="desc", limit=2, offset=1
    )
    assert [rollout.input for rollout in page] == [4, 3]
    assert (page.total, page.limit, page.offset) == (5, 2, 1)
    by_mode = await store.query_rollouts(sort_by="mode")
    assert [rollout.input for rollout in by_mode] == [1, 3, 5, 0, 2, 4]


async def test_without_a_field_rollouts_come_in_order_of_creation(store: Store):
    ids = await three(store)
    assert [r.rollout_id for r in await store.query_rollouts()] == ids
    assert [r.rollout_id for r in await store.query_rollouts(sort_order="desc")] == ids[::-1]


async def test_empty_pages_keep_the_total(store: Store):
    await three(store)
    for page in (await store.query_rollouts(limit=0), await store.query_rollouts(offset=7)):
        assert (list(page), page.total) == ([], 3)


async def test_none_comes_first_in_ascending_order(store: Store):
    await store.enqueue_rollout("b", mode="val")
    await store.enqueue_rollout("a")
    page = await store.query_rollouts(sort_by="mode")
    assert [rollout.input for rollout in page] == ["a", "b"]
    page = await store.query_rollouts(sort_by="mode", sort_order="desc")
    assert [rollout.input for rollout in page] == ["b", "a"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sort_by": "status; DROP TABLE rollouts"}, "fields are: .*start_time"),
        ({"sort_by": "nothing"}, "cannot sort by 'nothing'"),
        ({"sort_order": "up"}, "sort order is 'up'"),
        ({"filter_logic": "xor"}, "filter logic is 'xor'"),
        ({"status_in": ["queueing"]}, "no status 'queueing'; there are queuing"),
        ({"limit": -2}, "limit is -2"),
        ({"offset": -1}, "offset is -1"),
    ],
)
async def test_a_question_that_makes_no_sense_is_refused(
    store: Store, arguments: dict[str, object], message: str
):
    with pytest.raises(ValueError, match=message):
        await store.query_rollouts(**arguments)  # pyright: ignore[reportArgumentType]


async def test_values_are_never_part_of_the_sql(store: Store):
    await store.enqueue_rollout("'; DROP TABLE rollouts; --")
    page = await store.query_rollouts(rollout_id_contains="' OR 1=1 --")
    assert page.total == 0
    assert (await store.query_rollouts(rollout_id_in=["x' OR '1'='1"])).total == 0
    assert (await store.query_rollouts(rollout_id_contains="%")).total == 0


async def test_rollouts_come_with_their_latest_attempt(store: Store):
    taken = await begin(store)
    again = await store.start_attempt(taken.rollout_id)
    (found,) = await store.query_rollouts()
    assert isinstance(found, AttemptedRollout)
    assert found.attempt == again.attempt
    assert await store.get_rollout_by_id(taken.rollout_id) == found
    assert await store.get_rollout_by_id("ro-unknown") is None


# Updates.


async def test_only_given_fields_change_and_none_is_a_value(store: Store):
    rollout = await store.enqueue_rollout("task", mode="train", metadata={"a": 1})
    changed = await store.update_rollout(rollout.rollout_id, mode=None)
    assert changed == rollout.model_copy(update={"mode": None})
    changed = await store.update_rollout(
        rollout.rollout_id, input=None, metadata=None, config=RolloutConfig(max_attempts=7)
    )
    assert (changed.input, changed.metadata, changed.config.max_attempts) == (None, None, 7)


async def test_an_unknown_rollout_or_status_is_an_error(store: Store):
    with pytest.raises(ValueError, match="Rollout ro-unknown not found"):
        await store.update_rollout("ro-unknown", mode=None)
    rollout = await store.enqueue_rollout("task")
    with pytest.raises(ValueError, match="Invalid rollout status: done"):
        await store.update_rollout(rollout.rollout_id, status="done")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("end", ["succeeded", "failed", "cancelled"])
async def test_an_end_is_final_and_has_its_time(store: Store, clock: Clock, end: str):
    taken = await begin(store)
    clock.sleep(5)
    ended = await store.update_rollout(taken.rollout_id, status=end)  # pyright: ignore[reportArgumentType]
    assert (ended.status, ended.end_time) == (end, clock.now)
    with pytest.raises(ValueError, match=f"cannot go from {end} to requeuing"):
        await store.update_rollout(taken.rollout_id, status="requeuing")
    await store.update_attempt(taken.rollout_id, taken.attempt.attempt_id, status="running")
    await store.add_span(make_span(taken))
    late = await store.get_rollout_by_id(taken.rollout_id)
    assert late is not None
    assert (late.status, late.end_time) == (end, ended.end_time)


@pytest.mark.parametrize("status", ["preparing", "running"])
async def test_a_rollout_that_nobody_runs_cannot_be_set_to_running(store: Store, status: str):
    queued = await store.enqueue_rollout("task")
    again = await store.start_rollout("other")
    await store.update_rollout(again.rollout_id, status="requeuing")
    for rollout_id in (queued.rollout_id, again.rollout_id):
        with pytest.raises(ValueError, match="nobody runs it; start_attempt"):
            await store.update_rollout(rollout_id, status=status)  # pyright: ignore[reportArgumentType]
    assert len(await store.dequeue_many_rollouts(limit=3)) == 2


async def test_a_refused_update_changes_nothing(store: Store):
    taken = await begin(store)
    await store.update_rollout(taken.rollout_id, status="cancelled")
    with pytest.raises(ValueError, match="cannot go"):
        await store.update_rollout(taken.rollout_id, status="running", metadata={"x": 1})
    kept = await store.get_rollout_by_id(taken.rollout_id)
    assert kept is not None
    assert kept.metadata is None


async def test_cancelling_ends_the_attempt_and_frees_the_worker(store: Store, clock: Clock):
    taken = await begin(store)
    await store.update_rollout(taken.rollout_id, status="cancelled")
    attempt = await store.get_latest_attempt(taken.rollout_id)
    assert attempt is not None
    assert (attempt.status, attempt.end_time) == ("cancelled", clock.now)
    assert attempt.failure_kind == FailureKind.CANCELLED
    worker = await store.get_worker_by_id("w")
    assert worker is not None
    assert (worker.status, worker.current_attempt_id) == ("idle", None)


async def test_a_late_success_does_not_undo_a_cancellation(store: Store):
    taken = await begin(store)
    await store.update_rollout(taken.rollout_id, status="cancelled")
    attempt = await store.update_attempt(taken.rollout_id, "latest", status="succeeded")
    assert attempt.status == "cancelled"
    rollout = await store.get_rollout_by_id(taken.rollout_id)
    assert rollout is not None
    assert rollout.status == "cancelled"
