import resource
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agl_core.errors import ConfigError, ConflictError, LedgerError
from agl_core.ledger.s3_requests import PatientFileSystem
from agl_core.ledger.storage import Storage, open_storage
from tests import s3_servers


def test_a_written_key_reads_back(storage: Storage):
    storage.write_once("a/b.json", b"one")
    assert storage.read("a/b.json") == b"one"
    assert storage.exists("a/b.json")
    with storage.open("a/b.json") as source:
        source.seek(1)
        assert source.read() == b"ne"


def test_a_second_write_is_refused_and_the_first_stays(storage: Storage):
    storage.write_once("k", b"one")
    with pytest.raises(ConflictError, match="k exists; keys are written once"):
        storage.write_once("k", b"two")
    assert storage.read("k") == b"one"


def test_a_file_is_refused_where_its_key_exists(storage: Storage, tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"from a file")
    storage.put_file("f", path)
    path.write_bytes(b"changed")
    with pytest.raises(ConflictError):
        storage.put_file("f", path)
    assert storage.read("f") == b"from a file"


def test_of_many_writers_at_once_one_wins(storage: Storage):
    if not storage.conditional_put:
        pytest.skip("the server honours no condition")
    barrier = threading.Barrier(16)

    def write(number: int) -> bool:
        barrier.wait()
        try:
            storage.write_once("contested", str(number).encode())
        except ConflictError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        won = [number for number, ok in enumerate(pool.map(write, range(16))) if ok]
    assert [str(number).encode() for number in won] == [storage.read("contested")]


def test_list_gives_all_keys_below_a_prefix_sorted(storage: Storage):
    for key in ("p/b", "p/a/c", "q/a", "pp/x"):
        storage.write_once(key, b"")
    assert storage.list("p/") == ["p/a/c", "p/b"]
    assert storage.list("nothing/") == []


def test_a_missing_key_is_an_error_that_names_it(storage: Storage):
    with pytest.raises(LedgerError, match="cannot read missing"):
        storage.read("missing")
    assert not storage.exists("missing")


@pytest.mark.parametrize(
    "key", ["", "/a", "a//b", "../a", "a/.hidden", "a b", "a+b", "a%2Fb", "ä", "a\n"]
)
def test_a_key_that_leaves_the_ledger_or_needs_percents_is_refused(storage: Storage, key: str):
    with pytest.raises(ValueError, match="bad ledger key"):
        storage.write_once(key, b"")


@pytest.mark.skipif(s3_servers.NAME == "s3rver", reason="it honours no condition")
def test_both_backends_refuse_second_writes_themselves(storage: Storage):
    assert storage.conditional_put


def test_another_scheme_is_refused():
    with pytest.raises(ConfigError, match=r"use a local folder or s3://"):
        open_storage("gs://bucket/x")


@pytest.mark.skipif(s3_servers.NAME == "seaweedfs", reason="it makes buckets as they are named")
def test_a_missing_bucket_is_one_clear_error(s3_uri: str):
    with pytest.raises(
        LedgerError, match="s3://no-such-bucket/x: cannot write there: there is no bucket no-such"
    ):
        open_storage("s3://no-such-bucket/x").probe()


def test_a_failed_local_write_leaves_nothing_behind(tmp_path: Path):
    storage = open_storage(str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(LedgerError, match="cannot write folder/big: File too large"):
            storage.write_once("folder/big", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_ledger_is_one_clear_error(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LedgerError, match="cannot write a: File exists"):
        open_storage(str(tmp_path / "file")).write_once("a", b"")


def test_a_local_file_has_the_mode_that_the_users_mask_allows(local_storage: Storage):
    local_storage.write_once("a/b", b"x")
    path = local_storage.local_path("a/b")
    assert path is not None
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def test_a_bucket_that_does_not_answer_is_a_ledger_error(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    storage: Any = open_storage(s3_uri)
    fs = PatientFileSystem.of({"endpoint_url": "http://127.0.0.1:9"})
    fs.patience_seconds = 0.1
    monkeypatch.setattr(storage, "_fs", fs)
    (tmp_path / "file").write_bytes(b"x")
    for act in (
        lambda: storage.exists("a"),
        lambda: storage.list("a/"),
        lambda: storage.read("a"),
        lambda: storage.write_once("a", b"x"),
        lambda: storage.put_file("a", tmp_path / "file"),
    ):
        with pytest.raises(LedgerError, match=f"^ledger {s3_uri}: cannot "):
            act()
