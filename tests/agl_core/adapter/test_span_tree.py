import random

import pytest

from agl_core import semconv
from agl_core.adapter.span_tree import TraceTree, walk_with_agents
from tests.agl_core.adapter.traces import make_agent, make_llm_span, make_reward, make_span


def names(tree: TraceTree) -> dict[str, list[str]]:
    return {node.id: [child.id for child in node.children] for node in tree.walk() if node.children}


def test_children_are_in_the_order_of_the_list():
    spans = [make_span("b", 5, 6, parent="r"), make_span("r"), make_span("a", 1, 2, parent="r")]
    assert names(TraceTree.from_spans(spans)) == {"r": ["b", "a"]}


def test_no_spans_make_no_tree():
    with pytest.raises(ValueError, match="No spans provided"):
        TraceTree.from_spans([])


def test_a_parent_that_was_not_recorded_spans_its_children():
    tree = TraceTree.from_spans(
        [make_span("a", 1, 2, parent="x"), make_span("b", 4, 7, parent="x")]
    )
    assert (tree.id, tree.start_time, tree.end_time) == ("x", 1, 7)
    assert tree.span.name == semconv.VIRTUAL_SPAN
    assert names(tree) == {"x": ["a", "b"]}


def test_several_roots_get_one_above_them_in_the_order_of_the_list():
    spans = [make_span("c", parent="lost"), make_span("a"), make_span("b", 3, 9)]
    for _ in range(3):
        tree = TraceTree.from_spans(spans)
        assert tree.id == "virtual-root"
        assert [child.id for child in tree.children] == ["lost", "a", "b"]
        assert tree.end_time == 9


def test_a_span_recorded_twice_counts_once():
    tree = TraceTree.from_spans([make_span("a"), make_span("b", parent="a")] * 2)
    assert names(tree) == {"a": ["b"]}


def test_spans_in_a_circle_hang_below_the_root():
    spans = [
        make_span("leaf", parent="x"),
        make_span("x", parent="y"),
        make_span("y", parent="x"),
        make_span("me", parent="me"),
        make_span("root"),
    ]
    tree = TraceTree.from_spans(spans)
    assert sorted(node.id for node in tree.walk()) == sorted(
        ["virtual-root", *(span.span_id for span in spans)]
    )
    assert [child.id for child in tree.children] == ["root", "x", "me"]
    assert tree.find_id("x").children[0].id == "leaf"


def test_ten_thousand_levels_are_walked_without_recursion():
    depth = 10_000
    spans = [
        make_span(str(i), i, 2 * depth - i, parent=str(i - 1) if i else None) for i in range(depth)
    ]
    random.Random(0).shuffle(spans)
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert [node.id for node in tree.traverse()] == [str(i) for i in range(depth)]
    level, nested = 0, tree.to_json()
    while nested["children"]:
        level, nested = level + 1, nested["children"][0]
    assert level == depth - 1
    assert tree.names_tuple()[0] == "work"


def test_fifty_thousand_flat_spans_stay_flat_and_in_order():
    count = 50_000
    spans = [make_span("r", 0, count + 1)]
    spans += [make_span(str(i), i, i + 0.5, parent="r") for i in range(count)]
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert [child.id for child in tree.children] == [str(i) for i in range(count)]


def test_repair_moves_a_floating_call_into_its_agent():
    spans = [
        make_span("session", 0, 20),
        make_agent("agent", 1, 10, "solver", parent="session"),
        make_span("step", 2, 9, parent="agent"),
        make_llm_span("call", 3, 4, parent="session"),
        make_llm_span("later", 11, 12, parent="session"),
    ]
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert names(tree) == {"session": ["agent", "later"], "agent": ["step"], "step": ["call"]}


def test_repair_leaves_a_call_between_two_concurrent_agents_where_it_is():
    spans = [
        make_span("session", 0, 20),
        make_agent("one", 1, 10, "one", parent="session"),
        make_agent("two", 2, 11, "two", parent="session"),
        make_llm_span("call", 3, 4, parent="session"),
    ]
    tree = TraceTree.from_spans(spans)
    tree.repair_hierarchy()
    assert names(tree) == {"session": ["one", "two", "call"]}


@pytest.mark.parametrize(
    ("name", "attributes", "expected"),
    [
        ("x", {"agent.name": "a"}, "a"),
        ("x", {"agentops.span.kind": "agent", "operation.name": "a"}, "a"),
        ("x", {"agentops.span.kind": "tool", "operation.name": "a"}, None),
        ("x", {"recipient_agent_type": "a"}, "a"),
        ("x", {"langchain.chain.type": "a"}, "a"),
        ("x", {"executor.id": "a"}, "a"),
        ("x", {"type": "agent", "agentlightning.operation.input.name": "a"}, "a"),
        ("langchain.Chain.x", {"lc_name": "a"}, "a"),
        ("x", {"lc_name": "a"}, None),
        ("x", {"gen_ai.agent.name": "a"}, "a"),
        ("x", {"recipient_agent_type": "later", "agent.name": "a"}, "a"),
        ("x", {"agent.name": ""}, None),
    ],
)
def test_agents_are_named_by_what_frameworks_record(name: str, attributes: dict, expected: str):
    tree = TraceTree.from_spans([make_span("s", name=name, attributes=attributes)])
    assert tree.agent_name() == expected
    label = f"{name} [{expected}]" if expected else name
    assert tree.names_tuple() == (label, [])


def test_an_agents_own_span_belongs_to_the_agent_around_it():
    spans = [
        make_agent("a", 0, 9, "outer"),
        make_agent("b", 1, 8, "inner", parent="a"),
        make_span("c", 2, 3, parent="b"),
    ]
    found = [(node.id, agent) for node, agent in walk_with_agents(TraceTree.from_spans(spans))]
    assert found == [("a", None), ("b", "outer"), ("c", "inner")]


def test_calls_of_one_agent_are_found():
    spans = [
        make_agent("a", 0, 9, "outer"),
        make_llm_span("x", 1, 2, parent="a"),
        make_agent("b", 3, 8, "inner", parent="a"),
        make_llm_span("y", 4, 5, parent="b"),
        make_reward("z", 6, 1.0, parent="b"),
    ]
    tree = TraceTree.from_spans(spans)

    def found(agent_match: str | None) -> list[tuple[str, str | None]]:
        calls = tree.find_llm_calls(llm_call_match="openai", agent_match=agent_match)
        return [(node.id, agent) for node, agent in calls]

    assert found(None) == [("x", "outer"), ("y", "inner")]
    assert found("^out") == [("x", "outer")]
