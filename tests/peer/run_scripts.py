"""Runs scripts with one of the two packages, each in a fork of a process that has imported it.

PYTHON tests/peer/run_scripts.py PACKAGE [SCRIPT ...]

The last line is a JSON object: the results by script, or what a script's last words were. It needs
nothing but the package, so that it runs in the peer's environment.
"""

import importlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
DEADLINE_SECONDS = 90.0
LOADED = ("Trainer", "LitAgentRunner", "OtelTracer", "LightningStoreServer")
"""What most scripts use; loaded once, where a package loads such names when they are used."""


def names() -> list[str]:
    """Return all scripts."""
    helpers = ("__init__", "facts")
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in helpers)


def run(package: str, name: str) -> Any:
    """Return a script's results; a text about its end where there are none."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            _become(package, name, output.fileno())
        ended = _wait(pid)
        output.seek(0)
        lines = output.read().strip().splitlines() or [""]
    try:
        return json.loads(lines[-1])
    except ValueError:
        return f"{ended}: " + "\n".join(lines[-15:])


def _become(package: str, name: str, output: int) -> None:
    """Run a script in this process and end it."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv[:] = [name, package]
    code = 1
    try:
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        code = 0
    except BaseException:  # noqa: BLE001 - the end of a script, as an interpreter reports it
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int) -> str:
    """Return how a process ended; one that takes too long is killed, with its children."""
    until = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return f"exit code {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"not ended after {DEADLINE_SECONDS:g} s"


def main() -> None:
    """Run the scripts named on the command line, or all."""
    package, *wanted = sys.argv[1:]
    module = importlib.import_module(package)
    importlib.import_module("openai")  # both use it
    for part in LOADED:
        getattr(module, part)
    sys.path.insert(0, str(SCRIPTS))
    found = {}
    for name in wanted or names():
        started = time.monotonic()
        found[name] = run(package, name)
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)
    print("\n" + json.dumps(found, sort_keys=True), flush=True)


if __name__ == "__main__":
    main()
