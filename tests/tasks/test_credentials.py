"""S3 credentials from blocks of a real Prefect server."""

import asyncio
from typing import Any

import pytest
from prefect_aws.credentials import AwsCredentials, MinIOCredentials

from agl_core.config import S3Settings
from agl_core.errors import ConfigError, TransientError
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.storage import open_storage
from tasks.credentials import s3_credentials

SECRET = "a-secret-that-must-not-leak"

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture(autouse=True)
def no_aws_environment(s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bucket, and an environment that leads nowhere."""
    for name in ("ENDPOINT_URL", "ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "DEFAULT_REGION"):
        monkeypatch.delenv(f"AWS_{name}")


def aws_block(endpoint: str, **values: Any) -> Any:
    return AwsCredentials(
        aws_access_key_id="from-the-block",
        aws_secret_access_key=SECRET,  # type: ignore[arg-type]
        aws_client_parameters={"endpoint_url": endpoint, "config": {"connect_timeout": 7}},  # type: ignore[arg-type]
        region_name="eu-west-1",
        **values,
    )


def minio_block(endpoint: str) -> Any:
    return MinIOCredentials(
        minio_root_user="from-the-block",
        minio_root_password=SECRET,  # type: ignore[arg-type]
        aws_client_parameters={"endpoint_url": endpoint},  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kind", ["aws-credentials", "minio-credentials"])
def test_a_block_leads_to_the_store(s3_server: str, s3_uri: str, kind: str):
    block = aws_block(s3_server) if kind.startswith("aws") else minio_block(s3_server)
    block.save("leads", overwrite=True)
    settings = S3Settings(credentials=f"{kind}/leads")
    found = s3_credentials(settings)
    storage = open_storage(s3_uri, S3Access(settings, found))
    assert storage.probe()
    storage.write_once("k", b"one")
    assert storage.read("k") == b"one"
    assert SECRET not in repr(found)
    assert SECRET not in repr(S3Access(settings, found))


async def test_a_block_is_read_where_an_event_loop_runs(s3_server: str):
    await asyncio.to_thread(aws_block(s3_server).save, "loops", overwrite=True)
    found = s3_credentials(S3Settings(credentials="aws-credentials/loops"))
    assert found is not None
    assert found.key_id == "from-the-block"
    assert found.client["region_name"] == "eu-west-1"
    assert found.config == {"connect_timeout": 7}


def test_settings_that_contradict_the_block_are_an_error(s3_server: str):
    aws_block(s3_server).save("contradicts", overwrite=True)
    settings = S3Settings(credentials="aws-credentials/contradicts", region="us-west-2")
    message = "s3: region_name is us-west-2 in the settings, eu-west-1 in block aws-credentials/con"
    with pytest.raises(ConfigError, match=message):
        S3Access(settings, s3_credentials(settings))


def test_a_block_that_is_not_there_is_one_sentence(prefect_api: str):
    with pytest.raises(
        ConfigError, match=f"^there is no Prefect block aws-credentials/none on {prefect_api}"
    ):
        s3_credentials(S3Settings(credentials="aws-credentials/none"))


def test_credentials_that_were_not_loaded_are_an_error_not_the_environments(s3_uri: str):
    with pytest.raises(ConfigError, match="aws-credentials/x was not loaded in this process"):
        S3Access(S3Settings(credentials="aws-credentials/x"))


def test_a_prefect_server_that_does_not_answer_is_worth_another_try():
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}),
        pytest.raises(TransientError, match=r"http://127\.0\.0\.1:9/api does not answer"),
    ):
        s3_credentials(S3Settings(credentials="aws-credentials/x"))
