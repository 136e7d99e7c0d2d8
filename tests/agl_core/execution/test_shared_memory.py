import time
from typing import Any

import pytest

from agl_core.errors import ConfigError, ExecutionError
from agl_core.execution import SharedMemoryExecutionStrategy
from agl_core.runner import LitAgentRunner
from agl_core.store import InMemoryLightningStore
from agl_core.tracer import OtelTracer
from agl_core.trainer import Trainer
from tests.agl_core.execution import work

QUICK = {"type": "shm", "graceful_delay": 1.0, "join_timeout": 5.0}


def fit(agent: Any, rows: list[Any], algorithm: Any = None, **strategy: Any) -> Any:
    algorithm = algorithm or work.Enqueues()
    Trainer(strategy=QUICK | strategy, algorithm=algorithm).fit(agent, rows)
    return algorithm


@pytest.mark.parametrize("n_runners", [1, 3])
def test_threads_run_what_the_algorithm_enqueues(n_runners: int):
    algorithm = fit(work.doubles, list(range(6)), n_runners=n_runners)
    assert algorithm.rewards == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert set(algorithm.statuses) == {"succeeded"}


def test_each_thread_has_a_runner_of_its_own():
    algorithm = fit(work.KnowsItsRunner(), list(range(20)), n_runners=3)
    assert algorithm.rewards == [1.0] * 20
    assert len(algorithm.workers) >= 2


def test_a_runner_that_is_given_is_copied_for_each_thread():
    runner = LitAgentRunner[Any](OtelTracer(), poll_interval=0.02, interval_jitter=0.0)
    algorithm = work.Enqueues()
    trainer = Trainer(strategy=QUICK | {"n_runners": 3}, algorithm=algorithm, runner=runner)
    trainer.fit(work.KnowsItsRunner(), list(range(20)))
    assert algorithm.rewards == [1.0] * 20
    assert len(algorithm.workers) >= 2
    assert trainer.tracer is runner.tracer


@pytest.mark.parametrize("main_thread", ["runner", "algorithm"])
def test_an_error_of_the_algorithm_reaches_the_caller(main_thread: str):
    with pytest.raises(LookupError, match="the algorithm gave up"):
        fit(work.doubles, [1], work.GivesUp(), main_thread=main_thread)


@pytest.mark.parametrize("main_thread", ["runner", "algorithm"])
def test_a_runner_that_crashes_ends_the_run_with_its_error(main_thread: str):
    trainer = Trainer(
        strategy=QUICK | {"main_thread": main_thread, "graceful_delay": 0.2},
        algorithm=work.WaitsForEver(),
        runner=work.Breaks,
    )
    started = time.monotonic()
    with pytest.raises(LookupError, match="the runner broke"):
        trainer.fit(work.doubles, [1])
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("main_thread", ["runner", "algorithm"])
def test_an_algorithm_that_waits_for_runners_that_have_all_ended_is_told(main_thread: str):
    trainer = Trainer(
        strategy=QUICK | {"main_thread": main_thread, "graceful_delay": 0.2},
        algorithm=work.Enqueues(),
        max_rollouts=2,
    )
    with pytest.raises(ExecutionError, match="3 rollouts are queued that nobody will run"):
        trainer.fit(work.doubles, [1, 2, 3, 4, 5])


def test_an_algorithm_that_is_not_async_may_use_event_loops_of_its_own():
    assert fit(work.doubles, [1, 2], work.Synchronous(), n_runners=2).rewards == [2.0, 4.0]


async def test_fit_works_where_an_event_loop_runs_as_in_a_notebook():
    assert fit(work.doubles, [1, 2]).rewards == [2.0, 4.0]
    with pytest.raises(LookupError, match="the algorithm gave up"):
        fit(work.doubles, [1], work.GivesUp(), n_runners=2)


def test_a_store_that_is_not_thread_safe_must_be_managed():
    class Unsafe(InMemoryLightningStore):
        @property
        def capabilities(self) -> Any:
            return {**super().capabilities, "thread_safe": False}

    trainer = Trainer(
        strategy=QUICK | {"managed_store": False}, algorithm=work.Enqueues(), store=Unsafe()
    )
    with pytest.raises(ConfigError, match="Unsafe is not thread-safe; let it be managed"):
        trainer.fit(work.doubles, [1])
    trainer = Trainer(strategy=QUICK, algorithm=(algorithm := work.Enqueues()), store=Unsafe())
    trainer.fit(work.doubles, [1])
    assert algorithm.rewards == [2.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_runners": 0}, "n_runners must be at least 1"),
        ({"n_runners": 2, "main_thread": "runner"}, "main_thread='runner' needs one runner"),
        ({"main_thread": "both"}, "main_thread must be 'algorithm' or 'runner'"),
        ({"join_timeout": -1}, "join_timeout must be at least 0"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_an_error(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        SharedMemoryExecutionStrategy(**options)
