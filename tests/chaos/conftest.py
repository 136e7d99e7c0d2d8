"""One deterministic model server and one undisturbed run for the whole folder."""

from collections.abc import Iterator

import pytest

from tests.chaos.model_server import DeterministicEngine
from tests.conftest import CALCULATOR


@pytest.fixture(scope="session")
def deterministic() -> Iterator[DeterministicEngine]:
    with DeterministicEngine(CALCULATOR / "policy") as server:
        yield server
