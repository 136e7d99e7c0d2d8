import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from agl_core.scratch import LockedFolder, scratch_folder

LEAVE = """
import os, signal
from agl_core.scratch import scratch_folder
with scratch_folder("update") as folder:
    (folder / "weights").write_text("x")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_there_while_it_is_used(temporary: Path):
    with scratch_folder("update") as first, scratch_folder("update") as second:
        assert first != second
        assert sorted(temporary.iterdir()) == sorted([first, second])
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path):
    (temporary / "agl-of-someone-else").mkdir()
    subprocess.run([sys.executable, "-c", LEAVE], check=False)
    (left,) = temporary.glob("agl-scratch-update-*/weights")
    with scratch_folder("update"):
        assert not left.exists()
    assert [path.name for path in temporary.iterdir()] == ["agl-of-someone-else"]


LEAVE_HERE = """
import os, signal, sys
from pathlib import Path
from agl_core.scratch import LockedFolder
folder = LockedFolder("engine-", Path(sys.argv[1]))
(folder.path / "token").write_text("secret")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_a_locked_folder_to_the_next_of_its_name_only(tmp_path: Path):
    subprocess.run([sys.executable, "-c", LEAVE_HERE, str(tmp_path)], check=False)
    (left,) = tmp_path.glob("engine-*/token")
    held = LockedFolder("policy-", tmp_path)
    assert left.exists()
    new = LockedFolder("engine-", tmp_path)
    assert not left.exists()
    assert new.path.stat().st_mode & 0o777 == 0o700
    other = LockedFolder("engine-", tmp_path)
    assert new.path.exists()
    for folder in (held, new, other, other):
        folder.cleanup()
    assert list(tmp_path.iterdir()) == []
