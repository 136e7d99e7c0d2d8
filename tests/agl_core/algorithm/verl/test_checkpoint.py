"""Checkpoints are read without running what they hold."""

import io
import os
import pickle
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from agl_core.algorithm.verl import checkpoint
from agl_core.errors import TrainerError


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def legacy(value: object) -> bytes:
    """The bytes of torch's old format."""
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def current(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("written", [current, legacy, pickle.dumps])
def test_a_pickle_bomb_is_refused_and_not_run(written: Callable[[object], bytes], tmp_path: Path):
    path = tmp_path / "extra_state_world_size_1_rank_0.pt"
    path.write_bytes(written({"rng": Bomb(tmp_path / "exploded"), "lr_scheduler": None}))
    with pytest.raises(TrainerError, match="holds more than tensors and numbers") as caught:
        checkpoint.read(path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "exploded").exists()


def test_the_bomb_of_these_tests_explodes_where_it_is_unpickled(tmp_path: Path):
    torch.load(io.BytesIO(current(Bomb(tmp_path / "exploded"))), weights_only=False)
    assert (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 cut off", current({"a": torch.ones(9)})[:-70]]
)
def test_a_damaged_file_is_one_sentence(content: bytes, tmp_path: Path):
    path = tmp_path / "model_world_size_1_rank_0.pt"
    path.write_bytes(content)
    with pytest.raises(TrainerError, match=r"checkpoint file .*model_world") as caught:
        checkpoint.read(path)
    assert "\n" not in str(caught.value)


def test_the_states_of_all_random_generators_come_back(tmp_path: Path):
    states = {
        "cpu": torch.get_rng_state(),
        "numpy": np.random.get_state(legacy=True),
        "random": random.getstate(),
    }
    (tmp_path / "rng").write_bytes(current(states))
    found = checkpoint.read(tmp_path / "rng")
    assert torch.equal(found["cpu"], states["cpu"])
    assert found["random"] == states["random"]
    assert np.array_equal(found["numpy"][1], states["numpy"][1])
    assert found["numpy"][2:] == states["numpy"][2:]


def test_no_lock_files_stay_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """VERL's own function makes them."""
    from verl.utils.fs import local_mkdir_safe

    class Worker:
        def save_checkpoint(self, folder: str, global_step: int) -> None:
            local_mkdir_safe(folder)
            local_mkdir_safe(os.path.join(folder, "huggingface"))

    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    checkpoint.save(Worker(), tmp_path / "checkpoint", 1)
    assert (tmp_path / "checkpoint" / "huggingface").is_dir()
    assert list(temporary.iterdir()) == []
