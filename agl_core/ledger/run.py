"""One run in the ledger: its identity, written once, and its iterations.

runs/<run_id>/
    run.json                     identity: config, datasets, base model, code, packages
    changes/0001.json            what a start was allowed to change, and the identity from then on
    starts/, signs/              see `starts`
    data/train-<digest>.parquet  the rows as they were read
    code/<digest>.py             the agent's modules
    iterations/000000/...        see `stages`
"""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, model_validator

from agl_core.config import RunConfig, check_run_id
from agl_core.errors import ConfigError, LedgerError
from agl_core.failures import FailureSettings
from agl_core.ledger import files
from agl_core.ledger.digest import table_digest
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.manifest import Difference, Manifest
from agl_core.ledger.s3_access import ENVIRONMENT, S3Access
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.starts import RunLease, RunStarts
from agl_core.ledger.storage import Storage, open_storage
from agl_core.ledger.tables import DATASET
from agl_core.sources import source_diff, source_digest
from agl_core.types.training import FileRef, PolicyRef

logger = logging.getLogger(__name__)

CODE_IDENTITY = ("agent_sha256", "git_commit", "git_dirty")
"""Of `RunRecord.code`, what must not change from one start to the next where the agent's sources
are not known (a notebook, a record of before they were kept)."""


class DatasetRef(BaseModel):
    """A dataset as it was read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    """Of the rows, whatever file held them."""
    rows: int
    file: FileRef


class SourceRef(BaseModel):
    """One of the agent's source files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str
    """Of its syntax tree, without docstrings."""
    file: FileRef


RefT = TypeVar("RefT", DatasetRef, SourceRef)


@dataclass(frozen=True, slots=True)
class NewFile(Generic[RefT]):
    """A file of the identity on its way to the ledger."""

    ref: RefT
    content: bytes
    """Of its file."""
    is_kept: bool
    """Whether the file is there already."""


class BaseModelRecord(BaseModel):
    """The model that training starts from."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    tokenizer_digest: str
    chat_template_digest: str | None
    licence: str
    """From the folder's model card; `unknown` where it names none."""


class RunRecord(BaseModel):
    """Everything that is fixed for the whole run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    schema_version: int = 2
    run_id: str
    config: RunConfig
    datasets: dict[str, DatasetRef]
    base: BaseModelRecord
    code: dict[str, Any]
    """Commit of the working tree, sha256 of the agent's source, version of this package."""
    sources: dict[str, SourceRef] = {}
    """The agent's module and what it imports of its project, by place below the project."""
    packages: dict[str, str]
    """Versions of the packages that shape results."""
    conditional_put: bool
    """Whether the ledger's store itself refuses second writes, as found by the first preflight."""
    created: float

    def files(self) -> list[FileRef]:
        """Return the files that the identity refers to."""
        return [ref.file for ref in (*self.datasets.values(), *self.sources.values())]

    @model_validator(mode="before")
    @classmethod
    def _reads_version_1(cls, values: Any) -> Any:
        """Version 1 had one policy for all kinds of failure, among the settings of `rollout`."""
        if not isinstance(values, Mapping) or values.get("schema_version") != 1:
            return values
        rollout = dict(values["config"]["rollout"])
        retried, attempts = rollout.pop("retry"), rollout.pop("max_attempts")
        delay = rollout.pop("retry_delay_seconds")
        failures = {
            kind.value: {
                "attempts": attempts if kind.value in retried else 1,
                "delay_seconds": delay,
                "backoff": 1.0,
            }
            for kind in FailureSettings().policies()
        }
        limits = {"min_success_fraction": 0.0}  # it had none
        config = {**values["config"], "rollout": rollout, "failures": failures | limits}
        return {**values, "schema_version": 2, "config": config}


class RunChange(BaseModel):
    """What a start was allowed to change."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    created: float
    iteration: int
    """The first one that was committed with it, or will be."""
    differences: tuple[Difference, ...]
    record: RunRecord
    """Identity from then on."""


class RunLedger:
    """The keys of one run."""

    def __init__(self, storage: Storage, run_id: str) -> None:
        self.storage = storage
        self.run_id = run_id
        self.prefix = f"runs/{run_id}/"
        self.starts = RunStarts(storage, self.prefix, run_id)
        self.lease: RunLease | None = None
        """Of this process, while it carries the run on."""
        self.code: dict[str, Any] = {}
        """Of this process, for the records of its starts and stages."""
        self.packages: dict[str, str] = {}
        """Of this process, for the records of its starts."""
        self.record_key = f"{self.prefix}run.json"
        self.plot_key = f"{self.prefix}report/reward.png"

    def record(self) -> RunRecord:
        """Return the identity of the run, with what was changed since it began.

        Raises:
            ConfigError: There is no such run.
        """
        first, changes = self.first_record(), self.changes()
        return changes[-1].record if changes else first

    def changes(self) -> list[RunChange]:
        """Return what starts were allowed to change, oldest first."""
        return [
            files.read_model(self.storage, Unrecorded(key), RunChange) for key in self.change_keys()
        ]

    def change_keys(self) -> list[str]:
        """Return the keys of what starts were allowed to change, oldest first."""
        return self.storage.list(f"{self.prefix}changes/")

    def first_record(self) -> RunRecord:
        """Return the identity with which the run began.

        Raises:
            ConfigError: There is no such run.
        """
        if not self.exists():
            self.storage.list(self.prefix)  # says more where there is no bucket either
            raise ConfigError(f"there is no run {self.run_id!r} in {self.storage.uri}")
        return files.read_model(self.storage, Unrecorded(self.record_key), RunRecord)

    def exists(self) -> bool:
        """Say whether the run was started."""
        return self.storage.exists(self.record_key)

    def iteration(self, number: int) -> IterationLedger:
        """Return the keys of one iteration."""
        return IterationLedger(self.storage, self.run_id, number, self.lease, self.code)

    def dataset(self, name: str, rows: Sequence[str]) -> NewFile[DatasetRef]:
        """Return JSON texts as the dataset that `start` keeps; the same rows are kept once.

        Raises:
            LedgerError: The file of these rows is there, and holds others.
        """
        table = pa.table({"row": range(len(rows)), "input": list(rows)}, schema=DATASET)
        digest = table_digest(table, ["row", "input"])
        key = f"{self.prefix}data/{name}-{digest.removeprefix('sha256:')[:16]}.parquet"
        is_kept = self.storage.exists(key)
        content = self.storage.read(key) if is_kept else files.table_bytes(table)
        file = files.reference(key, content, rows=len(rows))
        if is_kept:
            kept = files.read_table(self.storage, file, DATASET)
            if (found := table_digest(kept, ["row", "input"])) != digest:
                raise LedgerError(f"{key} holds rows with digest {found}, its name says {digest}")
        ref = DatasetRef(digest=digest, rows=len(rows), file=file)
        return NewFile(ref, content, is_kept)

    def source(self, content: bytes) -> NewFile[SourceRef]:
        """Return a source file that `start` keeps, once."""
        key = f"{self.prefix}code/{files.sha256_of_bytes(content)[:16]}.py"
        file = files.reference(key, content)
        ref = SourceRef(digest=source_digest(content), file=file)
        return NewFile(ref, content, self.storage.exists(key))

    def start(
        self,
        record: RunRecord,
        new: Sequence[NewFile[Any]] = (),
        *,
        allow_changed: bool = False,
    ) -> RunRecord:
        """Write datasets and sources, then the identity; return the one that is there if it is the
        same.

        Args:
            record: Identity as this process finds it.
            new: What the record refers to.
            allow_changed: Go on with another identity; what differs is recorded, and the manifests
                say so from then on.

        Raises:
            LedgerError: The identity was changed after an iteration was committed.
            ConfigError: The run exists with another identity; the message names what differs, and
                nothing was written.
        """
        if not self.exists():
            self._keep(new)
            files.put_json(self.storage, self.record_key, record.model_dump(mode="json"))
            return record
        self._check_identity()
        recorded = self.record()
        differences = tuple(find_differences(recorded, record))
        if not differences:
            return recorded
        if not allow_changed:
            raise ConfigError(
                f"run {self.run_id!r} exists in {self.storage.uri} with another configuration: "
                + "; ".join(map(_in_words, differences))
                + ". Choose another run id, start it as it was, or go on with --allow-changed ("
                f"prefect deployment run training-run/{self.run_id} --param allow_changed=true): "
                "the manifests will say what changed"
                + "".join(f"\n{diff}" for diff in self._diffs(recorded, record, new))
            )
        self._keep(new)
        change = RunChange(
            created=time.time(),
            iteration=self.committed(),
            differences=differences,
            record=record,
        )
        key = f"{self.prefix}changes/{len(self.changes()) + 1:04d}.json"
        files.put_json(self.storage, key, change.model_dump(mode="json"))
        logger.warning("run %s goes on changed: %s", self.run_id, "; ".join(map(str, differences)))
        return record

    def _keep(self, new: Sequence[NewFile[Any]]) -> None:
        for key, file in {file.ref.file.key: file for file in new}.items():
            if not file.is_kept:
                self.storage.write_once(key, file.content)

    def _diffs(
        self, recorded: RunRecord, record: RunRecord, new: Sequence[NewFile[Any]]
    ) -> Iterator[str]:
        """Yield how each of the agent's sources changed."""
        contents = {file.ref.file.key: file.content for file in new}
        for difference in _source_differences(recorded, record):
            name = difference.key.removeprefix(_SOURCES)
            was, now = recorded.sources.get(name), record.sources.get(name)
            yield source_diff(
                name,
                files.read_bytes(self.storage, was.file) if was else b"",
                contents.get(now.file.key, b"") if now else b"",
            )

    def check_sources(self, record: RunRecord, contents: Mapping[str, bytes]) -> None:
        """Compare the agent's files, by place below the project, with those of the identity.

        A file that only one of them has is left out: whoever imports it has changed as well, or
        it is installed as a package here.

        Raises:
            ConfigError: One means something else; the message shows how it changed.
        """
        for name, content in sorted(contents.items()):
            was = record.sources.get(name)
            if was is None or was.file.sha256 == files.sha256_of_bytes(content):
                continue
            if was.digest != source_digest(content):
                kept = files.read_bytes(self.storage, was.file)
                raise ConfigError(
                    f"the agent's {name} is not the one that run {self.run_id!r} was started with, "
                    "and rollouts of two agents do not mix. Put it back and start the run again, "
                    "or go on with the change: agl run with --allow-changed (prefect deployment "
                    f"run training-run/{self.run_id} --param allow_changed=true)"
                    f"\n{source_diff(name, kept, content)}"
                )

    def committed(self) -> int:
        """Return the number of committed iterations."""
        count = 0
        while self.storage.exists(self.iteration(count).manifest_key):
            count += 1
        return count

    def manifest(self, iteration: int) -> Manifest:
        """Return the manifest of a committed iteration."""
        key = self.iteration(iteration).manifest_key
        return files.read_model(self.storage, Unrecorded(key), Manifest)

    def manifests(self) -> list[Manifest]:
        """Return the manifests of all committed iterations, in order.

        Raises:
            LedgerError: One cannot be read, or has another sha256 than the next one says.
        """
        found: list[Manifest] = []
        named: dict[str, FileRef] = {}
        for number in reversed(range(self.committed())):
            key = self.iteration(number).manifest_key
            manifest = files.read_model(self.storage, named.get(key) or Unrecorded(key), Manifest)
            named = {file.key: file for file in manifest.earlier}
            found.append(manifest)
        return found[::-1]

    def _check_identity(self) -> None:
        """Compare identity and changes with what the last manifest says of them.

        Raises:
            LedgerError: One has another sha256.
        """
        committed = self.committed()
        if not committed:
            return
        own = {self.record_key, *self.change_keys()}
        for file in self.manifest(committed - 1).earlier:
            if file.key in own:
                files.read_bytes(self.storage, file)


def open_run(
    ledger: str, run_id: str, access: S3Access = ENVIRONMENT, *, conditional_put: bool = True
) -> RunLedger:
    """Return the keys of a run that need not exist yet; see `open_storage`.

    Raises:
        ConfigError: The id is not one that a run can have, or the ledger's address is wrong.
    """
    try:
        check_run_id(run_id)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return RunLedger(open_storage(ledger, access, conditional_put=conditional_put), run_id)


_SOURCES = "sources."
_MAY_CHANGE = {
    "ledger",
    "s3",
    "serving",
    "preflight",
    "rollout",
    "failures",
    "max_automatic_starts",
}


def _identity(record: RunRecord) -> dict[str, Any]:
    """Return what must not change between two starts of one run.

    Where it runs (ledger address, serving), how its rollouts are spread, how often they are tried
    and how many may fail may change.
    """
    config = record.config.model_dump(mode="json", exclude=_MAY_CHANGE)
    config["rollout"] = {"timeout_seconds": record.config.rollout.timeout_seconds}
    config["failures"] = record.config.failures.identity()
    return {
        "config": config,
        "datasets": {name: ref.digest for name, ref in record.datasets.items()},
        "base_model": record.base.policy.weights_digest,
        "tokenizer": record.base.tokenizer_digest,
        "chat_template": record.base.chat_template_digest,
    }


def find_differences(recorded: RunRecord, record: RunRecord) -> Iterator[Difference]:
    """Yield what differs between two identities of one run."""
    yield from _differences(_identity(recorded), _identity(record))
    if recorded.sources and record.sources:
        yield from _source_differences(recorded, record)
    else:
        was, now = (
            {name: of.code.get(name) for name in CODE_IDENTITY} for of in (recorded, record)
        )
        yield from _differences(was, now, "code")


def _source_differences(recorded: RunRecord, record: RunRecord) -> Iterator[Difference]:
    """Yield the sources that mean something else; the same bytes never do, whatever Python's
    version makes of their syntax tree.
    """
    for name in sorted({*recorded.sources, *record.sources}):
        was, now = recorded.sources.get(name), record.sources.get(name)
        if was and now and (was.file.sha256 == now.file.sha256 or was.digest == now.digest):
            continue
        yield Difference(
            key=f"{_SOURCES}{name}",
            was=was.digest if was else None,
            now=now.digest if now else None,
        )


def _in_words(difference: Difference) -> str:
    if not difference.key.startswith(_SOURCES):
        return str(difference)
    name = difference.key.removeprefix(_SOURCES)
    if difference.was is None:
        return f"the agent imports {name}, which it did not"
    return f"the agent's {name} " + ("changed" if difference.now else "is imported no more")


def _differences(old: Any, new: Any, path: str = "") -> Iterator[Difference]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in sorted({*old, *new}):
            name = f"{path}.{key}" if path else str(key)
            yield from _differences(old.get(key), new.get(key), name)
    elif old != new and not (path.startswith("code.") and None in (old, new)):
        # No code is None where it is known: this process, or that one, runs outside a repository.
        yield Difference(key=path, was=old, now=new)
