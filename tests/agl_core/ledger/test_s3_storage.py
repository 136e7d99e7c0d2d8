"""What only S3 can do: lose replies, ignore conditions, upload in parts, refuse credentials."""

import logging
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
import pyarrow.parquet as pq
import pytest

from agl_core.config import S3Settings
from agl_core.errors import ConflictError, LedgerError, LedgerUnreachableError, TransientError
from agl_core.ledger import files, s3_storage
from agl_core.ledger.s3_access import S3Access
from agl_core.ledger.s3_storage import S3Storage
from agl_core.ledger.stages import IterationLedger
from tests.s3_proxy import (
    Behaviour,
    Forward,
    Reply,
    Request,
    S3Proxy,
    fails_for,
    honest,
    ignores_conditions,
    ignores_conditions_of_multipart,
    loses_reply,
    names_no_condition,
    refuses_conditions,
    refuses_multipart,
    s3_proxy,
)

PART = 5 << 20


@pytest.fixture
def proxy(s3_server: str, s3_uri: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Proxy]:
    with s3_proxy(s3_server) as running:
        yield running


def through(proxy: S3Proxy, uri: str, behave: Behaviour = honest, **options: Any) -> S3Storage:
    proxy.behave = behave
    return S3Storage(uri, S3Access(S3Settings(endpoint_url=proxy.url)), **options)


def impatient(storage: Any) -> S3Storage:
    """Let a storage try each request for a moment, not for half a minute."""
    storage._fs.patience_seconds = 0.1
    return storage


@pytest.fixture
def large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(s3_storage, "_PART_BYTES", PART)
    path = tmp_path / "large"
    path.write_bytes(b"a" * PART + b"b" * PART + b"c")
    return path


def uploads(uri: str) -> list[Any]:
    return boto3.client("s3").list_multipart_uploads(Bucket=uri.split("/")[2]).get("Uploads", [])


def test_opening_asks_nothing_and_reading_and_looking_ask_once(proxy: S3Proxy, s3_uri: str):
    storage = through(proxy, s3_uri)
    assert proxy.requests == []
    storage.write_once("a/k", b"one")
    storage.read("a/k")
    storage.exists("a/k")
    storage.exists("a/other")
    storage.list("nothing/")
    assert proxy.operations() == ["PUT", "GET", "HEAD", "HEAD", "GET"]


def test_a_folder_is_not_a_key(s3_uri: str):
    storage = S3Storage(s3_uri)
    storage.write_once("a/k", b"one")
    assert not storage.exists("a")


@pytest.mark.parametrize("behave", [honest, names_no_condition])
def test_a_probe_finds_that_conditions_are_honoured(
    proxy: S3Proxy, s3_uri: str, behave: Behaviour, caplog: pytest.LogCaptureFixture
):
    storage = through(proxy, s3_uri, behave)
    with caplog.at_level(logging.INFO):
        assert storage.probe()
        assert storage.probe()
    in_parts = ["POST uploads", "PUT partNumber uploadId", "POST uploadId", "DELETE uploadId"]
    assert proxy.operations() == ["PUT", "PUT", *in_parts, "PUT", *in_parts]
    assert storage.conditional_multipart
    assert uploads(s3_uri) == []
    assert f"ledger {s3_uri}: can be written; conditional put is honoured" in caplog.text
    storage.write_once("k", b"one")
    with pytest.raises(ConflictError, match="keys are written once"):
        storage.write_once("k", b"two")


@pytest.mark.parametrize("then", [honest, refuses_multipart])
def test_a_store_that_replaces_keys_by_multipart_gets_keys_that_no_other_try_has(
    proxy: S3Proxy, s3_uri: str, large_file: Path, then: Behaviour, caplog: pytest.LogCaptureFixture
):
    storage = through(proxy, s3_uri, ignores_conditions_of_multipart(then))
    with caplog.at_level(logging.INFO):
        assert storage.probe()
    assert not storage.conditional_multipart
    assert "ignores conditions of multipart uploads" in caplog.text
    assert uploads(s3_uri) == []

    # The one that was paused and the one that took over found the same tries before them.
    if then is honest:
        iterations = [IterationLedger(storage, "r", 0) for _ in range(2)]
        with pytest.raises(ConflictError), iterations[0].stage("update") as paused:
            with iterations[1].stage("update") as second:
                state = second.put_json("state", 2)
                ref = files.put_file(storage, f"{second.prefix}weights", large_file)
            large_file.write_bytes(b"x" * (2 * PART + 1))
            files.put_file(storage, f"{paused.prefix}weights", large_file)
            assert files.sha256_of_bytes(storage.read(ref.key)) == ref.sha256
            assert iterations[0]._next_attempt("update") == 2
            assert iterations[0].finished("update").file("state") == state


def test_a_large_record_goes_in_one_request(proxy: S3Proxy, s3_uri: str, large_file: Path):
    storage = through(proxy, s3_uri)
    storage.write_once("k", large_file.read_bytes())
    assert proxy.operations() == ["PUT"]
    assert storage.read("k") == large_file.read_bytes()


@pytest.mark.parametrize("behave", [ignores_conditions, refuses_conditions])
def test_a_store_without_conditions_is_told_and_looked_at_before_each_write(
    proxy: S3Proxy, s3_uri: str, behave: Behaviour, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    storage = through(proxy, s3_uri, behave)
    assert not storage.probe()
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "conditional put is NOT honoured" in warning
    assert "run each run in one place only" in warning
    for opened in (storage, through(proxy, s3_uri, behave, conditional_put=False)):
        key = f"k{id(opened)}"
        proxy.requests.clear()
        opened.write_once(key, b"one")
        assert proxy.operations() == ["HEAD", "PUT"]
        assert not any(request.conditional for request in proxy.requests)
        (tmp_path / "file").write_bytes(b"two")
        with pytest.raises(ConflictError):
            opened.put_file(key, tmp_path / "file")
        assert opened.read(key) == b"one"


def test_a_write_whose_reply_was_lost_is_no_conflict(proxy: S3Proxy, s3_uri: str):
    storage = through(proxy, s3_uri, loses_reply("PUT"))
    storage.write_once("k", b"one")
    assert proxy.operations() == ["PUT", "PUT", "HEAD"]
    assert storage.read("k") == b"one"
    with pytest.raises(ConflictError):
        storage.write_once("k", b"one")


def test_a_write_whose_every_reply_was_lost_is_found_done(proxy: S3Proxy, s3_uri: str):
    storage = impatient(through(proxy, s3_uri, loses_reply("PUT", times=1000)))
    storage.write_once("k", b"one")
    assert storage.read("k") == b"one"


def test_equal_bytes_of_another_writer_are_a_conflict_though_replies_are_lost(
    proxy: S3Proxy, s3_uri: str
):
    proxy.behave = loses_reply("PUT", times=2)
    storages = [through(proxy, s3_uri, proxy.behave) for _ in range(4)]

    def write(storage: S3Storage) -> bool:
        try:
            storage.write_once("claims/0001", b"the same")
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(write, storages)) == 1


def test_a_large_file_goes_in_parts_and_once(proxy: S3Proxy, s3_uri: str, large_file: Path):
    storage = through(proxy, s3_uri)
    storage.put_file("large", large_file)
    create, complete, part = "POST uploads", "POST uploadId", "PUT partNumber uploadId"
    assert sorted(proxy.operations()) == [complete, create, part, part, part]
    assert [r.operation for r in proxy.requests if r.conditional] == [complete]
    assert storage.read("large") == large_file.read_bytes()

    large_file.write_bytes(large_file.read_bytes()[::-1])
    with pytest.raises(ConflictError):
        storage.put_file("large", large_file)
    assert storage.read("large")[:1] == b"a"
    assert uploads(s3_uri) == []

    with pytest.raises(ConflictError):
        storage.write_once("large", large_file.read_bytes())
    assert uploads(s3_uri) == []


@pytest.mark.parametrize("operation", ["PUT partNumber uploadId", "POST uploadId"])
def test_a_failed_upload_leaves_no_key_and_no_parts(
    proxy: S3Proxy, s3_uri: str, large_file: Path, operation: str
):
    storage = through(proxy, s3_uri, fails_for(operation, 403, "AccessDenied"))
    with pytest.raises(LedgerError, match="cannot write large: access denied"):
        storage.put_file("large", large_file)
    assert "DELETE uploadId" in proxy.operations()
    assert not storage.exists("large")
    assert storage.list("") == []
    assert uploads(s3_uri) == []


@pytest.mark.parametrize(("status", "code"), [(404, "NoSuchUpload"), (412, "PreconditionFailed")])
def test_an_upload_whose_last_reply_was_lost_is_no_conflict(
    proxy: S3Proxy, s3_uri: str, large_file: Path, status: int, code: str
):
    """The server of the tests completes an upload twice; others say that it is gone, or done."""
    behave = loses_reply("POST uploadId", then=fails_for("POST uploadId", status, code))
    storage = through(proxy, s3_uri, behave)
    storage.put_file("large", large_file)
    assert storage.read("large") == large_file.read_bytes()
    assert uploads(s3_uri) == []


def test_a_lost_connection_is_worth_another_try_also_in_the_middle_of_a_table(
    proxy: S3Proxy, s3_uri: str, tmp_path: Path
):
    storage = impatient(through(proxy, s3_uri))
    storage.write_once("k", b"not a table")
    source = storage.open("k")
    proxy.behave = lambda request, forward: None
    for act in (
        lambda: pq.ParquetFile(source),
        lambda: storage.read("k"),
        lambda: storage.exists("k"),
        lambda: storage.write_once("new", b""),
    ):
        with pytest.raises(LedgerUnreachableError, match=f"^ledger {s3_uri}: cannot ") as raised:
            act()
        assert isinstance(raised.value, TransientError)
        assert isinstance(raised.value, LedgerError)


@pytest.mark.parametrize(
    ("status", "code"), [(503, "SlowDown"), (409, "ConditionalRequestConflict")]
)
def test_a_store_that_asks_to_come_again_is_worth_another_try(
    proxy: S3Proxy, s3_uri: str, status: int, code: str
):
    storage = impatient(through(proxy, s3_uri, fails_for("PUT", status, code)))
    with pytest.raises(LedgerUnreachableError, match="as the test wants it"):
        storage.write_once("k", b"one")


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (403, "AccessDenied", "access denied with the credentials from the environment (AWS_*); "),
        (403, "InvalidAccessKeyId", "refused the credentials from the environment (AWS_*) (Inva"),
        (404, "NoSuchBucket", "there is no bucket ledger-"),
    ],
)  # fmt: skip
def test_what_no_other_try_can_mend_is_one_sentence(
    proxy: S3Proxy, s3_uri: str, status: int, code: str, message: str
):
    storage = through(proxy, s3_uri, fails_for("PUT", status, code))
    with pytest.raises(LedgerError, match=re.escape(message)) as raised:
        storage.probe()
    assert not isinstance(raised.value, TransientError)


def test_no_credentials_at_all_are_one_sentence(s3_uri: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    with pytest.raises(
        LedgerError, match=r"no credentials in the environment \(AWS_\*\); set AWS_"
    ):
        S3Storage(s3_uri).probe()


@pytest.mark.parametrize("status", [503, 0])
def test_a_store_that_is_away_is_asked_again_until_the_deadline_and_no_longer(
    proxy: S3Proxy, s3_uri: str, status: int
):
    storage: Any = through(proxy, s3_uri)
    storage.write_once("k", b"one")
    storage._fs.patience_seconds = 1.5

    def away(request: Request, forward: Forward) -> Reply | None:
        return Reply(status, [], b"") if status else None

    proxy.behave = away
    for act in (lambda: storage.read("k"), lambda: storage.exists("k"), lambda: storage.list("a/")):
        proxy.requests.clear()
        started = time.monotonic()
        with pytest.raises(LedgerUnreachableError):
            act()
        assert time.monotonic() - started < 20.0
        assert 2 <= len(proxy.requests) <= 50


def test_a_part_that_was_refused_is_sent_again_and_no_other(
    proxy: S3Proxy, s3_uri: str, large_file: Path
):
    left = [1]

    def refuses_a_part(request: Request, forward: Forward) -> Reply:
        if "partNumber=2" in request.target and left:
            left.clear()
            return fails_for("PUT partNumber uploadId", 503, "SlowDown")(request, forward)
        return forward(request)

    storage = through(proxy, s3_uri, refuses_a_part)
    storage.put_file("large", large_file)
    assert storage.read("large") == large_file.read_bytes()
    assert proxy.operations().count("PUT partNumber uploadId") == 4
