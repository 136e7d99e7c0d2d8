"""What importing costs in a fresh process, beside a bare interpreter and the packages at the heart.

python -m benchmarks.imports
"""

import statistics
import subprocess
import sys
import time

STATEMENTS = (
    "pass",
    "import agl_core",
    "from agl_core import *",
    "import agl_core.runner.shard",
    "import openai",
    "import prefect",
)
ROUNDS = 5


def seconds(statement: str) -> float:
    """Return the wall time of a fresh process that runs one statement."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - started


def main() -> None:
    """Print the median of each statement and its ratio to a bare interpreter."""
    times: dict[str, list[float]] = {statement: [] for statement in STATEMENTS}
    for _ in range(ROUNDS):  # in turn, so that a noisy moment meets them all
        for statement, found in times.items():
            found.append(seconds(statement))
    bare = statistics.median(times["pass"])
    for statement, found in times.items():
        median = statistics.median(found)
        print(f"{statement:32} {median:6.2f} s  {median / bare:6.1f} x a bare interpreter")


if __name__ == "__main__":
    main()
