"""Runners: execute agents and turn what happens into outcomes and spans."""

from agl_core.runner.agent import LitAgentRunner
from agl_core.runner.base import Runner
from agl_core.runner.execution import LeakCounter
from agl_core.runner.outcome import JudgedAttempt, judge_attempt, make_attempt_id
from agl_core.runner.rollout import AttemptResult, run_attempt

__all__ = [
    "AttemptResult",
    "JudgedAttempt",
    "LeakCounter",
    "LitAgentRunner",
    "Runner",
    "judge_attempt",
    "make_attempt_id",
    "run_attempt",
]
