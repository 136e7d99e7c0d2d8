"""How a flow ends that cannot go on: Failed, with the error's own sentence as the message."""

from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import get_run_logger
from prefect.states import Failed

from agl_core.errors import AglError, ConfigError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def fails_in_one_sentence(
    function: Callable[Parameters, Awaitable[Result]],
) -> Callable[Parameters, Awaitable[Result]]:
    """Let errors of ours fail the flow with their message alone; the caller still gets the error.

    Prefect's own message would begin with "Flow run encountered an exception", its log with a
    traceback.
    """

    @wraps(function)
    async def flow_function(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
        try:
            return await function(*args, **kwargs)
        except AglError as error:
            if not isinstance(error, ConfigError):  # whose sentence says it all
                get_run_logger().info("where it failed", exc_info=error)
            return Failed(message=str(error), data=error)

    return flow_function
