"""A ledger whose disk is full, on a small file system that really is."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from agl_core.config import RunConfig
from agl_core.errors import LedgerError
from agl_core.ledger.run import open_run
from agl_core.ledger.verify import verify_run
from agl_core.serving.launch import ModelServer
from tests.conftest import small_run, train
from tests.deployments.test_cli import agl, write_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_api")]

DISK_BYTES = 32 << 20
FULL = "No space left on device. Make room there and start the run again"


class Disk:
    """A small file system."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._filler = root / "filler"

    def leave(self, free_bytes: int) -> None:
        """Fill it until so much is free."""
        self._filler.unlink(missing_ok=True)
        stat = os.statvfs(self.root)
        size = stat.f_bavail * stat.f_frsize - free_bytes
        with self._filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)

    def empty(self) -> None:
        """Make room."""
        self._filler.unlink()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    root = tmp_path / "disk"
    root.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "agl-test", str(root)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        pytest.skip(f"a full disk needs the right to mount a small file system: {reason}")
    try:
        yield Disk(root)
    finally:
        # Lazily: the engine still reads the policy that the run exported there.
        subprocess.run(["umount", "--lazy", str(root)], check=True)


def check_every_file_is_whole(config: RunConfig) -> None:
    ledger = open_run(config.ledger, config.run_id)
    files = [path for path in Path(config.ledger).rglob("*") if path.is_file()]
    assert not [path for path in files if path.name.startswith(".")]
    for path in files:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".parquet":
            pq.read_table(path)
    assert verify_run(ledger) == []


@pytest.mark.parametrize(
    ("free_bytes", "key"),
    [
        (120 << 10, "000000/"),  # in rollouts/, or in what follows where few chunks were flushed
        pytest.param(1 << 20, "000000/update/a1/checkpoint/", marks=pytest.mark.long),
        pytest.param(2500 << 10, "000001/update/a1/checkpoint/", marks=pytest.mark.long),
    ],
)
def test_a_run_whose_disk_fills_fails_says_why_and_goes_on_once_there_is_room(
    engine: ModelServer, disk: Disk, free_bytes: int, key: str
):
    config = small_run(engine.url, str(disk.root / "ledger"))
    disk.leave(free_bytes)
    with pytest.raises(LedgerError) as caught:
        train(config)
    message = str(caught.value)
    assert f"ledger {disk.root}/ledger: cannot write runs/small/iterations/{key}" in message
    assert FULL in message
    check_every_file_is_whole(config)

    disk.empty()
    assert train(config).committed() == 2
    check_every_file_is_whole(config)


def test_a_run_that_cannot_begin_leaves_nothing(disk: Disk, tmp_path: Path):
    disk.leave(0)
    config: dict[str, Any] = {"ledger": str(disk.root / "ledger")}
    done = agl("run", str(write_config(tmp_path, **config)))
    assert done.returncode == 2
    assert f"agl: ledger {disk.root}/ledger: cannot write runs/calculator/" in done.stderr
    assert FULL in done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(path.name for path in disk.root.iterdir()) == ["filler"]
