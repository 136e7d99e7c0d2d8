"""The word-problem agent: asks the model once and judges the last number of its answer."""

import re
from functools import lru_cache
from typing import Any

from openai import OpenAI

from agl_core.types.resources import LLM

INSTRUCTION = "Answer with one short sentence."
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def last_number(text: str) -> float | None:
    """Return the last number in a text such as `They have 3 + 4 = 7 apples.`, or None."""
    numbers = _NUMBER.findall(text)
    return float(numbers[-1]) if numbers else None


@lru_cache(maxsize=1)
def _client() -> OpenAI:
    """Return the client whose connections all rollouts share."""
    return OpenAI(api_key="none", base_url="http://127.0.0.1", max_retries=0)


def word_problem(task: dict[str, Any], llm: LLM) -> float:
    """Answer one question and return the reward.

    Args:
        task: `question` for the model and the right `answer`.
        llm: The model to ask, with the sampling parameters of this rollout.

    Returns:
        1.0 if the last number of the answer is right, else 0.0.

    Raises:
        openai.APIError: The model cannot be reached or refuses.
    """
    client = _client().with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "none")
    response = client.chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": f"{task['question']} {INSTRUCTION}"}],
        **llm.sampling_parameters,
    )
    return float(last_number(response.choices[0].message.content or "") == task["answer"])
