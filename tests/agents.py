"""Agents that tests run; each is an ordinary function, as a user would write it."""

import asyncio
import ctypes
import json
import logging
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import httpx
from openai import OpenAI

from agl_core.emitter import emit_annotation, emit_reward
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


def fails_mostly(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float:
    """Succeeds once in each group of four."""
    _ask(task, llm)
    if rollout.metadata and rollout.metadata["sample"] > 0:
        raise ValueError("the agent gave up")
    return 1.0


def gives_no_reward_on_last_sample(
    task: dict[str, Any], llm: LLM, rollout: AttemptedRollout
) -> float | None:
    """Returns None once in each group of four."""
    _ask(task, llm)
    return None if rollout.metadata and rollout.metadata["sample"] == 3 else 1.0


def fails_in_even_rows(task: dict[str, Any], llm: LLM, rollout: AttemptedRollout) -> float:
    """Fails on the last sample of every second dataset row."""
    text = _ask(task, llm)
    assert rollout.metadata is not None
    if rollout.metadata["row"] % 2 == 0 and rollout.metadata["sample"] == 3:
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


def ends_its_process(task: dict[str, Any], llm: LLM) -> float:
    """Ends as its task says, in ways that a thread does not survive, after one call and a note."""
    _ask(task, llm)
    emit_annotation({"pid": os.getpid()})
    logger.info("in process %d", os.getpid())
    match task["ends"]:
        case "exit":
            os._exit(7)
        case "segfault":
            ctypes.string_at(0)
        case "hang":
            child = subprocess.Popen(["sleep", "300"])
            emit_annotation({"child": child.pid})
            ctypes.PyDLL(None).sleep(300)  # holds the interpreter's lock
        case "raise":
            raise ConnectionError("lost")
        case "nothing":
            return None  # pyright: ignore[reportReturnType]
        case "emit":
            emit_reward(0.5)
            return None  # pyright: ignore[reportReturnType]
    return 1.0


async def ends_in_the_loop(task: dict[str, Any], llm: LLM) -> float:
    """The same, as a coroutine."""
    return ends_its_process(task, llm)


def calls_with_every_client(task: dict[str, Any], llm: LLM) -> float:
    """Calls the model with clients that read the proxies of the environment."""
    _ask(task, llm)
    url = f"{llm.get_base_url()}/chat/completions"
    body = {"model": llm.model, "messages": [{"role": "user", "content": task["question"]}]}
    httpx.post(url, json=body, timeout=30).raise_for_status()
    httpx.Client().post(url, json=body, timeout=30).raise_for_status()

    async def with_aiohttp() -> None:
        async with (
            aiohttp.ClientSession(trust_env=True) as session,
            session.post(url, json=body) as answer,
        ):
            answer.raise_for_status()

    asyncio.run(with_aiohttp())
    request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return float(answer.status == 200)


def verifies_with_an_alarm(task: dict[str, Any], llm: LLM) -> float:
    """Checks its answer under a `signal.alarm`, as math verifiers do."""
    _ask(task, llm)
    emit_annotation({"pid": os.getpid()})
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(1 if task["ends"] == "left behind" else 60)
    if task["ends"] == "in a loop of its own":
        asyncio.run(asyncio.sleep(0))
    if task["ends"] != "left behind":
        signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    return 1.0


__all__ = [
    "asks_once",
    "calculator",
    "calls_with_every_client",
    "ends_in_the_loop",
    "ends_its_process",
    "fails_and_logs",
    "fails_and_logs_in_the_loop",
    "fails_by_sample",
    "fails_in_even_rows",
    "fails_mostly",
    "fails_on_last_sample",
    "gives_no_reward_on_last_sample",
    "verifies_with_an_alarm",
]
