"""Datasets as JSON Lines, each line one task: read them, and publish immutable versions of them."""

import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

import fsspec

from agl_core.errors import ConfigError, ConflictError, LedgerError, StoreError
from agl_core.ledger.s3_access import ENVIRONMENT, S3Access
from agl_core.ledger.storage import Storage
from agl_core.store.json_text import encode
from agl_core.types.core import Dataset


def read_jsonl(uri: str, access: S3Access = ENVIRONMENT) -> list[str]:
    """Return each row as canonical JSON text.

    Args:
        uri: A local path, or any URI that fsspec reads, `s3://bucket/key` for one.
        access: How S3 is reached.

    Raises:
        ConfigError: The file is missing, cannot be read, is not UTF-8 or is empty, or a line is not
            JSON; the message names the line.
        LedgerError: It is a published version, and holds other rows than when it was published.
    """
    rows: list[str] = []
    text = _read_text(uri, access)
    _check_version(uri, text)
    # Not splitlines: a row may hold U+2028 and its like as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.dumps(json.loads(line), sort_keys=True))
        except json.JSONDecodeError as error:
            raise ConfigError(f"dataset {uri}, line {number} is not JSON: {error.msg}") from error
    if not rows:
        raise ConfigError(f"dataset {uri} has no rows")
    return rows


def rows_of(name: str, dataset: Dataset[Any]) -> list[str]:
    """Return the rows of a dataset in memory as those of a file are: canonical JSON text.

    Raises:
        ConfigError: A row is not JSON; the message names it.
    """
    rows: list[str] = []
    for number in range(len(dataset)):
        try:
            row = json.loads(encode(dataset[number], f"row {number} of {name}"))
        except StoreError as error:
            raise ConfigError(str(error)) from error
        rows.append(json.dumps(row, sort_keys=True))
    return rows


def publish_dataset(storage: Storage, name: str, uri: str, access: S3Access = ENVIRONMENT) -> str:
    """Keep a version of a dataset under its digest and return the version's URI.

    The same rows give the same version, whatever file they came from.

    Raises:
        ConfigError: The dataset cannot be used.
        LedgerError: The storage cannot be written.
    """
    return publish_rows(storage, name, read_jsonl(uri, access))


def publish_rows(storage: Storage, name: str, rows: Sequence[str]) -> str:
    """Keep rows of JSON text as a version of a dataset and return its URI.

    Raises:
        LedgerError: The storage cannot be written.
    """
    data = "".join(f"{row}\n" for row in rows).encode()
    key = f"datasets/{name}/{hashlib.sha256(data).hexdigest()[:16]}.jsonl"
    try:
        storage.write_once(key, data)
    except ConflictError:  # published before: the key is the digest of the content
        if (found := storage.read(key)) != data:
            _check_version(key, found.decode(errors="replace"))
    return f"{storage.uri}/{key}"


def _check_version(uri: str, text: str) -> None:
    """Compare the rows of a published version with its name; other files have no such name."""
    named = re.search(r"(?:^|/)datasets/[^/]+/([0-9a-f]{16})\.jsonl$", uri)
    found = hashlib.sha256(text.encode()).hexdigest()[:16]
    if named and named[1] != found:
        raise LedgerError(
            f"{uri} holds rows with digest {found}, it was published with {named[1]}: it was "
            "changed after that; publish the rows that you mean, which makes a version of its own"
        )


def _read_text(uri: str, access: S3Access) -> str:
    in_bucket = uri.startswith("s3://")
    options = access.options() if in_bucket else {}
    try:
        opened: Any = fsspec.open(uri, "r", encoding="utf-8", **options)
        with opened as file:
            return file.read()
    except FileNotFoundError as error:
        raise ConfigError(f"dataset {uri} does not exist") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"dataset {uri} is not UTF-8: {error}") from error
    except Exception as error:  # each of fsspec's file systems has its own
        reason = str(error)
        if in_bucket:
            from agl_core.ledger import s3_errors  # botocore takes a moment

            reason = s3_errors.reason(error, uri, access)
        raise ConfigError(f"dataset {uri} cannot be read: {reason}") from error
