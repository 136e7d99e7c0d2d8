"""Functions as agents: the decorators, and how an agent is found by its path."""

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, Concatenate, TypeVar, overload

from agl_core import env_var
from agl_core.errors import ConfigError
from agl_core.litagent.litagent import LitAgent
from agl_core.litagent.signature import (
    AgentFunction,
    UnknownPattern,
    check_signature,
    is_coroutine_function,
    name_of,
)
from agl_core.types.core import AttemptedRollout, RolloutMode
from agl_core.types.resources import LLM, NamedResources, PromptTemplate, ProxyLLM, Resource
from agl_core.types.tracer import RolloutRawResult

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=Resource)

LlmRolloutFunc = Callable[Concatenate[T, ...], Any]
"""Agent Lightning's name for the type of an agent's function; T is that of its task."""
PromptRolloutFunc = FunctionalLitAgentFunc = LlmRolloutFunc


class FunctionalLitAgent(LitAgent[Any]):
    """A function as an agent; still callable as the function it is.

    It gets the first `LLM`, or `PromptTemplate`, of the resources.

    Args:
        function: What is run.
        strip_proxy: Whether an LLM behind the recording proxy is bound to the attempt, so that the
            function sees a plain `LLM`; else it calls `get_base_url` itself.

    Raises:
        ConfigError: The function's signature is not one of an agent.
    """

    def __init__(self, function: AgentFunction, *, strip_proxy: bool = True) -> None:
        super().__init__()
        self._wants = check_signature(function)
        self._function = function
        self._strip_proxy = strip_proxy
        self._is_async = is_coroutine_function(function)
        functools.update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function as it is."""
        return self._function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<agent {self.name}>"

    def __reduce__(self) -> Any:
        """Travel by name where it stands in the function's place, else with the function."""
        name = getattr(self._function, "__qualname__", None)
        module = importlib.import_module(self._function.__module__) if name else None
        if name and getattr(module, name, None) is self:
            return name
        rebuild = functools.partial(type(self), strip_proxy=self._strip_proxy)
        return rebuild, (self._function,)

    @property
    def function(self) -> AgentFunction:
        """What is run."""
        return self._function

    @property
    def name(self) -> str:
        """Name of the function."""
        return name_of(self._function)

    @property
    def wants(self) -> frozenset[str]:
        """Which of `llm`, `prompt_template` and `rollout` the function takes."""
        return self._wants

    def is_async(self) -> bool:
        """Tell whether calling it returns a coroutine."""
        return self._is_async

    def source(self, mode: RolloutMode | None) -> Any:
        """Return the function."""
        return self._function

    def check_resources(self, resources: NamedResources) -> None:
        """Check that the resource that the function takes is given.

        Raises:
            ConfigError: It is not.
        """
        for name, kind, text in (
            ("llm", LLM, "LLM"),
            ("prompt_template", PromptTemplate, "prompt template"),
        ):
            if name in self._wants and not any(isinstance(r, kind) for r in resources.values()):
                raise ConfigError(
                    f"No {text} resource found in the provided resources: agent {self.name} takes "
                    f"{name}, but no such resource is given"
                )

    def rollout(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run the function, which is not async.

        Raises:
            ConfigError: It takes a resource that is not given.
            RuntimeError: It is async.
        """
        if self._is_async:
            raise RuntimeError(f"{self.name} is asynchronous. Use rollout_async instead.")
        return self._function(task, **self._arguments(resources, rollout))

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run the function, which is async.

        Raises:
            ConfigError: It takes a resource that is not given.
            RuntimeError: It is not async.
        """
        if not self._is_async:
            raise RuntimeError(f"{self.name} is synchronous. Use rollout instead.")
        return await self._function(task, **self._arguments(resources, rollout))

    def _arguments(self, resources: NamedResources, rollout: AttemptedRollout) -> dict[str, Any]:
        """Return the function's arguments by name."""
        self.check_resources(resources)
        arguments: dict[str, Any] = {}
        if "llm" in self._wants:
            llm = _first(resources, LLM, self.name)
            if self._strip_proxy and isinstance(llm, ProxyLLM):
                llm = llm.with_attempted_rollout(rollout)
            arguments["llm"] = llm
        if "prompt_template" in self._wants:
            arguments["prompt_template"] = _first(resources, PromptTemplate, self.name)
        if "rollout" in self._wants:
            arguments["rollout"] = rollout
        return arguments


def _first(resources: NamedResources, kind: type[R], agent: str) -> R:
    """Return the first resource of a kind, of which there is one; warn where there are more."""
    found = {name: value for name, value in resources.items() if isinstance(value, kind)}
    if len(found) > 1:
        logger.warning(
            "agent %s takes one %s, gets the first of %s",
            agent,
            kind.__name__,
            ", ".join(found),
        )
    return next(iter(found.values()))


def rollout(function: AgentFunction) -> FunctionalLitAgent:
    """Make a function an agent by its signature: one that takes `llm`, or `prompt_template`.

    Raises:
        ConfigError: The function's signature is not one of an agent (a `NotImplementedError` too).
    """
    return function if isinstance(function, FunctionalLitAgent) else FunctionalLitAgent(function)


@overload
def llm_rollout(function: AgentFunction) -> FunctionalLitAgent: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[AgentFunction], FunctionalLitAgent]: ...
def llm_rollout(
    function: AgentFunction | None = None, *, strip_proxy: bool = True
) -> FunctionalLitAgent | Callable[[AgentFunction], FunctionalLitAgent]:
    """Make a function that takes `llm` an agent.

    Args:
        function: What is decorated; None for use with parentheses.
        strip_proxy: See `FunctionalLitAgent`.

    Raises:
        ConfigError: The function's signature is another.
    """
    if function is None:
        return lambda function: llm_rollout(function, strip_proxy=strip_proxy)  # pyright: ignore
    return _taking("llm", function, strip_proxy=strip_proxy)


@overload
def prompt_rollout(function: AgentFunction) -> FunctionalLitAgent: ...
@overload
def prompt_rollout() -> Callable[[AgentFunction], FunctionalLitAgent]: ...
def prompt_rollout(
    function: AgentFunction | None = None,
) -> FunctionalLitAgent | Callable[[AgentFunction], FunctionalLitAgent]:
    """Make a function that takes `prompt_template` an agent.

    Raises:
        ConfigError: The function's signature is another.
    """
    if function is None:
        return lambda function: prompt_rollout(function)
    return _taking("prompt_template", function)


def _taking(
    resource: str, function: AgentFunction, *, strip_proxy: bool = True
) -> FunctionalLitAgent:
    wanted = f"it must have a positional parameter called {resource!r}"
    try:
        agent = FunctionalLitAgent(function, strip_proxy=strip_proxy)
    except UnknownPattern as error:
        raise UnknownPattern(f"{error}; {wanted}") from error
    if resource not in agent.wants:
        raise UnknownPattern(f"agent {agent.name}: {wanted}")
    return agent


def as_agent(agent: LitAgent[Any] | AgentFunction) -> LitAgent[Any]:
    """Return a function as an agent, an agent as it is.

    Raises:
        ConfigError: The function's signature is not one of an agent.
    """
    return agent if isinstance(agent, LitAgent) else FunctionalLitAgent(agent)


def load_agent(path: str) -> LitAgent[Any]:
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
    env_var.bypass_proxies()  # the module may make its client
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
