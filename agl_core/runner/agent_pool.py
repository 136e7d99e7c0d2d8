"""Agents in processes of their own, where a deadline must hold whatever the agent does.

Each process runs one attempt at a time and is used again; one past its deadline, or whose attempt
is cancelled, is killed with everything that it started. They end with this process, however it ends
(`agl_core.lifeline`). Nothing that comes from an agent is unpickled: both ways go lines of JSON.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

from agl_core.errors import TransientError
from agl_core.lifeline import ChildProcess, spawn
from agl_core.runner.children import kill_trees
from agl_core.runner.returned import Returned
from agl_core.runner.rollout import Ending
from agl_core.runner.span_messages import message_to_span
from agl_core.tracer.attempt_trace import AttemptTrace
from agl_core.types.core import AttemptedRollout
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import NamedResources

START_SECONDS = 120.0
"""For the start of a process and the import of the agent."""
_MODULE = "agl_core.runner.agent_process"
_END_SECONDS = 2.0
_LINE_BYTES = 256 * 1024 * 1024


@dataclass
class _AgentProcess:
    """One process and the connection to it."""

    child: ChildProcess
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    pid: int = 0
    """Of the agent's own process, which leads a group; 0 until it has said so."""

    @classmethod
    async def start(cls, agent: str) -> Self:
        """Start a process and wait until it has imported the agent.

        Raises:
            TransientError: It did not in time.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            descriptor = theirs.fileno()
            child = spawn(
                [sys.executable, "-P", "-m", _MODULE, agent, str(descriptor)],
                # Finds what this process finds, the agent above all.
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
                pass_fds=[descriptor],
            )
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE_BYTES)
        process = cls(child, reader, writer)
        try:
            async with asyncio.timeout(START_SECONDS):
                message = await process.read()
        except TimeoutError:
            message = None
        except BaseException:
            await process.kill()
            raise
        if message is None:
            await process.kill()
            raise TransientError(
                f"a process for the agent {agent} was not ready within {START_SECONDS:g} s, or "
                "ended before; its output says why"
            )
        process.pid = message["ready"]
        return process

    async def read(self) -> dict[str, Any] | None:
        """Return the next message; None where the process has ended."""
        try:
            line = await self.reader.readline()
        except ConnectionError:
            return None
        return json.loads(line) if line.endswith(b"\n") else None

    async def end(self) -> None:
        """Let an idle process end; kill it where it does not."""
        await self._close()
        if await asyncio.to_thread(self.child.wait, _END_SECONDS) is None:
            await self.kill()

    async def kill(self) -> int:
        """Kill the process with everything that it started; return its exit status."""
        await self._close()
        if self.pid:
            await asyncio.to_thread(kill_trees, [self.pid])
            if (status := await asyncio.to_thread(self.child.wait, _END_SECONDS)) is not None:
                return status
        await asyncio.to_thread(self.child.stop)
        return self.child.wait(0) or 0

    async def _close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class AgentPool:
    """The processes of one agent.

    Args:
        agent: `package.module:name`.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._idle: list[_AgentProcess] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, agent: str) -> AsyncGenerator[Self]:
        """Yield a pool whose processes end with the block."""
        pool = cls(agent)
        try:
            yield pool
        finally:
            await asyncio.gather(*(process.end() for process in pool._idle))

    async def run(
        self,
        rollout: AttemptedRollout,
        resources: NamedResources,
        trace: AttemptTrace,
        timeout_seconds: float | None,
    ) -> Ending:
        """Run the agent once and return how it ended; its spans are in the trace by then.

        Args:
            rollout: What it runs.
            resources: What it works with.
            trace: Gets its spans, those of an agent that is killed too.
            timeout_seconds: Deadline; the start of a process is not counted.

        Raises:
            TransientError: No process for it could be started.
        """
        process = self._idle.pop() if self._idle else await _AgentProcess.start(self._agent)
        end, status = None, 0
        try:
            task = {
                "rollout": rollout.model_dump(mode="json"),
                "resources": {name: value.model_dump() for name, value in resources.items()},
            }
            process.writer.write(json.dumps(task).encode() + b"\n")
            async with asyncio.timeout(timeout_seconds):
                end = await _follow(process, trace)
        except TimeoutError:
            message = f"the agent did not return within {timeout_seconds:g} s and was killed"
            return Ending(FailureKind.TIMEOUT, message, error=TimeoutError(message))
        finally:
            if end is not None:
                self._idle.append(process)
            else:
                status = await process.kill()
        if end is None:
            message = f"the agent's process ended: {_describe(status)}"
            return Ending(FailureKind.AGENT_ERROR, message)
        return Ending(
            FailureKind(end["kind"]),
            message=end["message"],
            reward=end["reward"],
            traceback=end["traceback"],
            returned=Returned(end["returned"]),
        )


async def _follow(process: _AgentProcess, trace: AttemptTrace) -> dict[str, Any] | None:
    """Take what the agent sends until it has ended; None where its process ended before."""
    root_id = 0
    while (message := await process.read()) is not None:
        match message:
            case {"span": span}:
                trace.add(message_to_span(span, trace, root_id))
            case {"log": log}:
                # In the context of the attempt, so that the line goes where its lines go.
                logging.getLogger(log["name"]).log(log["level"], "%s", log["text"])
            case {"root_id": root_id}:
                pass
            case {"end": end}:
                return end
            case _:
                raise AssertionError(f"an agent's process sent {message}")
    return None


def _describe(status: int) -> str:
    """Return an exit status in words; a guard's status for signal N is 256 - N."""
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(256 - status).name}"
    return f"exit code {status}"
