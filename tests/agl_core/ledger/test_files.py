import io
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import BaseModel

from agl_core.errors import LedgerError
from agl_core.ledger import files
from agl_core.ledger.files import Unrecorded
from agl_core.ledger.storage import Storage, open_storage
from agl_core.ledger.tables import OUTCOMES, REQUESTS, TRIPLETS
from tests.builders import make_requests


def test_a_table_reads_back_by_columns_and_by_row_groups(storage: Storage):
    ref = files.put_table(storage, "t.parquet", make_requests(5))
    assert ref.rows == 5
    assert files.read_table(storage, ref, REQUESTS, ["index"]).column_names == ["index"]
    assert pa.concat_tables(files.iter_tables(storage, ref, REQUESTS)).num_rows == 5
    assert files.count_rows(storage, ref.key) == 5


def test_another_kind_of_table_is_refused(storage: Storage):
    files.put_table(storage, "t.parquet", make_requests(1))
    with pytest.raises(LedgerError, match="holds b'requests' version 1, expected b'outcomes'"):
        files.read_table(storage, Unrecorded("t.parquet"), OUTCOMES)


def test_a_newer_version_is_refused(storage: Storage):
    schema = REQUESTS.with_metadata({b"agl.schema": b"requests", b"agl.schema_version": b"2"})
    files.put_table(storage, "t.parquet", make_requests(1).cast(schema))
    with pytest.raises(LedgerError, match="version 2, expected b'requests' version 1"):
        files.read_table(storage, Unrecorded("t.parquet"), REQUESTS)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda table: table.drop(["group"]), "it has no column group"),
        (lambda table: table.rename_columns({"row": "line"}), "it has no column row"),
        (
            lambda table: table.set_column(3, "row", table["row"].cast(pa.string())),
            "its column row holds string, expected int32",
        ),
    ],
)
def test_a_table_with_other_columns_than_its_schema_is_one_sentence(storage: Storage, spoil, words):
    spoiled = spoil(make_requests(2)).replace_schema_metadata(REQUESTS.metadata)
    ref = files.put_table(storage, "t.parquet", spoiled)
    with pytest.raises(LedgerError, match=words):
        files.read_table(storage, ref, REQUESTS)


def test_a_table_says_which_version_it_was_written_with(storage: Storage):
    old = TRIPLETS.with_metadata({b"agl.schema": b"triplets", b"agl.schema_version": b"2"})
    kept = {
        2: files.put_table(storage, "old.parquet", TRIPLETS.empty_table().cast(old)),
        3: files.put_table(storage, "new.parquet", TRIPLETS.empty_table()),
    }
    for version, ref in kept.items():
        with files.open_table(storage, ref, TRIPLETS) as table:
            assert table.version == version


class Model(BaseModel):
    number: int


def test_a_file_with_another_sha256_than_its_record_is_not_read(storage: Storage):
    table = files.put_table(storage, "t.parquet", make_requests(5))
    value = files.put_json(storage, "v.json", {"number": 1})
    other = files.put_table(storage, "other.parquet", make_requests(4))
    wrong = table.model_copy(update={"key": other.key})
    for read in (
        lambda: files.read_table(storage, wrong, REQUESTS, ["index"]),
        lambda: list(files.iter_tables(storage, wrong, REQUESTS)),
        lambda: files.read_model(storage, value.model_copy(update={"sha256": "0"}), Model),
        lambda: files.read_json(storage, value.model_copy(update={"sha256": "0"})),
    ):
        with pytest.raises(LedgerError, match=r"has sha256 [0-9a-f]+, its record says "):
            read()


@pytest.mark.parametrize(
    "content", [b"", b'{"number": ', b"[]", b'{"number": "x"}', b"\xff", b"[" * 9999]
)
def test_broken_json_is_one_sentence_that_names_the_file(storage: Storage, content: bytes):
    storage.write_once("v.json", content)
    with pytest.raises(LedgerError) as refused:
        files.read_model(storage, Unrecorded("v.json"), Model)
    assert str(refused.value).startswith("v.json cannot be used: it holds no Model (")
    assert "\n" not in str(refused.value)


def test_a_table_that_was_cut_short_is_one_sentence(storage: Storage):
    whole = files.table_bytes(make_requests(5))
    for content in (whole[:-9], whole[:4] + bytes(400) + whole[404:]):
        storage.replace("t.parquet", content)
        for read in (files.read_table, lambda *args: list(files.iter_tables(*args))):
            with pytest.raises(LedgerError, match=r"^t\.parquet cannot be used: it is no Parquet"):
                read(storage, Unrecorded("t.parquet"), REQUESTS)


def test_a_folder_comes_back_with_every_byte(storage: Storage, tmp_path: Path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a").write_bytes(b"x" * 3_000_000)
    (source / "sub" / "b").write_bytes(b"y")
    ref = files.put_folder(storage, "folder/", source)
    copy = files.fetch_folder(storage, ref, tmp_path / "cache")
    assert (copy / "a").read_bytes() == (source / "a").read_bytes()
    assert (copy / "sub" / "b").read_bytes() == b"y"


def test_a_copy_that_was_cut_short_is_not_taken_for_the_file(
    s3_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    storage = open_storage(s3_uri)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(b"x" * 3_000_000)
    ref = files.put_folder(storage, "folder/", tmp_path / "source")

    cut = _CutShort(storage.open("folder/a").read())
    with monkeypatch.context() as patch:
        patch.setattr(storage, "open", lambda key: cut)
        with pytest.raises(OSError, match="cut"):
            files.fetch_folder(storage, ref, tmp_path / "cache")
    copy = files.fetch_folder(storage, ref, tmp_path / "cache")
    assert (copy / "a").read_bytes() == b"x" * 3_000_000


class _CutShort(io.BytesIO):
    """Breaks in the second part."""

    def read(self, size: int | None = -1, /) -> bytes:
        if self.tell():
            raise OSError("cut")
        return super().read(size)


def test_a_changed_file_is_found_before_it_is_used(storage: Storage, tmp_path: Path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_bytes(b"x")
    ref = files.put_folder(storage, "folder/", tmp_path / "source")
    wrong = ref.files[0].model_copy(update={"sha256": "0" * 64})
    with pytest.raises(LedgerError, match=r"folder/a has sha256 .*, its record says 000"):
        files.fetch_folder(storage, ref.model_copy(update={"files": (wrong,)}), tmp_path / "cache")


def test_a_file_that_was_put_into_a_recorded_folder_is_never_loaded(
    storage: Storage, tmp_path: Path
):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_bytes(b"{}")
    ref = files.put_folder(storage, "policy/", tmp_path / "source")
    storage.write_once("policy/chat_template.jinja", b"Praise the user.")
    if storage.local_path("policy") is None:
        copy = files.fetch_folder(storage, ref, tmp_path / "cache")
        assert [path.name for path in copy.iterdir()] == ["config.json"]
    else:
        with pytest.raises(LedgerError, match=r"policy/chat_template\.jinja is not in the record"):
            files.fetch_folder(storage, ref, tmp_path / "cache")


def test_an_appended_table_holds_all_parts(tmp_path: Path):
    with files.table_writer(tmp_path / "t.parquet", REQUESTS) as writer:
        writer.append(make_requests(3))
        writer.append(make_requests(0))
        writer.append(make_requests(2))
    assert writer.rows == 5
