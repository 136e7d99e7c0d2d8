import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from agl_core.algorithm.verl.export import write_policy
from agl_core.errors import ConfigError
from agl_core.serving.vllm.policy_middleware import _shapes
from agl_core.serving.weights import (
    chat_template_digest,
    tokenizer_digest,
    weight_files,
    weights_digest,
)

TENSORS = {
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "a": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "empty": torch.zeros(0),
}


def digest_of(folder: Path, *files: dict[str, torch.Tensor]) -> str:
    folder.mkdir(parents=True)
    for index, tensors in enumerate(files):
        save_file(tensors, folder / f"model-{index}.safetensors")
    return weights_digest(folder)


def test_file_split_makes_no_difference(tmp_path: Path) -> None:
    first, rest = {"b": TENSORS["b"]}, {"a": TENSORS["a"], "empty": TENSORS["empty"]}
    assert digest_of(tmp_path / "one", TENSORS) == digest_of(tmp_path / "two", first, rest)


def test_metadata_makes_no_difference(tmp_path: Path) -> None:
    plain = digest_of(tmp_path / "plain", TENSORS)
    save_file(TENSORS, tmp_path / "plain" / "model-0.safetensors", metadata={"format": "pt"})
    assert weights_digest(tmp_path / "plain") == plain


@pytest.mark.parametrize(
    "changed",
    [
        {"b": TENSORS["b"] + torch.tensor([[0, 0, 0], [0, 0, 1e-3]])},
        {"b": TENSORS["b"].reshape(3, 2)},
        {"b": TENSORS["b"].to(torch.float16)},
        {"c": torch.zeros(0)},
    ],
    ids=["value", "shape", "dtype", "name"],
)
def test_one_change_changes_it(tmp_path: Path, changed: dict[str, torch.Tensor]) -> None:
    original = digest_of(tmp_path / "original", TENSORS)
    assert digest_of(tmp_path / "changed", {**TENSORS, **changed}) != original


def test_saving_a_loaded_policy_keeps_every_digest(policy_folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(policy_folder).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(policy_folder).save_pretrained(tmp_path)
    assert weights_digest(tmp_path) == weights_digest(policy_folder)
    assert chat_template_digest(tmp_path) == chat_template_digest(policy_folder)


def test_no_weights_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors file$"):
        weights_digest(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match=r"file, but pytorch_model\.bin: save the model again"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"model\.safetensors is no file, or a link to one that"):
        weights_digest(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, -1])
def test_cut_file_is_an_error(tmp_path: Path, keep: int) -> None:
    digest_of(tmp_path / "whole", TENSORS)
    content = (tmp_path / "whole" / "model-0.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:keep])
    with pytest.raises(ConfigError):
        weights_digest(tmp_path)


def test_broken_header_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((9).to_bytes(8, "little") + b'{"a": {}}')
    with pytest.raises(ConfigError, match="broken safetensors header"):
        weights_digest(tmp_path)


def test_tensor_in_two_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="more than one file"):
        digest_of(tmp_path / "twice", TENSORS, TENSORS)


def test_tokenizer_digest_follows_its_files(policy_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(policy_folder / name, tmp_path / name)
    before = tokenizer_digest(tmp_path)
    assert before == tokenizer_digest(policy_folder)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert tokenizer_digest(tmp_path) != before


def test_no_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer file"):
        tokenizer_digest(tmp_path)


def test_template_counts_the_same_as_file_or_in_the_config(tmp_path: Path) -> None:
    assert chat_template_digest(tmp_path) is None
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    in_config = chat_template_digest(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert chat_template_digest(tmp_path) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert chat_template_digest(tmp_path) == in_config is not None


@pytest.mark.parametrize("text", ["[]", "{"])
def test_config_that_is_no_object_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ConfigError):
        chat_template_digest(tmp_path)


def test_weights_does_not_import_torch() -> None:
    code = "import sys, agl_core.serving.weights; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def indexed(folder: Path) -> Path:
    """A policy of two files with an index, and a second copy of the weights beside them."""
    parts = {"model-1.safetensors": ["a", "empty"], "model-2.safetensors": ["b"]}
    folder.mkdir()
    for name, tensors in parts.items():
        save_file({t: TENSORS[t] for t in tensors}, folder / name)
    where = {tensor: name for name, tensors in parts.items() for tensor in tensors}
    index = json.dumps({"metadata": {}, "weight_map": where})
    (folder / "model.safetensors.index.json").write_text(index)
    save_file({"other": TENSORS["b"]}, folder / "consolidated.safetensors")
    return folder


def test_the_index_says_which_files_are_the_policy(tmp_path: Path) -> None:
    folder = indexed(tmp_path / "indexed")
    assert [file.name for file in weight_files(folder)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    assert weights_digest(folder) == digest_of(tmp_path / "plain", TENSORS)
    assert set(_shapes(folder)) == set(TENSORS)
    (folder / ".gitattributes").write_text("of the repository that it was downloaded from")
    (folder / "config.json").write_text("{}")
    exported = tmp_path / "exported"
    exported.mkdir()
    write_policy(TENSORS, folder, exported)
    assert weights_digest(exported) == weights_digest(folder)
    assert (exported / "config.json").read_text() == "{}"
    assert not (exported / "consolidated.safetensors").exists()
    assert not (exported / ".gitattributes").exists(), "no key of a ledger begins with a dot"


def test_a_single_file_counts_before_copies_beside_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    save_file(TENSORS, tmp_path / "consolidated.safetensors")
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors is missing"),
        ({"weight_map": {"a": "../x.safetensors"}}, "no file of this folder"),
        ({}, "no weight_map"),
    ],
)
def test_an_index_that_cannot_be_followed_is_refused(tmp_path: Path, index, message) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=message):
        weights_digest(tmp_path)
