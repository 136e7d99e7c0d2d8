"""The process of one agent: runs attempts, one after the other, as the shard's process tells it.

    python -m agl_core.runner.agent_process package.module:agent FD

A line of JSON each way, over the socket FD::

    -> {"rollout": ..., "resources": ...}     run this attempt
    <- {"ready": PID}                         once, when the agent is imported
    <- {"root_id": ID}                        the attempt has begun; id of its root span here
    <- {"span": ...}                          a span ended
    <- {"log": ...}                           the agent logged something
    <- {"end": ...}                           how the agent ended

The agent runs in the main thread, sync or async, so `signal.alarm` and other signal handlers work.
The process ends when the socket does. It never ends an attempt itself: at the deadline it is
killed.
"""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
from typing import Any

from pydantic import TypeAdapter

from agl_core.litagent.decorator import load_agent
from agl_core.litagent.litagent import LitAgent
from agl_core.lost_output import outlive_output
from agl_core.runner.execution import LeakCounter
from agl_core.runner.rollout import Ending, run_agent, run_sync_agent
from agl_core.runner.span_messages import span_to_message
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.tracer.otel import OtelTracer
from agl_core.types.core import AttemptedRollout
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources

_RESOURCES: TypeAdapter[NamedResources] = TypeAdapter(NamedResources)


class _Line:
    """The sending end, used from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        text = json.dumps(message, default=str)
        with self._lock:
            self._connection.sendall(text.encode() + b"\n")


class _LogHandler(logging.Handler):
    """Sends what is logged here to the shard's process."""

    def __init__(self, line: _Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.send(
            log={"name": record.name, "level": record.levelno, "text": self._text(record)}
        )

    def _text(self, record: logging.LogRecord) -> str:
        return (self.formatter or logging.Formatter()).format(record)


class _SpanSender:
    """Sends the spans of an attempt as they end."""

    def __init__(self, trace: AttemptTrace, line: _Line) -> None:
        self._trace = trace
        self._line = line
        self._lock = threading.Lock()
        self._sent = 0

    def send_new(self) -> None:
        with self._lock:
            spans = self._trace.spans()[self._sent :]
            self._sent += len(spans)
            for span in spans:
                self._line.send(span=span_to_message(span))


def _run(agent: LitAgent[Any], task: dict[str, Any], line: _Line) -> Ending:
    rollout = AttemptedRollout.model_validate(task["rollout"])
    resources = _RESOURCES.validate_python(task["resources"])
    tracer = OtelTracer()
    with tracer.attempt(rollout.rollout_id, rollout.attempt.attempt_id) as trace:
        line.send(root_id=trace.root.get_span_context().span_id)
        trace.on_end(_SpanSender(trace, line).send_new)
        if agent.is_async():
            ending = asyncio.run(run_agent(agent, rollout, resources, trace, None, LeakCounter()))
        else:
            ending = run_sync_agent(agent, rollout, resources, trace)
        signal.alarm(0)  # one that the agent left behind must not reach the next attempt
        trace.on_end(lambda: None)  # the root span stays here
    return ending


def _end_message(ending: Ending) -> dict[str, Any]:
    if ending.returned.spans:
        kind, message = FailureKind.AGENT_ERROR, "the agent returned spans, not a number or None"
        return {"kind": kind, "message": message, "reward": None, "returned": None, "traceback": ""}
    return {
        "kind": ending.kind,
        "message": ending.message,
        "reward": ending.reward,
        "returned": ending.returned.reward,
        "traceback": ending.traceback,
    }


def main(agent_path: str, descriptor: int) -> None:
    """Import the agent and run what the socket says, until it ends."""
    outlive_output()
    os.set_inheritable(descriptor, False)
    connection = socket.socket(fileno=descriptor)
    line = _Line(connection)
    agent = load_agent(agent_path)
    package = agent_path.partition(":")[0].partition(".")[0]
    for name in {package, "agl_core"}:
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger().addHandler(_LogHandler(line))
    line.send(ready=os.getpid())
    with connection, connection.makefile("r", encoding="utf-8") as tasks:
        for task in tasks:
            ending = _run(agent, json.loads(task), line)
            line.send(end=_end_message(ending))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
