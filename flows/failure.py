"""How a flow ends that cannot go on: Failed, Cancelled or Crashed, with our own sentence as the
message. One that had completed and whose outcome is recorded stays Completed, whoever retries it.
"""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import State, get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.states import Cancelled, Completed, Crashed, Failed

from agl_core.errors import AglError, ConfigError, NothingToRetryError, RunCancelled
from agl_core.lost_output import outlive_output
from flows.cancellation import ProcessExit, until_cancelled
from flows.patience import patiently

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
        except NothingToRetryError as error:
            if await _had_completed():
                return Completed(message=f"kept as it was: {error}")
            return Failed(message=str(error), data=error)
        except AglError as error:
            if not isinstance(error, ConfigError):  # whose sentence says it all
                get_run_logger().info("where it failed", exc_info=error)
            return Failed(message=str(error), data=error)

    return flow_function


async def _had_completed() -> bool:
    """Say whether this flow run had ended as Completed before it was started again.

    A server lets everybody set the state of a run that has a deployment; what a retry finds can
    only be looked at when its flow runs.
    """
    run_id = flow_run.id
    if run_id is None or (flow_run.run_count or 1) < 2:
        return False

    async def read() -> list[State]:
        async with get_client() as client:
            return await client.read_flow_run_states(UUID(run_id))

    states = sorted(await patiently(read), key=lambda state: state.timestamp)
    ends = [state for state in states if state.is_final()]
    return bool(ends) and ends[-1].is_completed()
