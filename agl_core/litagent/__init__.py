"""Agents: ordinary functions of a task and a model (or a prompt) that return a reward."""

from agl_core.litagent.decorator import (
    FunctionalLitAgent,
    as_agent,
    llm_rollout,
    load_agent,
    prompt_rollout,
    rollout,
)

__all__ = [
    "FunctionalLitAgent",
    "as_agent",
    "llm_rollout",
    "load_agent",
    "prompt_rollout",
    "rollout",
]
