"""Emitters: how an agent records rewards and annotations in its attempt."""

from agl_core.emitter.annotation import emit_annotation
from agl_core.emitter.reward import (
    emit_reward,
    final_reward,
    find_final_reward,
    get_reward_value,
)

__all__ = [
    "emit_annotation",
    "emit_reward",
    "final_reward",
    "find_final_reward",
    "get_reward_value",
]
