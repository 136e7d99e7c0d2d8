import asyncio
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import ConfigError, ExecutionError, StoreError, TransientError
from agl_core.execution import ClientServerExecutionStrategy
from agl_core.litagent import LitAgent
from agl_core.store import (
    InMemoryLightningStore,
    LightningStoreClient,
    LightningStoreServer,
    SqliteLightningStore,
)
from agl_core.tracer import OtelTracer
from agl_core.trainer import Trainer
from deployments.server import free_port
from tests.agl_core.execution import work
from tests.agl_core.execution.processes import (
    all_gone,
    children,
    dawdling,
    descendants,
    wait_until,
)

QUICK = {"type": "cs", "server_port": 0, "graceful_timeout": 3.0, "terminate_timeout": 3.0}
METHODS = ["fork", "spawn"]


BEFORE: set[int] = set()
"""Processes of other tests: servers of the session."""


@pytest.fixture(autouse=True)
def others() -> None:
    BEFORE.clear()
    BEFORE.update(descendants(os.getpid()))


def new_processes(below: Callable[[int], list[int]] = descendants) -> list[int]:
    return [pid for pid in below(os.getpid()) if pid not in BEFORE]


def fit(agent: Any, rows: list[Any], algorithm: Any = None, **strategy: Any) -> Any:
    algorithm = algorithm or work.Enqueues()
    Trainer(strategy=QUICK | strategy, algorithm=algorithm).fit(agent, rows)
    assert new_processes() == []
    return algorithm


@pytest.mark.parametrize("method", METHODS)
def test_two_processes_run_what_the_algorithm_enqueues(method: str):
    algorithm = fit(work.Doubles(), list(range(12)), n_runners=2, start_method=method)
    assert algorithm.rewards == [2.0 * number for number in range(12)]
    assert set(algorithm.statuses) == {"succeeded"}
    assert os.getpid() not in algorithm.pids
    assert all_gone(list(algorithm.pids))


@pytest.mark.parametrize("method", METHODS)
def test_the_algorithm_can_be_the_process_and_the_runner_be_here(method: str, tmp_path: Path):
    store = SqliteLightningStore(tmp_path / "store.db")
    trainer = Trainer(
        strategy=QUICK | {"main_process": "runner", "start_method": method},
        algorithm=work.GivesUp(),
        store=store,
    )
    with pytest.raises(LookupError, match="the algorithm gave up"):
        trainer.fit(work.doubles, [1, 2, 3])
    assert new_processes() == []
    assert [one.status for one in _rollouts(store)] == ["succeeded"] * 3


def _rollouts(store: SqliteLightningStore) -> list[Any]:
    return list(asyncio.run(store.query_rollouts()))


def test_an_error_of_the_algorithm_reaches_the_caller_and_ends_the_runners():
    algorithm = work.GivesUp()
    with pytest.raises(LookupError, match="the algorithm gave up"):
        fit(work.doubles, [1, 2, 3], algorithm, n_runners=2)
    assert algorithm.pids
    assert all_gone(list(algorithm.pids))


def test_a_runner_that_crashes_again_and_again_ends_the_run():
    with pytest.raises(
        ExecutionError, match=r"unexpected exit codes: .*exit code 7, after 1 restarts"
    ):
        fit(work.dies, [1, 2, 3], n_runners=2, max_restarts=1)


def test_a_runner_that_crashes_ends_the_run_where_the_policy_says_so():
    with pytest.raises(ExecutionError, match="exit code 7; on_runner_crash='end'"):
        fit(work.dies, [1], n_runners=2, on_runner_crash="end")


def test_what_a_runner_raised_is_told():
    trainer = Trainer(
        strategy=QUICK | {"on_runner_crash": "end"},
        algorithm=work.WaitsForEver(),
        runner=work.Breaks,
    )
    with pytest.raises(ExecutionError, match="LookupError: the runner broke"):
        trainer.fit(work.doubles, [1])


def test_a_killed_runner_is_replaced_and_nothing_is_lost(tmp_path: Path):
    rows = [{"number": n, "folder": str(tmp_path) if n < 2 else ""} for n in range(10)]
    killed: list[int] = []

    def kill() -> None:
        killed.extend(pid for pair in wait_until(lambda: _two(tmp_path)) for pid in pair)
        for runner in killed[::2]:
            os.kill(runner, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    algorithm = fit(work.dawdles, rows, work.Enqueues(work.RETRIED), n_runners=2)
    killer.join()
    assert algorithm.rewards == [float(number) for number in range(10)]
    assert set(algorithm.statuses) == {"succeeded"}
    assert wait_until(lambda: all_gone(killed))  # what the agents had started too


def _two(folder: Path) -> list[tuple[int, int]] | None:
    found = dawdling(folder)
    return found if len(found) == 2 else None


def test_a_run_without_restarts_is_over_when_a_runner_is_killed(tmp_path: Path):
    killer = threading.Thread(
        target=lambda: os.kill(wait_until(lambda: dawdling(tmp_path))[0][0], signal.SIGKILL)
    )
    killer.start()
    with pytest.raises(ExecutionError, match="runner 0 ended with exit code -9"):
        fit(work.dawdles, [{"folder": str(tmp_path)}], on_runner_crash="end")
    killer.join()
    assert wait_until(lambda: all_gone([pid for pair in dawdling(tmp_path) for pid in pair]))


def test_a_rollout_that_does_not_end_holds_up_the_end_for_a_while_only(tmp_path: Path):
    class Leaves(work.Enqueues):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await self.get_store().add_resources(work.RESOURCES)
            await self.get_store().enqueue_rollout(train_dataset[0])
            wait_until(lambda: dawdling(tmp_path))

    store = SqliteLightningStore(tmp_path.parent / f"{tmp_path.name}.db")
    strategy = QUICK | {"graceful_timeout": 0.5}
    started = time.monotonic()
    Trainer(strategy=strategy, algorithm=Leaves(), store=store).fit(
        work.dawdles, [{"folder": str(tmp_path), "number": 1}]
    )
    assert time.monotonic() - started < 30
    assert new_processes() == []
    assert [one.attempt.failure_kind for one in _rollouts(store)] == ["infra_error"]


def test_an_algorithm_that_waits_for_runners_that_have_all_ended_is_told():
    trainer = Trainer(strategy=QUICK | {"n_runners": 2}, algorithm=work.Enqueues(), max_rollouts=1)
    with pytest.raises(ExecutionError, match="3 rollouts are queued that nobody will run"):
        trainer.fit(work.doubles, [1, 2, 3, 4, 5])


def test_an_algorithm_goes_on_when_all_runners_have_ended():
    class Learns(work.Enqueues):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await super().run(train_dataset)
            await asyncio.sleep(3.0)
            self.statuses.append("learned")

    algorithm = Learns()
    strategy = QUICK | {"graceful_timeout": 0.2}
    Trainer(strategy=strategy, algorithm=algorithm, max_rollouts=1).fit(work.doubles, [1])
    assert algorithm.statuses == ["succeeded", "learned"]


def test_a_run_whose_supervisor_is_told_to_end_did_not_succeed():
    def interrupt() -> None:
        (supervisor,) = wait_until(lambda: len(found := new_processes(children)) == 1 and found)
        wait_until(lambda: children(supervisor))
        os.kill(supervisor, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(ExecutionError, match="the algorithm was stopped before its end"):
        fit(work.doubles, [1], work.WaitsForEver(), graceful_timeout=0.5)


AT_FORK: list[Callable[[], None]] = []
os.register_at_fork(after_in_parent=lambda: [hook() for hook in AT_FORK])


@pytest.fixture
def interrupted_start(request: pytest.FixtureRequest) -> Iterator[list[bool]]:
    """Interrupt a process while it starts its first one; whether that came to pass is told."""
    where, when = request.param
    start, done, trainer = ForkProcess.start, [], os.getpid()

    def interrupt() -> None:
        if (os.getpid() == trainer) == (where == "the trainer") and not done:
            done.append(True)
            signal.raise_signal(signal.SIGINT)

    def interrupted(self: ForkProcess) -> None:
        if when == "before it":
            interrupt()
        AT_FORK[:] = [interrupt] if when == "as it forks" else []
        start(self)
        if when == "after it":
            interrupt()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForkProcess, "start", interrupted)
        yield done
    AT_FORK.clear()


STARTS = ["before it", "as it forks", "after it"]


@pytest.mark.parametrize(
    "interrupted_start", [("the supervisor", when) for when in STARTS], indirect=True
)
def test_a_supervisor_that_is_interrupted_while_it_starts_a_runner_leaves_none(
    interrupted_start: list[bool],
):
    with pytest.raises(ExecutionError, match="the algorithm was stopped before its end"):
        fit(work.doubles, [1], work.WaitsForEver(), graceful_timeout=0.5)
    assert new_processes() == []


@pytest.mark.parametrize(
    "interrupted_start", [("the trainer", when) for when in STARTS], indirect=True
)
@pytest.mark.parametrize("main_process", ["algorithm", "runner"])
def test_a_trainer_that_is_interrupted_while_it_starts_a_process_leaves_none(
    main_process: str, interrupted_start: list[bool]
):
    with pytest.raises(KeyboardInterrupt):
        fit(work.doubles, [1], work.WaitsForEver(), main_process=main_process)
    assert interrupted_start == [True]
    assert new_processes() == []


def test_what_cannot_be_sent_to_a_spawned_process_is_named():
    class Local(LitAgent[Any]):
        pass

    with pytest.raises(ConfigError, match=r"agent cannot be sent to a spawned process.*Local"):
        fit(Local(), [1], start_method="spawn")
    trainer = Trainer(
        strategy=QUICK | {"start_method": "spawn"},
        algorithm=work.Enqueues(),
        tracer=lambda: OtelTracer(),
    )
    with pytest.raises(ConfigError, match="tracer cannot be sent to a spawned process"):
        trainer.fit(work.doubles, [1])


async def test_a_runner_of_one_fit_is_refused_by_the_store_of_another():
    async with LightningStoreServer(InMemoryLightningStore(), port=0) as mine:
        runners = pickle.loads(pickle.dumps(mine.client()))
        port = int(mine.endpoint.rpartition(":")[2])
    async with LightningStoreServer(InMemoryLightningStore(), port=port):
        with pytest.raises(StoreError, match=r"this store is that of run .*, not of run-"):
            await runners.dequeue_rollout("Worker-0")


async def test_a_second_trainer_on_the_same_port_is_refused():
    async with LightningStoreServer(InMemoryLightningStore(), port=0) as other:
        port = int(other.endpoint.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}"):
            fit(work.doubles, [1], server_port=port)


def test_a_runner_waits_for_the_store_for_a_while_only():
    port = free_port()
    started = time.monotonic()
    trainer = Trainer(
        strategy=QUICK | {"role": "runner", "server_port": port, "connect_timeout": 1.0}
    )
    with pytest.raises(TransientError, match=f"no store answers at http://127.0.0.1:{port} with"):
        trainer.fit(work.doubles)
    assert time.monotonic() - started < 15


def test_a_store_of_this_process_cannot_be_unmanaged():
    with pytest.raises(ConfigError, match="InMemoryLightningStore lives in this process"):
        fit(work.doubles, [1], managed_store=False)


def test_a_store_on_disk_is_used_as_it_is_by_all_where_it_is_not_managed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("AGL_MANAGED_STORE", "0")
    algorithm = work.Enqueues()
    store = SqliteLightningStore(tmp_path / "store.db")
    trainer = Trainer(strategy=QUICK, algorithm=algorithm, store=store)
    trainer.fit(work.doubles, [1, 2])
    assert [one.attempt.failure_message for one in _rollouts(store)] == [None, None]
    assert algorithm.rewards == [2.0, 4.0]


def test_the_environment_says_what_arguments_do_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AGL_CURRENT_ROLE", "runner")
    monkeypatch.setenv("AGL_SERVER_HOST", "10.1.2.3")
    monkeypatch.setenv("AGL_SERVER_PORT", "5000")
    strategy = ClientServerExecutionStrategy()
    assert (strategy.role, strategy.server_host, strategy.server_port) == (
        "runner",
        "10.1.2.3",
        5000,
    )
    strategy = ClientServerExecutionStrategy("algorithm", "h", 1)
    assert (strategy.role, strategy.server_host, strategy.server_port) == ("algorithm", "h", 1)
    monkeypatch.setenv("AGL_CURRENT_ROLE", "boss")
    with pytest.raises(
        ConfigError, match="role must be one of 'algorithm', 'runner', or 'both'; got 'bo"
    ):
        ClientServerExecutionStrategy()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_runners": 0}, "n_runners must be at least 1; got 0"),
        ({"n_runners": 2, "main_process": "runner"}, "requires n_runners to be 1; here are role"),
        (
            {"role": "algorithm", "main_process": "runner"},
            "requires n_runners to be 1; here are role",
        ),
        ({"main_process": "both"}, "main_process must be 'algorithm' or 'runner'"),
        ({"start_method": "forkserver"}, "start_method must be 'fork' or 'spawn'"),
        ({"on_runner_crash": "ignore"}, "on_runner_crash must be 'restart' or 'end'"),
        ({"max_restarts": -1}, "max_restarts must be at least 0"),
        ({"role": "runner", "server_port": 0}, "a runner needs the port"),
    ],
)
def test_a_setting_that_cannot_be_honoured_is_an_error(options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ClientServerExecutionStrategy(**options)


def test_a_client_in_another_process_can_read_what_is_served():
    """What is managed is served to anyone of this machine who does not insist on a run."""
    port = free_port()
    seen: list[int] = []

    class Looks(work.Enqueues):
        async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
            await super().run(train_dataset, val_dataset)
            async with LightningStoreClient(f"http://127.0.0.1:{port}") as client:
                seen.append((await client.query_rollouts()).total)

    fit(work.doubles, [1, 2], Looks(), server_port=port)
    assert seen == [2]
