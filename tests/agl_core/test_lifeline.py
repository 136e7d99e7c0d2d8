import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from agl_core.lifeline import spawn

CHILD = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"
STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "print(os.getpid(), flush=True); time.sleep(600)"
)
LEAVES_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
try:
    time.sleep(float(sys.argv[2]))
except KeyboardInterrupt:
    pass
"""
PARENT = """
import sys, time
from pathlib import Path
from agl_core.lifeline import spawn
child = spawn([sys.executable, "-c", sys.argv[1]], Path(sys.argv[2]))
time.sleep(600)
"""


def wait_for_pid(log: Path) -> int:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if log.exists() and log.read_text().endswith("\n"):
            return int(log.read_text().split()[0])
        time.sleep(0.02)
    raise AssertionError("the child did not start")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_end(pid: int, seconds: float = 20) -> bool:
    deadline = time.monotonic() + seconds
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


def test_stop_ends_the_command(tmp_path: Path):
    child = spawn([sys.executable, "-c", CHILD], tmp_path / "log")
    pid = wait_for_pid(tmp_path / "log")
    assert child.is_running
    child.stop()
    assert not child.is_running
    assert wait_for_end(pid)


def test_a_command_that_ignores_sigint_is_ended_all_the_same(tmp_path: Path):
    with spawn([sys.executable, "-c", STUBBORN], tmp_path / "log"):
        pid = wait_for_pid(tmp_path / "log")
    assert wait_for_end(pid)


def test_the_command_ends_when_its_parent_is_killed(tmp_path: Path):
    log = tmp_path / "log"
    parent = subprocess.Popen([sys.executable, "-c", PARENT, CHILD, str(log)])
    pid = wait_for_pid(log)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert wait_for_end(pid)


def test_a_command_that_ends_by_itself_is_noticed_and_its_output_kept(tmp_path: Path):
    child = spawn([sys.executable, "-c", "print('one'); print('two'); raise SystemExit(3)"],
                  tmp_path / "log")  # fmt: skip
    deadline = time.monotonic() + 20
    while child.is_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running
    assert child.log_tail(1) == "two"
    child.stop()


def test_what_the_command_started_ends_with_it(tmp_path: Path):
    """Whether it is stopped or ends by itself."""
    for seconds in ("600", "2"):
        log = tmp_path / seconds
        with spawn([sys.executable, "-c", LEAVES_A_CHILD, STUBBORN, seconds], log) as command:
            pid = wait_for_pid(log)
            deadline = time.monotonic() + 20
            while seconds == "2" and command.is_running and time.monotonic() < deadline:
                time.sleep(0.02)
        assert wait_for_end(pid, 5)
