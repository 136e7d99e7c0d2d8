from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import semconv
from agl_core.semconv import LinkPydanticModel
from agl_core.tracer.attributes import (
    check_attributes_sanity,
    extract_links_from_attributes,
    extract_tags_from_attributes,
    filter_and_unflatten_attributes,
    filter_attributes,
    flatten_attributes,
    format_exception_attributes,
    full_qualified_name,
    make_link_attributes,
    make_tag_attributes,
    query_linked_spans,
    sanitize_attribute_value,
    sanitize_attributes,
    unflatten_attributes,
)

primitives = st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
names = st.text(st.characters(exclude_characters=".", exclude_categories=["Nd"]), min_size=1)
trees = st.recursive(
    primitives,
    lambda below: (
        st.lists(below, min_size=1, max_size=4)
        | st.dictionaries(names, below, min_size=1, max_size=4)
    ),
    max_leaves=20,
)
nested = st.dictionaries(names, trees, min_size=1, max_size=4)


@given(nested)
def test_unflattening_undoes_flattening(tree):
    assert unflatten_attributes(flatten_attributes(tree)) == tree
    assert unflatten_attributes(flatten_attributes(tree, expand_leaf_lists=False)) == tree


@given(nested)
def test_flat_attributes_are_primitives_that_a_span_can_record(tree):
    check_attributes_sanity(flatten_attributes(tree))


@given(st.dictionaries(st.text(st.sampled_from("ab01."), max_size=6), st.integers(), max_size=6))
def test_any_names_can_be_unflattened(flat):
    unflatten_attributes(flat)


def test_lists_of_primitives_stay_whole_when_asked():
    tree = {"ids": [1, 2], "choices": [{"token_ids": [3]}]}
    flat = flatten_attributes(tree, expand_leaf_lists=False)
    assert flat == {"ids": [1, 2], "choices.0.token_ids": [3]}


def test_what_is_empty_has_no_leaves():
    assert flatten_attributes({"a": {}, "b": [], "c": {"d": 1}}) == {"c.d": 1}


def test_a_name_that_is_not_a_string_is_refused():
    with pytest.raises(ValueError, match="attribute name 1 under 'a' is not a string"):
        flatten_attributes({"a": {1: "x"}})


@pytest.mark.parametrize(
    ("flat", "tree"),
    [
        ({"0": "a", "1": "b"}, ["a", "b"]),
        ({"x.1": "b", "x.0": "a"}, {"x": ["a", "b"]}),
        ({"x.0": "a", "x.2": "c"}, {"x": {"0": "a", "2": "c"}}),
        ({"x.00": "a"}, {"x": {"00": "a"}}),
        ({"x": 1, "x.y": 2}, {"x": {"y": 2}}),
        ({"x.y.z": 1, "x.y": 2}, {"x": {"y": {"z": 1}}}),
        ({"x": {"0": 1}}, {"x": {"0": 1}}),
        ({}, {}),
    ],
)
def test_numbers_from_zero_without_a_gap_are_a_list(flat, tree):
    assert unflatten_attributes(flat) == tree


def test_a_prefix_ends_at_a_dot():
    attributes = {"gen_ai.prompt": 1, "gen_ai.prompt.0.role": 2, "gen_ai.prompts": 3}
    assert list(filter_attributes(attributes, "gen_ai.prompt")) == list(attributes)[:2]
    assert filter_and_unflatten_attributes(attributes, "gen_ai.prompt") == [{"role": 2}]
    assert filter_and_unflatten_attributes(attributes, "gen_ai.prompt.") == [{"role": 2}]


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        ("x", "x"),
        ((1, 2), [1, 2]),
        ([1, "x"], '[1, "x"]'),
        ({"a": None}, '{"a": null}'),
        (None, "null"),
        ({1}, "{1}"),
    ],
)
def test_any_value_can_be_made_recordable(value, recorded):
    assert sanitize_attribute_value(value) == recorded
    assert sanitize_attributes({"a": value}) == {"a": recorded}
    check_attributes_sanity({"a": recorded})


@pytest.mark.parametrize("value", [None, {"a": 1}, [1, "x"], [True, 1], [[1]], object()])
def test_a_value_that_a_span_cannot_record_is_refused(value):
    with pytest.raises(ValueError, match="attribute 'a' is a"):
        check_attributes_sanity({"a": value})


def test_a_value_that_json_does_not_know_is_refused_where_its_text_is_not_wanted():
    with pytest.raises(ValueError, match=r"'a': Object must be JSON serializable, got: .*set"):
        sanitize_attributes({"a": {1}}, force=False)


def test_an_attribute_needs_a_name():
    with pytest.raises(ValueError, match="name 1 is not a string"):
        check_attributes_sanity({1: "x"})


@given(st.lists(st.text()))
def test_tags_come_back(tags):
    assert extract_tags_from_attributes(make_tag_attributes(tags) | {"other": 1}) == tags


@given(st.dictionaries(st.text(), st.text()))
def test_links_come_back(links):
    found = extract_links_from_attributes(make_link_attributes(links) | {"other": 1})
    assert {link.key_match: link.value_match for link in found} == links


@pytest.mark.parametrize("broken", [{"1": "x"}, {"0": 1}, {"a": "x"}])
def test_broken_tags_are_refused(broken):
    with pytest.raises(ValueError, match="tags are not"):
        extract_tags_from_attributes({f"{semconv.TAG_PREFIX}.{k}": v for k, v in broken.items()})


@pytest.mark.parametrize("broken", [{"1.key_match": "x"}, {"0.key_match": "x"}, {"0": "x"}])
def test_broken_links_are_refused(broken):
    with pytest.raises(ValueError):  # noqa: PT011 - ours or pydantic's
        extract_links_from_attributes({f"{semconv.LINK_PREFIX}.{k}": v for k, v in broken.items()})


def test_a_link_needs_text():
    with pytest.raises(ValueError, match="link 'a' is a int"):
        make_link_attributes({"a": 1})  # pyright: ignore


def test_a_linked_span_matches_all_links():
    spans = [
        SimpleNamespace(trace_id="t", span_id=f"s{n}", attributes={"k": "v", "n": str(n)})
        for n in range(3)
    ]

    def found(**links):
        pairs = [LinkPydanticModel(key_match=k, value_match=v) for k, v in links.items()]
        return [span.span_id for span in query_linked_spans(spans, pairs)]

    assert found(k="v", n="1") == ["s1"]
    assert found(trace_id="t", span_id="s2") == ["s2"]
    assert found(trace_id="other", k="v") == []
    assert found(k="w") == []
    assert found() == ["s0", "s1", "s2"]


def test_an_exception_has_the_attributes_of_opentelemetry():
    try:
        raise KeyError("x")
    except KeyError as error:
        attributes = format_exception_attributes(error)
    assert attributes["exception.type"] == "KeyError"
    assert attributes["exception.message"] == "'x'"
    assert 'raise KeyError("x")' in str(attributes["exception.stacktrace"])
    assert attributes["exception.escaped"] is True


def test_a_class_is_named_with_its_module():
    assert full_qualified_name(LinkPydanticModel) == "agl_core.semconv.LinkPydanticModel"
    assert full_qualified_name(int) == "int"


def test_the_path_of_agent_lightning_has_the_same_functions():
    from agl_core.tracer import attributes
    from agl_core.utils import otel

    names = set(otel.__all__) - {"get_tracer", "get_tracer_provider"}
    assert all(getattr(otel, name) is getattr(attributes, name) for name in names)


def test_links_compare_attributes_as_text():
    spans = [
        SimpleNamespace(trace_id="t", span_id="s", attributes={"step": step}) for step in (1, 2)
    ]
    link = LinkPydanticModel(key_match="step", value_match="2")
    assert query_linked_spans(spans, [link]) == spans[1:]
