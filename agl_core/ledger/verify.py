"""Check a run against its manifests: sha256, size and rows of every file, every figure built again
from the files, each iteration starting from what the one before it made, each manifest naming the
one before it.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agl_core.errors import AglError, LedgerError
from agl_core.ledger import files
from agl_core.ledger.chain import (
    MADE_LATER,
    changes_until,
    differences_of,
    earlier_keys,
    leaves,
    read_seals,
    record_at,
    sealed_keys,
)
from agl_core.ledger.commit import build_manifest, read_stages
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.run import RunLedger
from agl_core.ledger.stages import StageRecord
from agl_core.serving.weights import weights_digest
from agl_core.types.training import FileRef, PolicyRef

_WHOLE = ("coverage", "rows")
"""Counts that mean something together; of everything else, each leaf is compared by itself."""
_VERSION_1 = ("coverage", "rows", "content_digest")
"""What is compared of a manifest of before there was a chain."""


def verify_run(ledger: RunLedger) -> list[str]:
    """Return what differs from the manifests, one sentence each; empty where all is as recorded.

    Raises:
        ConfigError: There is no such run.
    """
    return RunCheck(ledger).differences()


def find_late(ledger: RunLedger) -> list[str]:
    """Return the keys that shards flushed after their iteration was committed.

    A shard that was given up may live on (a zombie). What it writes then was never read, so it is
    no difference.
    """
    found: list[str] = []
    for manifest in ledger.manifests():
        iteration = ledger.iteration(manifest.iteration)
        listed = {file.key for file in manifest.files}
        late = set(ledger.storage.list(f"{iteration.prefix}rollouts/")) - listed
        found.extend(sorted(key for key in late if _claim_of(key) in listed))
    return found


def _claim_of(key: str) -> str | None:
    """Return the key of the claim that a chunk belongs to; None where the key is no chunk's."""
    chunk = re.fullmatch(r"(.*/rollouts/[^/]+/)chunks/(\d+)-\d+\.(spans|outcomes)\.parquet", key)
    return f"{chunk[1]}claims/{chunk[2]}.json" if chunk else None


class RunCheck:
    """Walks over a run. Files are read once; records and manifests are read in each walk."""

    def __init__(self, ledger: RunLedger) -> None:
        self.ledger = ledger
        self.storage = ledger.storage
        self._found: dict[str, FileRef | None] = {}
        """What lies under a key; None where nothing does."""
        self._counted: dict[str, int] = {}
        """Rows of the tables."""
        self._built: dict[tuple[int, int | None], tuple[Manifest, list[str]]] = {}
        """Figures of an iteration as its files give them, and what is wrong with its weights."""

    def differences(self) -> list[str]:
        """Return what differs from the manifests, one sentence each.

        Raises:
            ConfigError: There is no such run.
        """
        try:
            records = [
                self.ledger.first_record(),
                *(change.record for change in self.ledger.changes()),
            ]
            self.ledger.starts.all()
        except LedgerError as error:
            return [str(error)]
        named = {file.key: file for record in records for file in record.files()}
        walk = self._walk(named.values(), records[0].base.policy)
        return list(dict.fromkeys(walk))

    def _walk(self, named: Iterable[FileRef], policy: PolicyRef) -> Iterator[str]:
        yield from self._files(named)
        committed = self.ledger.committed()
        yield from self._gap(committed)
        for number in range(committed):
            yield from self.iteration(number, policy)
            with suppress(LedgerError, ValueError):  # said by the walk over the iteration
                state = self.ledger.manifest(number).state
                policy = PolicyRef.model_validate(state.get("policy"))
        yield from self._seals(committed)

    def iteration(self, number: int, policy: PolicyRef) -> Iterator[str]:
        """Yield what differs in one iteration.

        Args:
            number: Of the iteration.
            policy: That was made before it.
        """
        key = Unrecorded(self.ledger.iteration(number).manifest_key)
        try:
            raw, manifest = files.read_json(self.storage, key), self.ledger.manifest(number)
        except LedgerError as error:
            yield str(error)
            return
        broken = False
        for difference in (*self._listed(manifest), *self._earlier(manifest, number)):
            broken = True
            yield difference
        other = manifest.policy_in.weights_digest != policy.weights_digest
        if not broken:
            yield from self._figures(number, manifest, raw, skip_policy=other)
        if other:
            yield (
                f"iteration {number} starts from {manifest.policy_in.version} "
                f"with other weights than were made before it"
            )

    def _gap(self, committed: int) -> Iterator[str]:
        """Yield the manifests behind one that is missing."""
        for key in self.storage.list(f"{self.ledger.prefix}iterations/"):
            folder, _, name = key.rpartition("/")
            if name == "manifest.json" and int(folder.rsplit("/", 1)[1]) >= committed:
                yield f"{key} is there, the manifest of iteration {committed} is missing"

    def _files(self, named: Iterable[FileRef]) -> Iterator[str]:
        for file in named:
            if (found := self._look(file.key)) is None:
                yield f"{file.key} is missing"
            elif found.sha256 != file.sha256:
                yield f"{file.key} has sha256 {found.sha256}, its record says {file.sha256}"
            elif found.size_bytes != file.size_bytes:
                yield f"{file.key} has {found.size_bytes} bytes, its record says {file.size_bytes}"
            elif (rows := self._rows(file.key)) != file.rows:
                yield f"{file.key} has {rows} rows, its record says {file.rows}"

    def _look(self, key: str) -> FileRef | None:
        if key not in self._found:
            there = self.storage.exists(key)
            self._found[key] = files.hashed(self.storage, key) if there else None
        return self._found[key]

    def _rows(self, key: str) -> int | None:
        if key.endswith(".parquet") and key not in self._counted:
            self._counted[key] = files.count_rows(self.storage, key)
        return self._counted.get(key)

    def _listed(self, manifest: Manifest) -> Iterator[str]:
        """Compare the files of an iteration with those that its manifest lists."""
        iteration = self.ledger.iteration(manifest.iteration)
        keys = [file.key for file in manifest.files]
        listed = {*keys, iteration.manifest_key}
        for key in self.storage.list(iteration.prefix):
            if key not in listed and _claim_of(key) not in listed:
                yield f"{key} is not in the manifest of iteration {manifest.iteration}"
        if keys != sorted(set(keys)):
            yield f"iteration {manifest.iteration}: its manifest lists files twice or unsorted"
        yield from self._files(manifest.files)

    def _earlier(self, manifest: Manifest, number: int) -> Iterator[str]:
        """Compare the files that were there before an iteration with those its manifest names."""
        if manifest.schema_version == 1:
            return
        keys = [file.key for file in manifest.earlier]
        later = tuple(self.ledger.prefix + folder for folder in MADE_LATER)
        stated = [key for key in keys if not key.startswith(later)]
        start = manifest.observed.get("start")
        if not (start is None or (type(start) is int and self.ledger.starts.has_begun(start))):
            yield f"iteration {number}: observed.start is {start!r}, and there is no such start"
            return
        for key in sorted(set(earlier_keys(self.ledger, number, start)) ^ set(stated)):
            yield f"iteration {number}: {key} is " + (
                "named in its manifest, and was not there before it"
                if key in stated
                else "not named in its manifest, and was there before it"
            )
        if keys != sorted(set(keys)):
            yield f"iteration {number}: its manifest names earlier files twice or unsorted"
        yield from self._files(manifest.earlier)

    def _figures(
        self, number: int, manifest: Manifest, raw: dict[str, Any], *, skip_policy: bool
    ) -> Iterator[str]:
        """Build the manifest again and compare every leaf."""
        try:
            stages = read_stages(self.ledger.iteration(number))
            expected, wrong = self._expected(number, manifest, stages)
            yield from wrong
        except AglError as error:
            text = str(error)
            prefix = f"iteration {number}: "
            yield text if text.startswith(prefix) else prefix + text
            return
        observed = expected.observed | {"prefect": manifest.observed.get("prefect")}
        same = {"files": manifest.files, "earlier": manifest.earlier}  # compared before
        built = expected.model_copy(update=same | {"observed": observed}).model_dump(mode="json")
        stated = manifest.model_dump(mode="json") | raw
        names = [name for name in built if not (skip_policy and name == "policy_in")]
        if manifest.schema_version == 1 and not _is_chained(stages):
            names = [name for name in names if name in _VERSION_1]
        for name in names:
            yield from _compare(f"iteration {number}", name, built[name], stated[name])

    def _expected(
        self, number: int, manifest: Manifest, stages: dict[str, StageRecord]
    ) -> tuple[Manifest, list[str]]:
        """Return what the manifest should say, without its lists of files and Prefect's ids."""
        start = manifest.observed.get("start")
        if (number, start) not in self._built:
            built = build_manifest(
                self.ledger.iteration(number),
                stages,
                record_at(self.ledger, number, start),
                changed=differences_of(changes_until(self.ledger, number)),
                listed=(),
                earlier=(),
                start=start,
                prefect={},
            )
            self._built[number, start] = built, list(self._weights(number, built.policy_out))
        return self._built[number, start]

    def _weights(self, number: int, policy: PolicyRef | None) -> Iterator[str]:
        """Compare the digest of an exported policy with its files, which were compared before."""
        if policy is None or policy.folder is None:
            return
        with TemporaryDirectory() as folder:
            local = files.fetch_folder(self.storage, policy.folder, Path(folder))
            found = weights_digest(local)
        if found != policy.weights_digest:
            yield (
                f"iteration {number}: the weights of {policy.version} have digest {found}, its "
                f"record says {policy.weights_digest}"
            )

    def _seals(self, committed: int) -> Iterator[str]:
        """Compare what was there when the run was done."""
        try:
            seals = read_seals(self.ledger)
        except LedgerError as error:
            yield str(error)
            return
        for key, sealed in seals.items():
            stem = key.rsplit("/", 1)[1].removesuffix(".json")
            if (sealed.run_id, f"{sealed.committed:06d}") != (self.ledger.run_id, stem):
                yield f"{key} is of {sealed.run_id} after {sealed.committed} iterations"
                continue
            if sealed.committed > committed:
                yield f"{key} was made after {sealed.committed} iterations; {committed} are there"
                continue
            keys = {file.key for file in sealed.files}
            begun = [
                number
                for number in range(1, 1 + len(self.ledger.starts.all()))
                if f"{self.ledger.starts.prefix}{number:06d}.start.json" in keys
            ]
            last = max(begun, default=None)
            for name in sorted(sealed_keys(self.ledger, sealed.committed, last) - keys):
                yield f"{name} is not in {key}"
            yield from self._files(sealed.files)


def _is_chained(stages: dict[str, StageRecord]) -> bool:
    """Say whether an iteration was made when manifests named the one before them."""
    return bool(stages["rollout"].outputs)


def _compare(of: str, name: str, built: Any, stated: Any) -> Iterator[str]:
    if name in _WHOLE:
        if not _is_same(built, stated):
            yield f"{of}: {name} is {built}, the manifest says {stated}"
        return
    was, now = leaves(built, name), leaves(stated, name)
    for path in sorted({*was, *now}):
        if path not in was:
            yield f"{of}: the manifest says {path} {now[path]!r}, which nothing says"
        elif path not in now:
            yield f"{of}: {path} is {was[path]!r}, the manifest does not say so"
        elif not _is_same(was[path], now[path]):
            yield f"{of}: {path} is {was[path]}, the manifest says {now[path]}"


def _is_same(one: Any, other: Any) -> bool:
    """Compare JSON values with their types: 1, 1.0 and true differ."""
    was, now = leaves(one), leaves(other)
    return was == now and all(type(was[path]) is type(now[path]) for path in was)
