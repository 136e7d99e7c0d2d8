"""`agl store` as a process of its own."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

_COMMAND = [sys.executable, "-c", "from deployments.cli import main; main()", "store"]


def start_store(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """Start `agl store` with arguments and variables."""
    return subprocess.Popen(
        [*_COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path.cwd()), "COLUMNS": "200"} | environment,
    )


class StoreProcess:
    """A store that serves from a process until it is stopped or killed."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self._process = start_store(*arguments, **environment)
        assert self._process.stdout is not None
        self.said = self._process.stdout.readline()
        found = re.search(r"(http://\S+)  run (\S+)", self.said)
        if found is None:
            raise RuntimeError(self._process.communicate(timeout=10)[1])
        self.url, self.run_id = found.groups()

    def kill(self) -> None:
        """End it without notice."""
        self._process.kill()
        self._process.communicate()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Ask it to end, and return its exit status."""
        self._process.send_signal(number)
        self._process.communicate(timeout=20)
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.kill()
