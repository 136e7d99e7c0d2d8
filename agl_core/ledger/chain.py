"""What vouches for what: each manifest names the files of the run that were there before it, a seal
those that no later manifest will name.

    run.json, changes, data, code, starts  <-  manifest 0  <-  manifest 1  <-  ...  <-  seal

What nothing names yet is the last manifest of a run that is not done, and the last seal. Both are
compared with what their own files say (`verify`); whoever can write to the ledger could rewrite
all of it, so `agl ledger verify` prints the sha256 of the last manifest, to be kept elsewhere.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict

from agl_core.errors import ConflictError
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.manifest import Difference
from agl_core.ledger.run import RunChange, RunLedger, RunRecord
from agl_core.types.training import FileRef

MADE_LATER = ("report/", "seals/")
"""Folders of files that are made when a run is done; it may go on after that."""


class Seal(BaseModel):
    """What a run that is done consists of, besides what its manifests name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    committed: int
    """Iterations."""
    files: tuple[FileRef, ...]
    """Identity, changes, starts and their ends, the last manifest, the report, earlier seals."""


def changes_until(ledger: RunLedger, iteration: int) -> list[RunChange]:
    """Return what starts were allowed to change up to an iteration, oldest first."""
    return [change for change in ledger.changes() if change.iteration <= iteration]


def differences_of(changes: Iterable[RunChange]) -> tuple[Difference, ...]:
    """Return what differs, change by change."""
    return tuple(item for change in changes for item in change.differences)


def record_at(ledger: RunLedger, iteration: int, start: int | None) -> RunRecord:
    """Return the run's identity as of an iteration, with the code and the packages of the start
    that committed it.
    """
    changes = changes_until(ledger, iteration)
    record = changes[-1].record if changes else ledger.first_record()
    began = ledger.starts.read(start) if start is not None else None
    if began is None or began.code is None or began.packages is None:
        return record
    return record.model_copy(update={"code": began.code, "packages": began.packages})


def earlier_keys(ledger: RunLedger, iteration: int, start: int | None) -> dict[str, FileRef | None]:
    """Return the keys that a manifest names of the run, with the references that its records have;
    without what is made later.

    Args:
        ledger: Of the run.
        iteration: Of the manifest.
        start: The one that commits it; None where no process holds the run.
    """
    changes = changes_until(ledger, iteration)
    found: dict[str, FileRef | None] = {ledger.record_key: None}
    found |= dict.fromkeys(ledger.change_keys()[: len(changes)])
    for record in (ledger.first_record(), *(change.record for change in changes)):
        found |= {file.key: file for file in record.files()}
    if start is not None:
        found |= dict.fromkeys(ledger.starts.keys_until(start))
    if iteration > 0:
        found[ledger.iteration(iteration - 1).manifest_key] = None
    return dict(sorted(found.items()))


def earlier_files(ledger: RunLedger, iteration: int, start: int | None) -> tuple[FileRef, ...]:
    """Return the files of the run that an iteration's manifest names; what the manifest before
    names is not read again.
    """
    known: dict[str, FileRef] = {}
    if iteration > 0:
        known = {file.key: file for file in ledger.manifest(iteration - 1).earlier}
    keys = earlier_keys(ledger, iteration, start)
    for folder in MADE_LATER:
        keys |= dict.fromkeys(ledger.storage.list(f"{ledger.prefix}{folder}"))
    return tuple(
        known.get(key) or file or files.refer(ledger.storage, key)
        for key, file in sorted(keys.items())
    )


def seal(ledger: RunLedger) -> None:
    """Name what no manifest of a run that is done names; a seal that is there stays."""
    committed = ledger.committed()
    key = _seal_key(ledger, committed)
    if not committed or ledger.storage.exists(key):
        return
    latest = ledger.starts.latest()
    keys = sealed_keys(ledger, committed, latest.number if latest else None)
    for folder in MADE_LATER:
        keys |= set(ledger.storage.list(f"{ledger.prefix}{folder}"))
    found = [files.refer(ledger.storage, name) for name in sorted(keys)]
    sealed = Seal(run_id=ledger.run_id, committed=committed, files=tuple(found))
    try:
        files.put_json(ledger.storage, key, sealed.model_dump(mode="json"))
    except ConflictError:  # by another process that found the run done at this moment
        return


def sealed_keys(ledger: RunLedger, committed: int, start: int | None) -> set[str]:
    """Return the keys that a seal names at least."""
    keys = {ledger.record_key, ledger.iteration(committed - 1).manifest_key}
    keys |= set(ledger.change_keys()[: len(changes_until(ledger, committed - 1))])
    if start is not None:
        keys |= {*ledger.starts.keys_until(start), ledger.starts.end_key(start)} & set(
            ledger.storage.list(ledger.starts.prefix)
        )
    return keys


def read_seals(ledger: RunLedger) -> dict[str, Seal]:
    """Return the seals of a run by their keys, oldest first."""
    keys = ledger.storage.list(f"{ledger.prefix}seals/")
    return {key: files.read_model(ledger.storage, Unrecorded(key), Seal) for key in keys}


def _seal_key(ledger: RunLedger, committed: int) -> str:
    return f"{ledger.prefix}seals/{committed:06d}.json"


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return every leaf of a JSON value by its path; empty lists and objects are leaves."""
    if isinstance(value, dict) and value:
        items = [(f"{path}.{key}" if path else str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and value:
        items = [(f"{path}[{place}]", item) for place, item in enumerate(value)]
    else:
        return {path: value}
    found: dict[str, Any] = {}
    for name, item in items:
        found |= leaves(item, name)
    return found
