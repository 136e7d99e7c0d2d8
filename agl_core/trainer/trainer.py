"""`Trainer.fit`: an agent is trained from a script or a notebook, without Prefect."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from agl_core.adapter.base import TraceAdapter
from agl_core.adapter.triplet import TracerTraceToTriplet
from agl_core.algorithm.base import Algorithm
from agl_core.errors import ConfigError
from agl_core.execution.base import ExecutionStrategy
from agl_core.litagent.litagent import LitAgent
from agl_core.llm_proxy.proxy import LLMProxy
from agl_core.runner.base import Runner
from agl_core.store.base import LightningStore
from agl_core.store.memory import InMemoryLightningStore
from agl_core.trainer.bundles import AlgorithmWork, RunnerWork, make_runner, make_tracer
from agl_core.trainer.init_utils import build_component, load_class
from agl_core.trainer.registry import ExecutionStrategyRegistry
from agl_core.types.core import Dataset, Hook
from agl_core.types.resources import NamedResources

_FAST = "agl_core.algorithm.fast"


class Trainer:
    """Puts an algorithm, runners and what they need together, and runs them by a strategy.

    Each component is given as an instance, a class, a function that makes one, a path
    (`package.module.Class`), or a dict with `type` and arguments. Runners and tracers that are not
    given as instances are made anew for each worker.

    Args:
        dev: Deprecated: `fit` does what `dev` does.
        n_runners: How many runners there are; None for the strategy's own number, which is 1 unless
            it says otherwise.
        max_rollouts: After how many each runner ends; None for no limit.
        initial_resources: What the first rollouts are given.
        tracer: Records what agents do; default `OtelTracer`.
        adapter: Turns spans into what the algorithm learns from; default `TracerTraceToTriplet`,
            whose arguments a dict without `type` has.
        store: Default `InMemoryLightningStore`.
        runner: Default `LitAgentRunner`, whose arguments a dict without `type` has.
        strategy: "cs" (default), "shm", or another `ExecutionStrategy`.
        port: Of the store's server, for strategies that have one.
        algorithm: What learns; for `dev`, a `FastAlgorithm`, by default `Baseline`.
        llm_proxy: The proxy that agents call through where the algorithm owns one; `LLMProxy`'s
            arguments as a dict. It is given the store.
        n_workers: Deprecated name of `n_runners`.
        max_tasks: Deprecated name of `max_rollouts`.
        daemon: True: what a trainer starts ends with it.
        triplet_exporter: Deprecated name of `adapter`.
        hooks: Called around each attempt; one or several.

    Raises:
        ValueError: A value that cannot be honoured; the message says which.
        TypeError: A component is of another kind.
    """

    def __init__(
        self,
        *,
        dev: bool = False,
        n_runners: int | None = None,
        max_rollouts: int | None = None,
        initial_resources: NamedResources | None = None,
        tracer: Any = None,
        adapter: Any = None,
        store: Any = None,
        runner: Any = None,
        strategy: Any = None,
        port: int | None = None,
        algorithm: Any = None,
        llm_proxy: Any = None,
        n_workers: int | None = None,
        max_tasks: int | None = None,
        daemon: bool = True,
        triplet_exporter: Any = None,
        hooks: Hook | Sequence[Hook] | None = None,
    ) -> None:
        if dev:
            _deprecated("dev", "call Trainer.dev()")
        if not daemon:
            raise ConfigError("daemon=False is not supported: what a trainer starts ends with it")
        n_runners = _renamed("n_workers", n_workers, "n_runners", n_runners)
        max_rollouts = _renamed("max_tasks", max_tasks, "max_rollouts", max_rollouts)
        adapter = _renamed("triplet_exporter", triplet_exporter, "adapter", adapter)
        self._is_dev = dev
        self._tracer_spec, self._runner_spec = tracer, runner
        self.max_rollouts = self.max_tasks = max_rollouts
        self.initial_resources = initial_resources
        self.tracer = make_tracer(tracer)
        self.adapter = self.triplet_exporter = _adapter(adapter)
        self.algorithm: Algorithm | None = build_component(
            algorithm, expected_type=Algorithm, spec_name="algorithm", allow_none=True
        )
        self.strategy = _strategy(strategy, n_runners, port)
        self.n_runners = self.n_workers = getattr(self.strategy, "n_runners", n_runners or 1)
        self.store = _store(store)
        self.runner = self._checked_runner(runner, tracer)
        self.llm_proxy: LLMProxy | None = build_component(
            llm_proxy,
            expected_type=LLMProxy,
            spec_name="llm_proxy",
            allow_none=True,
            optional_defaults={"store": self.store},
            dict_requires_type=False,
            dict_default_cls=LLMProxy,
        )
        self.hooks = _hooks(hooks)
        self.agent: LitAgent[Any] | None = None
        """What runs since `fit` or `dev` was called."""

    def fit(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Let the algorithm learn from rollouts of the agent, and return when it has ended.

        Args:
            agent: What the runners run.
            train_dataset: Inputs to learn from.
            val_dataset: Inputs to score with.

        Raises:
            TypeError: The agent is no `LitAgent`, or a dataset has no rows by position.
            ConfigError: Something is missing; nothing was started.
            Exception: What the algorithm raised.
            ExecutionError: The runners failed.
            KeyboardInterrupt: Ctrl-C; what was started has ended.
        """
        if self._is_dev:
            self.dev(agent, train_dataset, val_dataset=val_dataset)
            return
        has_work = getattr(self.strategy, "role", "both") == "runner"
        if self.algorithm is None and not has_work and _is_managed(self.strategy):
            raise ConfigError(
                "the trainer has no algorithm, and nobody else can reach its store; give "
                "algorithm=..., or call dev() to try the agent"
            )
        self._execute(agent, self.algorithm, train_dataset, val_dataset)

    def dev(
        self,
        agent: LitAgent[Any],
        train_dataset: Dataset[Any] | None = None,
        *,
        val_dataset: Dataset[Any] | None = None,
    ) -> None:
        """Try the agent with an algorithm that only runs it: a `FastAlgorithm`.

        Args:
            agent: What the runners run.
            train_dataset: Inputs.
            val_dataset: Further inputs.

        Raises:
            TypeError: The algorithm is none; see also `fit`.
            ConfigError: There is no dataset, or no initial resource that the agent takes.
        """
        fast = load_class(f"{_FAST}.FastAlgorithm")
        algorithm = self.algorithm or load_class(f"{_FAST}.Baseline")()
        if not isinstance(algorithm, fast):
            raise TypeError(
                "Trainer.dev() requires an algorithm that inherits from FastAlgorithm. "
                f"Received {type(algorithm).__name__}: dev() tries an agent, and "
                f"{type(algorithm).__name__} is no FastAlgorithm; leave "
                "algorithm out for Baseline, or call fit()"
            )
        if train_dataset is None and val_dataset is None:
            raise ConfigError("dev() needs inputs: give train_dataset or val_dataset")
        _check_agent(agent)
        agent.check_resources(self.initial_resources or {})
        self._execute(agent, algorithm, train_dataset, val_dataset)

    def __getstate__(self) -> dict[str, Any]:
        """Leave behind what stays in the process of the algorithm."""
        kept = ("n_runners", "n_workers", "max_rollouts", "max_tasks", "initial_resources")
        return {name: self.__dict__.get(name) if name in kept else None for name in self.__dict__}

    def _execute(
        self,
        agent: LitAgent[Any],
        algorithm: Algorithm | None,
        train_dataset: Dataset[Any] | None,
        val_dataset: Dataset[Any] | None,
    ) -> None:
        _check_agent(agent)
        for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            _check_dataset(name, dataset)
        self.agent = agent
        agent.set_trainer(self)
        self.strategy.execute(
            AlgorithmWork(
                algorithm=algorithm,
                train_dataset=train_dataset,
                val_dataset=val_dataset,
                adapter=self.adapter,
                initial_resources=self.initial_resources,
                llm_proxy=self.llm_proxy,
                trainer=self,
            ),
            RunnerWork(
                agent=agent,
                runner=self._runner_spec,
                tracer=self._tracer_spec,
                hooks=self.hooks,
                max_rollouts=self.max_rollouts,
                trainer=self,
            ),
            self.store,
        )

    def _checked_runner(self, spec: Any, tracer: Any) -> Runner[Any]:
        """Return a runner, and see that it does what the other arguments say.

        Raises:
            ConfigError: It is an instance that does something else.
        """
        runner = make_runner(spec, self.tracer, self.max_rollouts)
        if not isinstance(spec, Runner):
            return runner
        own = getattr(runner, "max_rollouts", None)
        if self.max_rollouts is not None and own != self.max_rollouts:
            raise ConfigError(
                f"max_rollouts is {self.max_rollouts}, and the runner given has {own}; say it there"
            )
        own_tracer = getattr(runner, "tracer", None)
        if tracer is not None and own_tracer is not self.tracer:
            raise ConfigError("the runner given has another tracer; leave tracer out")
        self.tracer = own_tracer or self.tracer
        return runner


def _adapter(spec: Any) -> TraceAdapter[Any]:
    adapter = build_component(
        spec,
        expected_type=TraceAdapter,
        spec_name="adapter",
        default_factory=TracerTraceToTriplet,
        dict_requires_type=False,
        dict_default_cls=TracerTraceToTriplet,
    )
    assert adapter is not None, "there is a default"
    return adapter


def _store(spec: Any) -> LightningStore:
    store = build_component(
        spec,
        expected_type=LightningStore,
        spec_name="store",
        default_factory=InMemoryLightningStore,
    )
    assert store is not None, "there is a default"
    return store


def _strategy(spec: Any, n_runners: int | None, port: int | None) -> ExecutionStrategy:
    """Return the strategy, which has as many runners and the port that were asked for.

    Raises:
        ConfigError: It has not.
    """
    given = {} if n_runners is None else {"n_runners": n_runners}
    if port is not None and not (isinstance(spec, Mapping) and "server_port" in spec):
        given["server_port"] = port
    strategy = build_component(
        "cs" if spec is None else spec,
        expected_type=ExecutionStrategy,
        spec_name="strategy",
        optional_defaults=given,
        registry=ExecutionStrategyRegistry,
    )
    assert strategy is not None, "there is a default"
    own = getattr(strategy, "n_runners", None)
    if n_runners is not None and own != n_runners:
        raise ConfigError(
            f"n_runners is {n_runners}, and the strategy given has "
            f"{'none' if own is None else own}; say it there"
        )
    if port is not None:
        if not hasattr(strategy, "server_port"):
            raise ConfigError(f"port is {port}, but {type(strategy).__name__} has no server")
        if isinstance(spec, Mapping) and spec.get("server_port", port) != port:
            raise ConfigError(f"port is {port}, and the strategy's is {spec['server_port']}")
        strategy.server_port = port  # pyright: ignore[reportAttributeAccessIssue]
    return strategy


def _hooks(hooks: Hook | Sequence[Hook] | None) -> tuple[Hook, ...]:
    found = (hooks,) if isinstance(hooks, Hook) else tuple(hooks or ())
    for hook in found:
        if not isinstance(hook, Hook):
            raise TypeError(f"hooks: {hook!r} is no Hook")
    return found


def _check_agent(agent: Any) -> None:
    if not isinstance(agent, LitAgent):
        raise TypeError(f"not a LitAgent: {agent!r}; is the function decorated with @rollout?")
    agent.check_methods()


def _check_dataset(name: str, dataset: Any) -> None:
    if isinstance(dataset, str):
        raise TypeError(
            f"{name} is a text: servers of the protocol before 0.2 are not supported; give rows"
        )
    if dataset is not None and not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise TypeError(f"{name} must have a length and rows by position; got {dataset!r}")


def _is_managed(strategy: ExecutionStrategy) -> bool:
    return bool(getattr(strategy, "managed_store", True))


def _renamed(old: str, old_value: Any, new: str, new_value: Any) -> Any:
    """Return the value of an argument that has a deprecated name too."""
    if old_value is None:
        return new_value
    _deprecated(old, f"use {new}")
    return old_value if new_value is None else new_value


def _deprecated(name: str, instead: str) -> None:
    warnings.warn(f"{name} is deprecated; {instead}", DeprecationWarning, stacklevel=4)
