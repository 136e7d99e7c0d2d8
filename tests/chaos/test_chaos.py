"""The short form of the chaos test: one seeded fault of each kind, several kinds in one run where
they do not get into each other's way. `python -m tests.chaos` is the long form.
"""

from collections.abc import Iterator

import pytest

from tests.chaos.agents import AGENT_FAULTS
from tests.chaos.cases import (
    Case,
    Injector,
    World,
    agent_exits,
    ill_agent,
    ill_model,
    ill_storage,
    kill_run,
    kill_server,
    play,
)
from tests.chaos.model_server import ALWAYS, MODEL_FAULTS, DeterministicEngine
from tests.chaos.s3 import S3_FAULTS
from tests.chaos.world import world as open_world

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_api")]

_NOT_FOR_EVER = ("holds_gil", "os_exit")
_PLAIN_FAULTS = tuple(kind for kind in AGENT_FAULTS if kind not in _NOT_FOR_EVER)
_ASYNC_FAULTS = tuple(kind for kind in _PLAIN_FAULTS if kind != "hangs_in_c")


@pytest.fixture(scope="module")
def world(
    deterministic: DeterministicEngine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("chaos"), deterministic) as found:
        found.iterations = 1
        yield found


@pytest.mark.parametrize(
    ("case", "inject"),
    [
        (Case("kill training run", "rollout", 1), kill_run),
        pytest.param(Case("kill training run", "update", 2), kill_run, marks=pytest.mark.long),
        pytest.param(
            Case("kill server", "rollout", 1),
            kill_server,
            # Prefect's client leaves connections to the dead server.
            marks=pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ),
        (Case("S3", "rollout", 1), ill_storage(*S3_FAULTS, share=0.2)),
        (Case("model, for a while", "rollout", 1), ill_model(*MODEL_FAULTS, times=2)),
        pytest.param(
            Case("model, for ever", "rollout", 2),
            ill_model(*MODEL_FAULTS, times=ALWAYS),
            marks=pytest.mark.long,
        ),
        (
            Case("sync agents, once", "rollout", 1),
            ill_agent(*_PLAIN_FAULTS, agent="solve", times=1),
        ),
        (
            Case("async agents, for ever", "rollout", 3),
            ill_agent(*_ASYNC_FAULTS, agent="solve_async", times=ALWAYS),
        ),
        pytest.param(
            Case("holds the lock", "rollout", 1),
            ill_agent("holds_gil", times=1),
            marks=pytest.mark.long,
        ),
        pytest.param(Case("os._exit", "rollout", 1), agent_exits, marks=pytest.mark.long),
    ],
    ids=lambda value: value.run_id if isinstance(value, Case) else "",
)
def test_a_fault_changes_nothing_that_is_learned(world: World, case: Case, inject: Injector):
    result = play(world, case, inject)
    assert result.problems == []
    assert result.hits, "the fault was not there"
