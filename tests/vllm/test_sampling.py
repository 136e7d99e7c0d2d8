"""SmolLM2 on real vLLM with the sampling defaults of an instruct model in its folder: what is
sampled and recorded is the policy's own distribution.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from agl_core import semconv
from agl_core.config import ServingSettings, VllmSettings
from agl_core.errors import ConfigError
from agl_core.identity import base_model
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.serving import start
from agl_core.serving.attached import check_attached
from agl_core.serving.decoding import load_policy, score
from agl_core.serving.launch import ModelServer
from agl_core.tracer import OtelTracer
from examples.word_problems.fetch_model import MODEL, fetch
from tests.vllm.test_vllm import PYTHON, reference

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

INSTRUCT = {"do_sample": True, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
HELLO: Any = [{"role": "user", "content": "Tell me a story about a fox, a river and a bell."}]
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    fetch()
    found = tmp_path_factory.mktemp("policy") / "smollm2"
    shutil.copytree(MODEL, found)
    path = found / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | INSTRUCT))
    return found


@pytest.fixture(scope="module", params=["as the run starts it", "with the folder's defaults"])
def server(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, bool]]:
    """A vLLM's address, and whether it has sampling defaults of its own: the control."""
    has_defaults = request.param == "with the folder's defaults"
    args = ("--enforce-eager", "--max-model-len", "512", "--dtype", "float32")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1"}
    vllm = VllmSettings(python=str(PYTHON.absolute()), args=args, env=env)
    settings = ServingSettings(vllm=vllm, startup_timeout_seconds=900)
    with pytest.MonkeyPatch.context() as patch:
        if has_defaults:
            command = start.vllm_command

            def with_defaults(*arguments: Any) -> Any:
                made = command(*arguments)
                made.arguments[made.arguments.index("--generation-config") + 1] = "auto"
                return made

            patch.setattr(start, "vllm_command", with_defaults)
        base = reference("v000000", folder)
        with ModelServer.start(settings, base, tmp_path_factory.mktemp("run")) as found:
            yield found.url, has_defaults


def distance(folder: Path, recorded: tuple[Any, Any, Any], temperature: float) -> np.ndarray:
    """[response_length] recorded log-probs less those of a plain forward pass."""
    prompt_ids, response_ids, logprobs = map(list, recorded)
    policy = load_policy("v000000", folder)
    return np.asarray(logprobs) - score(policy, prompt_ids, response_ids, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_log_probs_are_the_policys_own(
    server: tuple[str, bool], folder: Path, temperature: float
):
    """Of either server: the proxy leaves no field to it."""
    tracer = OtelTracer()
    config = ProxyConfig(backend_url=f"{server[0]}/v1", policy=reference("v000000", folder))
    with ProxyServer(config, tracer) as proxy, tracer.attempt("ro-1", "at-1") as trace:
        url = f"{proxy.url}/rollout/ro-1/attempt/at-1/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            client.chat.completions.create(
                model="v000000", messages=HELLO, max_tokens=NUM_TOKENS, temperature=temperature
            )
        (span,) = [s for s in trace.spans() if s.name == semconv.LLM_CALL_SPAN]
    names = (semconv.PROMPT_TOKEN_IDS, semconv.RESPONSE_TOKEN_IDS, semconv.LOGPROBS)
    assert span.attributes is not None
    recorded = tuple(span.attributes[name] for name in names)
    differences = distance(folder, recorded, temperature)
    print(f"{server} T={temperature}: max {np.abs(differences).max():.2e}")  # noqa: T201
    assert np.abs(differences).max() < 1e-3
    assert span.attributes[semconv.SAMPLING] == "{}"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_call_that_leaves_fields_out_is_cut_by_a_server_with_defaults_alone(
    server: tuple[str, bool], folder: Path, temperature: float
):
    url, has_defaults = server
    body = {"model": "v000000", "messages": HELLO, "max_tokens": NUM_TOKENS, "seed": 7}
    body |= {"temperature": temperature, "logprobs": True, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).json()
    choice = answer["choices"][0]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    recorded = (answer["prompt_token_ids"], choice["token_ids"], logprobs)
    differences = distance(folder, recorded, temperature)
    print(f"{server} T={temperature}: mean {differences.mean():.3f}")  # noqa: T201
    if has_defaults:
        assert differences.mean() > 0.05
    else:
        assert np.abs(differences).max() < 1e-3


def test_the_preflight_refuses_a_server_with_defaults_alone(server: tuple[str, bool], folder: Path):
    url, has_defaults = server
    if not has_defaults:
        check_attached(url, base_model(str(folder)))
        return
    with pytest.raises(ConfigError, match="--generation-config vllm"):
        check_attached(url, base_model(str(folder)))
