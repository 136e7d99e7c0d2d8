"""The calculator agent: asks the model, runs the tool that it may call, and judges its answer.

The model writes either a call such as `calc(12+34)`, and is told the result, or its final answer:
`=46`, or `~50` where it guesses. The reward is 1.0 for the right number, else 0.0. The stock OpenAI
client is used; all rollouts of a process share one.
"""

import ast
import operator
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from openai import OpenAI

from agl_core.emitter.annotation import emit_annotation
from agl_core.types.resources import LLM

if TYPE_CHECKING:  # 0.1 s, and only annotations need them
    from openai.types.chat import ChatCompletionMessageParam

MAX_CALLS = 3
TOOL_ERROR = "error"
_MAX_EXPRESSION = 40
_ANSWER = re.compile(r"[=~]\s*(-?\d{1,12})")
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


def evaluate(expression: str) -> str:
    """Return the value of an expression of integers, `+`, `-`, `*` and parentheses.

    Anything else, or more than 40 characters, gives `error`: this runs text that a model wrote.
    """
    if len(expression) > _MAX_EXPRESSION:
        return TOOL_ERROR
    try:
        return str(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return TOOL_ERROR


def _value(node: ast.expr) -> int:
    """Return the value of one node; ValueError for a node that is not arithmetic."""
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"not allowed: {type(node).__name__}")


def run_tool(text: str) -> str | None:
    """Return the tool's answer, `error` for a call it cannot read; None where none is called."""
    text = text.strip()
    if not text.startswith("calc"):
        return None
    if not (text.startswith("calc(") and text.endswith(")")):
        return TOOL_ERROR
    return evaluate(text.removeprefix("calc(").removesuffix(")"))


def final_answer(text: str) -> int | None:
    """Return the number that the model answers with, or None where it gives none."""
    found = _ANSWER.fullmatch(text.strip())
    return None if found is None else int(found.group(1))


@lru_cache(maxsize=1)
def _client() -> OpenAI:
    """Return the client whose connections all rollouts share; a new one takes 20 to 50 ms."""
    return OpenAI(api_key="none", base_url="http://127.0.0.1", max_retries=0)


def calculator(task: dict[str, Any], llm: LLM) -> float:
    """Answer one question and return the reward.

    Args:
        task: `question` for the model and the right `answer`.
        llm: The model to ask, with the sampling parameters of this rollout.

    Returns:
        1.0 if the final answer is right, else 0.0.

    Raises:
        openai.APIError: The model cannot be reached or refuses.
    """
    client = _client().with_options(base_url=llm.get_base_url(), api_key=llm.api_key or "none")
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": task["question"]}]
    tool_used = False
    reward = 0.0
    for _ in range(MAX_CALLS):
        response = client.chat.completions.create(
            model=llm.model, messages=messages, **llm.sampling_parameters
        )
        text = response.choices[0].message.content or ""
        result = run_tool(text)
        if result is None:
            reward = float(final_answer(text) == task["answer"])
            break
        tool_used = True
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": result},
        ]
    emit_annotation({"calculator.tool_used": tool_used})
    return reward
