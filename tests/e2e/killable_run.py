"""Run a training campaign in this process and kill it (SIGKILL) at a chosen write to the ledger.

    python -m tests.e2e.killable_run CONFIG.json PATTERN

PATTERN is matched against each key just before it is written; an empty one never matches.
"""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from agl_core.config import RunConfig
from agl_core.ledger.local_storage import LocalStorage
from flows.training_run import training_run


def kill_before_writing(pattern: str) -> None:
    publish: Any = LocalStorage._publish

    def publish_or_die(self: LocalStorage, key: str, fill: Any) -> None:
        if re.search(pattern, key):
            os.kill(os.getpid(), signal.SIGKILL)
        publish(self, key, fill)

    LocalStorage._publish = publish_or_die


if __name__ == "__main__":
    config = RunConfig.model_validate_json(Path(sys.argv[1]).read_text())
    if sys.argv[2]:
        kill_before_writing(sys.argv[2])
    asyncio.run(training_run(config))
