"""The S3 credentials that a run's settings name."""

from agl_core.config import S3Settings
from agl_core.ledger.s3_access import S3Credentials


def find_credentials(s3: S3Settings) -> S3Credentials | None:
    """Return the credentials that settings name; Prefect is loaded only if they name some.

    Raises:
        ConfigError: There is no server to ask, or no such block.
    """
    if s3.credentials is None:
        return None
    from deployments.server import require_server

    require_server(f"Prefect block {s3.credentials}")
    from tasks.credentials import s3_credentials

    return s3_credentials(s3)
