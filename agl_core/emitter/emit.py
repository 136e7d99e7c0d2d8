"""The one way of every emitter: check the attributes, let the active tracer record the span."""

import logging
import os
from collections.abc import Mapping
from typing import Any

from agl_core.env_var import LightningEnvVar, resolve_bool_env_var
from agl_core.tracer.attributes import check_attributes_sanity, flatten_attributes
from agl_core.tracer.base import Tracer
from agl_core.tracer.current import get_active_tracer, get_current_attempt
from agl_core.tracer.dummy import DummyTracer
from agl_core.types.tracer import SpanCoreFields, TraceStatus

logger = logging.getLogger(__name__)


def emit(
    name: str,
    attributes: Mapping[str, Any],
    *,
    propagate: bool,
    status: TraceStatus | None = None,
) -> SpanCoreFields:
    """Record a span without duration and return what it records.

    Args:
        name: Of the span.
        attributes: Nested mappings and lists are flattened with dots.
        propagate: Whether the active tracer records it; else it is only returned.
        status: How it ended; None for no statement.

    Raises:
        RuntimeError: `propagate`, and no tracer is active.
        ValueError: A name is not a string, is empty or there twice once flattened, or a value is
            not a primitive.
    """
    try:
        flat = flatten_attributes(attributes)
    except RecursionError as error:
        raise ValueError(f"attributes of {name} are nested too deeply") from error
    check_attributes_sanity(flat)
    tracer = tracer_for(propagate)
    if resolve_bool_env_var(LightningEnvVar.AGL_EMITTER_DEBUG, fallback=False):
        logger.info("emitted %s: %s", name, flat)
    return tracer.create_span(name, flat, status=status)


def tracer_for(propagate: bool) -> Tracer:
    """Return the active tracer, or without `propagate` one that keeps nothing.

    Raises:
        RuntimeError: `propagate`, and no tracer is active, or this is a process that the agent
            forked.
    """
    if not propagate:
        return DummyTracer()
    attempt = get_current_attempt()
    if attempt is not None and attempt.process_id != os.getpid():
        raise RuntimeError(
            f"cannot emit in process {os.getpid()}: the agent runs in process "
            f"{attempt.process_id}, and nothing that is emitted elsewhere reaches its attempt; "
            "return the value from the other process, and emit it in the agent's own"
        )
    tracer = get_active_tracer()
    if tracer is None:
        raise RuntimeError(
            "No active tracer found. Cannot emit: no active tracer: annotations, rewards and "
            "the like are emitted by an agent while it "
            "runs; a thread that the agent starts needs its context: "
            "pool.submit(contextvars.copy_context().run, function, argument), or "
            "asyncio.to_thread; propagate=False only builds the span"
        )
    return tracer
