"""The one place where a request to S3 is sent again.

s3fs and botocore each do it by themselves, inside each other: 25 times together, 125 where nothing
comes back, so a store that is away would be reported after minutes. Both are told to try once. Here
a request has a deadline; one part of a multipart upload is one request.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar

import s3fs
from fsspec.asyn import sync_wrapper
from tenacity import (
    AsyncRetrying,
    Retrying,
    retry_if_exception,
    stop_after_delay,
    wait_random_exponential,
)

from agl_core.ledger.s3_errors import is_unreachable

PATIENCE_SECONDS = 30.0
"""From the first try of a request to its last; a try itself takes 15 s at most."""
_ONCE = {"retries": {"mode": "standard", "total_max_attempts": 1}}

P = ParamSpec("P")
T = TypeVar("T")


class PatientFileSystem(s3fs.S3FileSystem):
    """Sends requests again while the store does not answer, or asks to come again."""

    retries = 1
    patience_seconds = PATIENCE_SECONDS

    @classmethod
    def of(cls, options: dict[str, Any]) -> Self:
        """Return one with the arguments of an `s3fs.S3FileSystem`."""
        arguments: dict[str, Any] = {
            **options,
            "config_kwargs": _ONCE | (options.get("config_kwargs") or {}),
            "use_listings_cache": False,
            "skip_instance_cache": True,
        }
        return cls(**arguments)

    @contextmanager
    def hurried(self, seconds: float) -> Generator[None]:
        """Have no more patience than that in the enclosed code."""
        before, self.patience_seconds = self.patience_seconds, min(self.patience_seconds, seconds)
        try:
            yield
        finally:
            self.patience_seconds = before

    def patiently(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call what reads bodies or pages: these break off after their request was answered."""
        return Retrying(**self._policy())(act, *args, **kwargs)

    async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "get_object":  # tried again with its body, by `patiently`
            return await super()._call_s3(method, *args, **kwargs)
        call = super()._call_s3
        return await AsyncRetrying(**self._policy())(call, method, *args, **kwargs)

    call_s3 = sync_wrapper(_call_s3)  # the inherited one would call the inherited method

    def _policy(self) -> dict[str, Any]:
        return {
            "retry": retry_if_exception(is_unreachable),
            "wait": wait_random_exponential(multiplier=0.2, max=3.0),
            "stop": stop_after_delay(self.patience_seconds),
            "reraise": True,
        }
