"""Everything that can be found wrong with a run before anything costly starts.

    examine(config)       reads and compares, cheap checks first; writes the ledger's probe only
    prepare_run(config)   the same, then writes the run's identity or finds the one that is there

What needs the run's model server or a work pool is checked later (`flows/canary.py`,
`flows/pool_check.py`). The first check that fails ends all of it with its own sentence.
"""

import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from agl_core import identity
from agl_core.algorithm.build import build_algorithm
from agl_core.algorithm.iterative import IterativeAlgorithm
from agl_core.config import RunConfig
from agl_core.dataset import read_jsonl
from agl_core.errors import AglError
from agl_core.ledger.run import NewFile, RunLedger, RunRecord, SourceRef, open_run
from agl_core.ledger.s3_access import S3Access, S3Credentials
from agl_core.litagent.decorator import load_agent
from agl_core.prepared import PreparedRun
from agl_core.serving.attached import check_attached
from agl_core.serving.launch import check_server
from agl_core.sources import local_sources

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check that has ended."""

    name: str
    seconds: float
    problem: str = ""
    """What is wrong and what to do, in one sentence; empty where it passed."""


class Checks:
    """Times checks and tells of each.

    Args:
        on_end: Called after each one.
    """

    def __init__(self, on_end: Callable[[CheckResult], object] = lambda result: None) -> None:
        self._on_end = on_end

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Run the block as a check; an error of ours is its problem, and goes on."""
        started = time.monotonic()
        try:
            yield
        except AglError as error:
            self._on_end(CheckResult(name, time.monotonic() - started, str(error)))
            raise
        self._on_end(CheckResult(name, time.monotonic() - started))


_UNSEEN = Checks()


def examine(
    config: RunConfig, credentials: S3Credentials | None = None, checks: Checks = _UNSEEN
) -> PreparedRun:
    """Check what can be checked by reading, and the ledger by its probe.

    The record is the one that this start would write; the run may not be there yet.

    Args:
        config: What to train.
        credentials: Those that `config.s3` names.
        checks: Is told of each check.

    Raises:
        ConfigError: Something is wrong with the configuration, the data, the agent or the model, or
            a living process carries the run on.
        UpstreamError: A server of `serving.url` does not answer, or not with a chat completion.
        LedgerError: The ledger cannot be written.
    """
    return _examine(config, credentials, checks)[0]


def _examine(
    config: RunConfig, credentials: S3Credentials | None, checks: Checks
) -> tuple[PreparedRun, list[NewFile[Any]]]:
    access = S3Access(config.s3, credentials)
    with checks("settings of the algorithm are honoured"):
        algorithm = build_algorithm(config)
    with checks("agent can be imported"):
        load_agent(config.agent)
    with checks("datasets can be read"):
        inputs: dict[str, Sequence[str]] = {"train": read_jsonl(config.train_data, access)}
        if config.val_data is not None:
            inputs["val"] = read_jsonl(config.val_data, access)
    for url in config.serving.urls:
        with checks("model server answers"):
            check_server(url)
    return _compare(config, algorithm, inputs, access, checks)


def _compare(
    config: RunConfig,
    algorithm: IterativeAlgorithm[Any],
    inputs: dict[str, Sequence[str]],
    access: S3Access,
    checks: Checks,
) -> tuple[PreparedRun, list[NewFile[Any]]]:
    """Check the model against the data, and that the ledger can be written and is free."""
    with checks("model is there and fits the data"):
        base = identity.base_model(algorithm.model_path)
        start_state = algorithm.start(base.policy, inputs["train"], inputs.get("val"))
    for url in config.serving.urls:
        with checks("model server has the policy's tokens and log-probs"):
            check_attached(url, base)
    with checks("ledger can be written"):
        ledger = open_run(config.ledger, config.run_id, access)
        conditional_put = ledger.storage.probe()
        ledger.starts.refuse_if_held()
    datasets = {name: ledger.dataset(name, rows) for name, rows in inputs.items()}
    sources = read_sources(config.agent, ledger)
    record = RunRecord(
        run_id=config.run_id,
        config=config,
        datasets={name: new.ref for name, new in datasets.items()},
        base=base,
        code=identity.code(config.agent),
        sources={name: new.ref for name, new in sources.items()},
        packages=identity.packages(),
        conditional_put=conditional_put,
        created=time.time(),
    )
    run = PreparedRun(config, ledger, record, algorithm, inputs, start_state)
    return run, [*datasets.values(), *sources.values()]


def read_sources(agent: str, ledger: RunLedger) -> dict[str, NewFile[SourceRef]]:
    """Return the files that an agent is made of here, on their way to the ledger."""
    paths = local_sources(agent.partition(":")[0])
    return {name: ledger.source(path.read_bytes()) for name, path in paths.items()}


def prepare_run(
    config: RunConfig,
    credentials: S3Credentials | None = None,
    *,
    allow_changed: bool = False,
) -> PreparedRun:
    """Check the configuration and write the run's identity, or find the one that is there.

    Args:
        config: What to train.
        credentials: Those that `config.s3` names.
        allow_changed: Go on with a run that exists with another identity; manifests will say so.

    Raises:
        ConfigError: As `examine`, or the run exists with another identity.
        UpstreamError: As `examine`.
        LedgerError: The ledger cannot be written.
    """
    return _begin(*_examine(config, credentials, _UNSEEN), allow_changed=allow_changed)


def prepare_own_run(
    config: RunConfig,
    algorithm: IterativeAlgorithm[Any],
    inputs: dict[str, Sequence[str]],
    *,
    allow_changed: bool = False,
) -> PreparedRun:
    """Do what `prepare_run` does for an algorithm and datasets that this process has already.

    Args:
        config: What to train; its agent and datasets are names for the record.
        algorithm: What learns.
        inputs: Rows of the datasets as JSON, by `train` and `val`.
        allow_changed: Go on with a run that exists with another identity; manifests will say so.

    Raises:
        ConfigError: As `prepare_run`.
        UpstreamError: As `examine`.
        LedgerError: The ledger cannot be written.
    """
    for url in config.serving.urls:
        check_server(url)
    compared = _compare(config, algorithm, inputs, S3Access(config.s3), _UNSEEN)
    return _begin(*compared, allow_changed=allow_changed)


def _begin(run: PreparedRun, new: list[NewFile[Any]], *, allow_changed: bool) -> PreparedRun:
    """Write the run's identity, or find the one that is there."""
    recorded = run.ledger.start(run.record, new, allow_changed=allow_changed)
    run.ledger.code, run.ledger.packages = run.record.code, run.record.packages
    return replace(run, record=_as_of_now(recorded, run.record))


def _as_of_now(recorded: RunRecord, now: RunRecord) -> RunRecord:
    """Return a run's identity with the code and the packages of this process.

    They may change from one start to the next; each manifest states those that made it.
    """
    for name in ("code", "packages"):
        old, new = getattr(recorded, name), getattr(now, name)
        if changed := sorted(key for key in {*old, *new} if old.get(key) != new.get(key)):
            logger.warning(
                "run %s goes on with other %s than it began with (manifests say so): %s",
                recorded.run_id,
                name,
                ", ".join(f"{key} was {old.get(key)}, now {new.get(key)}" for key in changed),
            )
    return recorded.model_copy(update={"code": now.code, "packages": now.packages})
