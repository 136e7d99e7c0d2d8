"""The calculator agent, ill on a seeded share of the rollouts.

`AGL_CHAOS_PLAN` names a JSON file (`Plan`) that says how; it is read at each call, so whoever runs
the agents may change it meanwhile. A marker file beside it counts how often a rollout was ill, over
processes and their deaths.
"""

import asyncio
import ctypes
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agl_core.types.core import AttemptedRollout
from agl_core.types.resources import LLM
from examples.calculator.agent import calculator
from tests.chaos.model_server import chance

PLAN = "AGL_CHAOS_PLAN"
AGENT_FAULTS = (
    *("raises", "hangs", "hangs_in_c", "holds_gil"),
    *("sys_exit", "os_exit", "nan", "no_reward", "no_call"),
)
HOLD_SECONDS = 3.0
_HANG_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How agents are ill."""

    kinds: tuple[str, ...]
    """A chosen rollout has one of these, always the same."""
    seed: int
    share: float
    times: int
    """Of each chosen rollout."""
    mode: str = "train"

    def write(self, path: Path) -> None:
        """Let it count from now on."""
        path.write_text(json.dumps(asdict(self)))

    def chooses(self, row: int, sample: int) -> bool:
        """Say whether this rollout is ill."""
        return chance(self.seed, row, sample) < self.share

    def kind_of(self, row: int, sample: int) -> str:
        """Return how this rollout is ill."""
        return self.kinds[int(chance(self.seed, row, sample, "kind") * len(self.kinds))]


def solve(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float | None:
    """A sync agent."""
    match fault(rollout):
        case "hangs":
            time.sleep(_HANG_SECONDS)
        case "hangs_in_c":  # lets go of the interpreter lock
            ctypes.CDLL(None).sleep(int(_HANG_SECONDS))
        case "holds_gil":
            ctypes.PyDLL(None).usleep(int(HOLD_SECONDS * 1e6))
        case ended:
            return _end(ended, task, llm)
    return calculator(task, llm)


async def solve_async(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float | None:
    """An async agent."""
    match fault(rollout):
        case "hangs":
            await asyncio.sleep(_HANG_SECONDS)
        case "hangs_in_c" | "holds_gil":
            ctypes.PyDLL(None).usleep(int(HOLD_SECONDS * 1e6))
        case ended:
            return await asyncio.to_thread(_end, ended, task, llm)
    return await asyncio.to_thread(calculator, task, llm)


def _end(kind: str | None, task: dict[str, Any], llm: LLM) -> float | None:
    """Answer, or end in another way."""
    if kind == "no_call":
        return 1.0
    reward = calculator(task, llm)
    match kind:
        case "raises":
            raise ValueError("the agent gave up")
        case "sys_exit":
            sys.exit(3)
        case "os_exit":
            os._exit(3)
        case "nan":
            return float("nan")
        case "no_reward":
            return None
        case _:
            return reward


def fault(rollout: AttemptedRollout) -> str | None:
    """Return how this attempt is ill, and count it; None where it is not."""
    path = Path(os.environ.get(PLAN, "/nowhere"))
    if not path.exists():
        return None
    plan = Plan(**json.loads(path.read_text()))
    facts = rollout.metadata or {}
    if rollout.mode != plan.mode or not plan.chooses(facts["row"], facts["sample"]):
        return None
    for time_ in range(plan.times):
        try:
            Path(f"{path}.{rollout.rollout_id}.{time_}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return plan.kind_of(facts["row"], facts["sample"])
    return None
