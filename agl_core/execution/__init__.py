"""Execution strategies: where an algorithm and its runners live, and how they end together."""

from agl_core.execution.base import AlgorithmBundle, ExecutionStrategy, RunnerBundle
from agl_core.execution.client_server import ClientServerExecutionStrategy
from agl_core.execution.events import ExecutionEvent, MultiprocessingEvent, ThreadingEvent
from agl_core.execution.shared_memory import SharedMemoryExecutionStrategy

__all__ = [
    "AlgorithmBundle",
    "ClientServerExecutionStrategy",
    "ExecutionEvent",
    "ExecutionStrategy",
    "MultiprocessingEvent",
    "RunnerBundle",
    "SharedMemoryExecutionStrategy",
    "ThreadingEvent",
]
