"""Digests of what a thing means, apart from how it is stored."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def json_digest(value: Any) -> str:
    """Return the sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def table_digest(table: pa.Table, columns: Sequence[str]) -> str:
    """Return the sha256 of some columns' values, in row order.

    Compression, row groups, encodings and chunking do not change it; a null and an empty value
    differ.
    """
    digest = hashlib.sha256()
    for name in columns:
        array = table.column(name).combine_chunks()
        digest.update(f"{name}:{_type_name(array.type)}:{len(array)};".encode())
        _update(digest, array)
    return "sha256:" + digest.hexdigest()


def _type_name(kind: Any) -> str:
    """Return a type's name; Parquet and Arrow call the items of a list differently."""
    return f"list<{_type_name(kind.value_type)}>" if pa.types.is_list(kind) else str(kind)


def _update(digest: Any, array: Any) -> None:
    if isinstance(array, pa.ChunkedArray):  # combine_chunks of an empty column may stay chunked
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.nulls(0, array.type)
    digest.update(np.packbits(array.is_valid().to_numpy(zero_copy_only=False)).tobytes())
    if pa.types.is_list(array.type):
        lengths = array.value_lengths().fill_null(0)
        digest.update(lengths.to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        _update(digest, array.flatten())
    elif pa.types.is_struct(array.type):
        for field in array.flatten():
            _update(digest, field)
    elif pa.types.is_string(array.type) or pa.types.is_binary(array.type):
        values = array.cast(pa.large_binary()).fill_null(b"")
        digest.update(
            pc.binary_length(values).to_numpy(zero_copy_only=False).astype("<i8").tobytes()
        )
        digest.update(b"".join(values.to_pylist()))
    else:
        filled = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
        digest.update(np.ascontiguousarray(filled.to_numpy(zero_copy_only=False)).tobytes())
