"""What importing costs, seen in fresh processes."""

import subprocess
import sys
from collections.abc import Sequence

import pytest

import agl_core

HEAVY = ("torch", "verl", "vllm", "ray", "transformers", "prefect")
WEB = ("starlette", "uvicorn", "httpx", "google.protobuf")


def loaded_by(statement: str, modules: Sequence[str] = HEAVY) -> list[str]:
    code = f"{statement}\nimport sys\nprint(*[m for m in {modules} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_agl_core_loads_nothing_heavy():
    assert loaded_by("import agl_core") == []


def test_a_store_in_this_process_loads_no_web_server():
    assert loaded_by("import agl_core", WEB) == []
    assert loaded_by("from agl_core.store import SqliteLightningStore", WEB) == []


def test_a_client_of_a_store_loads_no_web_server():
    statement = "from agl_core.store import LightningStoreClient"
    assert loaded_by(statement, ("starlette", "uvicorn", "google.protobuf")) == []


def test_using_every_public_name_loads_nothing_heavy():
    assert loaded_by("from agl_core import *") == []


def test_what_a_runner_needs_loads_nothing_heavy():
    assert loaded_by("import agl_core.runner.shard") == []


def test_checking_a_configuration_loads_nothing_heavy():
    statement = "from agl_core.algorithm.verl.algorithm import VERL; import agl_core.preflight"
    assert loaded_by(statement) == []


@pytest.mark.parametrize("name", agl_core.__all__)
def test_every_public_name_exists(name: str):
    assert getattr(agl_core, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        agl_core.nothing  # noqa: B018 - looking it up is the test
