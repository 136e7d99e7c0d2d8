"""Agents that fail."""

from typing import Any

from examples.calculator.agent import calculator

_calls = 0


def never(task: Any, llm: Any) -> float:
    """Fail on every row."""
    raise ValueError("the tool is not installed")


def not_the_first(task: Any, llm: Any) -> float:
    """Fail on the first row that this process gives it."""
    global _calls
    _calls += 1
    if _calls == 1:
        raise ValueError("this once")
    return calculator(task, llm)
