"""Check a run against its manifests: every sha256, row count and coverage, recomputed."""

from agl_core.ledger import files
from agl_core.ledger.manifest import Manifest
from agl_core.ledger.run import RunLedger
from agl_core.ledger.storage import Storage


def verify_run(ledger: RunLedger) -> list[str]:
    """Return what differs from the manifests, one sentence each; empty where all is as recorded."""
    found: list[str] = []
    for manifest in ledger.manifests():
        found.extend(_verify_iteration(ledger, manifest))
    return found


def _verify_iteration(ledger: RunLedger, manifest: Manifest) -> list[str]:
    found: list[str] = []
    iteration = ledger.iteration(manifest.iteration)
    listed = {file.key for file in manifest.files} | {iteration.manifest_key}
    found.extend(
        f"{key} is not in the manifest of iteration {manifest.iteration}"
        for key in ledger.storage.list(iteration.prefix)
        if key not in listed
    )
    for file in manifest.files:
        found.extend(_verify_file(ledger.storage, file.key, file.sha256, file.rows))
    return found


def _verify_file(storage: Storage, key: str, sha256: str, rows: int | None) -> list[str]:
    if not storage.exists(key):
        return [f"{key} is missing"]
    with storage.open(key) as source:
        hashed = files.sha256_of(source)
    if hashed != sha256:
        return [f"{key} has sha256 {hashed}, the manifest says {sha256}"]
    if rows is not None and (counted := files.count_rows(storage, key)) != rows:
        return [f"{key} has {counted} rows, the manifest says {rows}"]
    return []
