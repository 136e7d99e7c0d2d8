"""`prefect.yaml`, linted: Prefect ignores keys that it does not know."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
    WorkPoolConfig,
)
from pydantic import BaseModel

from agl_core.config import RunConfig

FILE: dict[str, Any] = yaml.safe_load(Path("prefect.yaml").read_text())
DEPLOYMENTS: list[dict[str, Any]] = FILE["deployments"]
NAMES = [deployment["name"] for deployment in DEPLOYMENTS]


def known(model: type[BaseModel]) -> set[str]:
    fields = model.model_fields.items()
    return {field.alias or name for name, field in fields}


def test_every_key_is_one_that_prefect_knows():
    assert set(FILE) - {"definitions"} <= known(PrefectYamlModel)
    for deployment in DEPLOYMENTS:
        assert set(deployment) <= known(DeploymentConfig)
        assert set(deployment["work_pool"]) <= known(WorkPoolConfig)
        assert set(deployment.get("concurrency_limit", {})) <= known(ConcurrencyLimitSpec)
        for schedule in deployment.get("schedules", []):
            assert set(schedule) <= known(RawScheduleConfig)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=NAMES)
def test_every_entry_point_is_a_flow_of_that_name(deployment: dict[str, Any]):
    module, _, name = deployment["entrypoint"].rpartition(".")
    found = getattr(import_module(module), name)
    assert isinstance(found, Flow)
    assert found.name == deployment["name"]
    assert set(deployment.get("parameters", {})) <= set(found.parameters.properties)


def test_the_default_configuration_is_valid_and_the_demos():
    parameters = next(d for d in DEPLOYMENTS if d["name"] == "training-run")["parameters"]
    deployed = RunConfig.model_validate(parameters["config"])
    demo = RunConfig.model_validate(
        yaml.safe_load(Path("examples/calculator/run.yaml").read_text())
    )
    assert deployed.algorithm == demo.algorithm
    assert deployed.agent == demo.agent
