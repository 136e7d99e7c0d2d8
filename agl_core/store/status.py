"""Statuses of rollouts and attempts: what they mean, and which may follow which.

    queuing ----> preparing ---> running ---> succeeded | failed | cancelled
                  ^   |            |
                  |   v            v
                 requeuing <-------+           (another attempt is due)

Ends of a rollout are final. Ends of an attempt are final too, except `unresponsive`: silence may
have been a slow network, so an attempt that shows life again goes on, as long as its rollout waits
in the queue for another one (`may_recover`). Only the latest attempt decides its rollout's status.

Pure: tables and functions of them.
"""

from collections.abc import Mapping
from typing import Final, get_args

from agl_core.types.core import AttemptStatus, Rollout, RolloutConfig, RolloutStatus

ROLLOUT_STATUSES: Final[tuple[RolloutStatus, ...]] = get_args(RolloutStatus)
ATTEMPT_STATUSES: Final[tuple[AttemptStatus, ...]] = get_args(AttemptStatus)

QUEUING: Final = frozenset[RolloutStatus]({"queuing", "requeuing"})
RUNNING: Final = frozenset[RolloutStatus]({"preparing", "running"})
FINISHED: Final = frozenset[RolloutStatus]({"succeeded", "failed", "cancelled"})
LIVE_ATTEMPT: Final = frozenset[AttemptStatus]({"preparing", "running"})

_ENDS: Final[frozenset[RolloutStatus]] = FINISHED
ROLLOUT_TRANSITIONS: Final[Mapping[RolloutStatus, frozenset[RolloutStatus]]] = {
    "queuing": frozenset[RolloutStatus]({"preparing", "running", "requeuing"}) | _ENDS,
    "preparing": frozenset[RolloutStatus]({"running", "requeuing"}) | _ENDS,
    # Back to preparing: another attempt was begun by hand.
    "running": frozenset[RolloutStatus]({"preparing", "requeuing"}) | _ENDS,
    # To running or an end: the late life, or result, of the attempt that was given up.
    "requeuing": frozenset[RolloutStatus]({"preparing", "running"}) | _ENDS,
    "succeeded": frozenset[RolloutStatus](),
    "failed": frozenset[RolloutStatus](),
    "cancelled": frozenset[RolloutStatus](),
}
"""Statuses that may follow each; staying is always allowed."""

_ATTEMPT_ENDS: Final = frozenset[AttemptStatus](
    {"succeeded", "failed", "unresponsive", "timeout", "cancelled"}
)
ATTEMPT_TRANSITIONS: Final[Mapping[AttemptStatus, frozenset[AttemptStatus]]] = {
    "preparing": frozenset[AttemptStatus]({"running"}) | _ATTEMPT_ENDS,
    "running": _ATTEMPT_ENDS,
    # Only where `may_recover`.
    "unresponsive": frozenset[AttemptStatus]({"running", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset[AttemptStatus](),
    "failed": frozenset[AttemptStatus](),
    "timeout": frozenset[AttemptStatus](),
    "cancelled": frozenset[AttemptStatus](),
}
"""Statuses that may follow each; staying is always allowed."""


def is_queuing(status: RolloutStatus | Rollout) -> bool:
    """Tell whether a rollout, given as a record or by its status, waits in the queue."""
    return _status(status) in QUEUING


def is_running(status: RolloutStatus | AttemptStatus | Rollout) -> bool:
    """Tell whether a rollout, or the status of one or of an attempt, is with a worker."""
    return _status(status) in LIVE_ATTEMPT


def is_finished(status: RolloutStatus | AttemptStatus | Rollout) -> bool:
    """Tell whether a rollout, or what has the status of one or of an attempt, has ended."""
    return _status(status) in _ENDS | _ATTEMPT_ENDS


def _status(given: RolloutStatus | AttemptStatus | Rollout) -> RolloutStatus | AttemptStatus:
    """Return the status; Agent Lightning's scripts give the rollout."""
    return given.status if isinstance(given, Rollout) else given


def may_follow(before: RolloutStatus, after: RolloutStatus) -> bool:
    """Tell whether a rollout may go from one status to another, or stay."""
    return before == after or after in ROLLOUT_TRANSITIONS[before]


def attempt_may_follow(
    before: AttemptStatus, after: AttemptStatus, *, recoverable: bool = False
) -> bool:
    """Tell whether an attempt may go from one status to another, or stay.

    Args:
        before: What it is.
        after: What it shall be.
        recoverable: What `may_recover` says of it.
    """
    if before == "unresponsive" and before != after and not recoverable:
        return False
    return before == after or after in ATTEMPT_TRANSITIONS[before]


def may_recover(
    attempt_status: AttemptStatus, rollout_status: RolloutStatus, *, is_latest: bool
) -> bool:
    """Tell whether an attempt that was given up as silent may go on: nobody has replaced it, and
    the rollout still waits for another attempt.
    """
    return attempt_status == "unresponsive" and rollout_status == "requeuing" and is_latest


def may_retry(status: AttemptStatus, sequence_id: int, config: RolloutConfig) -> bool:
    """Tell whether another attempt follows one that ended so.

    Args:
        status: How it ended.
        sequence_id: Its 1-based number.
        config: Of the rollout.
    """
    return status in config.retry_condition and sequence_id < config.max_attempts


def rollout_status(status: AttemptStatus, sequence_id: int, config: RolloutConfig) -> RolloutStatus:
    """Return the status of a rollout whose latest attempt has this status.

    Args:
        status: Of the latest attempt.
        sequence_id: Its 1-based number.
        config: Of the rollout.
    """
    if status == "preparing" or status == "running" or status == "succeeded":
        return status
    if may_retry(status, sequence_id, config):
        return "requeuing"
    return "cancelled" if status == "cancelled" else "failed"
