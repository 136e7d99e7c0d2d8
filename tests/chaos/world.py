"""What the cases need, each part started by the first case that asks for it."""

import os
import tempfile
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

from tests import conftest
from tests.chaos.agents import PLAN
from tests.chaos.cases import World
from tests.chaos.model_server import DeterministicEngine
from tests.chaos.s3 import IllBucket, ill_bucket
from tests.chaos.servers import MortalPool, MortalServer

T = TypeVar("T")


@contextmanager
def world(folder: Path, engine: DeterministicEngine) -> Generator[World]:
    """Give a world on the Prefect server that this process is a client of."""
    plan = folder / "plan.json"
    before = os.environ.copy()
    os.environ[PLAN] = str(plan)
    with ExitStack() as stack:

        def bucket() -> IllBucket:
            return stack.enter_context(ill_bucket())

        def server() -> MortalServer:
            found = MortalServer(folder / "server", conftest.MORTAL_PREFECT_PORT)
            stack.callback(found.close)
            found.start()
            return found

        def pool() -> MortalPool:
            found = MortalPool(folder)
            stack.callback(found.close)
            found.deploy()
            found.start_worker()
            return found

        try:
            yield World(folder, engine, plan, _once(bucket), _once(server), _once(pool), {})
        finally:
            os.environ.clear()
            os.environ.update(before)


def _once(make: Callable[[], T]) -> Callable[[], T]:
    return cache(make)


@contextmanager
def open_world() -> Generator[World]:
    """Give a world with a Prefect server of its own, outside of pytest."""
    home = Path(os.environ["PREFECT_HOME"])
    with (
        tempfile.TemporaryDirectory(prefix="agl-chaos-") as folder,
        conftest.prefect_server(home, port=conftest._PREFECT_PORT),
        DeterministicEngine(conftest.CALCULATOR / "policy") as engine,
        world(Path(folder), engine) as found,
    ):
        yield found
