"""S3 credentials from a Prefect block: parameters hold its name, the server its secret.

The blocks are those of prefect-aws (extra `aws`), which users of Prefect on AWS or MinIO have; the
UI hides their secrets. Prefect's own `RemoteFileSystem` would keep them as plain settings.
"""

from typing import Any

from pydantic import SecretStr

from agl_core.config import S3Settings
from agl_core.errors import ConfigError, TransientError
from agl_core.ledger.s3_access import S3Credentials
from agl_core.utils.shown_url import without_credentials


def s3_credentials(settings: S3Settings) -> S3Credentials | None:
    """Return what the block that the settings name says; None where they name none.

    Read once by each process that opens the ledger; a role is assumed then, and not again.

    Raises:
        ConfigError: There is no such block, it holds no credentials, or no server can be asked.
        TransientError: The Prefect server does not answer.
    """
    if settings.credentials is None:
        return None
    block = _load(settings.credentials)
    found = block.get_boto3_session().get_credentials()
    if found is None:
        raise ConfigError(f"Prefect block {settings.credentials} holds no credentials")
    frozen = found.get_frozen_credentials()
    client = block.aws_client_parameters.get_params_override()
    client.pop("config", None)  # boto3's; s3fs makes its own of the same values
    if block.region_name:
        client["region_name"] = block.region_name
    return S3Credentials(
        key_id=frozen.access_key,
        secret=SecretStr(frozen.secret_key),
        token=SecretStr(frozen.token) if frozen.token else None,
        client=client,
        config=block.aws_client_parameters.config or {},
    )


def _load(reference: str) -> Any:
    import httpx
    from prefect.settings import PREFECT_API_URL

    try:
        from prefect_aws.credentials import AwsCredentials, MinIOCredentials
    except ImportError as error:
        raise ConfigError(
            f"Prefect block {reference} needs prefect-aws: pip install 'agl-prefect[aws]'"
        ) from error
    if not PREFECT_API_URL.value():
        raise ConfigError(
            f"Prefect block {reference}: set PREFECT_API_URL to the server that has it"
        )
    kinds = {"aws-credentials": AwsCredentials, "minio-credentials": MinIOCredentials}
    kind, _, name = reference.partition("/")
    try:
        # Async callers get a coroutine unless told otherwise, and a ledger is opened from both.
        return kinds[kind].load(name, _sync=True)  # type: ignore[call-arg]
    except ValueError as error:  # Prefect's for a block that is not there
        raise ConfigError(
            f"there is no Prefect block {reference} on "
            f"{without_credentials(PREFECT_API_URL.value())}; save it there"
        ) from error
    except httpx.TransportError as error:
        raise TransientError(
            f"Prefect block {reference}: {without_credentials(PREFECT_API_URL.value())} "
            "does not answer"
        ) from error
