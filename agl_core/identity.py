"""What a run is made from: base model, code and packages, by digest and version."""

import hashlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from agl_core.errors import ConfigError
from agl_core.ledger.run import BaseModelRecord
from agl_core.ledger.storage import is_key_segment
from agl_core.serving.weights import (
    chat_template_digest,
    companion_files,
    tokenizer_digest,
    weight_files,
    weights_digest,
)
from agl_core.types.training import PolicyRef

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PACKAGES = (
    "agl-prefect",
    "openai",
    "opentelemetry-sdk",
    "prefect",
    "pyarrow",
    "ray",
    "tensordict",
    "torch",
    "transformers",
    "verl",
)


def base_model(folder: str) -> BaseModelRecord:
    """Return the record of a local Hugging Face folder.

    Raises:
        ConfigError: There is no such folder, it holds no safetensors file, or the ledger could not
            keep one of its files under its name.
    """
    path = Path(folder).expanduser().resolve()
    if not path.exists() and _HUB_NAME.fullmatch(folder):
        raise ConfigError(
            f"model folder {folder} does not exist; if it is a name on the Hugging Face Hub, "
            f"download it (hf download {folder} --local-dir FOLDER) and give the folder"
        )
    if not path.is_dir():
        raise ConfigError(f"model folder {folder} does not exist")
    for file in (*weight_files(path), *companion_files(path)):
        if not is_key_segment(file.name):
            raise ConfigError(
                f"model folder {folder}: rename or remove the file {file.name!r}; each policy is "
                "kept in the ledger with its files' names, which may have letters, digits, "
                "dashes, dots and underscores, no dot first"
            )
    return BaseModelRecord(
        policy=PolicyRef(version="v000000", weights_digest=weights_digest(path), path=str(path)),
        tokenizer_digest=tokenizer_digest(path),
        chat_template_digest=chat_template_digest(path),
        licence=_licence(path),
    )


def code(agent: str) -> dict[str, Any]:
    """Return the commit of the agent's working tree, the agent's source digest and this package's
    version; None where there is no repository.
    """
    origin = source_file(agent.partition(":")[0])
    folder = origin.parent if origin else Path.cwd()
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", ":(top)*.py")
    return {
        "agent_sha256": hashlib.sha256(origin.read_bytes()).hexdigest() if origin else None,
        "git_commit": _git(folder, "rev-parse", "HEAD"),
        # Of Python files: other files of the tree are no code, or in the identity by digest.
        "git_dirty": None if changes is None else bool(changes),
        "package_version": importlib.metadata.version("agl-prefect"),
    }


def source_file(module: str) -> Path | None:
    """Return the file of a module; None for one without, as a notebook's, or that is not there."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        file = getattr(loaded, "__file__", None)
    else:
        try:
            found = importlib.util.find_spec(module)
        except (ImportError, ValueError):  # so is a package around it
            found = None
        file = found.origin if found else None
    return Path(file) if file else None


def packages() -> dict[str, str]:
    """Return the versions of the packages that shape results; one that is not installed is left
    out.
    """
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _licence(folder: Path) -> str:
    """Return the licence that the model card's front matter names, or `unknown`."""
    card = folder / "README.md"
    if card.is_file():
        for line in card.read_text(encoding="utf-8", errors="replace").split("---")[1:2]:
            for entry in line.splitlines():
                if entry.startswith("license:"):
                    return entry.removeprefix("license:").strip()
    return "unknown"


def _git(folder: Path, *arguments: str) -> str | None:
    """Return what git says of a folder, or None outside a repository."""
    try:
        command = ["git", "-C", str(folder), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
