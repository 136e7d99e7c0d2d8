"""What a run is made from, as its record says."""

import re
import shutil
from pathlib import Path

import pytest

from agl_core.errors import ConfigError
from agl_core.identity import base_model
from tests.conftest import CALCULATOR


def test_a_model_card_that_is_not_utf8_still_says_its_licence(tmp_path: Path):
    folder = tmp_path / "policy"
    shutil.copytree(CALCULATOR / "policy", folder)
    card = "---\nauthor: J\u00f6rg\nlicense: mit\n---\nF\u00fcr alle\n"
    (folder / "README.md").write_bytes(card.encode("latin-1"))
    assert base_model(str(folder)).licence == "mit"


def test_a_hub_name_as_model_folder_is_told_how_to_be_one():
    with pytest.raises(ConfigError, match=r"hf download Qwen/Qwen2.5-0.5B --local-dir FOLDER"):
        base_model("Qwen/Qwen2.5-0.5B")


def test_a_folder_that_is_no_hub_name_only_does_not_exist(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"none does not exist$"):
        base_model(str(tmp_path / "none"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(CALCULATOR / "policy", tmp_path / "my model"))


@pytest.mark.parametrize("name", ["notes (old).txt", "a+b.json", "résumé.md", "100%.txt"])
def test_a_file_that_no_ledger_keeps_is_refused_before_the_run_begins(folder: Path, name: str):
    (folder / name).touch()
    message = f"model folder {folder}: rename or remove the file {name!r}; each policy is kept"
    with pytest.raises(ConfigError, match=re.escape(message)):
        base_model(str(folder))


def test_files_that_no_policy_takes_along_may_have_any_name(folder: Path):
    before = base_model(str(folder))
    (folder / ".git attributes").touch()
    (folder / "old copy.bin").touch()
    (folder / "a folder").mkdir()
    assert base_model(str(folder)) == before
