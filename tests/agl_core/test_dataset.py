import gzip
import json
from pathlib import Path

import boto3
import pytest

from agl_core.dataset import publish_dataset, read_jsonl
from agl_core.errors import ConfigError, LedgerError
from agl_core.ledger.storage import Storage, open_storage


def write(folder: Path, *lines: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_rows_are_canonical_and_blank_lines_are_skipped(tmp_path: Path):
    path = write(tmp_path, '{"b": 1, "a": 2}', "", '"text"')
    assert read_jsonl(path) == ['{"a": 2, "b": 1}', '"text"']


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (('{"a": 1}', "{broken"), "line 2 is not JSON"),
        (("", ""), "has no rows"),
    ],
)
def test_a_bad_dataset_is_one_clear_error(tmp_path: Path, lines: tuple[str, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        read_jsonl(write(tmp_path, *lines))


@pytest.mark.parametrize("uri", ["nowhere.jsonl", "nothing://x/y"])
def test_a_dataset_that_cannot_be_read_is_named(uri: str):
    with pytest.raises(ConfigError, match=f"dataset {uri} "):
        read_jsonl(uri)


def test_a_dataset_in_a_bucket_is_read(s3_uri: str):
    bucket = s3_uri.split("/")[2]
    boto3.client("s3").put_object(Bucket=bucket, Key="d/rows.jsonl", Body=b'{"a": 1}\n')
    assert read_jsonl(f"s3://{bucket}/d/rows.jsonl") == ['{"a": 1}']


def test_a_published_version_reads_back_and_is_kept_once(storage: Storage, tmp_path: Path):
    path = write(tmp_path, json.dumps({"b": 1, "a": 2}))
    first = publish_dataset(storage, "sums", path)
    again = publish_dataset(storage, "sums", write(tmp_path, '{"a": 2, "b": 1}', ""))
    assert first == again
    assert read_jsonl(first) == ['{"a": 2, "b": 1}']
    other = publish_dataset(storage, "sums", write(tmp_path, '{"a": 3}'))
    assert other != first
    assert len(storage.list("datasets/sums/")) == 2


def test_only_a_newline_ends_a_row(tmp_path: Path):
    text = "first\u2028second\u0085third"
    (tmp_path / "rows.jsonl").write_text(f'{{"q": "{text}"}}\r\n\n{{"q": 2}}', encoding="utf-8")
    first, second = read_jsonl(str(tmp_path / "rows.jsonl"))
    assert first == r'{"q": "first\u2028second\u0085third"}'
    assert second == '{"q": 2}'


def test_another_encoding_is_said(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes('{"q": "\u00e9"}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"rows\.jsonl is not UTF-8"):
        read_jsonl(str(tmp_path / "rows.jsonl"))


def test_a_published_version_that_was_changed_is_not_read(storage: Storage, tmp_path: Path):
    path = write(tmp_path, '{"a": 1}')
    uri = publish_dataset(storage, "sums", path)
    key = uri.removeprefix(f"{storage.uri}/")
    storage.replace(key, storage.read(key).replace(b"1", b"2"))
    for use in (lambda: read_jsonl(uri), lambda: publish_dataset(storage, "sums", path)):
        with pytest.raises(LedgerError, match=r"holds rows with digest [0-9a-f]{16}, it was publ"):
            use()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.decode().encode("utf-16"),  # as PowerShell writes files
        gzip.compress,
    ],
)
def test_a_bom_and_gzip_are_read(tmp_path: Path, wrap):
    path = tmp_path / "rows"
    path.write_bytes(wrap('{"a": "ü"}\r\n2\n'.encode()))
    assert read_jsonl(str(path)) == [json.dumps({"a": "ü"}), "2"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1\x00\xff", "is a Parquet file, and datasets are JSON Lines; convert it"),
        (gzip.compress(b"1\n" * 1000, mtime=0)[:-9], "is damaged gzip"),
        (b'"\xe9"\n', "is not UTF-8"),
        (b"\xff\xfe1", "is not UTF-8"),
        (b"[\n1,\n2]\n", "line 1 is not JSON: .*one JSON list, make a line of each item: jq"),
        (b'{\n"a": 1}\n', "line 1 is not JSON: .*over several lines, give each row a line: jq"),
        (b'1\n{"a": NaN}\n', "line 2 is not JSON: NaN"),
        (b"1\n" + b"9" * 5000, "line 2 is not JSON: Exceeds the limit"),
        (b"[" * 200_000, "line 1 is not JSON: it is nested too deeply"),
    ],
)
def test_what_is_no_json_lines_is_one_sentence(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "rows"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_jsonl(str(path))


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".", "-x", "a b", "a+b", "ä"])
def test_a_dataset_is_kept_in_a_folder_of_its_name_only(tmp_path: Path, name: str):
    path = write(tmp_path, "1")
    with pytest.raises(ConfigError, match="dataset name"):
        publish_dataset(open_storage(str(tmp_path / "ledger")), name, path)
    assert not (tmp_path / "ledger" / "datasets").exists()
