"""This project's log lines in the Prefect UI.

Prefect takes over the loggers that `PREFECT_LOGGING_EXTRA_LOGGERS` names (`prefect.yaml` and
`deployments/server.py` set it), but at the level that each has, which is none by default.
"""

import logging

LOGGERS = ("agl_core", "flows")


def show_logs() -> None:
    """Let one line for each stage, flush and iteration through, unless a level was set before."""
    for name in LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
