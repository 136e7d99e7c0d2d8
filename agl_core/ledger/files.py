"""Files of the ledger with their sha256: write and read bytes, JSON, tables and folders, by
reference.

Tables are read by columns or by row groups; large files are hashed and copied in parts.
"""

import hashlib
import json
import os
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from agl_core.errors import LedgerError
from agl_core.ledger.storage import Storage
from agl_core.types.training import FileRef, FolderRef

_PART = 1 << 20


def sha256_of(source: BinaryIO) -> str:
    """Return the hex sha256 of everything that is left to read, in parts."""
    digest = hashlib.sha256()
    while part := source.read(_PART):
        digest.update(part)
    return digest.hexdigest()


def sha256_of_bytes(data: bytes) -> str:
    """Return the hex sha256 of some bytes."""
    return hashlib.sha256(data).hexdigest()


def put_bytes(storage: Storage, key: str, data: bytes, rows: int | None = None) -> FileRef:
    """Write a new key and return its reference."""
    storage.write_once(key, data)
    return reference(key, data, rows)


def reference(key: str, data: bytes, rows: int | None = None) -> FileRef:
    """Return the reference of a key with this content."""
    return FileRef(key=key, sha256=sha256_of_bytes(data), size_bytes=len(data), rows=rows)


def put_json(storage: Storage, key: str, value: Any) -> FileRef:
    """Write a value as readable JSON with sorted keys."""
    text = json.dumps(value, indent=1, sort_keys=True, allow_nan=False)
    return put_bytes(storage, key, text.encode() + b"\n")


def read_json(storage: Storage, key: str) -> Any:
    """Return the value of a JSON file."""
    return json.loads(storage.read(key))


def put_file(storage: Storage, key: str, path: Path, rows: int | None = None) -> FileRef:
    """Copy a local file to a new key, in parts."""
    with path.open("rb") as source:
        sha256 = sha256_of(source)
    storage.put_file(key, path)
    return FileRef(key=key, sha256=sha256, size_bytes=path.stat().st_size, rows=rows)


def put_folder(storage: Storage, prefix: str, folder: Path) -> FolderRef:
    """Copy every file of a local folder to keys below `prefix` (which ends in `/`)."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    refs = (put_file(storage, prefix + path.relative_to(folder).as_posix(), path) for path in files)
    return FolderRef(prefix=prefix, files=tuple(refs))


def fetch_folder(storage: Storage, ref: FolderRef, cache: Path) -> Path:
    """Return a local folder with the referenced files, each sha256 verified.

    A ledger on this machine's disk is used in place; do not write there.

    Raises:
        LedgerError: A file is missing or differs from its sha256.
    """
    folder = storage.local_path(ref.prefix.rstrip("/"))
    for file in ref.files:
        path = storage.local_path(file.key) or cache / file.key
        if storage.local_path(file.key) is None and not path.exists():
            _download(storage, file.key, path)
        _verify(path, file)
    return folder or cache / ref.prefix


def _download(storage: Storage, key: str, path: Path) -> None:
    """Copy a key to a local file that appears whole: the next process trusts that it is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part_path = path.with_name(f".{path.name}.{os.getpid()}")
    with storage.open(key) as source, part_path.open("wb") as target:
        while part := source.read(_PART):
            target.write(part)
    part_path.replace(path)


def _verify(path: Path, ref: FileRef) -> None:
    if not path.is_file():
        raise LedgerError(f"{ref.key} is missing")
    with path.open("rb") as source:
        found = sha256_of(source)
    if found != ref.sha256:
        raise LedgerError(f"{ref.key} has sha256 {found}, its record says {ref.sha256}")


def put_table(storage: Storage, key: str, table: pa.Table) -> FileRef:
    """Write a table as one Parquet file."""
    return put_bytes(storage, key, table_bytes(table), rows=table.num_rows)


def table_bytes(table: pa.Table) -> bytes:
    """Return a table as the content of a Parquet file (zstd)."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


class TableWriter:
    """Appends tables to one local Parquet file, a row group each, before it goes to the ledger."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path = path
        self.rows = 0
        self._schema = schema
        self._writer = pq.ParquetWriter(path, schema, compression="zstd")

    def append(self, table: pa.Table) -> None:
        """Append the rows of a table of the same schema."""
        if table.num_rows:
            self._writer.write_table(table.cast(self._schema))
            self.rows += table.num_rows

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()


@contextmanager
def table_writer(path: Path, schema: pa.Schema) -> Generator[TableWriter]:
    """Open a `TableWriter` and finish its file at the end."""
    writer = TableWriter(path, schema)
    try:
        yield writer
    finally:
        writer.close()


def read_table(
    storage: Storage, key: str, schema: pa.Schema, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a table of the ledger, or some of its columns.

    Raises:
        LedgerError: The file is missing or holds another kind of table.
    """
    with storage.open(key) as source:
        file = pq.ParquetFile(source)
        _check_schema(key, file.schema_arrow, schema)
        return file.read(columns=list(columns) if columns is not None else None)


def read_version(storage: Storage, key: str, schema: pa.Schema) -> int:
    """Return the version of the schema that a table of the ledger was written with.

    Raises:
        LedgerError: The file is missing or holds another kind of table.
    """
    with storage.open(key) as source:
        found = pq.ParquetFile(source).schema_arrow
    _check_schema(key, found, schema)
    return _version(found)


def iter_tables(
    storage: Storage, key: str, schema: pa.Schema, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield a table of the ledger one row group at a time."""
    with storage.open(key) as source:
        file = pq.ParquetFile(source)
        _check_schema(key, file.schema_arrow, schema)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=list(columns) if columns is not None else None)


def count_rows(storage: Storage, key: str) -> int:
    """Return the number of rows that a Parquet file's own footer states."""
    with storage.open(key) as source:
        return pq.ParquetFile(source).metadata.num_rows


def _check_schema(key: str, found: pa.Schema, expected: pa.Schema) -> None:
    """Refuse a file of another kind, or of a version that this reader does not know (n and n -
    1).
    """
    name, version = (expected.metadata or {})[b"agl.schema"], _version(expected)
    metadata = found.metadata or {}
    if metadata.get(b"agl.schema") != name or not version - 1 <= _version(found) <= version:
        raise LedgerError(
            f"{key} holds {metadata.get(b'agl.schema')!r} version {_version(found)}, "
            f"expected {name!r} version {version}"
        )


def _version(schema: pa.Schema) -> int:
    return int((schema.metadata or {}).get(b"agl.schema_version", b"-1"))
