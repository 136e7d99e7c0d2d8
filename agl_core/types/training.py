"""What an algorithm asks for, and the references through which it gets it."""

from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from agl_core.types.resources import JsonDict


class _Value(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRef(_Value):
    """One immutable file of the ledger."""

    key: str
    """Path below the ledger's root."""
    sha256: str
    size_bytes: int
    rows: int | None = None
    """Rows of a table; None for other files."""


class FolderRef(_Value):
    """A folder of immutable files."""

    prefix: str
    """Key prefix, ending in `/`; each file's key starts with it."""
    files: tuple[FileRef, ...]


class PolicyRef(_Value):
    """One immutable set of weights, with its tokenizer and chat template, as a Hugging Face
    folder.
    """

    version: str
    """Name under which it is served, `v000000` for the base model."""
    weights_digest: str
    """`agl_core.serving.weights.weights_digest` of the folder."""
    path: str | None = None
    """Local folder of a base model that is not copied into the ledger."""
    folder: FolderRef | None = None
    """Where the ledger keeps it; exactly one of `path` and `folder` is set."""


class RolloutRequest(_Value):
    """One rollout that an algorithm asks for."""

    dataset: Literal["train", "val"]
    row: int
    """Row of that dataset."""
    group: int
    """Rollouts of one input share a group; numbered from 0 within the proposal."""
    sample: int
    """Number of the rollout within its group."""
    mode: Literal["train", "val"]


class Proposal(_Value):
    """The rollouts of one iteration, and what they are given."""

    policy: PolicyRef
    sampling_parameters: JsonDict
    """Fields of each model request, for example `temperature` and `max_tokens`."""
    requests: tuple[RolloutRequest, ...]


class Dataset(Protocol):
    """Rows by position, as the reference's datasets."""

    def __len__(self) -> int:
        """Return the number of rows."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one row."""
        ...


class Artifacts(Protocol):
    """Where an algorithm puts what it makes; backed by the ledger, one prefix for each try of a
    stage.
    """

    def scratch(self, name: str) -> Path:
        """Return an empty local folder that may be lost when the process ends."""
        ...

    def put_folder(self, name: str, folder: Path) -> FolderRef:
        """Keep every file of a local folder; large files are streamed."""
        ...

    def put_table(self, name: str, table: pa.Table) -> FileRef:
        """Keep a table as `<name>.parquet`."""
        ...

    def fetch_folder(self, ref: FolderRef) -> Path:
        """Return a local copy of a kept folder, each file's sha256 verified.

        Raises:
            LedgerError: A file is missing or its sha256 differs.
        """
        ...
