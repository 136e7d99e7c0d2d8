"""An agent that takes its process with it."""

import os
import signal
from typing import Any


def kill_process(task: Any, llm: Any) -> float:
    """End the process as the kernel's OOM killer does."""
    del task, llm
    os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
