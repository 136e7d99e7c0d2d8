"""A server that runs already is asked, for one token, what training needs to know of it."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agl_core.env_var import ENGINE_TOKEN
from agl_core.errors import ConfigError, UpstreamError
from agl_core.identity import base_model
from agl_core.ledger.run import BaseModelRecord
from agl_core.serving import attached
from agl_core.serving.attached import CONVERSATIONS, check_attached
from agl_core.serving.decoding import load_policy, score
from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.serving.generation import GenerationRequest
from agl_core.utils.threaded_server import ThreadedServer
from tests.fakes import ScriptedModelServer


@pytest.fixture
def base(policy_folder: Path) -> BaseModelRecord:
    return base_model(str(policy_folder))


@pytest.fixture
def engine_url(engine: Engine) -> Iterator[str]:
    with ThreadedServer(create_app(engine)) as server:
        yield server.url


def change_vocabulary(folder: Path) -> None:
    """Give two tokens each other's id."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(tokenizer))


def change_template(folder: Path) -> None:
    path = folder / "chat_template.jinja"
    path.write_text("Answer! " + path.read_text())


def changed_policy(
    policy_folder: Path, folder: Path, change: Callable[[Path], None]
) -> BaseModelRecord:
    shutil.copytree(policy_folder, folder)
    change(folder)
    return base_model(str(folder))


def test_an_engine_with_the_policy_is_taken_after_a_few_calls(
    engine_url: str, engine: Engine, base: BaseModelRecord
):
    check_attached(engine_url, base)
    assert engine.num_batches == len(CONVERSATIONS) + 3


@pytest.mark.parametrize(
    ("change", "what"),
    [(change_vocabulary, "another tokenizer"), (change_template, "another chat template")],
)
def test_an_engine_with_another_policys_texts_is_refused(
    engine_url: str,
    policy_folder: Path,
    tmp_path: Path,
    change: Callable[[Path], None],
    what: str,
):
    changed = changed_policy(policy_folder, tmp_path / "changed", change)
    with pytest.raises(ConfigError) as caught:
        check_attached(engine_url, changed)
    assert str(caught.value) == (
        f"model server {engine_url} has {what} than the policy {tmp_path / 'changed'}: start it "
        "with that folder, or leave out serving.url"
    )


@pytest.mark.parametrize("change", [change_vocabulary, change_template])
def test_a_server_that_states_no_digests_is_judged_by_its_token_ids(
    engine_url: str,
    base: BaseModelRecord,
    policy_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path], None],
):
    ask_server = attached.ask_server

    def states_none(*request: Any, **options: Any) -> dict[str, object]:
        answer = ask_server(*request, **options)
        unknown = ("tokenizer_digest", "chat_template_digest")
        return {name: answer[name] for name in answer if name not in unknown}

    monkeypatch.setattr(attached, "ask_server", states_none)
    check_attached(engine_url, base)
    changed = changed_policy(policy_folder, tmp_path / "changed", change)
    with pytest.raises(ConfigError, match="has another tokenizer or chat template than the policy"):
        check_attached(engine_url, changed)


def test_a_server_without_token_ids_or_log_probs_is_refused(base: BaseModelRecord):
    with ScriptedModelServer() as server:
        url = server.base_url.removesuffix("/v1")
        server.token_ids = False
        with pytest.raises(ConfigError, match="nothing to train on: no token ids in the answer; "):
            check_attached(url, base)
        server.token_ids, server.logprobs_missing = True, 1
        with pytest.raises(ConfigError, match="8 response token ids but 7 log-probs; use a server"):
            check_attached(url, base)
        server.fail_next(1)
        with pytest.raises(UpstreamError, match=r"answers HTTP 500: .*scripted failure 500"):
            check_attached(url, base)


def test_a_missing_token_is_said(
    engine: Engine, base: BaseModelRecord, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(ENGINE_TOKEN, raising=False)
    with ThreadedServer(create_app(engine, token="right")) as server:
        with pytest.raises(ConfigError, match=r"wants another token: .* in AGL_ENGINE_TOKEN"):
            check_attached(server.url, base)
        monkeypatch.setenv(ENGINE_TOKEN, "right")
        check_attached(server.url, base)


@pytest.fixture
def alter(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str, Any, Any], Any]], None]:
    """Put something between the check and the engine's answers."""
    ask_server = attached.ask_server

    def install(change: Callable[[str, Any, Any], Any]) -> None:
        def asked(method: str, url: str, body: Any = None, **options: Any) -> Any:
            ask = lambda other: ask_server(method, url, other, **options)  # noqa: E731
            return change(url, body, ask)

        monkeypatch.setattr(attached, "ask_server", asked)

    return install


def logprobs_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["choices"][0]["logprobs"]["content"]


def raw_logprobs(policy_folder: Path) -> Callable[[str, Any, Any], Any]:
    """As vLLM answers by default: sampled at T, log-probs of T = 1."""
    policy = load_policy("v000000", policy_folder)

    def change(url: str, body: Any, ask: Any) -> Any:
        answer = ask(body)
        if url.endswith("/chat/completions"):
            ids = answer["choices"][0]["token_ids"]
            values = score(policy, answer["prompt_token_ids"], ids, 1.0)
            for entry, value in zip(logprobs_of(answer), values, strict=True):
                entry["logprob"] = value
        return answer

    return change


RAW = "gives log-probs at temperature 1, not at the one it samples with: start vLLM with --logpro"


def test_log_probs_of_another_temperature_are_refused(
    engine_url: str, base: BaseModelRecord, policy_folder: Path, alter: Any
):
    alter(raw_logprobs(policy_folder))
    with pytest.raises(ConfigError, match=RAW):
        check_attached(engine_url, base)


def test_they_are_refused_also_while_the_server_has_other_weights(
    engine_url: str,
    base: BaseModelRecord,
    policy_folder: Path,
    engine: Engine,
    other_policy_folder: Path,
    alter: Any,
):
    engine.load("v000007", other_policy_folder)
    check_attached(engine_url, base)
    alter(raw_logprobs(other_policy_folder))
    with pytest.raises(ConfigError, match=RAW):
        check_attached(engine_url, base)


def test_log_probs_that_are_not_the_policys_are_refused(
    engine_url: str, base: BaseModelRecord, alter: Any
):
    def quantised(url: str, body: Any, ask: Any) -> Any:
        answer = ask(body)
        if url.endswith("/chat/completions"):
            for entry in logprobs_of(answer):
                entry["logprob"] -= 0.4
        return answer

    alter(quantised)
    with pytest.raises(ConfigError, match=r"differ from the policy's own by 0\.40 nats on average"):
        check_attached(engine_url, base)


DEFAULTS = [{"top_p": 0.8}, {"top_k": 3}, {"top_p": 0.95}]


@pytest.mark.parametrize("defaults", DEFAULTS)
@pytest.mark.parametrize("has_policy", [True, False])
def test_a_server_with_sampling_defaults_of_its_own_is_refused(
    engine_url: str,
    base: BaseModelRecord,
    engine: Engine,
    other_policy_folder: Path,
    alter: Any,
    defaults: dict[str, float],
    has_policy: bool,
):
    """As vLLM on a folder whose `generation_config.json` has some."""
    if not has_policy:
        engine.load("v000007", other_policy_folder)

    def with_defaults(url: str, body: Any, ask: Any) -> Any:
        return ask(body and {**defaults, **body})

    alter(with_defaults)
    with pytest.raises(
        ConfigError, match=r"has sampling defaults of its own.*--generation-config vllm"
    ):
        check_attached(engine_url, base)


def test_a_server_that_cuts_the_distribution_whatever_it_is_told_is_refused(
    engine_url: str, base: BaseModelRecord, alter: Any
):
    def cut(url: str, body: Any, ask: Any) -> Any:
        return ask(body and {**body, "top_p": 0.5})

    alter(cut)
    with pytest.raises(ConfigError, match="differ from the policy's own by"):
        check_attached(engine_url, base)


def test_a_response_scored_at_once_has_the_log_probs_it_was_sampled_with(
    engine: Engine, policy_folder: Path
):
    request = GenerationRequest("v000000", [3, 4, 5], max_tokens=12, temperature=0.7, seed=5)
    sampled = engine.submit(request).result(timeout=60)
    policy = load_policy("v000000", policy_folder)
    scored = score(policy, request.prompt_ids, sampled.token_ids, 0.7)
    assert scored == pytest.approx(sampled.logprobs, abs=1e-5)
