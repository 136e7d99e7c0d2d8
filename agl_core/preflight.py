"""Everything that can be found wrong with a run before anything costly starts."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agl_core import identity
from agl_core.algorithm import IterativeAlgorithm, build_algorithm
from agl_core.config import RunConfig
from agl_core.dataset import read_jsonl
from agl_core.ledger.run import RunLedger, RunRecord, open_run
from agl_core.ledger.s3_access import S3Access, S3Credentials
from agl_core.litagent.decorator import load_agent
from agl_core.serving.attached import check_attached
from agl_core.serving.launch import check_server

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run whose configuration was checked and whose identity stands in the ledger."""

    config: RunConfig
    ledger: RunLedger
    record: RunRecord
    """As the ledger has it, but with the code and the packages of this process."""
    algorithm: IterativeAlgorithm[Any]
    inputs: dict[str, Sequence[str]]
    """Rows of the datasets as JSON, by `train` and `val`."""
    start_state: Any
    """State before the first iteration."""

    def state_after(self, committed: int) -> Any:
        """Return the algorithm's state after some committed iterations."""
        if committed == 0:
            return self.start_state
        state = self.ledger.manifest(committed - 1).state
        return self.algorithm.state_type.model_validate(state)


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
        ConfigError: Something is wrong with the configuration, the data, the agent or the model, or
            the run exists with another identity, or a living process carries it on.
        UpstreamError: `serving.url` does not answer, or not with a chat completion.
        LedgerError: The ledger cannot be written.
    """
    access = S3Access(config.s3, credentials)
    algorithm = build_algorithm(config)
    if config.serving.url is not None:
        check_server(config.serving.url)
    load_agent(config.agent)
    inputs: dict[str, Sequence[str]] = {"train": read_jsonl(config.train_data, access)}
    if config.val_data is not None:
        inputs["val"] = read_jsonl(config.val_data, access)
    base = identity.base_model(algorithm.model_path)
    if config.serving.url is not None:
        check_attached(config.serving.url, base)
    start_state = algorithm.start(base.policy, inputs["train"], inputs.get("val"))
    ledger = open_run(config.ledger, config.run_id, access)
    conditional_put = ledger.storage.probe()
    ledger.starts.refuse_if_held()
    datasets = {name: ledger.dataset(name, rows) for name, rows in inputs.items()}
    record = RunRecord(
        run_id=config.run_id,
        config=config,
        datasets={name: dataset.ref for name, dataset in datasets.items()},
        base=base,
        code=identity.code(config.agent),
        packages=identity.packages(),
        conditional_put=conditional_put,
        created=time.time(),
    )
    recorded = ledger.start(record, datasets.values(), allow_changed=allow_changed)
    ledger.code = record.code
    return PreparedRun(config, ledger, _as_of_now(recorded, record), algorithm, inputs, start_state)


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
