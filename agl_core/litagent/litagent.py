"""The agent as users write it: a class with the method that runs one rollout.

    rollout | rollout_async                            any mode
    training_rollout | training_rollout_async          mode "train"; `rollout` unless overridden
    validation_rollout | validation_rollout_async      any other mode; `rollout` unless overridden

A runner calls the async ones where any of them is overridden. They return what `RolloutRawResult`
says: nothing, the reward, or spans.
"""

import warnings
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from agl_core.errors import ConfigError
from agl_core.types.core import AttemptedRollout, RolloutMode
from agl_core.types.resources import NamedResources
from agl_core.types.tracer import RolloutRawResult

if TYPE_CHECKING:  # both know agents
    from agl_core.runner.base import Runner
    from agl_core.tracer.base import Tracer

T_task = TypeVar("T_task")

_runner_here: ContextVar["tuple[weakref.ref[Any], weakref.ref[Any]] | None"] = ContextVar(
    "agl_agent_runner", default=None
)
"""An agent and its runner: threads that share an agent have a runner each."""
_ASYNC_METHODS = ("rollout_async", "training_rollout_async", "validation_rollout_async")


class LitAgent(Generic[T_task]):
    """An agent: override `rollout` or `rollout_async`.

    Args:
        trained_agents: Deprecated; set `agent_match` of the adapter.
    """

    def __init__(self, *, trained_agents: str | None = None) -> None:
        if trained_agents is not None:
            warnings.warn(
                "trained_agents chooses nothing; pass agent_match to the adapter",
                DeprecationWarning,
                stacklevel=2,
            )
        self.trained_agents = trained_agents

    _trainer: "weakref.ref[Any] | None" = None
    _runner: "weakref.ref[Runner[Any]] | None" = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind who holds the agent in this process."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_trainer", "_runner")}

    @property
    def name(self) -> str:
        """Name for messages."""
        return type(self).__name__

    def is_async(self) -> bool:
        """Tell whether a runner awaits the async methods: any of them is overridden."""
        return any(self._overrides(name) for name in _ASYNC_METHODS)

    def _overrides(self, method: str) -> bool:
        return getattr(type(self), method) is not getattr(LitAgent, method)

    def check_methods(self) -> None:
        """Check that no method is overridden in vain.

        Raises:
            ConfigError: The agent is async, and a sync method for one mode would never run.
        """
        if not self.is_async():
            return
        for name in ("training_rollout", "validation_rollout"):
            sync = next((n for n in (name, "rollout") if self._overrides(n)), None)
            matching = {name: (name,), "rollout": (name, "rollout")}
            if sync and not any(self._overrides(f"{n}_async") for n in matching[sync]):
                raise ConfigError(
                    f"agent {self.name} overrides async methods, so that its {sync} would never "
                    f"run as {name}; make it {sync}_async, or override only sync methods"
                )

    # Who holds the agent.

    def set_trainer(self, trainer: Any) -> None:
        """Say which trainer trains the agent."""
        self._trainer = weakref.ref(trainer)

    def set_runner(self, runner: "Runner[Any]") -> None:
        """Say which runner runs the agent, in this context and where no other is known."""
        self._runner = weakref.ref(runner)
        _runner_here.set((weakref.ref(self), self._runner))

    @property
    def trainer(self) -> Any:
        """The trainer.

        Raises:
            ValueError: There is none, or no more.
        """
        return _alive(self._trainer, "trainer")

    @property
    def runner(self) -> "Runner[Any]":
        """The runner; of several that share the agent, the one that the running code belongs to.

        Raises:
            ValueError: There is none, or no more.
        """
        here = _runner_here.get()
        is_mine = here is not None and here[0]() is self and here[1]() is not None
        return _alive(here[1] if here and is_mine else self._runner, "runner")

    @property
    def tracer(self) -> "Tracer":
        """The tracer of the runner, else of the trainer.

        Raises:
            ValueError: There is neither, or no more.
        """
        holder = self.runner if self._runner is not None else self.trainer
        return holder.tracer

    def get_trainer(self) -> Any:
        """Return `trainer`."""
        return self.trainer

    def get_runner(self) -> "Runner[Any]":
        """Return `runner`."""
        return self.runner

    def get_tracer(self) -> "Tracer":
        """Return `tracer`."""
        return self.tracer

    # Deprecated hooks; the runner calls those that are overridden.

    def on_rollout_start(self, task: Any, runner: Any, tracer: Any) -> None:
        """Act before an attempt; deprecated, use `Hook`. `task` is the attempted rollout."""

    def on_rollout_end(self, task: Any, rollout: Any, runner: Any, tracer: Any) -> None:
        """Act after an attempt; deprecated, use `Hook`. `task` and `rollout` are the same."""

    # What it does.

    def check_resources(self, resources: NamedResources) -> None:
        """Raise a `ConfigError` where the agent needs a resource that is not there."""

    def rollout(
        self, task: T_task, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run one rollout.

        Args:
            task: The input.
            resources: By name.
            rollout: What is run, with its attempt.
        """
        raise NotImplementedError(
            f"Agents must implement the `rollout` method: {self.name} "
            "overrides neither rollout nor rollout_async"
        )

    async def rollout_async(
        self, task: T_task, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run one rollout; see `rollout`."""
        raise NotImplementedError(
            "Agents must implement the `rollout_async` method for async operations: "
            f"{self.name} does not override rollout_async"
        )

    def training_rollout(
        self, task: T_task, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run one rollout to train on; see `rollout`."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(
        self, task: T_task, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run one rollout to measure; see `rollout`."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: T_task, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run one rollout to train on; see `rollout`."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(
        self, task: T_task, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutRawResult:
        """Run one rollout to measure; see `rollout`."""
        return await self.rollout_async(task, resources, rollout)

    def call(self, resources: NamedResources, rollout: AttemptedRollout) -> Any:
        """Call the method for the rollout's mode; returns a coroutine where the agent is async."""
        method = getattr(self, method_for(rollout.mode, is_async=self.is_async()))
        return method(rollout.input, resources, rollout)

    def source(self, mode: RolloutMode | None) -> Any:
        """Return the user's function that runs a rollout of this mode, for messages."""
        is_async = self.is_async()
        names = (method_for(mode, is_async=is_async), "rollout_async" if is_async else "rollout")
        return getattr(self, next((name for name in names if self._overrides(name)), names[-1]))


def method_for(mode: RolloutMode | None, *, is_async: bool) -> str:
    """Return the name of the method that runs a rollout of this mode."""
    name = "training_rollout" if mode == "train" else "validation_rollout"
    return f"{name}_async" if is_async else name


def _alive(reference: "weakref.ref[Any] | None", what: str) -> Any:
    holder = reference() if reference is not None else None
    if holder is None:
        said = (
            "reference is no longer valid (object has been garbage collected)"
            if reference
            else "has not been set for this agent"
        )
        gone = "any more" if reference else "yet"
        raise ValueError(f"{what.capitalize()} {said}: the agent has no {what} {gone}")
    return holder
