"""Real vLLM on a CPU, started by `ModelServer` with a small random policy: what it samples is
recorded as it is, new weights answer under their version, and two adapters are served at once.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from anthropic import Anthropic
from openai import OpenAI
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from agl_core import semconv
from agl_core.config import ServingSettings, VllmSettings
from agl_core.errors import UpstreamError
from agl_core.ledger.storage import Storage, open_storage
from agl_core.llm_proxy import ProxyConfig, ProxyServer
from agl_core.serving.launch import ModelServer
from agl_core.serving.weights import weights_digest
from agl_core.tracer import OtelTracer
from agl_core.types.training import PolicyRef
from examples.calculator.make_policy import SPECIAL, make_tokenizer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]

PYTHON = Path(os.environ.get("VLLM_PYTHON", ".venv-vllm/bin/python"))
HELLO: Any = [{"role": "user", "content": "What is 12+34?"}]
TEMPERATURE = 0.7


def write_policy(folder: Path, seed: int) -> Path:
    """Write a policy whose heads are wide enough for vLLM's attention on CPUs."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|end|>"),
        pad_token_id=SPECIAL.index("<|pad|>"),
        dtype=torch.float32,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_adapter(folder: Path, base: Path, seed: int) -> Path:
    """Write a LoRA adapter that changes the policy visibly."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.2)
    adapted.save_pretrained(folder)
    return folder


def reference(version: str, folder: Path) -> PolicyRef:
    digest = weights_digest(folder)
    return PolicyRef(version=version, weights_digest=digest, path=str(folder))


def expected_logprobs(base: Path, adapter: Path | None, ids: list[int], start: int) -> list[float]:
    """Return the log-probs of ids[start:] by a plain forward pass."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return [logprobs[place - 1, ids[place]].item() for place in range(start, len(ids))]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("policies")
    first = write_policy(root / "first", 0)
    second = write_policy(root / "second", 1)
    return {
        "first": first,
        "second": second,
        "red": write_adapter(root / "red", second, 2),
        "blue": write_adapter(root / "blue", second, 3),
    }


@pytest.fixture(scope="module")
def server(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ModelServer]:
    args = ["--enforce-eager", "--max-model-len", "256", "--dtype", "float32"]
    args += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8"]
    vllm = VllmSettings(
        python=str(PYTHON.absolute()), args=tuple(args), env={"VLLM_CPU_KVCACHE_SPACE": "1"}
    )
    settings = ServingSettings(vllm=vllm, startup_timeout_seconds=900)
    base = reference("v000000", folders["first"])
    with ModelServer.start(settings, base, tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "ledger"))


class Recorded:
    """Calls through the proxy, and what their spans say."""

    def __init__(self, server: ModelServer, policy: PolicyRef) -> None:
        self._config = ProxyConfig(backend_url=f"{server.url}/v1", policy=policy)
        self._version = policy.version

    def call(self, *, stream: bool, seed: int = 7) -> tuple[str, dict[str, Any]]:
        """Return the text that the agent gets, and the attributes of the call's span."""
        tracer = OtelTracer()
        with (
            ProxyServer(self._config, tracer) as proxy,
            tracer.attempt("ro-1", "at-1") as trace,
            OpenAI(
                base_url=f"{proxy.url}/rollout/ro-1/attempt/at-1/v1", api_key="none", max_retries=0
            ) as client,
        ):
            asked: dict[str, Any] = {"model": self._version, "messages": HELLO, "seed": seed}
            asked |= {"max_tokens": 12, "temperature": TEMPERATURE}
            if stream:
                chunks = client.chat.completions.create(**asked, stream=True)
                text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            else:
                answer = client.chat.completions.create(**asked)
                text = answer.choices[0].message.content
            span = trace.spans()[-1]
        assert span.status.status_code == "OK" or span.status.description in (None, ""), span.status
        return text, dict(span.attributes)


def check_recorded(
    attributes: dict[str, Any], version: str, base: Path, adapter: Path | None = None
) -> None:
    """Check that a span names the version and has the exact log-probs of its weights."""
    assert attributes[semconv.POLICY_VERSION] == version
    prompt = list(attributes[semconv.PROMPT_TOKEN_IDS])
    response = list(attributes[semconv.RESPONSE_TOKEN_IDS])
    expected = expected_logprobs(base, adapter, prompt + response, len(prompt))
    assert list(attributes[semconv.LOGPROBS]) == pytest.approx(expected, abs=1e-3)


def test_streamed_and_plain_calls_record_the_backends_own_ids_and_logprobs(
    server: ModelServer, folders: dict[str, Path]
) -> None:
    policy = reference("v000000", folders["first"])
    recorded = Recorded(server, policy)
    asked = {"model": "v000000", "messages": HELLO, "seed": 7, "max_tokens": 12}
    asked |= {"temperature": TEMPERATURE, "logprobs": True, "return_token_ids": True}
    own = httpx.post(f"{server.url}/v1/chat/completions", json=asked, timeout=300).json()
    choice = own["choices"][0]
    for stream in (False, True):
        text, attributes = recorded.call(stream=stream)
        assert text == choice["message"]["content"]
        assert list(attributes[semconv.PROMPT_TOKEN_IDS]) == own["prompt_token_ids"]
        assert list(attributes[semconv.RESPONSE_TOKEN_IDS]) == choice["token_ids"]
        assert list(attributes[semconv.LOGPROBS]) == pytest.approx(
            [entry["logprob"] for entry in choice["logprobs"]["content"]], abs=1e-6
        )
        check_recorded(attributes, "v000000", folders["first"])


def test_tokens_are_counted_by_vllms_tokenizer(
    server: ModelServer, folders: dict[str, Path]
) -> None:
    policy = reference("v000000", folders["first"])
    config = ProxyConfig(backend_url=f"{server.url}/v1", policy=policy)
    with (
        ProxyServer(config, OtelTracer()) as proxy,
        Anthropic(base_url=f"{proxy.url}/rollout/ro-1/attempt/at-1", api_key="none") as client,
    ):
        counted = client.messages.count_tokens(model="v000000", messages=HELLO)
    _, attributes = Recorded(server, policy).call(stream=False)
    assert counted.input_tokens == len(attributes[semconv.PROMPT_TOKEN_IDS])


def test_reloaded_weights_answer_under_their_version(
    server: ModelServer, folders: dict[str, Path], storage: Storage
) -> None:
    policy = reference("v000001", folders["second"])
    server.serve(policy, storage)
    served = httpx.get(f"{server.url}/policy").json()
    assert (served["version"], served["weights_digest"]) == ("v000001", policy.weights_digest)
    assert httpx.get(f"{server.url}/weight_info").json() == {"weight_version": "v000001"}
    for stream in (False, True):
        _, attributes = Recorded(server, policy).call(stream=stream)
        check_recorded(attributes, "v000001", folders["second"])


def test_two_adapters_are_served_at_once(
    server: ModelServer, folders: dict[str, Path], storage: Storage
) -> None:
    base = reference("v000001", folders["second"])
    server.serve(base, storage)
    adapters = {"v000002": "red", "v000003": "blue"}
    for version, name in adapters.items():
        server.serve(reference(version, folders[name]), storage)

    def call(number: int) -> tuple[str, dict[str, Any]]:
        version = list(adapters)[number % 2]
        policy = reference(version, folders[adapters[version]])
        return version, Recorded(server, policy).call(stream=number % 4 > 1, seed=number)[1]

    with ThreadPoolExecutor(4) as pool:
        for version, attributes in pool.map(call, range(8)):
            check_recorded(attributes, version, folders["second"], folders[adapters[version]])
    _, attributes = Recorded(server, base).call(stream=False)
    check_recorded(attributes, "v000001", folders["second"])


def test_weights_of_another_model_are_refused_and_the_old_ones_serve_on(
    server: ModelServer, folders: dict[str, Path], storage: Storage, tmp_path: Path
) -> None:
    base = reference("v000001", folders["second"])
    server.serve(base, storage)
    with pytest.raises(UpstreamError, match="not weights of this model"):
        server.serve(reference("v000009", Path("examples/calculator/policy")), storage)
    _, attributes = Recorded(server, base).call(stream=False)
    check_recorded(attributes, "v000001", folders["second"])
