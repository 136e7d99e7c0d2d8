from typing import Any

import pytest
from pydantic import ValidationError

from agl_core.config import (
    RolloutSettings,
    RunConfig,
    S3Settings,
    ServingSettings,
    check_settings,
)
from agl_core.errors import ConfigError


@pytest.mark.parametrize("setting", [{"threads": 2}, {"max_batch_size": 1}])
def test_settings_of_an_engine_are_refused_where_none_is_started(setting: dict[str, Any]):
    with pytest.raises(ValidationError, match="only for an engine that the run starts"):
        ServingSettings.model_validate({"url": "http://127.0.0.1:1", **setting})
    assert ServingSettings.model_validate(setting).url is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", ("http://a:1/", "https://b:2/x")])
def test_settings_survive_the_way_through_json(url: Any):
    settings = ServingSettings(url=url)
    assert ServingSettings.model_validate_json(settings.model_dump_json()) == settings
    assert all(not address.endswith("/") for address in settings.urls)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ([], "names no model server"),
        (["http://a:1", "http://a:1/"], "names a model server twice"),
        (["http://a:1", "b:1"], "'b:1' does not begin with http:// or https://"),
    ],
)
def test_addresses_that_cannot_be_model_servers_are_refused(url: Any, message: str):
    with pytest.raises(ValidationError, match=message):
        ServingSettings(url=url)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_number_that_the_record_cannot_hold_is_refused(value: float):
    with pytest.raises(ValidationError, match="finite number"):
        RolloutSettings(timeout_seconds=value)
    run = {"run_id": "x", "ledger": "l", "agent": "a:b", "train_data": "t"}
    with pytest.raises(ValidationError, match="finite number"):
        RunConfig.model_validate({**run, "algorithm": {"config": {}}, "pass_reward": value})


@pytest.mark.parametrize(
    "s3",
    [
        {"credentials": "AKIAEXAMPLE"},
        {"credentials": "secret/ledger"},
        {"endpoint_url": "https://user:password@minio.example"},
        {"key": "AKIAEXAMPLE"},
    ],
)
def test_settings_of_s3_hold_names_and_no_secrets(s3: dict[str, Any]):
    with pytest.raises(ValidationError):
        S3Settings.model_validate(s3)


def test_settings_of_s3_are_refused_with_a_local_ledger():
    run = {"run_id": "x", "agent": "a:b", "train_data": "t", "algorithm": {"config": {}}}
    s3 = {"credentials": "aws-credentials/ledger"}
    with pytest.raises(ValidationError, match="s3: settings of an s3:// ledger; this one is l"):
        RunConfig.model_validate({**run, "ledger": "l", "s3": s3})
    config = RunConfig.model_validate({**run, "ledger": "s3://b/x", "s3": s3})
    assert config.s3.credentials == "aws-credentials/ledger"


@pytest.mark.parametrize(
    "settings",
    [
        {"train_data": "https://me:hunter2@host/rows.jsonl"},
        {"val_data": "https://host/rows.jsonl?X-Amz-Signature=hunter2"},
        {"train_data": "https://host/rows.jsonl?x=1&hf_token=hunter2"},
        {"serving": {"url": ["http://a:1", "http://hunter2@b:1"]}},
        {"ledger": "s3://key:hunter2@bucket/x"},
        {"serving": {"vllm": {"python": "p", "env": {"HTTP_PROXY": "http://u:hunter2@proxy:1"}}}},
    ],
)
def test_a_url_with_credentials_is_refused_and_not_repeated(settings: dict[str, Any]):
    run = {"run_id": "x", "ledger": "l", "agent": "a:b", "train_data": "t", "algorithm": {}}
    with pytest.raises(ConfigError, match="would become part of the run's record") as caught:
        check_settings(RunConfig, run | settings)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(ValidationError) as raw:
        RunConfig.model_validate(run | settings)
    assert "hunter2" not in str(raw.value)
    check_settings(RunConfig, run | {"serving": {"url": "http://a:1/v1?x=1"}})


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "Proxy_Password", "DB_PASSWD"]
)
def test_a_secret_for_vllm_is_refused_and_not_repeated(name: str):
    run = {"run_id": "x", "ledger": "l", "agent": "a:b", "train_data": "t", "algorithm": {}}
    vllm = {"python": "p", "env": {"VLLM_CPU_KVCACHE_SPACE": "1", name: "hunter2"}}
    message = f"serving.vllm.env: {name} would become part of the run's record"
    with pytest.raises(ConfigError, match=message) as caught:
        check_settings(RunConfig, run | {"serving": {"vllm": vllm}})
    assert "hunter2" not in str(caught.value)
