"""What a failed S3 request means: the object, the caller's rights, or the connection."""

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from s3fs.core import S3_RETRYABLE_ERRORS

from agl_core.errors import LedgerError, LedgerUnreachableError
from agl_core.ledger.s3_access import S3Access

# s3fs translates what the store answers to OSError or ValueError; no answer stays botocore's or
# the HTTP client's.
S3_ERRORS = (OSError, ValueError, BotoCoreError, ClientError, *S3_RETRYABLE_ERRORS)

_NO_ANSWER = (ConnectionError, TimeoutError, BotoConnectionError, *S3_RETRYABLE_ERRORS)
_TRY_AGAIN = frozenset(
    {
        *("SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "OperationAborted"),
        *("ConditionalRequestConflict", "500", "502", "503", "504"),
    }
)
_EXISTS = frozenset({"PreconditionFailed", "412"})
_MISSING = frozenset({"NoSuchKey", "NoSuchUpload", "404"})
_WRONG_CREDENTIALS = frozenset(
    {
        *("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity"),
        *("ExpiredToken", "InvalidToken", "TokenRefreshRequired"),
    }
)
_DENIED = frozenset({"AccessDenied", "AllAccessDisabled", "403", "Forbidden"})
_NOT_S3 = frozenset({"400", "404", "405", "501"})
"""HTTP statuses of an answer that has no code of S3's."""
_NOT_IMPLEMENTED = frozenset({"NotImplemented", "501"})


def code_of(error: BaseException) -> str:
    """Return the code that the store answered with; empty where there is no answer."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, ClientError):
            return str(link.response.get("Error", {}).get("Code", ""))
        link = link.__cause__
    return ""


def says_exists(error: BaseException) -> bool:
    """Say whether a conditional write was refused because the key exists.

    s3fs knows it only from AWS, which names the condition that failed.
    """
    return isinstance(error, FileExistsError) or code_of(error) in _EXISTS


def says_not_implemented(error: BaseException) -> bool:
    """Say whether the store does not know the request, or one of its headers."""
    return code_of(error) in _NOT_IMPLEMENTED


def may_have_been_done(error: BaseException) -> bool:
    """Say whether a write that failed so may stand nevertheless: its reply was lost, or the
    request was sent again and met its own result.
    """
    if isinstance(error, EndpointConnectionError | ConnectTimeoutError):
        return False
    return says_exists(error) or code_of(error) in _MISSING or is_unreachable(error)


def ledger_error(error: BaseException, uri: str, doing: str, access: S3Access) -> LedgerError:
    """Return the error to raise for a request that failed.

    Args:
        error: As s3fs or botocore raised it.
        uri: Root of the ledger.
        doing: What was tried, for example `read run.json`.
        access: How the store was reached.
    """
    message = f"ledger {uri}: cannot {doing}: {reason(error, uri, access)}"
    return LedgerUnreachableError(message) if is_unreachable(error) else LedgerError(message)


def reason(error: BaseException, uri: str, access: S3Access) -> str:
    """Return in words why a request failed, and what to do about it where that is known."""
    code = code_of(error)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return (
            f"no credentials in {access.source}; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or name a Prefect block in s3.credentials"
        )
    if code == "NoSuchBucket":
        bucket = uri.removeprefix("s3://").partition("/")[0]
        return f"there is no bucket {bucket} at this endpoint; create it, or correct the address"
    if code in _WRONG_CREDENTIALS:
        return f"the store refused the credentials from {access.source} ({code}); correct them"
    if code in _DENIED:
        return (
            f"access denied with the credentials from {access.source}; correct them, or grant them "
            "s3:GetObject and s3:ListBucket, for a run also s3:PutObject and "
            "s3:AbortMultipartUpload"
        )
    if code in _NOT_S3:
        return f"{error}; is a store that speaks the S3 API at {access.address}?"
    return str(error)


def is_unreachable(error: BaseException) -> bool:
    """Say whether the store did not answer, or asks to come again: another try may work."""
    return isinstance(error, _NO_ANSWER) or code_of(error) in _TRY_AGAIN
