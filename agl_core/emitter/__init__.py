"""Emitters: how an agent records rewards, notes, values and operations in its attempt."""

from agl_core.emitter.annotation import emit_annotation
from agl_core.emitter.exception import emit_exception
from agl_core.emitter.message import emit_message, get_message_value
from agl_core.emitter.object import emit_object, get_object_value
from agl_core.emitter.operation import operation
from agl_core.emitter.reward import (
    emit_reward,
    final_reward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    reward,
)

__all__ = [
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "final_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "operation",
    "reward",
]
