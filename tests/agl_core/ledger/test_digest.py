import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core.ledger.digest import json_digest, table_digest

LISTS = st.lists(st.none() | st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5), max_size=20)


def table(values: list[list[int] | None]) -> pa.Table:
    return pa.table({"ids": pa.array(values, pa.list_(pa.int32()))})


@given(LISTS, st.integers(1, 5))
def test_storage_does_not_change_a_digest(tmp_path_factory, values, rows):
    path = tmp_path_factory.mktemp("digest") / "t.parquet"
    pq.write_table(table(values), path, row_group_size=rows, compression="snappy")
    assert table_digest(pq.read_table(path), ["ids"]) == table_digest(table(values), ["ids"])


@given(LISTS, LISTS)
def test_two_digests_agree_only_where_the_values_do(left, right):
    same = table_digest(table(left), ["ids"]) == table_digest(table(right), ["ids"])
    assert same == (left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (pa.array(["a", "bc"]), pa.array(["ab", "c"])),
        (pa.array(["", None]), pa.array([None, ""])),
        (pa.array([0.0, None]), pa.array([None, 0.0])),
        (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
        (pa.array([True, False]), pa.array([False, True])),
    ],
)
def test_values_that_look_alike_differ(left, right):
    assert table_digest(pa.table({"x": left}), ["x"]) != table_digest(pa.table({"x": right}), ["x"])


def test_an_empty_column_has_a_digest():
    assert table_digest(table([]), ["ids"]).startswith("sha256:")


def test_json_digest_ignores_the_order_of_keys():
    assert json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})


REWARDS = st.lists(
    st.lists(
        st.fixed_dictionaries(
            {"name": st.sampled_from(["a", "b"]), "value": st.sampled_from([0.0, 1.0])}
        ),
        max_size=2,
    ),
    max_size=5,
)


@given(REWARDS, REWARDS)
def test_lists_of_records_differ_where_a_field_does(tmp_path_factory, left, right):
    kind = pa.list_(pa.struct([("name", pa.string()), ("value", pa.float64())]))
    tables = [pa.table({"rewards": pa.array(values, kind)}) for values in (left, right)]
    digests = [table_digest(table, ["rewards"]) for table in tables]
    assert (digests[0] == digests[1]) == (left == right)
    path = tmp_path_factory.mktemp("digest") / "t.parquet"
    pq.write_table(tables[0], path)
    assert table_digest(pq.read_table(path), ["rewards"]) == digests[0]
