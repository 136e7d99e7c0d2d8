"""The spans of one attempt as a tree: who caused what, and which agent was at work.

Every walk is a loop: a trace may be ten thousand spans deep. Children are in the order of the list
of spans. A parent that was never recorded becomes a virtual span over the time of its children;
several roots get a virtual one above them, which is common: the reward that a runner writes is a
trace of its own.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agl_core import semconv
from agl_core.adapter.hierarchy import Interval, find_enclosing
from agl_core.types.tracer import Span

VIRTUAL_ROOT_ID = "virtual-root"


@dataclass(slots=True, eq=False)
class TraceTree:
    """A span and the spans below it."""

    id: str
    span: Span
    children: list["TraceTree"] = field(default_factory=list["TraceTree"])

    @classmethod
    def from_spans(cls, spans: Sequence[Span]) -> "TraceTree":
        """Return the tree of an attempt's spans.

        A span recorded twice counts once. Spans that are each other's parents hang below the root.

        Raises:
            ValueError: There are no spans.
        """
        if not spans:
            raise ValueError("No spans provided to create TraceTree.")
        nodes: dict[str, TraceTree] = {}
        for span in spans:
            nodes.setdefault(span.span_id, cls(span.span_id, span))
        missing: dict[str, TraceTree] = {}
        roots: list[TraceTree] = []
        for node in nodes.values():
            parent_id = node.span.parent_id
            if not parent_id:
                roots.append(node)
            elif parent_id in nodes:
                nodes[parent_id].children.append(node)
            else:
                if parent_id not in missing:
                    missing[parent_id] = cls(parent_id, _virtual_span(parent_id, node.span))
                    roots.append(missing[parent_id])
                missing[parent_id].children.append(node)
        for parent in missing.values():
            _span_children(parent)
        roots += _break_cycles(nodes, roots)
        if len(roots) == 1:
            return roots[0]
        top = cls(VIRTUAL_ROOT_ID, _virtual_span(VIRTUAL_ROOT_ID, spans[0]), roots)
        _span_children(top)
        return top

    @property
    def start_time(self) -> float | None:
        """When the span started, UTC epoch seconds."""
        return self.span.start_time

    @property
    def end_time(self) -> float | None:
        """When the span ended, UTC epoch seconds."""
        return self.span.end_time

    def add_child(self, child: "TraceTree") -> None:
        """Put a tree below this span, after its other children."""
        self.children.append(child)

    def walk(self) -> Iterator["TraceTree"]:
        """Yield this node and all below it, each before its children."""
        waiting: list[TraceTree] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))

    def traverse(self) -> list["TraceTree"]:
        """Return this node and all below it, each before its children."""
        return list(self.walk())

    def find_id(self, span_id: str) -> "TraceTree | None":
        """Return the node of a span, or None."""
        return next((node for node in self.walk() if node.id == span_id), None)

    def names_tuple(self) -> tuple[str, list[Any]]:
        """Return the names of the spans as nested `(name, [children])`, those of agents with the
        agent's: `invoke_agent [planner]`.
        """

        def name(node: TraceTree) -> str:
            agent = node.agent_name()
            return node.span.name if agent is None else f"{node.span.name} [{agent}]"

        return self._fold(lambda node, below: (name(node), below))

    def to_json(self) -> dict[str, Any]:
        """Return the tree as nested `{"id", "span", "children"}`, the spans as plain data."""
        return self._fold(
            lambda node, below: {
                "id": node.id,
                "span": node.span.model_dump(mode="json"),
                "children": below,
            }
        )

    def agent_name(self) -> str | None:
        """Return the name of the agent whose work this span is, or None if it is no agent's."""
        return read_agent_name(self.span)

    def repair_hierarchy(self) -> None:
        """Move spans that float at the top under those they ran in (`adapter.hierarchy`).

        The top is the first node from the root on that has not exactly one child; its children
        float.
        """
        top = self
        while len(top.children) == 1:
            top = top.children[0]
        below = top.traverse()[1:]
        positions = {id(node): position for position, node in enumerate(below)}
        parents: list[int | None] = [None] * len(below)
        for position, node in enumerate(below):
            for child in node.children:
                parents[positions[id(child)]] = position
        moves = find_enclosing([_interval(*pair) for pair in zip(below, parents, strict=True)])
        moved = {id(below[position]) for position in moves}
        top.children = [child for child in top.children if id(child) not in moved]
        for position, parent in sorted(moves.items()):
            below[parent].add_child(below[position])

    def find_llm_calls(
        self, *, llm_call_match: str, agent_match: str | None = None
    ) -> list[tuple["TraceTree", str | None]]:
        """Return nodes whose name matches, each with the name of its agent, in preorder.

        Args:
            llm_call_match: Regular expression, found anywhere in the span's name.
            agent_match: Regular expression on the agent's name; None for calls of any agent.
        """
        is_call, is_agent = re.compile(llm_call_match), re.compile(agent_match or "")
        return [
            (node, agent)
            for node, agent in walk_with_agents(self)
            if is_call.search(node.span.name)
            and (agent_match is None or (agent is not None and is_agent.search(agent)))
        ]

    def _fold(self, combine: Callable[["TraceTree", list[Any]], Any]) -> Any:
        """Return `combine(node, results of its children)` of this node, from the leaves up."""
        results: dict[int, Any] = {}
        for node in reversed(self.traverse()):
            below = [results.pop(id(child)) for child in node.children]
            results[id(node)] = combine(node, below)
        return results[id(self)]


def walk_with_agents(tree: TraceTree) -> Iterator[tuple[TraceTree, str | None]]:
    """Yield each node in preorder with the name of the agent around it.

    An agent's own span belongs to the agent around that one.
    """
    waiting: list[tuple[TraceTree, str | None]] = [(tree, None)]
    while waiting:
        node, agent = waiting.pop()
        yield node, agent
        inner = node.agent_name() or agent
        waiting.extend((child, inner) for child in reversed(node.children))


def read_agent_name(span: Span) -> str | None:
    """Return the agent's name by the attributes of the frameworks that record one, or None."""
    attributes = span.attributes
    candidates = [
        attributes.get("agent.name"),
        attributes.get("operation.name")
        if _is(attributes, "agentops.span.kind", "agent")
        else None,
        attributes.get("recipient_agent_type"),
        attributes.get("langchain.chain.type"),
        attributes.get("executor.id"),
        attributes.get("agentlightning.operation.input.name")
        if _is(attributes, "type", "agent")
        else None,
        attributes.get("lc_name") if span.name.startswith("langchain.Chain.") else None,
        attributes.get("gen_ai.agent.name"),
    ]
    return next((name for name in candidates if isinstance(name, str) and name), None)


def _is(attributes: Mapping[str, Any], name: str, value: str) -> bool:
    return attributes.get(name) == value


def _interval(node: TraceTree, parent: int | None) -> Interval:
    start, end = node.start_time, node.end_time
    return Interval(
        start=float("nan") if start is None else start,
        end=float("nan") if end is None else end,
        parent=parent,
    )


def _virtual_span(span_id: str, model: Span) -> Span:
    """Return a span that nobody recorded, of the same attempt as another one."""
    return Span(
        rollout_id=model.rollout_id,
        attempt_id=model.attempt_id,
        sequence_id=model.sequence_id,
        trace_id=model.trace_id,
        span_id=span_id,
        name=semconv.VIRTUAL_SPAN,
    )


def _span_children(node: TraceTree) -> None:
    """Set the times of a virtual span to the first start and the last end below it."""
    starts = [child.start_time for child in node.children if child.start_time is not None]
    ends = [child.end_time for child in node.children if child.end_time is not None]
    node.span.start_time = min(starts, default=None)
    node.span.end_time = max(ends, default=None)


def _break_cycles(nodes: dict[str, TraceTree], roots: list[TraceTree]) -> list[TraceTree]:
    """Cut each cycle of parents at one of its spans, and return those spans."""
    reached = {id(node) for root in roots for node in root.walk()}
    cut: list[TraceTree] = []
    for node in nodes.values():
        if id(node) in reached:
            continue
        passed: set[str] = set()
        while node.id not in passed:
            passed.add(node.id)
            node = nodes[str(node.span.parent_id)]
        parent = nodes[str(node.span.parent_id)]
        parent.children = [child for child in parent.children if child is not node]
        cut.append(node)
        reached.update(id(below) for below in node.walk())
    return cut
