import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from agl_core.emitter import emit_reward, find_final_reward
from agl_core.runner.returned import Returned, read_returned, to_records
from agl_core.store import InMemoryLightningStore
from agl_core.tracer import OtelTracer
from agl_core.types.tracer import Span, SpanCoreFields


def test_a_number_is_a_reward_and_none_is_nothing():
    assert read_returned(None) == Returned()
    assert read_returned(True) == Returned(1.0)
    assert isinstance(read_returned(2).reward, float)


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.25), 0.25),
        (Fraction(1, 4), 0.25),
        (Decimal("0.25"), 0.25),
    ],
    ids=repr,
)
def test_a_number_of_numpy_is_returned_as_it_is_emitted(value, reward):
    read = read_returned(value).reward
    assert (read, type(read)) == (reward, float)
    with OtelTracer().attempt("ro", "at"):
        emitted = emit_reward(value)
    assert find_final_reward([emitted]) == reward


def test_a_masked_number_is_no_reward():
    reward = read_returned(np.ma.array([1.0], mask=True).mean()).reward
    assert reward is not None
    assert math.isnan(reward)  # which is refused as no finite number
    with pytest.raises(ValueError, match="must be finite"):
        emit_reward(np.ma.masked, propagate=False)


@pytest.mark.parametrize("value", [np.array([1.0]), np.array("x"), "1.0", 1j])
def test_what_is_no_single_number_is_refused(value):
    with pytest.raises(TypeError, match="must return a number or None"):
        read_returned(value)


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        ("1.0", r"convert text with float"),
        (np.array([1.0]), r"choose one value of an array"),
        ((1.0, {"steps": 3}), r"give the number alone, and record the rest with emit_annotation"),
        ({"a": 1.0}, r"emit_reward\(\.\.\., primary_key=\.\.\.\)"),
    ],
    ids=repr,
)
def test_a_refused_return_value_says_what_to_do(value, advice):
    with pytest.raises(TypeError, match=advice):
        read_returned(value)
    if not isinstance(value, dict):
        with pytest.raises(TypeError, match=advice):
            emit_reward(value, propagate=False)


def test_spans_of_one_kind_are_taken():
    spans = [SpanCoreFields(name="a"), SpanCoreFields(name="b")]
    assert read_returned(spans) == Returned(None, spans)


def test_a_coroutine_that_nobody_awaited_is_closed():
    async def forgot():
        return 1.0

    with pytest.raises(TypeError, match="without being an async function"):
        read_returned(forgot())


async def test_records_are_numbered_by_the_store_in_their_order():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    rollout = await store.start_rollout("t")
    ids = (rollout.rollout_id, rollout.attempt.attempt_id)
    with tracer.attempt(*ids) as trace:
        records = await to_records([SpanCoreFields(name=n) for n in "abc"], trace, store)
        assert [(r.name, r.sequence_id) for r in records] == [("a", 1), ("b", 2), ("c", 3)]
        assert {(r.rollout_id, r.attempt_id) for r in records} == {ids}
        assert len({r.parent_id for r in records}) == 1
        assert await to_records([], trace, store) == []
        with pytest.raises(ValueError, match="of rollout 'ro-x', attempt 'at-x'"):
            foreign = Span.from_attributes(attributes={}, rollout_id="ro-x", attempt_id="at-x")
            await to_records([foreign], trace, store)
