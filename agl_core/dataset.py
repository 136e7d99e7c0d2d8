"""Datasets as JSON Lines, each line one task: read them, and publish immutable versions of them."""

import codecs
import contextlib
import gzip
import hashlib
import json
import re
import zlib
from collections.abc import Sequence
from typing import Any

import fsspec

from agl_core.errors import ConfigError, ConflictError, LedgerError, StoreError
from agl_core.ledger.s3_access import ENVIRONMENT, S3Access
from agl_core.ledger.storage import Storage
from agl_core.store.json_text import encode
from agl_core.text_formats import parse_json
from agl_core.types.core import Dataset

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GZIP, _PARQUET = b"\x1f\x8b", b"PAR1"
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How Windows' PowerShell begins what it writes to a file."""


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
            rows.append(json.dumps(parse_json(line), sort_keys=True))
        except ValueError as error:
            raise ConfigError(
                f"dataset {uri}, line {number} is not JSON: {error}{_advice(text)}"
            ) from error
    if not rows:
        raise ConfigError(f"dataset {uri} has no rows")
    return rows


def _advice(text: str) -> str:
    """Return what to do with a file that is JSON as a whole, and not in each line."""
    with contextlib.suppress(ValueError):
        if isinstance(parse_json(text), list):
            return "; the file is one JSON list, make a line of each item: jq -c '.[]'"
        return "; the file is one JSON value over several lines, give each row a line: jq -c ."
    return ""


def rows_of(name: str, dataset: Dataset[Any]) -> list[str]:
    """Return the rows of a dataset in memory as those of a file are: canonical JSON text.

    Raises:
        ConfigError: A row is not JSON; the message names it.
    """
    rows: list[str] = []
    for number in range(len(dataset)):
        try:
            row = parse_json(encode(dataset[number], f"row {number} of {name}"))
        except StoreError as error:
            raise ConfigError(str(error)) from error
        except ValueError as error:
            raise ConfigError(f"row {number} of {name} is not JSON: {error}") from error
        rows.append(json.dumps(row, sort_keys=True))
    return rows


def check_dataset_name(name: str) -> None:
    """Return if versions of a dataset can be kept under its name.

    Raises:
        ConfigError: It would be no single folder of the ledger.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"dataset name {name!r}: use up to 100 letters, digits, dashes, dots and underscores, "
            "a letter or a digit first"
        )


def publish_dataset(storage: Storage, name: str, uri: str, access: S3Access = ENVIRONMENT) -> str:
    """Keep a version of a dataset under its digest and return the version's URI.

    The same rows give the same version, whatever file they came from.

    Raises:
        ConfigError: The dataset cannot be used.
        LedgerError: The storage cannot be written.
    """
    check_dataset_name(name)
    return publish_rows(storage, name, read_jsonl(uri, access))


def publish_rows(storage: Storage, name: str, rows: Sequence[str]) -> str:
    """Keep rows of JSON text as a version of a dataset and return its URI.

    Raises:
        ConfigError: The name cannot be used.
        LedgerError: The storage cannot be written.
    """
    check_dataset_name(name)
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
        opened: Any = fsspec.open(uri, "rb", **options)
        with opened as file:
            content: bytes = file.read()
    except FileNotFoundError as error:
        raise ConfigError(f"dataset {uri} does not exist") from error
    except Exception as error:  # each of fsspec's file systems has its own
        reason = str(error)
        if in_bucket:
            from agl_core.ledger import s3_errors  # botocore takes a moment

            reason = s3_errors.reason(error, uri, access)
        raise ConfigError(f"dataset {uri} cannot be read: {reason}") from error
    return _decode(uri, content)


def _decode(uri: str, content: bytes) -> str:
    """Return the text of a dataset, which may be compressed by gzip and begin with a BOM."""
    if content.startswith(_PARQUET):
        raise ConfigError(
            f"dataset {uri} is a Parquet file, and datasets are JSON Lines; convert it: "
            f"pandas.read_parquet({uri!r}).to_json('rows.jsonl', orient='records', lines=True)"
        )
    try:
        if content.startswith(_GZIP):
            content = gzip.decompress(content)
        encoding = "utf-16" if content.startswith(_UTF16) else "utf-8-sig"
        return content.decode(encoding).replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"dataset {uri} is not UTF-8: {error}; is it text, and of one encoding? iconv converts"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"dataset {uri} is damaged gzip: {error}") from error
