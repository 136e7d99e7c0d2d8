"""Write new weights as an ordinary Hugging Face folder."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from agl_core.errors import ConfigError, TrainerError
from agl_core.serving.weights import companion_files, weight_files


def write_policy(weights: Mapping[str, torch.Tensor], like: Path, folder: Path) -> None:
    """Mirror a policy's folder: same files, same tensors in each, same dtypes, new values.

    So configuration, tokenizer and chat template are kept byte by byte, and unchanged weights give
    equal files.

    Args:
        weights: Tensors by their Hugging Face name; more than the folder names are allowed, as a
            tied output layer is.
        like: The folder to mirror.
        folder: An existing empty folder.

    Raises:
        TrainerError: The folder to mirror has no safetensors, or a tensor that is not given.
    """
    try:
        sources = weight_files(like)
    except ConfigError as error:
        raise TrainerError(str(error)) from error
    for source in sources:
        _write_like(source, folder / source.name, weights)
    for path in companion_files(like):
        (folder / path.name).write_bytes(path.read_bytes())


def _write_like(source: Path, target: Path, weights: Mapping[str, torch.Tensor]) -> None:
    with safe_open(source, framework="pt") as layout:
        names, metadata = list(layout.keys()), layout.metadata()
        dtypes = {name: layout.get_tensor(name).dtype for name in names}
    missing = [name for name in names if name not in weights]
    if missing:
        raise TrainerError(f"{source.name}: the model has no tensor {missing[0]!r}")
    save_file({n: weights[n].to(dtypes[n]).contiguous() for n in names}, target, metadata)
