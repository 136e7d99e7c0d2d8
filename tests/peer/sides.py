"""The two packages that a script can run with, and what is known to differ."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EXPECTED = HERE / "expected"
PEER_PYTHON = "AGL_PEER_PYTHON"
OURS, PEER = "agl_core", "agentlightning"
DEADLINE_SECONDS = 600


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same with both."""

    fact: str
    """`script/key/key`."""
    peer: Any
    ours: Any
    why: str


def results(python: str, package: str) -> dict[str, Any]:
    """Return what all scripts say with a package.

    Raises:
        RuntimeError: The process failed.
    """
    root = HERE.parent.parent
    env = os.environ | {"PYTHONPATH": str(root) if package == OURS else "", **_QUIET}
    command = [python, str(HERE / "run_scripts.py"), package]
    done = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=DEADLINE_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


_QUIET = {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""The peer asks the network for prices when it is imported, three times, unless told not to."""


def at(found: Any, fact: str) -> Any:
    """Return a fact of the results of all scripts, None where it is absent."""
    for key in fact.split("/"):
        found = found[int(key)] if isinstance(found, list) else found.get(key)
    return found


def replace(found: dict[str, Any], fact: str, value: Any) -> None:
    """Put a fact in the place of another; None takes it away."""
    folder, _, key = fact.rpartition("/")
    place = at(found, folder)
    if isinstance(place, list):
        place[int(key)] = value
    elif value is None:
        place.pop(key, None)
    else:
        place[key] = value


def expected() -> dict[str, Any]:
    """Return what scripts have to say with our package."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(EXPECTED.glob("*.json"))}


def record(differences: list[Difference]) -> None:
    """Write what the peer says as what is expected, with our side of what differs."""
    found = results(os.environ[PEER_PYTHON], PEER)
    for one in differences:
        replace(found, one.fact, one.ours)
    for name, facts in found.items():
        text = json.dumps(facts, indent=1, sort_keys=True)
        (EXPECTED / f"{name}.json").write_text(text + "\n")
    print(f"recorded {len(found)} scripts", file=sys.stderr)
