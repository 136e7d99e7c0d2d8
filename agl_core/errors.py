"""The errors of the project, one class for each boundary that can break.

    AglError
    +-- ConfigError      (ValueError)         the caller's settings or data; exit status 2
    +-- LedgerError      (RuntimeError)       the record is missing, broken, or cannot be written
    |   +-- ConflictError (FileExistsError)   a write-once key exists with other content
    |   +-- LedgerUnreachableError            its store does not answer; also a TransientError
    |   +-- LeaseLostError                    another process carries the run on
    +-- StoreError       (ValueError)         a store refused what it was asked
    +-- TraceError       (ValueError)         spans that cannot become training data
    +-- UpstreamError    (ConnectionError)    a model server that refuses, or answers wrongly
    +-- TransientError   (ConnectionError)    another try may work
    +-- InfraError       (ConnectionError)    an agent says that a service it needs failed
    +-- TrainerError     (RuntimeError)       the update step
    +-- ExecutionError   (RuntimeError)       threads or processes of a trainer that failed
    +-- RunCancelled     (RuntimeError)       someone ended the run or a part of it
    +-- IterationStopped (RuntimeError)       too many rollouts failed, by the run's own limits
    +-- RolloutFailed    (RuntimeError)       one attempt that did not succeed

Each takes a message plus fields with defaults, so that it survives pickling between processes.
"""


class AglError(Exception):
    """Root of every error that this project raises on purpose."""


class TransientError(AglError, ConnectionError):
    """Something failed that another try may get right."""


class InfraError(AglError, ConnectionError):
    """Raised by agents: a service that the agent needs failed, and another try may work.

    The attempt ends as `infra_error`, whatever the service's own exception is.
    """


class ConfigError(AglError, ValueError):
    """The caller's configuration or data cannot be used as it is."""


class NothingToRetryError(ConfigError):
    """What is started again is recorded, so that nothing would use what it gives."""


class LedgerError(AglError, RuntimeError):
    """The ledger cannot be read or written, or holds something that contradicts itself."""


class ConflictError(LedgerError, FileExistsError):
    """A write-once key exists already."""


class LedgerUnreachableError(LedgerError, TransientError):
    """The ledger's store does not answer, or asks to come again."""


class LeaseLostError(LedgerError):
    """Another process carries the run on; this one must record nothing more."""


class RunCancelled(AglError, RuntimeError):  # noqa: N818 - someone's wish, no error
    """A run, an iteration or a shard was cancelled; it goes on where the ledger ends."""

    def __init__(self, message: str = "", *, interrupted: bool = False) -> None:
        super().__init__(message)
        self.interrupted = interrupted
        """Whether this process was told to end, by Ctrl-C for example."""


class StoreError(AglError, ValueError):
    """A store cannot do what it was asked: no such record, or a transition that is not legal."""


class TraceError(AglError, ValueError):
    """Recorded spans cannot be turned into training data."""


class UpstreamError(AglError, ConnectionError):
    """The model server refused a request or answered with something unusable."""


class TrainerError(AglError, RuntimeError):
    """The update step failed."""


class ExecutionError(AglError, RuntimeError):
    """A runner, or the process of an algorithm, ended before its work was done."""


class IterationStopped(AglError, RuntimeError):  # noqa: N818 - the run's limits are kept
    """Rollouts failed in a way, or so often, that the run's settings say to stop."""


class RolloutFailed(AglError, RuntimeError):  # noqa: N818 - the outcome it carries is the news
    """One attempt at a rollout did not succeed; the task run that made it ends in this."""

    def __init__(self, message: str = "", retry_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_seconds = retry_seconds
        """Seconds to wait before another attempt; None where there is none."""
