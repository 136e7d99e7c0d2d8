"""What an agent returned: nothing, its reward, or spans of the attempt."""

import inspect
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan

from agl_core.emitter.reward import describe_no_number, to_float, unboxed
from agl_core.store.base import LightningStore
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.types.tracer import Span, SpanContext, SpanCoreFields

logger = logging.getLogger(__name__)

ReturnedSpans = Sequence[ReadableSpan] | Sequence[Span] | Sequence[SpanCoreFields]

_KINDS = (ReadableSpan, Span, SpanCoreFields)


@dataclass(frozen=True, slots=True)
class Returned:
    """An agent's return value, read."""

    reward: float | None = None
    spans: ReturnedSpans = field(default_factory=list[Span])
    """All of one kind."""


def read_returned(value: Any) -> Returned:
    """Return what an agent's return value says; a number is whatever `emit_reward` takes as one.

    Raises:
        TypeError: It is neither None, a number, nor a list of spans.
        ValueError: The spans are of different kinds.
    """
    if value is None:
        return Returned()
    number = unboxed(value)
    if isinstance(number, Real):
        return Returned(to_float(number))
    if isinstance(value, list | tuple) and all(isinstance(item, _KINDS) for item in value):
        if not value:
            logger.warning("an agent returned an empty list: neither a reward nor spans")
        elif not any(all(isinstance(item, kind) for item in value) for kind in _KINDS):
            kinds = sorted({type(item).__name__ for item in value})
            raise ValueError(
                "Invalid raw result type: the agent returned spans of different "
                f"kinds: {', '.join(kinds)}"
            )
        return Returned(spans=value)
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("the agent returned a coroutine without being an async function")
    raise TypeError(
        "Invalid raw result type. It's expected to be none, float, or a list of ReadableSpan "
        "or Span, but got: the agent must return a number or None, or a list of spans, got "
        f"{describe_no_number(value)}"
    )


async def to_records(
    spans: ReturnedSpans, trace: AttemptTrace, store: LightningStore
) -> list[Span]:
    """Return spans of an attempt as the store keeps them; without a place they are below its root.

    Raises:
        ValueError: One belongs to another attempt.
    """
    unnumbered = sum(not isinstance(span, Span) for span in spans)
    ids = (trace.rollout_id, trace.attempt_id)
    numbers = iter(await store.get_many_span_sequence_ids([ids] * unnumbered) if unnumbered else ())
    return [_to_record(span, trace, numbers) for span in spans]


def _to_record(
    span: ReadableSpan | Span | SpanCoreFields, trace: AttemptTrace, numbers: Iterator[int]
) -> Span:
    rollout_id, attempt_id = trace.rollout_id, trace.attempt_id
    if isinstance(span, Span):
        if (span.rollout_id, span.attempt_id) != (rollout_id, attempt_id):
            raise ValueError(
                f"the agent returned span {span.name!r} of rollout {span.rollout_id!r}, attempt "
                f"{span.attempt_id!r}; it ran {rollout_id}, {attempt_id}"
            )
        return span
    if isinstance(span, ReadableSpan):
        return Span.from_opentelemetry(span, rollout_id, attempt_id, next(numbers))
    root = trace.root.get_span_context()
    place = SpanContext.from_opentelemetry(root) if root.is_valid else None
    return Span.from_core_fields(
        span,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=next(numbers),
        trace_id=place.trace_id if place else None,
        parent_id=place.span_id if place else None,
    )
