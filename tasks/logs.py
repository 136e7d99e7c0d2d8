"""This project's log lines, and those of the agents, in the Prefect UI.

Prefect takes over the loggers that `PREFECT_LOGGING_EXTRA_LOGGERS` names (`prefect.yaml` and
`deployments/server.py` set it), but at the level that each has, which is none by default. What an
agent logs, itself or in a library, goes to the task run of its rollout; agents in threads too,
since they run in a copy of its context.
"""

import logging
from collections import Counter
from contextvars import ContextVar

from prefect.logging.handlers import APILogHandler
from prefect.settings import PREFECT_LOGGING_EXTRA_LOGGERS

LOGGERS = ("agl_core", "flows")
MAX_AGENT_LINES = 200
"""Of one attempt; each costs the server a row."""

_attempt_lines: ContextVar[Counter[str] | None] = ContextVar("agl_attempt_lines", default=None)


def show_logs() -> None:
    """Let one line for each stage, flush and iteration through, unless a level was set before."""
    for name in LOGGERS:
        _show_info(name)


def show_agent_logs(agent: str) -> None:
    """Send what is logged during an attempt to its task run.

    The agent's own package from INFO on, others from the level that they have (WARNING by default).

    Args:
        agent: `package.module:name`.
    """
    _show_info(agent.partition(":")[0].partition(".")[0])
    root = logging.getLogger()
    if not any(isinstance(handler, _AgentLogHandler) for handler in root.handlers):
        root.addHandler(_AgentLogHandler())


def begin_attempt() -> None:
    """Let the lines that are logged in this context from here on count as one attempt's."""
    _attempt_lines.set(Counter())


def _show_info(name: str) -> None:
    logger = logging.getLogger(name)
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


class _AgentLogHandler(APILogHandler):
    """Prefect's handler for the lines of an attempt that do not reach Prefect in another way."""

    def emit(self, record: logging.LogRecord) -> None:
        lines = _attempt_lines.get()
        if lines is None or _is_sent_already(record.name):
            return
        lines["shown"] += 1
        if lines["shown"] > MAX_AGENT_LINES + 1:
            return
        if lines["shown"] > MAX_AGENT_LINES:
            values = vars(record) | {
                "msg": "further lines of this attempt are not shown",
                "args": (),
            }
            record = logging.makeLogRecord(values | {"exc_info": None, "exc_text": None})
        super().emit(record)


def _is_sent_already(name: str) -> bool:
    sent = ("prefect", *PREFECT_LOGGING_EXTRA_LOGGERS.value())
    return any(name == logger or name.startswith(f"{logger}.") for logger in sent)
