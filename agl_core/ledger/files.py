"""Files of the ledger with their sha256: write and read bytes, JSON, tables and folders, by
reference.

Whoever reads a file gives its reference, and gets content with the sha256 of the record or an
error; a file that nothing has recorded is read as `Unrecorded`. A file is read once: hashed and
kept in memory, above 64 MiB in a temporary file. Tables are then read by columns or row groups.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ValidationError

from agl_core.errors import LedgerError
from agl_core.ledger.storage import Storage
from agl_core.types.training import FileRef, FolderRef

ModelT = TypeVar("ModelT", bound=BaseModel)

_PART = 1 << 20
_IN_MEMORY = 64 << 20


@dataclass(frozen=True, slots=True)
class Unrecorded:
    """A file whose sha256 stands nowhere: it is a record itself, or its stage has none yet."""

    key: str


File = FileRef | Unrecorded


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


def refer(storage: Storage, key: str) -> FileRef:
    """Return the reference of a file by reading it."""
    rows = count_rows(storage, key) if key.endswith(".parquet") else None
    return hashed(storage, key).model_copy(update={"rows": rows})


def hashed(storage: Storage, key: str) -> FileRef:
    """Return sha256 and size of a file by reading it, whatever it holds."""
    with storage.open(key) as source:
        return FileRef(key=key, sha256=sha256_of(source), size_bytes=source.tell())


def read_bytes(storage: Storage, file: File) -> bytes:
    """Return the content of a small file.

    Raises:
        LedgerError: It is missing, cannot be read, or has another sha256 than its record says.
    """
    data = storage.read(file.key)
    _compare(file, sha256_of_bytes(data))
    return data


def read_json(storage: Storage, file: File) -> Any:
    """Return the value of a JSON file.

    Raises:
        LedgerError: As `read_bytes`, or it holds no JSON.
    """
    data = read_bytes(storage, file)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _broken(file.key, f"it is no JSON: {error}") from error


def read_model(storage: Storage, file: File, kind: type[ModelT]) -> ModelT:
    """Return what a JSON file holds.

    Raises:
        LedgerError: As `read_bytes`, or it does not hold that; the message names the first thing
            that is wrong.
    """
    data = read_bytes(storage, file)
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        reason = f"{place}: {first['msg']}" if place else first["msg"]
        raise _broken(file.key, f"it holds no {kind.__name__} ({reason})") from error


def _broken(key: str, reason: str) -> LedgerError:
    return LedgerError(
        f"{key} cannot be used: {reason}. It was changed or cut short after it was written: put a "
        "copy back, or start another run under another run id"
    )


def _compare(file: File, sha256: str) -> None:
    if isinstance(file, FileRef) and file.sha256 != sha256:
        raise LedgerError(f"{file.key} has sha256 {sha256}, its record says {file.sha256}")


@contextmanager
def _checked(storage: Storage, file: File) -> Generator[BinaryIO]:
    """Yield the content of a file after its sha256 was compared with the record's."""
    with storage.open(file.key) as source, tempfile.SpooledTemporaryFile(_IN_MEMORY) as kept:
        digest = hashlib.sha256()
        while part := source.read(_PART):
            digest.update(part)
            kept.write(part)
        _compare(file, digest.hexdigest())
        kept.seek(0)
        yield cast("Any", kept)


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
        LedgerError: A file is missing or differs from its sha256, or one lies there that the
            record does not name, which whoever loads the folder would read as well.
    """
    folder = storage.local_path(ref.prefix.rstrip("/"))
    if folder is not None:
        named = {file.key for file in ref.files}
        if strange := [key for key in storage.list(ref.prefix) if key not in named]:
            raise LedgerError(
                f"{strange[0]} is not in the record of its folder: it was put there afterwards. "
                "Find out who did, and remove it"
            )
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
        _compare(ref, sha256_of(source))


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


class TableReader:
    """A table of the ledger whose content was checked."""

    def __init__(self, key: str, file: pq.ParquetFile) -> None:
        self._key = key
        self._file = file
        self.version = _version(file.schema_arrow)
        """Version of the schema that the table was written with."""

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Return the table, or some of its columns."""
        with _as_parquet(self._key):
            return self._file.read(columns=list(columns) if columns is not None else None)

    def groups(self, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """Yield it one row group at a time."""
        names = list(columns) if columns is not None else None
        for group in range(self._file.num_row_groups):
            with _as_parquet(self._key):
                table = self._file.read_row_group(group, columns=names)
            yield table


@contextmanager
def open_table(storage: Storage, file: File, schema: pa.Schema) -> Generator[TableReader]:
    """Open a table of the ledger.

    Raises:
        LedgerError: The file is missing, has another sha256 than its record says, or holds another
            kind of table.
    """
    with _checked(storage, file) as source:
        parquet = _open_parquet(file.key, source)
        _check_schema(file.key, parquet.schema_arrow, schema)
        yield TableReader(file.key, parquet)


def _open_parquet(key: str, source: BinaryIO) -> pq.ParquetFile:
    with _as_parquet(key):
        return pq.ParquetFile(source)


@contextmanager
def _as_parquet(key: str) -> Generator[None]:
    """Refuse what is no Parquet file, or a damaged one, in one sentence."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of this host; what Arrow says of a file's content has no number
        raise _broken(key, f"it is no Parquet file: {' '.join(str(error).split())}") from error


def read_table(
    storage: Storage, file: File, schema: pa.Schema, columns: Sequence[str] | None = None
) -> pa.Table:
    """Return a table of the ledger, or some of its columns; errors as `open_table`."""
    with open_table(storage, file, schema) as table:
        return table.read(columns)


def iter_tables(
    storage: Storage, file: File, schema: pa.Schema, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield a table of the ledger one row group at a time; errors as `open_table`."""
    with open_table(storage, file, schema) as table:
        yield from table.groups(columns)


def count_rows(storage: Storage, key: str) -> int:
    """Return the number of rows that a Parquet file's own footer states."""
    with storage.open(key) as source:
        return _open_parquet(key, source).metadata.num_rows


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
    for field in expected:
        at = found.get_field_index(field.name)
        if at < 0 and _version(found) == version:
            raise _broken(key, f"it has no column {field.name}, or two of them")
        if at >= 0 and found.field(at).type != field.type:
            kinds = f"{found.field(at).type}, expected {field.type}"
            raise _broken(key, f"its column {field.name} holds {kinds}")


def _version(schema: pa.Schema) -> int:
    found = (schema.metadata or {}).get(b"agl.schema_version", b"")
    return int(found) if found.isdigit() else -1
