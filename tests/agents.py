"""Agents that tests run; each is an ordinary function, as a user would write it."""

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

from openai import OpenAI

from agl_core.types.core import AttemptedRollout
from agl_core.types.resources import LLM
from examples.calculator.agent import calculator


def _ask(task: dict[str, Any], llm: LLM) -> str:
    with OpenAI(base_url=llm.get_base_url(), api_key=llm.api_key, max_retries=0) as client:
        answer = client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task["question"]}],
            **llm.sampling_parameters,
        )
    return answer.choices[0].message.content or ""


def asks_once(task: dict[str, Any], llm: LLM) -> float:
    """A sync agent with its own client."""
    return float(len(_ask(task, llm)) % 2)


def fails_by_sample(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float | None:
    """Ends in another way for each sample of a group."""
    sample = rollout.metadata["sample"] if rollout.metadata else 0
    _ask(task, llm)
    match sample:
        case 0:
            return 1.0
        case 1:
            raise ValueError("the agent gave up")
        case 2:
            time.sleep(60)
            return 1.0
        case _:
            return None


def fails_on_last_sample(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float:
    """Fails once in each group of four."""
    text = _ask(task, llm)
    if rollout.metadata and rollout.metadata["sample"] == 3:
        raise ValueError("the agent gave up")
    return float(len(text))


logger = logging.getLogger(__name__)


def fails_and_logs(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float | None:
    """Ends as its task says, in a thread; an `infra_error` succeeds when it is tried again."""
    _ask(task, llm)
    number = rollout.attempt.sequence_id
    logger.info("attempt %d of %s", number, rollout.rollout_id)
    logging.getLogger("tests_library").warning("a library warns %s", rollout.rollout_id)
    match task["ends"]:
        case "agent_error":
            raise ValueError("the agent gave | up")
        case "infra_error" if number == 1:
            raise ConnectionError("lost")
        case "no_reward":
            return None
        case "chatty":
            for line in range(300):
                logger.info("line %d", line)
    return 1.0


async def fails_and_logs_in_the_loop(
    task: dict[str, Any], llm: LLM, rollout: AttemptedRollout
) -> float | None:
    """The same in the event loop, without a model call where it fails."""
    logger.info("attempt %d of %s", rollout.attempt.sequence_id, rollout.rollout_id)
    if task["ends"] != "succeeded":
        raise ValueError("the agent gave up")
    await asyncio.to_thread(_ask, task, llm)
    return 1.0


def waits_at_a_gate(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float:
    """Works until the file exists that its task names; leaves a file that says that it does."""
    gate = Path(task["gate"])
    (gate.parent / f"waiting-{rollout.attempt.attempt_id}").touch()
    text = _ask(task, llm)
    while not gate.exists():
        time.sleep(0.1)
    return float(len(text) + (rollout.metadata or {})["sample"])


__all__ = [
    "asks_once",
    "calculator",
    "fails_and_logs",
    "fails_and_logs_in_the_loop",
    "fails_by_sample",
    "fails_on_last_sample",
]
