"""Check a run against its manifests: sha256 and rows of every file, coverage and content digest
recomputed, each iteration starting from what the one before it made.
"""

import re
from collections.abc import Iterator

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.commit import content_digest
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.recount import check_collected, recount
from agl_core.ledger.run import RunLedger, RunRecord
from agl_core.ledger.stages import STAGES
from agl_core.ledger.storage import Storage
from agl_core.types.training import FileRef, PolicyRef


def verify_run(ledger: RunLedger) -> list[str]:
    """Return what differs from the manifests, one sentence each; empty where all is as recorded.

    Raises:
        ConfigError: There is no such run.
    """
    run, manifests = ledger.first_record(), ledger.manifests()
    records = [run, *(change.record for change in ledger.changes())]
    datasets = {ref.file.key: ref.file for record in records for ref in record.datasets.values()}
    found: list[str] = []
    for file in datasets.values():
        found.extend(_verify_file(ledger.storage, file))
    found.extend(_find_gap(ledger, len(manifests)))
    policy = run.base.policy
    for manifest in manifests:
        differences = [*_verify_files(ledger, manifest)]
        found.extend(differences or _verify_content(ledger, manifest))
        if manifest.policy_in.weights_digest != policy.weights_digest:
            found.append(
                f"iteration {manifest.iteration} starts from {manifest.policy_in.version} "
                f"with other weights than were made before it"
            )
        policy = PolicyRef.model_validate(manifest.state["policy"])
    return found


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


def _find_gap(ledger: RunLedger, committed: int) -> Iterator[str]:
    """Yield the manifests behind one that is missing."""
    for key in ledger.storage.list(f"{ledger.prefix}iterations/"):
        folder, _, name = key.rpartition("/")
        if name == "manifest.json" and int(folder.rsplit("/", 1)[1]) >= committed:
            yield f"{key} is there, the manifest of iteration {committed} is missing"


def _verify_files(ledger: RunLedger, manifest: Manifest) -> Iterator[str]:
    iteration = ledger.iteration(manifest.iteration)
    listed = {file.key for file in manifest.files} | {iteration.manifest_key}
    for key in ledger.storage.list(iteration.prefix):
        if key not in listed and _claim_of(key) not in listed:
            yield f"{key} is not in the manifest of iteration {manifest.iteration}"
    for file in manifest.files:
        yield from _verify_file(ledger.storage, file)


def _verify_content(ledger: RunLedger, manifest: Manifest) -> Iterator[str]:
    """Compare what the files say with what the manifest says of them."""
    run = RunRecord.model_validate(manifest.identity | {"created": 0.0})
    iteration = ledger.iteration(manifest.iteration)
    stages = {name: record for name in STAGES if (record := iteration.record(name))}
    try:
        for name in ("evaluate_base", "evaluate"):
            if name in stages:
                check_collected(iteration, stages[name])
        _, counted = recount(iteration, stages["collect"], stages["adapt"], stages["update"])
    except LedgerError as error:
        yield f"iteration {manifest.iteration}: {error}"
        return
    computed = {
        **counted._asdict(),
        "content_digest": content_digest(
            iteration, run, stages, PolicyRef.model_validate(manifest.state["policy"])
        ),
    }
    for name, value in computed.items():
        if value != (stated := getattr(manifest, name)):
            yield f"iteration {manifest.iteration}: {name} is {value}, the manifest says {stated}"


def _verify_file(storage: Storage, file: FileRef) -> Iterator[str]:
    if not storage.exists(file.key):
        yield f"{file.key} is missing"
        return
    with storage.open(file.key) as source:
        hashed = files.sha256_of(source)
    if hashed != file.sha256:
        yield f"{file.key} has sha256 {hashed}, its record says {file.sha256}"
    elif file.rows is not None and (counted := files.count_rows(storage, file.key)) != file.rows:
        yield f"{file.key} has {counted} rows, its record says {file.rows}"
