import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_core.serving.conversation import TokenizeRequest
from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.serving.weights import chat_template_digest, tokenizer_digest, weights_digest
from agl_core.utils.threaded_server import ThreadedServer
from tests.builders import statuses_for_a_page

HELLO = [{"role": "user", "content": "What is 12+34?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
BROKEN_CALL = {**CALL, "function": {"name": "add", "arguments": "[1"}}
DEEP_CALL = {**CALL, "function": {"name": "add", "arguments": "[" * 100_000}}


def make_body(**changes: Any) -> dict[str, Any]:
    body = {"model": "v000000", "messages": HELLO, "max_tokens": 8, "seed": 3}
    return {**body, **changes}


def client_of(engine: Engine, token: str | None = None) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(engine, token))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(engine) as client:
        yield client


async def chat(client: httpx.AsyncClient, **changes: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json=make_body(**changes))


async def test_answer_has_ids_logprobs_usage_and_policy(
    client: httpx.AsyncClient, engine: Engine, policy_folder: Path
) -> None:
    response = await chat(client, logprobs=True, return_token_ids=True)
    answer = response.json()
    choice = answer["choices"][0]
    tokenizer = engine.loaded.tokenizer
    template = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(answer["prompt_token_ids"]) == template
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [
        tokenizer.decode([token_id]) for token_id in choice["token_ids"]
    ]
    assert all(entry["logprob"] <= 0 and entry["top_logprobs"] == [] for entry in content)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert answer["usage"] == {
        "prompt_tokens": len(answer["prompt_token_ids"]),
        "completion_tokens": len(choice["token_ids"]),
        "total_tokens": len(answer["prompt_token_ids"]) + len(choice["token_ids"]),
    }
    assert answer["system_fingerprint"] == weights_digest(policy_folder)
    assert response.headers["x-agl-weights-digest"] == weights_digest(policy_folder)
    assert response.headers["x-agl-policy-version"] == answer["model"] == "v000000"


async def test_ids_and_logprobs_come_only_where_asked_for(client: httpx.AsyncClient) -> None:
    answer = (await chat(client)).json()
    assert "prompt_token_ids" not in answer
    assert "token_ids" not in answer["choices"][0]
    assert answer["choices"][0]["logprobs"] is None


async def test_same_seed_same_tokens_and_no_seed_other_ones(client: httpx.AsyncClient) -> None:
    texts = [(await chat(client, max_tokens=20)).json()["choices"][0]["message"] for _ in "ab"]
    assert texts[0] == texts[1]
    free = [
        (await chat(client, max_tokens=20, seed=None)).json()["choices"][0]["message"]["content"]
        for _ in range(4)
    ]
    assert len(set(free)) > 1


async def test_several_choices_differ_and_the_first_is_that_of_n_1(
    client: httpx.AsyncClient,
) -> None:
    one = (await chat(client, return_token_ids=True)).json()
    three = (await chat(client, n=3, return_token_ids=True)).json()
    ids = [choice["token_ids"] for choice in three["choices"]]
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert ids[0] == one["choices"][0]["token_ids"]
    assert ids[0] != ids[1] != ids[2]
    assert three["usage"]["completion_tokens"] == sum(map(len, ids))


async def test_open_limit_is_what_the_model_has_room_for(client: httpx.AsyncClient) -> None:
    usage = (await chat(client, max_tokens=None)).json()["usage"]
    assert usage["total_tokens"] <= 256


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stream_options": {"include_usage": True}}, "stream_options: only with stream"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage"),
        ({"tools": []}, "tools"),
        ({"tools": [TOOL]}, "tools: the policy's chat template does not show them"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls: false"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"forced_token_ids": [9]}, "forced_token_ids: for tests only"),
        ({"min_p": 0.1}, "min_p"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 5}, "top_logprobs: only with logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"n": 0}, "n:"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 9}, "max_tokens and max_completion_tokens differ"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "no"}]}, "refusal"),
        ({"messages": [{"role": "assistant", "content": "x", "audio": {"id": "a"}}]}, "audio"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [BROKEN_CALL]}]}, "arguments of add"),
        ({"messages": [{"role": "assistant", "tool_calls": [DEEP_CALL]}]}, "arguments of add"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, "256 positions"),
        ({"messages": [{"role": "user", "content": "x"}] * 257}, "messages: 257 of them exceed"),
        ({"max_tokens": 250}, "256 positions"),
        ({"model": None}, "model"),
    ],
)
async def test_unsupported_request_is_400_and_names_the_field(
    client: httpx.AsyncClient, changes: dict[str, Any], named: str
) -> None:
    response = await chat(client, **changes)
    assert response.status_code == 400
    error = response.json()["error"]
    assert named in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["code"]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"safety_identifier": "s", "prompt_cache_key": "k", "prediction": {"type": "content"}},
        {"logit_bias": {}, "modalities": ["text"], "functions": [], "audio": None},
        {"parallel_tool_calls": False, "reasoning_effort": None, "web_search_options": None},
        {"ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "priority": 0},
        {"add_generation_prompt": True, "continue_final_message": False},
    ],
)
async def test_fields_that_say_nothing_about_the_answer_change_nothing(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    asked = {"seed": 5, "return_token_ids": True}
    answers = [await chat(client, **asked), await chat(client, **asked, **fields)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[1].text
    first, second = (answer.json()["choices"][0]["token_ids"] for answer in answers)
    assert first == second


def test_messages_as_clients_of_the_field_send_them_reach_the_template() -> None:
    cached = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    nothing = {"function_call": None, "audio": None, "annotations": [{"type": "url_citation"}]}
    sent = [
        {"role": "user", "content": [cached], "name": "me"},
        {"role": "assistant", "content": "46", "refusal": None, "tool_calls": None, **nothing},
        {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "why"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}]},
    ]
    request = TokenizeRequest.model_validate_json(json.dumps({"model": "m", "messages": sent}))
    assert request.template_messages() == [
        {"role": "user", "content": "hi", "name": "me"},
        {"role": "assistant", "content": "46"},
        {"role": "assistant", "content": "no", "reasoning_content": "why"},
        {"role": "assistant", "content": "never"},
    ]


async def test_neutral_values_and_echoed_messages_are_taken(client: httpx.AsyncClient) -> None:
    echo = {"role": "assistant", "content": "46", "refusal": None, "tool_calls": []}
    response = await chat(
        client,
        top_p=1.0,
        top_k=-1,
        stream=False,
        n=1,
        stop=None,
        presence_penalty=0.0,
        response_format={"type": "text"},
        messages=[*HELLO, echo, {"role": "user", "content": [{"type": "text", "text": "And?"}]}],
    )
    assert response.status_code == 200


async def test_body_that_is_no_json_is_400(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/chat/completions", content=b"{")
    assert response.status_code == 400


async def test_unknown_route_and_method_answer_in_openai_shape(client: httpx.AsyncClient) -> None:
    for response in (await client.get("/v1/nothing"), await client.put("/policy")):
        assert response.status_code in (404, 405)
        assert response.json()["error"]["message"]


async def test_stop_text_is_cut_off(client: httpx.AsyncClient) -> None:
    text = (await chat(client)).json()["choices"][0]["message"]["content"]
    choice = (await chat(client, stop=text[2])).json()["choices"][0]
    assert choice["message"]["content"] == text[: text.index(text[2])]


async def test_swap_changes_the_digest_and_refuses_the_old_name(
    client: httpx.AsyncClient, other_policy_folder: Path
) -> None:
    before = (await client.get("/policy")).json()
    body = {"version": "v000001", "path": str(other_policy_folder)}
    loaded = (await client.post("/policy", json=body)).json()
    assert loaded == (await client.get("/policy")).json()
    assert loaded == {
        "version": "v000001",
        "weights_digest": weights_digest(other_policy_folder),
        "tokenizer_digest": tokenizer_digest(other_policy_folder),
        "chat_template_digest": chat_template_digest(other_policy_folder),
    }
    assert loaded["weights_digest"] != before["weights_digest"]
    refused = await chat(client)
    assert refused.status_code == 404
    assert refused.json()["error"]["message"] == ("model v000000 is not served; serving v000001")
    taken = await chat(client, model="v000001")
    assert taken.headers["x-agl-weights-digest"] == loaded["weights_digest"]
    assert (await client.get("/v1/models")).json()["data"][0]["id"] == "v000001"


@pytest.mark.parametrize("body", [{"version": "v000001", "path": "/nowhere"}, {"version": "v1"}])
async def test_bad_policy_is_400_and_the_old_one_still_served(
    client: httpx.AsyncClient, body: dict[str, str]
) -> None:
    response = await client.post("/policy", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]
    assert (await client.get("/policy")).json()["version"] == "v000000"
    assert (await chat(client)).status_code == 200


async def test_token_is_required_except_for_health(engine: Engine) -> None:
    async with client_of(engine, token="secret") as client:
        assert (await client.get("/health")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}):
            refused = await client.get("/policy", headers=headers)
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        right = {"authorization": "Bearer secret"}
        assert (await client.get("/policy", headers=right)).status_code == 200


async def test_metrics_count(client: httpx.AsyncClient) -> None:
    answers = [(await chat(client)).json() for _ in range(3)]
    metrics = (await client.get("/metrics")).json()
    assert metrics == {
        "requests_total": 3,
        "prompt_tokens_total": sum(answer["usage"]["prompt_tokens"] for answer in answers),
        "completion_tokens_total": sum(a["usage"]["completion_tokens"] for a in answers),
        "batches_total": 3,
    }


async def test_concurrent_requests_share_batches(client: httpx.AsyncClient, engine: Engine) -> None:
    responses = await asyncio.gather(*(chat(client, seed=seed) for seed in range(64)))
    assert {response.status_code for response in responses} == {200}
    assert engine.num_batches <= 8


async def test_unexpected_error_is_500_in_openai_shape(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.loaded, "model", fail)
    transport = httpx.ASGITransport(create_app(engine), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await chat(client)
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"


async def test_closed_engine_is_503(policy_folder: Path) -> None:
    engine = Engine(policy_folder, "v000000")
    engine.close()
    async with client_of(engine) as client:
        assert (await chat(client)).status_code == 503


async def test_headers_name_the_weights_that_answered(
    engine: Engine,
    client: httpx.AsyncClient,
    other_policy_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    submit = engine.submit_together

    def submit_late(*requests: Any) -> Any:
        """Other weights under the same name overtake the request."""
        engine.load("v000000", other_policy_folder)
        return submit(*requests)

    monkeypatch.setattr(engine, "submit_together", submit_late)
    response = await chat(client)
    digest = weights_digest(other_policy_folder)
    assert response.json()["system_fingerprint"] == digest
    assert response.headers["x-agl-weights-digest"] == digest


def test_a_running_engine_without_a_token_refuses_what_a_web_page_sends(engine: Engine) -> None:
    with ThreadedServer(create_app(engine)) as server:
        for path in ("/policy", "/tokenize", "/v1/completions", "/v1/chat/completions"):
            assert statuses_for_a_page(server.url + path) == [403, 403, 403, 415]
