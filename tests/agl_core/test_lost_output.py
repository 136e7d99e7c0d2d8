"""A process whose output is read by nobody any more."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import pathlib, subprocess, sys, time
from rich.console import Console
from agl_core.lost_output import outlive_output

folder = pathlib.Path(sys.argv[1])
if sys.argv[2] == "outlives":
    outlive_output()
    outlive_output()
console = Console(file=sys.stderr)
console.print("up")
while not (folder / "reader-is-gone").exists():
    time.sleep(0.005)
console.print("at once, perhaps before the thread has seen it")
time.sleep(0.2)
print("an agent's line", flush=True)
console.print("a line of Prefect's")
child = subprocess.run([sys.executable, "-c", "print('a tool of an agent', flush=True)"])
assert child.returncode == 0
(folder / "went-on").touch()
"""


@pytest.mark.parametrize("mode", ["outlives", "control"])
def test_a_process_goes_on_when_the_reader_of_its_output_is_gone(tmp_path: Path, mode: str):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), mode]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stderr.readline() == b"up\n"
        process.stdout.close()
        process.stderr.close()
        (tmp_path / "reader-is-gone").touch()
        status = process.wait(60)
    goes_on = mode == "outlives"
    assert (status == 0, (tmp_path / "went-on").exists()) == (goes_on, goes_on)


def test_output_that_is_read_arrives(tmp_path: Path):
    (tmp_path / "reader-is-gone").touch()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "outlives"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "an agent's line\na tool of an agent\n"
    assert done.stderr.endswith("a line of Prefect's\n")
