"""Digests that say which policy a folder holds: its weights, its tokenizer, its chat template.

Read from the files by hand, without torch: a runner or the ledger can check a policy that it never
loads. The weights' digest is over the tensors, not over the files: how an exporter split them makes
no difference.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agl_core.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
_CHUNK_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""
_TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    file: Path
    start: int
    size_bytes: int


def companion_files(folder: Path) -> list[Path]:
    """Return the files that a policy has beside its weights: configuration, tokenizer, chat
    template, licence.

    Other copies of the weights are left out, and hidden files, such as a repository's
    `.gitattributes`.
    """

    def is_one(path: Path) -> bool:
        is_other_index = path.name.endswith(".index.json") and path.name != _INDEX
        is_weights = path.suffix in _WEIGHT_SUFFIXES or is_other_index
        return path.is_file() and not is_weights and not path.name.startswith(".")

    return sorted(path for path in folder.iterdir() if is_one(path))


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a policy's weights, as transformers and vLLM find them.

    They are those that `model.safetensors.index.json` names, or `model.safetensors`. Files beside
    them, such as a second copy of the weights in `consolidated.safetensors`, are no part of the
    policy. A folder with neither is taken as a whole.

    Raises:
        ConfigError: There is no such file, the index is broken, or it names a file that is not
            there.
    """
    index, single = folder / _INDEX, folder / "model.safetensors"
    if index.is_file():
        shards = _read_json_object(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index}: no weight_map with the files of the tensors")
        names = set(shards.values())
        if not all(isinstance(name, str) and name == Path(name).name for name in names):
            raise ConfigError(f"{index}: its weight_map names what is no file of this folder")
        if single.is_file() and names != {single.name}:
            raise ConfigError(f"{folder} holds {single.name} and {index.name}: remove one of them")
        files = [folder / name for name in sorted(names)]
        if missing := [file.name for file in files if not file.is_file()]:
            raise ConfigError(f"{folder}: {missing[0]} is missing, and {index.name} names it")
        return files
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if broken := [file.name for file in files if not file.is_file()]:
        raise ConfigError(f"{folder}: {broken[0]} is no file, or a link to one that is gone")
    if not files:
        others = [file.name for file in folder.glob("*") if file.suffix in _WEIGHT_SUFFIXES]
        found = f", but {min(others)}: save the model again with transformers" if others else ""
        raise ConfigError(f"{folder}: no *.safetensors file{found}")
    return files


def weights_digest(folder: Path) -> str:
    """Return `sha256:` and the hash over every tensor: name, dtype, shape and bytes, by name.

    Args:
        folder: Holds `*.safetensors` files; see `weight_files`.

    Raises:
        ConfigError: There is no such file, one is cut short or broken, or two hold the same tensor.
    """
    files = weight_files(folder)
    tensors: dict[str, _Tensor] = {}
    for file in files:
        for tensor in _read_header(file):
            if tensor.name in tensors:
                raise ConfigError(f"{folder}: tensor {tensor.name} is in more than one file")
            tensors[tensor.name] = tensor
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(json.dumps([name, tensor.dtype, tensor.shape]).encode() + b"\n")
        for chunk in _read_bytes(tensor):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def tokenizer_digest(folder: Path) -> str:
    """Return `sha256:` and the hash over names and bytes of the tokenizer's files that exist.

    Raises:
        ConfigError: The folder holds no tokenizer file.
    """
    files = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not files:
        raise ConfigError(f"{folder}: no tokenizer file such as tokenizer.json")
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(json.dumps([file.name, len(content)]).encode() + b"\n" + content)
    return f"sha256:{digest.hexdigest()}"


def chat_template_digest(folder: Path) -> str | None:
    """Return `sha256:` and the hash over the chat template's text; None where there is no template.

    Raises:
        ConfigError: `tokenizer_config.json` is not a JSON object.
    """
    template: Any = None
    config_file = folder / "tokenizer_config.json"
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        try:
            template = template_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{template_file} is not UTF-8: {error}") from error
    elif config_file.is_file():
        template = _read_json_object(config_file).get("chat_template")
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def _read_json_object(file: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds."""
    try:
        value = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return value


def _read_header(file: Path) -> list[_Tensor]:
    """Return what the header lists: 8 bytes of little-endian length, then JSON."""
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        if size_bytes < 8 or header_bytes > min(size_bytes - 8, _MAX_HEADER_BYTES):
            raise ConfigError(f"{file}: not a safetensors file, or cut short")
        raw = stream.read(header_bytes)
    data_start = 8 + header_bytes
    tensors: list[_Tensor] = []
    try:
        for name, entry in json.loads(raw).items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= size_bytes - data_start:
                raise ConfigError(f"{file}: tensor {name} lies outside the file; cut short?")
            shape = list(entry["shape"])
            tensors.append(
                _Tensor(name, entry["dtype"], shape, file, data_start + start, end - start)
            )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: broken safetensors header: {error}") from error
    return tensors


def _read_bytes(tensor: _Tensor) -> Iterator[bytes]:
    """Yield the tensor's bytes in chunks."""
    left = tensor.size_bytes
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.start)
        while left > 0:
            chunk = stream.read(min(left, _CHUNK_BYTES))
            if not chunk:
                raise ConfigError(f"{tensor.file}: cut short within tensor {tensor.name}")
            left -= len(chunk)
            yield chunk
