"""Agents: classes with a `rollout` method, or functions of a task and a model (or a prompt)."""

from agl_core.litagent.decorator import (
    FunctionalLitAgent,
    as_agent,
    llm_rollout,
    load_agent,
    prompt_rollout,
    rollout,
)
from agl_core.litagent.litagent import LitAgent

__all__ = [
    "FunctionalLitAgent",
    "LitAgent",
    "as_agent",
    "llm_rollout",
    "load_agent",
    "prompt_rollout",
    "rollout",
]
