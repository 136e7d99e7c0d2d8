"""Annotations, messages, objects, exceptions and operations as spans."""

import asyncio
import importlib
import logging
import sys
from typing import Any

from facts import answer, fails, names

agl: Any = importlib.import_module(sys.argv[1])
logging.disable(logging.CRITICAL)


@agl.rollout
async def agent(task: Any, llm: Any) -> float:
    @agl.operation
    def add(a: int, b: int = 2) -> int:
        return a + b

    @agl.operation(name="joined", by="hand")
    async def join(*words: str, end: str = ".") -> dict[str, str]:
        return {"text": " ".join(words) + end}

    @agl.operation
    def fall() -> None:
        raise LookupError("fell")

    agl.emit_annotation({"deep": {"list": [1, "two"], "flag": True}, "n": 1.5})
    agl.emit_message("hello", attributes={"to": "all"})
    agl.emit_object({"a": [1, 2]})
    try:
        raise ValueError("broken")
    except ValueError as error:
        agl.emit_exception(error)
    assert add(1) == 3
    await join("a", "b", end="!")
    try:
        fall()
    except LookupError:
        agl.emit_message("caught")
    with agl.operation(kind="block") as op:
        op.set_input("first", named={"x": 1})
        op.set_output([1, 2])
    return 1.0


async def stored() -> dict[str, Any]:
    store = agl.InMemoryLightningStore()
    runner = agl.LitAgentRunner(agl.OtelTracer())
    llm = agl.LLM(endpoint="http://h/v1", model="m")
    with runner.run_context(agent=agent, store=store):
        ended = await runner.step(1, resources={"main_llm": llm})
    spans = list(await store.query_spans(ended.rollout_id))
    statuses = {name: set[str]() for name in names(spans)}
    shown: dict[str, list[Any]] = {name: [] for name in statuses}
    for span in spans:
        if span.name in shown:
            statuses[span.name].add(span.status.status_code)
            trace = {"exception.stacktrace"} & span.attributes.keys()
            shown[span.name].append(span.attributes | dict.fromkeys(trace, "..."))
    operations = shown.pop("agentlightning.operation")
    return {
        "status": ended.status,
        "names": sorted(names(spans)),
        "attributes": shown,
        "statuses": {name: sorted(found) for name, found in statuses.items()},
        "operations": dict(zip(("add", "join", "fall", "block"), operations, strict=True)),
        "bodies": [agl.get_message_value(span) for span in spans if "message" in span.name],
        "objects": [agl.get_object_value(span) for span in spans if "object" in span.name],
    }


def decoded(value: Any) -> Any:
    span = agl.emit_object(value, propagate=False)
    back = agl.get_object_value(span)
    return [sorted(span.attributes), back.decode() if isinstance(back, bytes) else back]


found: dict[str, Any] = {"stored": asyncio.run(stored())}
found |= {f"object {v!r}": decoded(v) for v in ("text", 3, 2.5, True, None, b"raw", [1, {"a": 2}])}
found |= {
    "operation at import": fails(lambda: agl.operation(len), RuntimeError, "tracer"),
    "no object": fails(lambda: agl.emit_object(object(), propagate=False), RuntimeError, "JSON"),
    "no text": fails(lambda: agl.emit_message(3, propagate=False), TypeError),
    "no error": fails(lambda: agl.emit_exception("x", propagate=False), TypeError),
    "no tracer": fails(lambda: agl.emit_annotation({"a": 1}), RuntimeError, "tracer"),
    "two names": fails(
        lambda: agl.operation(name="a", **{"agentlightning.operation.name": "b"}),
        ValueError,
        "both",
    ),
    "returned": [
        (one := agl.emit_annotation({"a": {"b": 1}}, propagate=False)).name,
        dict(one.attributes),
    ],
}
answer(found)
