"""Which functions are agents.

    (task, llm)                    (task, llm, rollout)
    (task, prompt_template)        (task, prompt_template, rollout)

Sync or async; the first parameter has any name, the others are recognised by theirs. Further
parameters need defaults.
"""

import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from agl_core.errors import ConfigError

AgentFunction = Callable[..., Any]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_SIGNATURES = "(task, llm), (task, llm, rollout) or the same with prompt_template instead of llm"


class SignatureError(ConfigError, NotImplementedError):
    """A function whose signature is not one of an agent."""


class UnknownPattern(SignatureError):  # noqa: N818 - a kind of SignatureError
    """A function that has parameters, but not the ones of an agent."""


def name_of(function: AgentFunction) -> str:
    """Return the function's name for messages."""
    return getattr(function, "__name__", type(function).__name__)


def is_coroutine_function(function: AgentFunction) -> bool:
    """Tell whether calling it returns a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def check_signature(function: AgentFunction) -> frozenset[str]:
    """Return which resources and context the function takes; a partial has those it binds.

    Raises:
        SignatureError: It is not a signature of an agent.
    """
    if not callable(function) or inspect.isclass(function):
        raise SignatureError(f"an agent is a function {_SIGNATURES}, got {function!r}")
    name = name_of(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise SignatureError(f"agent {name} is a generator; an agent returns its reward or None")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:  # many builtins have none
        raise SignatureError(
            f"agent {name} has no signature to read; expected {_SIGNATURES}"
        ) from error
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise SignatureError(
            f"agent {name} has no first parameter for its task; expected {_SIGNATURES}"
        )
    if len(parameters) < 2:
        raise UnknownPattern(
            f"Function signature {inspect.signature(function)} does not match any known agent "
            f"patterns: agent {name} must have at least 2 parameters, exactly one of llm and "
            f"prompt_template after its task; expected {_SIGNATURES}"
        )
    others = parameters[1:]
    wants = frozenset(parameter.name for parameter in others if _is_known(parameter))
    if len(wants & {"llm", "prompt_template"}) != 1:
        raise UnknownPattern(
            f"Function signature {inspect.signature(function)} does not match any known agent "
            f"patterns: agent {name} must take exactly one of llm and prompt_template; expected "
            f"{_SIGNATURES}"
        )
    for parameter in others:
        if parameter.name not in wants and not _is_optional(parameter):
            raise SignatureError(
                f"agent {name} has a parameter {parameter.name!r} that nothing fills; "
                f"expected {_SIGNATURES}"
            )
    bound = function.keywords if isinstance(function, functools.partial) else {}
    return wants - bound.keys()


def _is_optional(parameter: Parameter) -> bool:
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is not Parameter.empty or parameter.kind in variadic


def _is_known(parameter: Parameter) -> bool:
    return parameter.name in ("llm", "prompt_template", "rollout") and parameter.kind in (
        Parameter.POSITIONAL_OR_KEYWORD,
        Parameter.KEYWORD_ONLY,
    )
