"""How a flow ends that cannot go on: Failed, Cancelled or Crashed, with our own sentence as the
message.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from prefect import get_run_logger
from prefect.states import Cancelled, Crashed, Failed

from agl_core.errors import AglError, ConfigError, RunCancelled
from agl_core.lost_output import outlive_output
from flows.cancellation import ProcessExit, until_cancelled

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def fails_in_one_sentence(
    function: Callable[Parameters, Coroutine[Any, Any, Result]],
) -> Callable[Parameters, Coroutine[Any, Any, Result]]:
    """Let errors of ours fail the flow with their message alone, and a cancellation of its run end
    it as Cancelled; the caller still gets the error.

    Prefect's own message would begin with "Flow run encountered an exception", its log with a
    traceback.
    """

    @wraps(function)
    async def flow_function(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Any:
        outlive_output()  # a worker that is killed takes the reader of it along
        try:
            return await until_cancelled(function(*args, **kwargs))
        except RunCancelled as error:
            return Cancelled(message=str(error), data=error)
        except ProcessExit as error:
            get_run_logger().info("where it was raised", exc_info=error)
            return Crashed(message=str(error), data=error)
        except AglError as error:
            if not isinstance(error, ConfigError):  # whose sentence says it all
                get_run_logger().info("where it failed", exc_info=error)
            return Failed(message=str(error), data=error)

    return flow_function
