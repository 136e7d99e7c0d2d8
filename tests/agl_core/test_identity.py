import re
import shutil
from pathlib import Path

import pytest

from agl_core.errors import ConfigError
from agl_core.identity import base_model
from tests.conftest import CALCULATOR


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
