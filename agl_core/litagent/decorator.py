"""Agents are ordinary functions: which signatures are accepted, and the one form they get.

    (task, llm)                    (task, llm, rollout)
    (task, prompt_template)        (task, prompt_template, rollout)

Sync or async; the first parameter has any name, the others are recognised by theirs. Further
parameters need defaults.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any

from agl_core.errors import ConfigError
from agl_core.types.core import AttemptedRollout
from agl_core.types.resources import LLM, PromptTemplate

AgentFunction = Callable[..., Any]

_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_SIGNATURES = "(task, llm), (task, llm, rollout) or the same with prompt_template instead of llm"


class FunctionalLitAgent:
    """A function as an agent; still callable as the function it is.

    Raises:
        ConfigError: The function's signature is not one of an agent.
    """

    def __init__(self, function: AgentFunction) -> None:
        self._wants = _check_signature(function)
        self._function = function
        self._is_async = _is_coroutine_function(function)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it is."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<agent {self.name}>"

    @property
    def name(self) -> str:
        """Name of the function."""
        return _name_of(self._function)

    @property
    def wants(self) -> frozenset[str]:
        """Which of `llm`, `prompt_template` and `rollout` the function takes."""
        return self._wants

    def is_async(self) -> bool:
        """Tell whether calling it returns a coroutine."""
        return self._is_async

    def call(
        self,
        task: Any,
        *,
        rollout: AttemptedRollout,
        llm: LLM | None = None,
        prompt_template: PromptTemplate | None = None,
    ) -> Any:
        """Call the function with the arguments that it takes; returns a coroutine if it is async.

        Raises:
            ConfigError: It takes a resource that is not given.
        """
        self.check_resources(llm=llm, prompt_template=prompt_template)
        given = {"llm": llm, "prompt_template": prompt_template, "rollout": rollout}
        return self._function(task, **{name: given[name] for name in self._wants})

    def check_resources(self, *, llm: LLM | None, prompt_template: PromptTemplate | None) -> None:
        """Check that every resource that the function takes is given.

        Raises:
            ConfigError: One is not.
        """
        for name, value in (("llm", llm), ("prompt_template", prompt_template)):
            if name in self._wants and value is None:
                raise ConfigError(f"agent {self.name} takes {name}, but no such resource is given")


def rollout(function: AgentFunction) -> FunctionalLitAgent:
    """Mark a function as an agent; optional, it checks the signature where the agent is defined.

    Raises:
        ConfigError: The function's signature is not one of an agent.
    """
    return as_agent(function)


llm_rollout = rollout
prompt_rollout = rollout


def as_agent(function: AgentFunction) -> FunctionalLitAgent:
    """Return the function as an agent (an agent as it is).

    Raises:
        ConfigError: The function's signature is not one of an agent.
    """
    return function if isinstance(function, FunctionalLitAgent) else FunctionalLitAgent(function)


def load_agent(path: str) -> FunctionalLitAgent:
    """Import an agent by its path.

    Args:
        path: `package.module:attribute`.

    Raises:
        ConfigError: The path is malformed, the module cannot be imported, it has no such attribute,
            or the attribute is not an agent.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"agent {path!r}: expected 'package.module:attribute'")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script that exits is no agent either
        raise ConfigError(
            f"agent {path!r}: cannot import {module_name!r}: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"agent {path!r}: module {module_name!r} has no attribute {attribute!r}")
    try:
        return as_agent(getattr(module, attribute))
    except ConfigError as error:
        raise ConfigError(f"agent {path!r}: {error}") from error


def _name_of(function: AgentFunction) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _is_coroutine_function(function: AgentFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object whose __call__ is async
    )


def _check_signature(function: AgentFunction) -> frozenset[str]:
    """Return which resources and context the function takes."""
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"an agent is a function {_SIGNATURES}, got {function!r}")
    name = _name_of(function)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"agent {name} is a generator; an agent returns its reward or None")
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters or parameters[0].kind not in _POSITIONAL:
        raise ConfigError(
            f"agent {name} has no first parameter for its task; expected {_SIGNATURES}"
        )
    others = parameters[1:]
    wants = frozenset(parameter.name for parameter in others if _is_known(parameter))
    if len(wants & {"llm", "prompt_template"}) != 1:
        raise ConfigError(
            f"agent {name} must take exactly one of llm and prompt_template; expected {_SIGNATURES}"
        )
    for parameter in others:
        if parameter.name not in wants and not _is_optional(parameter):
            raise ConfigError(
                f"agent {name} has a parameter {parameter.name!r} that nothing fills; "
                f"expected {_SIGNATURES}"
            )
    return wants


def _is_optional(parameter: Parameter) -> bool:
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is not Parameter.empty or parameter.kind in variadic


def _is_known(parameter: Parameter) -> bool:
    return parameter.name in ("llm", "prompt_template", "rollout") and parameter.kind in (
        Parameter.POSITIONAL_OR_KEYWORD,
        Parameter.KEYWORD_ONLY,
    )
