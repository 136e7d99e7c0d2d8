"""Adapters: what an algorithm learns from, made from what was recorded."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

from opentelemetry.sdk.trace import ReadableSpan

from agl_core import semconv
from agl_core.types.core import Triplet
from agl_core.types.tracer import Span

T_from = TypeVar("T_from")
T_to = TypeVar("T_to")


class Adapter(ABC, Generic[T_from, T_to]):
    """Turns recorded data into another form; a pure function with settings."""

    def __call__(self, source: T_from, /) -> T_to:
        """Return `adapt(source)`."""
        return self.adapt(source)

    @abstractmethod
    def adapt(self, source: T_from, /) -> T_to:
        """Return the other form of the source, which stays as it is."""


class OtelTraceAdapter(Adapter[Sequence[ReadableSpan], T_to]):
    """An adapter of one attempt's spans as OpenTelemetry's SDK records them."""


class TraceAdapter(Adapter[Sequence[Span], T_to]):
    """An adapter of one attempt's spans as a store returns them."""


class TraceToTripletBase(TraceAdapter[list[Triplet]]):
    """An adapter of one attempt's spans to training triplets."""


def as_spans(source: Iterable[Span | ReadableSpan]) -> list[Span]:
    """Return the source with SDK spans as spans of an attempt.

    Their ids come from the attributes that our tracer sets, else they are empty; the sequence id is
    then the position.
    """
    return [
        span if isinstance(span, Span) else _from_sdk(span, position)
        for position, span in enumerate(source)
    ]


def _from_sdk(span: ReadableSpan, position: int) -> Span:
    attributes: dict[str, Any] = dict(span.attributes or {})
    sequence_id = attributes.get(semconv.SEQUENCE_ID)
    return Span.from_opentelemetry(
        span,
        rollout_id=str(attributes.get(semconv.ROLLOUT_ID, "")),
        attempt_id=str(attributes.get(semconv.ATTEMPT_ID, "")),
        sequence_id=sequence_id if isinstance(sequence_id, int) else position,
    )
