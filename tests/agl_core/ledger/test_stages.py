import shutil

import pytest

from agl_core.errors import ConflictError, LedgerError
from agl_core.ledger.stages import IterationLedger
from agl_core.ledger.storage import Storage
from tests.builders import make_requests


def open_iteration(storage: Storage) -> IterationLedger:
    return IterationLedger(storage, "run", 3)


def test_a_finished_stage_has_a_record_with_its_outputs(storage: Storage):
    iteration = open_iteration(storage)
    with iteration.stage("adapt") as stage:
        stage.put_table("rows", make_requests(2))
        stage.values["count"] = 2
    record = open_iteration(storage).finished("adapt")
    assert record.file("rows").key == "runs/run/iterations/000003/adapt/a1/rows.parquet"
    assert record.file("rows").rows == 2
    assert record.values == {"count": 2}


def test_a_stage_that_raises_has_no_record_and_its_outputs_stay(storage: Storage):
    iteration = open_iteration(storage)
    with pytest.raises(RuntimeError, match="killed"), iteration.stage("adapt") as stage:
        stage.put_json("half", {})
        raise RuntimeError("killed")
    assert iteration.record("adapt") is None
    with iteration.stage("adapt") as stage:
        stage.put_json("half", {"second": True})
    record = iteration.finished("adapt")
    assert record.attempt == 2
    assert storage.exists("runs/run/iterations/000003/adapt/a1/half.json")


def test_a_stage_is_recorded_once(storage: Storage):
    iteration = open_iteration(storage)
    with iteration.stage("adapt"):
        pass
    with pytest.raises(ConflictError), iteration.stage("adapt"):
        pass


def test_an_unfinished_stage_is_an_error_that_names_it(storage: Storage):
    with pytest.raises(LedgerError, match=r"stages/update\.json"):
        open_iteration(storage).finished("update")


def test_scratch_folders_are_gone_after_the_stage(storage: Storage):
    with open_iteration(storage).stage("update") as stage:
        folder = stage.scratch("checkpoint")
        (folder / "x").write_text("x")
        ref = stage.put_folder("checkpoint", folder)
        assert stage.fetch_folder(ref).is_dir()
    assert not folder.exists()
    assert [file.key[-1] for file in ref.files] == ["x"]


def test_a_stage_is_recorded_though_its_scratch_folder_is_gone(storage: Storage):
    iteration = open_iteration(storage)
    with iteration.stage("adapt") as stage:
        shutil.rmtree(stage.local)
    assert iteration.finished("adapt").attempt == 1
