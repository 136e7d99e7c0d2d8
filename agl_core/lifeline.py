"""Child processes that never outlive their parent, however it ends.

`spawn` starts a command below a small guard process. The guard holds the read end of a pipe whose
write end only the parent has: when the parent exits, even by SIGKILL, the pipe closes and the guard
ends the command's process group, with SIGINT first, then SIGTERM, then SIGKILL. What is left of the
group when the command itself has ended is killed.

    parent --(stdin pipe)--> guard (this module as a script) --> command, in its own process group
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_GRACE_SECONDS = 8.0


class ChildProcess:
    """A guarded command; end it with `stop` or by leaving the `with` block."""

    def __init__(self, guard: "subprocess.Popen[bytes]", log: Path) -> None:
        self._guard = guard
        self.log = log
        """File with the command's output."""

    @property
    def is_running(self) -> bool:
        """Whether the command still runs."""
        return self._guard.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the guard, the parent of the command."""
        return self._guard.pid

    def log_tail(self, lines: int = 15) -> str:
        """Return the last lines of the command's output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the command and everything it started, and wait for that."""
        if self._guard.stdin and not self._guard.stdin.closed:
            self._guard.stdin.close()
        try:
            self._guard.wait(timeout=3 * _GRACE_SECONDS + 2)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


def spawn(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> ChildProcess:
    """Start a command that ends when this process ends.

    Args:
        command: Program and arguments.
        log: File that gets its output, appended; its folder is created.
        env: Environment of the command; None inherits this process's.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        guard = subprocess.Popen(
            # -P: the folder of this file has modules named like the standard library.
            [sys.executable, "-P", str(Path(__file__).resolve()), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=dict(env) if env is not None else None,
            # A Ctrl-C in the terminal reaches the parent alone, which then ends the guard.
            start_new_session=True,
        )
    return ChildProcess(guard, log)


def _guard(command: Sequence[str]) -> int:
    """Run the command until it ends or standard input closes; return its exit status."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_with_parent() -> None:
        while os.read(0, 4096):  # not sys.stdin, whose lock would block the end of this process
            pass
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(child.pid, number)
                child.wait(timeout=_GRACE_SECONDS)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue

    threading.Thread(target=end_with_parent, daemon=True).start()
    status = child.wait()
    with contextlib.suppress(ProcessLookupError):  # the usual case: nothing is left of the group
        os.killpg(child.pid, signal.SIGKILL)
    return status


if __name__ == "__main__":
    sys.exit(_guard(sys.argv[1:]))
