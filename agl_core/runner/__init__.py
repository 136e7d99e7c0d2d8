"""Runners: execute agents and turn what happens into outcomes and spans."""

from agl_core.runner.execution import LeakCounter
from agl_core.runner.rollout import AttemptResult, make_attempt_id, run_attempt

__all__ = ["AttemptResult", "LeakCounter", "make_attempt_id", "run_attempt"]
