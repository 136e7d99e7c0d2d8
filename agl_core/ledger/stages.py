"""Stages of an iteration: each writes its outputs, then its record; a recorded stage is never
repeated.

runs/<run_id>/iterations/000003/
    update/a1/...            outputs of a try that was killed: kept, unused
    update/a2/...            outputs of the try that counts
    stages/update.json       its record, written after them
    manifest.json            written last of all
"""

import logging
import os
import socket
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field

from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.starts import RunLease
from agl_core.ledger.storage import Storage
from agl_core.scratch import scratch_folder
from agl_core.types.training import FileRef, FolderRef

logger = logging.getLogger(__name__)

STAGES = (
    "propose",
    "publish",
    "rollout_base",  # iteration 0 only: rollouts that score the policy that training starts from
    "evaluate_base",
    "rollout",
    "collect",
    "adapt",
    "update",
    "export",
    "rollout_new",  # rollouts that score the version just exported
    "evaluate",
)
"""Stages with a record, in order; `commit` writes the manifest."""


class StageRecord(BaseModel):
    """What one finished stage wrote, by reference."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    stage: str
    attempt: int
    """Number of the try that counts, from 1."""
    outputs: dict[str, FileRef | FolderRef]
    values: dict[str, Any]
    """Small facts: counts, means, versions."""
    started: float
    """UTC epoch seconds."""
    seconds: float
    host: str
    pid: int
    start: int | None = None
    """Number of the start of the run that wrote it."""
    code: dict[str, Any] = Field(default_factory=dict)
    """Commit of the agent's working tree, and the like, as of that start."""

    def file(self, name: str) -> FileRef:
        """Return the reference of an output file.

        Raises:
            KeyError: The stage wrote no such file.
        """
        ref = self.outputs[name]
        if not isinstance(ref, FileRef):
            raise KeyError(f"{name} of stage {self.stage} is a folder")
        return ref

    def all_files(self) -> list[FileRef]:
        """Return the references of every file that the stage wrote."""
        found: list[FileRef] = []
        for ref in self.outputs.values():
            found.extend(ref.files if isinstance(ref, FolderRef) else (ref,))
        return found


class StageAttempt(BaseModel):
    """One try of a stage: a place for its outputs (the `Artifacts` protocol)."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    storage: Any
    prefix: str
    """Key prefix of this try, ending in `/`."""
    local: Path
    """Local folder of this try; gone when the stage ends."""
    outputs: dict[str, FileRef | FolderRef] = Field(default_factory=dict)
    values: dict[str, Any] = Field(default_factory=dict)

    def scratch(self, name: str) -> Path:
        """Return an empty local folder."""
        folder = self.local / name
        folder.mkdir(parents=True)
        return folder

    def put_folder(self, name: str, folder: Path) -> FolderRef:
        """Keep every file of a local folder."""
        ref = files.put_folder(self.storage, f"{self.prefix}{name}/", folder)
        self.outputs[name] = ref
        return ref

    def put_table(self, name: str, table: pa.Table) -> FileRef:
        """Keep a table as `<name>.parquet`."""
        ref = files.put_table(self.storage, f"{self.prefix}{name}.parquet", table)
        self.outputs[name] = ref
        return ref

    @contextmanager
    def table(self, name: str, schema: pa.Schema) -> Generator[files.TableWriter]:
        """Keep a table that is appended in parts as `<name>.parquet`."""
        path = self.local / f"{name}.parquet"
        with files.table_writer(path, schema) as writer:
            yield writer
        key = f"{self.prefix}{name}.parquet"
        self.outputs[name] = files.put_file(self.storage, key, path, rows=writer.rows)

    def put_json(self, name: str, value: Any) -> FileRef:
        """Keep a value as `<name>.json`."""
        ref = files.put_json(self.storage, f"{self.prefix}{name}.json", value)
        self.outputs[name] = ref
        return ref

    def fetch_folder(self, ref: FolderRef) -> Path:
        """Return a local copy of a kept folder, each file's sha256 verified."""
        return files.fetch_folder(self.storage, ref, self.local / "fetched")


class IterationLedger:
    """The keys of one iteration."""

    def __init__(
        self,
        storage: Storage,
        run_id: str,
        iteration: int,
        lease: RunLease | None = None,
        code: Mapping[str, Any] | None = None,
    ) -> None:
        self.storage = storage
        self.lease = lease
        """Checked before each record; None only to read."""
        self._code = dict(code or {})
        self.run_id = run_id
        self.iteration = iteration
        self.prefix = f"runs/{run_id}/iterations/{iteration:06d}/"
        self.manifest_key = f"{self.prefix}manifest.json"

    def record(self, stage: str) -> StageRecord | None:
        """Return the record of a finished stage, or None."""
        key = self._record_key(stage)
        if not self.storage.exists(key):
            return None
        return files.read_model(self.storage, Unrecorded(key), StageRecord)

    def finished(self, stage: str) -> StageRecord:
        """Return the record of a stage that must have finished.

        Raises:
            LedgerError: It has no record.
        """
        key = self._record_key(stage)
        return files.read_model(self.storage, Unrecorded(key), StageRecord)

    @contextmanager
    def stage(self, stage: str) -> Generator[StageAttempt]:
        """Run one try of a stage; its record is written when the block ends without an error."""
        started, clock = time.time(), time.monotonic()
        number = self._next_attempt(stage)
        with scratch_folder(stage) as local:
            attempt = StageAttempt(
                storage=self.storage, prefix=f"{self.prefix}{stage}/a{number}/", local=local
            )
            yield attempt
            self.check_lease()
            record = StageRecord(
                stage=stage,
                attempt=number,
                outputs=attempt.outputs,
                values=attempt.values,
                started=started,
                seconds=time.monotonic() - clock,
                host=socket.gethostname(),
                pid=os.getpid(),
                start=self.lease.number if self.lease else None,
                code=self._code,
            )
            files.put_json(self.storage, self._record_key(stage), record.model_dump(mode="json"))
            logger.info(
                "run=%s iteration=%d stage=%s done in %.1f s %s",
                self.run_id,
                self.iteration,
                stage,
                record.seconds,
                _in_short(record.values),
            )

    def before(self) -> "IterationLedger":
        """Return the keys of the iteration before this one, to read them."""
        return IterationLedger(self.storage, self.run_id, self.iteration - 1)

    def check_lease(self) -> None:
        """Do nothing while this process carries the run on.

        Raises:
            LeaseLostError: Another one does.
        """
        if self.lease is not None:
            self.lease.check()

    def _record_key(self, stage: str) -> str:
        return f"{self.prefix}stages/{stage}.json"

    def _next_attempt(self, stage: str) -> int:
        """Return the number after the highest try that left anything behind."""
        prefix = f"{self.prefix}{stage}/"
        tries = {key.removeprefix(prefix).split("/")[0] for key in self.storage.list(prefix)}
        return 1 + max((int(name[1:]) for name in tries if name[1:].isdigit()), default=0)


def _in_short(values: Mapping[str, Any]) -> str:
    """Return a stage's facts as one line: numbers and names, not lists of files."""
    return ", ".join(_facts(values))


def _facts(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            yield f"{prefix}{name}={value:.4g}"
        elif isinstance(value, int | str):
            yield f"{prefix}{name}={value}"
