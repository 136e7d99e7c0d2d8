"""What an attempt left, in numbers, for its metadata in the store."""

import logging
from collections.abc import Sequence
from typing import Any

from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.runner.rollout import AttemptResult
from agl_core.types.tracer import Span

logger = logging.getLogger(__name__)


def diagnose(result: AttemptResult, spans: Sequence[Span]) -> dict[str, Any]:
    """Return counts of spans and model calls, and where the reward is from.

    Args:
        result: How the attempt ended.
        spans: All of the attempt that this runner knows; a proxy elsewhere may have stored more.
    """
    numbers: dict[str, Any] = {
        "n_spans": len(spans),
        "n_dropped_spans": result.trace.dropped_spans,
        "reward": result.ending.reward,
        "reward_source": result.reward_source,
        "duration_seconds": round(result.duration_seconds, 6),
    }
    try:
        report = TracerTraceToTriplet().adapt_with_report(spans).report
    except Exception as error:  # noqa: BLE001 - counts of what agents of others recorded
        logger.warning("calls not counted: rollout=%s: %s", result.rollout.rollout_id, error)
        return numbers
    return numbers | {
        "n_llm_calls": report.num_llm_calls,
        "n_without_ids": report.num_without_ids,
    }
