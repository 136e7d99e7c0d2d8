"""The rollouts of one purpose (`train`, or the validation of one version): requests, claims,
chunks.

    rollouts/<set>/
        requests.parquet                   who shall run; written once, before anything runs
        resources.json                     the policy and sampling parameters that the rollouts are
                                           given, and the sha256 of the requests
        claims/0001.json                   indices that shard attempt 1 takes
        chunks/0001-0001.spans.parquet     what it finished, flushed as it goes
        chunks/0001-0001.outcomes.parquet  written after the spans: with it the rollouts count as
        finished

The latest claim that lists a rollout decides: results of an earlier claim are kept and unused. When
all have ended, the record of their stage names every file of the set; later stages read those alone
(`RolloutSet.recorded`), so what a zombie flushes after that is kept and unused too.
"""

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.files import File, Unrecorded
from agl_core.ledger.stages import IterationLedger, StageAttempt
from agl_core.ledger.tables import OUTCOMES, REQUESTS, SPANS
from agl_core.types.outcome import FailureKind
from agl_core.types.resources import JsonDict
from agl_core.types.training import FileRef, FolderRef, PolicyRef

_STAGES = ("rollout_base", "rollout", "rollout_new")
_RECORDED = "rollouts"
"""Name of a set's files among the outputs of its stage."""


class SetResources(BaseModel):
    """What the rollouts of a set are given."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    sampling_parameters: JsonDict
    requests: FileRef | None = None
    """None in sets of before it was noted."""
    vocabulary_size: int | None = None
    """Number of token ids that the policy has; None if it is not known."""


class Claim(BaseModel):
    """The rollouts that one shard attempt takes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    indices: tuple[int, ...]
    created: float
    host: str
    pid: int
    retry_of: int | None = None
    """The claim whose shard, retried by itself, took what was left of it."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One flush of a shard."""

    claim: int
    spans: FileRef
    outcomes: FileRef


class RolloutSet:
    """Requests, claims and chunks of one set of rollouts."""

    def __init__(self, iteration: IterationLedger, name: str) -> None:
        self.name = name
        self.storage = iteration.storage
        self.prefix = f"{iteration.prefix}rollouts/{name}/"
        self.resources_key = f"{self.prefix}resources.json"
        self.requests_key = f"{self.prefix}requests.parquet"
        self._check_lease = iteration.check_lease
        self._recorded: dict[str, FileRef] | None = None
        """By key; None while no record names the set's files."""
        self._requests: File | None = None

    @classmethod
    def recorded(cls, iteration: IterationLedger, name: str) -> "RolloutSet":
        """Return the set as the record of its stage has it; as it lies there without a record."""
        rollouts = cls(iteration, name)
        for stage in _STAGES:
            record = iteration.record(stage)
            if record is not None and record.values.get("rollout_set") == name:
                folder = record.outputs.get(_RECORDED)
                if isinstance(folder, FolderRef):
                    rollouts._recorded = {file.key: file for file in folder.files}
        return rollouts

    @property
    def is_recorded(self) -> bool:
        """Whether only what a record names is read."""
        return self._recorded is not None

    def record(self, stage: StageAttempt) -> None:
        """Name the set's files, as they are now, in the record of its stage."""
        found = [files.refer(self.storage, key) for key in self.storage.list(self.prefix)]
        stage.outputs[_RECORDED] = FolderRef(prefix=self.prefix, files=tuple(found))
        stage.values |= {"rollout_set": self.name, "claims": len(self._claim_keys())}

    def write_requests(
        self,
        requests: pa.Table,
        policy: PolicyRef,
        sampling_parameters: JsonDict,
        vocabulary_size: int | None = None,
    ) -> None:
        """Write the requests and the resources, once; a set that has them already keeps those."""
        if not self.storage.exists(self.requests_key):
            files.put_table(self.storage, self.requests_key, requests)
        if not self.storage.exists(self.resources_key):
            resources = SetResources(
                policy=policy,
                sampling_parameters=sampling_parameters,
                requests=files.refer(self.storage, self.requests_key),
                vocabulary_size=vocabulary_size,
            )
            files.put_json(self.storage, self.resources_key, resources.model_dump(mode="json"))

    def read_resources(self) -> SetResources:
        """Return what the rollouts are given."""
        return files.read_model(self.storage, self._file(self.resources_key), SetResources)

    def read_requests(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the requests (schema `REQUESTS`), ordered by `index`."""
        if self._requests is None:
            file = self._file(self.requests_key)
            named = self.read_resources().requests if isinstance(file, Unrecorded) else None
            self._requests = named or file
        return files.read_table(self.storage, self._requests, REQUESTS, columns)

    def claim(self, indices: Sequence[int], retry_of: int | None = None) -> Claim:
        """Take rollouts for one shard attempt, under the next free number.

        Raises:
            LeaseLostError: Another process carries the run on.
            ConflictError: Another process took the number at this moment.
        """
        self._check_lease()
        numbers = [int(key.rsplit("/", 1)[1].split(".")[0]) for key in self._claim_keys()]
        claim = Claim(
            number=1 + max(numbers, default=0),
            indices=tuple(indices),
            created=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
            retry_of=retry_of,
        )
        files.put_json(self.storage, self._claim_key(claim.number), claim.model_dump(mode="json"))
        return claim

    def claim_rest(self, claim: int) -> Claim | None:
        """Take what is unfinished or failed of a claim that no other one has replaced; None where
        nothing is.

        Its shard is run again by itself. What came of its earlier tries is kept, unused.
        """
        own = {c.number for c in self.claims() if claim in (c.number, c.retry_of)}
        latest = self.deciding_claims()
        left = self.unfinished(include_failed=True)
        mine = [index for index in left if latest.get(index) in own]
        return self.claim(mine, retry_of=claim) if mine else None

    def read_claim(self, number: int) -> Claim:
        """Return one claim."""
        return self._read_claim(self._claim_key(number))

    def _read_claim(self, key: str) -> Claim:
        return files.read_model(self.storage, self._file(key), Claim)

    def claims(self) -> list[Claim]:
        """Return all claims, oldest first."""
        claims = [self._read_claim(key) for key in self._claim_keys()]
        return sorted(claims, key=lambda claim: claim.number)  # by name, 10000 is before 9999

    def put_chunk(self, claim: int, number: int, spans: pa.Table, outcomes: pa.Table) -> Chunk:
        """Write one flush: the spans, then the outcomes."""
        stem = f"{self.prefix}chunks/{claim:04d}-{number:04d}"
        return Chunk(
            claim=claim,
            spans=files.put_table(self.storage, f"{stem}.spans.parquet", spans),
            outcomes=files.put_table(self.storage, f"{stem}.outcomes.parquet", outcomes),
        )

    def deciding_claims(self) -> dict[int, int]:
        """Return the number of the latest claim for each rollout that was ever claimed."""
        latest: dict[int, int] = {}
        for claim in self.claims():
            latest.update(dict.fromkeys(claim.indices, claim.number))
        return latest

    def outcomes(self) -> pa.Table:
        """Return every attempt of every claim (schema `OUTCOMES`), ordered by index and attempt.

        `final` stays true only where the deciding claim's last attempt stands.
        """
        latest = self.deciding_claims()
        tables: list[pa.Table] = []
        for claim, _, table in self._flushed_outcomes():
            counts = pa.array([latest[i] == claim for i in table["index"].to_pylist()], pa.bool_())
            final = pc.and_(table["final"], counts)
            position = table.schema.get_field_index("final")
            tables.append(table.set_column(position, "final", final))
        merged = pa.concat_tables([OUTCOMES.empty_table(), *tables])
        return merged.sort_by([("index", "ascending"), ("started", "ascending")])

    def unfinished(self, *, include_failed: bool = False) -> list[int]:
        """Return the indices of the requests without a finished record, ascending.

        Args:
            include_failed: Also those whose last attempt did not succeed: what a start of an
                iteration that was stopped runs again.
        """
        table = self.outcomes().select(["index", "kind", "final"])
        done = table["final"]
        if include_failed:
            done = pc.and_(done, pc.equal(table["kind"], FailureKind.SUCCEEDED.value))
        indices = self.read_requests(["index"])["index"]
        finished = pc.is_in(indices, value_set=table.filter(done)["index"].combine_chunks())
        return indices.filter(pc.invert(finished)).to_pylist()

    def unfinished_of(self, claim: Claim) -> list[int]:
        """Return the indices of a claim without a finished record of its own, ascending.

        Reads the flushes of this claim alone.
        """
        done: set[int] = set()
        for number, stem in self._chunk_stems():
            if number == claim.number:
                file = self._file(f"{stem}.outcomes.parquet")
                table = files.read_table(self.storage, file, OUTCOMES, ["index", "final"])
                done.update(table.filter(table["final"])["index"].to_pylist())
        return sorted(set(claim.indices) - done)

    def iter_spans(self) -> Iterator[pa.Table]:
        """Yield the spans of deciding claims (schema `SPANS`), one flush at a time."""
        latest = self.deciding_claims()
        for claim, stem, outcomes in self._flushed_outcomes():
            counted = {index for index in outcomes["index"].to_pylist() if latest[index] == claim}
            file = self._file(f"{stem}.spans.parquet")
            for table in files.iter_tables(self.storage, file, SPANS):
                counts = [index in counted for index in table["index"].to_pylist()]
                yield table.filter(pa.array(counts, pa.bool_()))

    def _flushed_outcomes(self) -> Iterator[tuple[int, str, pa.Table]]:
        """Yield claim number, key stem and outcomes of every complete flush, in order.

        A flush whose success the shard was never told of was written again under the next number:
        each rollout counts in the first flush of its claim that has it.
        """
        seen: set[tuple[int, int]] = set()
        for claim, stem in self._chunk_stems():
            file = self._file(f"{stem}.outcomes.parquet")
            table = files.read_table(self.storage, file, OUTCOMES)
            indices = table["index"].to_pylist()
            is_new = pa.array([(claim, index) not in seen for index in indices], pa.bool_())
            seen.update((claim, index) for index in indices)
            yield claim, stem, table.filter(is_new)

    def _claim_keys(self) -> list[str]:
        return self._keys(f"{self.prefix}claims/")

    def _keys(self, prefix: str) -> list[str]:
        if self._recorded is None:
            return self.storage.list(prefix)
        return sorted(key for key in self._recorded if key.startswith(prefix))

    def _file(self, key: str) -> File:
        """Return what names a file of the set.

        Raises:
            LedgerError: The set is recorded, and this file is not.
        """
        if self._recorded is None:
            return Unrecorded(key)
        if key not in self._recorded:
            raise LedgerError(f"{key} is not in the record of the stage that ran {self.name}")
        return self._recorded[key]

    def _claim_key(self, number: int) -> str:
        return f"{self.prefix}claims/{number:04d}.json"

    def _chunk_stems(self) -> list[tuple[int, str]]:
        """Return claim number and key stem of every complete flush, in order."""
        suffix = ".outcomes.parquet"
        keys = self._keys(f"{self.prefix}chunks/")
        stems = [key.removesuffix(suffix) for key in keys if key.endswith(suffix)]
        return [(int(stem.rsplit("/", 1)[1].split("-")[0]), stem) for stem in stems]
