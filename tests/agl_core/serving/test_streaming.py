"""Streams, tools and completions of the engine over real HTTP, as clients of OpenAI see them."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from agl_core.serving.engine import Engine
from agl_core.serving.engine_server import create_app
from agl_core.utils.threaded_server import ThreadedServer

HELLO = [{"role": "user", "content": "What is 12+34?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
ADD_CALL = '<tool_call>{"name": "add", "arguments": {"a": 12}}</tool_call>'


@pytest.fixture
def tool_engine(tool_policy_folder: Path) -> Iterator[Engine]:
    engine = Engine(tool_policy_folder, "v000000", max_batch_size=8)
    yield engine
    engine.close()


@pytest.fixture
def http(tool_engine: Engine) -> Iterator[httpx.Client]:
    app = create_app(tool_engine, allows_forced=True)
    with ThreadedServer(app) as server, httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def client(http: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


class Gate:
    """Lets an engine's model take one step for each release."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = threading.Semaphore(0)
        self.num_steps = 0
        self._model: Callable[..., Any] = engine.loaded.model
        monkeypatch.setattr(engine.loaded, "model", self._call)

    def _call(self, **kwargs: Any) -> Any:
        if not self.steps.acquire(timeout=20):
            raise RuntimeError("the gate stayed closed")
        self.num_steps += 1
        return self._model(**kwargs)


def forced(engine: Engine, *texts: str) -> list[list[int]]:
    """Return the ids of some texts, each with the end token."""
    loaded = engine.loaded
    end_id: int = loaded.tokenizer.eos_token_id
    return [[*loaded.encode_text(text), end_id] for text in texts]


def events(response: httpx.Response) -> Iterator[Any]:
    """Give what the events of a stream hold."""
    for line in response.iter_lines():
        if line:
            assert line.startswith("data: ")
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def stream(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chunks of a whole stream."""
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=asked) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-agl-policy-version"] == "v000000"
        *chunks, done = events(response)
    assert done == "[DONE]"
    return chunks


def put_together(chunks: list[dict[str, Any]], num_choices: int) -> list[dict[str, Any]]:
    """Return the choices that chunks make up, as they are without a stream."""
    choices: list[dict[str, Any]] = [{"index": i, "content": ""} for i in range(num_choices)]
    for chunk in chunks:
        for piece in chunk["choices"]:
            choice = choices[piece["index"]]
            delta = piece.get("delta", {"content": piece.get("text")})
            choice["content"] += delta.get("content") or ""
            choice.setdefault("tool_calls", []).extend(delta.get("tool_calls") or [])
            choice.setdefault("token_ids", []).extend(piece.get("token_ids") or [])
            for name, values in (piece["logprobs"] or {}).items():
                choice.setdefault("logprobs", {}).setdefault(name, []).extend(values)
            choice |= {name: piece.get(name) for name in ("finish_reason", "stop_reason")}
    return choices


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3, "top_p": 0.9},
        {"temperature": 0},
        {"logprobs": False, "top_logprobs": None, "return_token_ids": False},
        {"stop": ["a", "Z"], "max_tokens": 60},
        {"tools": [ADD]},
    ],
)
def test_a_stream_is_the_plain_answer_in_pieces(http: httpx.Client, more: dict[str, Any]) -> None:
    body = {
        "model": "v000000",
        "messages": HELLO,
        "max_tokens": 12,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
        **more,
    }
    plain = http.post("/v1/chat/completions", json=body).json()
    chunks = stream(http, "/v1/chat/completions", body)
    for choice, streamed in zip(
        plain["choices"], put_together(chunks, body.get("n", 1)), strict=True
    ):
        assert streamed["content"] == choice["message"]["content"]
        assert streamed["token_ids"] == choice.get("token_ids", [])
        assert streamed.get("logprobs") == choice["logprobs"]
        assert streamed["finish_reason"] == choice["finish_reason"]
        assert streamed["stop_reason"] == choice["stop_reason"]
    assert chunks[0].get("prompt_token_ids") == plain.get("prompt_token_ids")
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == plain["usage"]
    assert not any("usage" in chunk for chunk in chunks[:-1])
    num_tokens = plain["usage"]["completion_tokens"]
    assert len(chunks) == body.get("n", 1) + num_tokens + 1
    assert len({chunk["id"] for chunk in chunks}) == 1
    if "stop" in more:
        assert chunks[-2]["choices"][0]["stop_reason"] in ("a", "Z")


def test_each_token_leaves_before_the_next_is_sampled(
    http: httpx.Client, tool_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tool_engine, monkeypatch)
    gate.steps.release()
    body = {"model": "v000000", "messages": HELLO, "max_tokens": 4, "stream": True, "seed": 1}
    body["return_token_ids"] = True
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        found = events(response)
        assert next(found)["choices"][0]["delta"]["role"] == "assistant"
        for number in range(1, 5):
            (choice,) = next(found)["choices"]
            assert len(choice["token_ids"]) == 1
            assert gate.num_steps == number
            gate.steps.release()
        assert next(found) == "[DONE]"


def test_a_client_that_leaves_a_stream_frees_its_place(
    http: httpx.Client, tool_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tool_engine, monkeypatch)
    gate.steps.release()
    body = {"model": "v000000", "messages": HELLO, "max_tokens": 500, "n": 8, "stream": True}
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        next(events(response))
    check_that_the_place_is_free(http, gate)


def test_a_client_that_leaves_a_plain_call_frees_its_place(
    http: httpx.Client, tool_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(tool_engine, monkeypatch)
    body = {"model": "v000000", "messages": HELLO, "max_tokens": 500, "n": 8}
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/chat/completions", json=body, timeout=0.3)
    gate.steps.release()
    check_that_the_place_is_free(http, gate)


def check_that_the_place_is_free(http: httpx.Client, gate: Gate) -> None:
    """Have another call answered, which the 8 responses of the one before would keep waiting."""
    time.sleep(0.3)  # the server sees the connection close
    gate.steps.release(3)
    body = {"model": "v000000", "messages": HELLO, "max_tokens": 2}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert gate.num_steps <= 4


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"model": "v000009"}, 404), ({"max_tokens": 5000}, 400), ({"stream": 1}, 400)],
)
def test_what_is_wrong_with_a_stream_is_said_before_it_begins(
    http: httpx.Client, changes: dict[str, Any], status: int
) -> None:
    body = {"model": "v000000", "messages": HELLO, "stream": True, **changes}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_a_stream_that_breaks_off_is_an_error_of_the_client(
    client: openai.OpenAI, tool_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = tool_engine.loaded.model, iter(range(3))

    def break_off(**kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise RuntimeError("out of memory")
        return model(**kwargs)

    monkeypatch.setattr(tool_engine.loaded, "model", break_off)
    chunks = client.chat.completions.create(
        model="v000000", messages=HELLO, max_tokens=9, stream=True
    )
    seen = []
    with pytest.raises(openai.APIError, match="internal error"):
        seen.extend(chunks)
    assert len(seen) == 4


def test_an_agent_runs_on_scripted_turns_with_exact_logprobs(
    client: openai.OpenAI, tool_engine: Engine
) -> None:
    script = forced(tool_engine, f"I add.{ADD_CALL}", "It is 46.")
    more = {"forced_token_ids": script, "return_token_ids": True}
    messages: list[Any] = [{"role": "user", "content": "Add."}]
    answers = []
    for _ in script:
        answer = client.chat.completions.create(
            model="v000000",
            messages=messages,
            tools=[ADD],
            logprobs=True,
            temperature=0.7,
            extra_body=more,
        )
        answers.append(answer)
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})
    first, second = (answer.choices[0] for answer in answers)
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "I add."
    (call,) = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": 12}')
    assert (second.finish_reason, second.message.content) == ("stop", "It is 46.")
    assert second.message.tool_calls is None
    prompt = tool_engine.loaded.tokenizer.decode(answers[1].prompt_token_ids)
    assert '<tool_call>{"arguments": {"a": 12}, "name": "add"}</tool_call>' in prompt.replace(
        '{"name": "add", "arguments": {"a": 12}}', '{"arguments": {"a": 12}, "name": "add"}'
    )
    assert "<|tool|>46<|end|>" in prompt
    for answer, ids in zip(answers, script, strict=True):
        assert answer.choices[0].token_ids == ids
        with torch.inference_mode():
            whole = torch.tensor([answer.prompt_token_ids + ids])
            logits = tool_engine.loaded.model(whole).logits[0]
        expected = torch.log_softmax(logits / 0.7, dim=-1)[-len(ids) - 1 : -1]
        found = [entry.logprob for entry in answer.choices[0].logprobs.content]
        assert found == pytest.approx(expected[range(len(ids)), ids].tolist(), abs=1e-4)


def test_streamed_tool_calls_are_those_of_the_plain_answer(
    client: openai.OpenAI, http: httpx.Client, tool_engine: Engine
) -> None:
    broken = '<tool_call>{"name": add}</tool_call>'
    (ids,) = forced(tool_engine, f"Two: {ADD_CALL}\n{ADD_CALL} and {broken}")
    body = {"model": "v000000", "messages": HELLO, "tools": [ADD], "forced_token_ids": ids}
    plain = http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert plain["message"]["content"] == f"Two:  and {broken}"
    assert plain["finish_reason"] == "tool_calls"
    calls = plain["message"]["tool_calls"]
    assert len({call["id"] for call in calls}) == 2
    with client.chat.completions.stream(
        model="v000000", messages=HELLO, tools=[ADD], extra_body={"forced_token_ids": ids}
    ) as streamed:
        final = streamed.get_final_completion().choices[0]
    assert final.message.content == plain["message"]["content"]
    assert final.finish_reason == "tool_calls"
    assert [
        (call.id, call.function.name, call.function.arguments) for call in final.message.tool_calls
    ] == [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "46"}
        for call in final.message.tool_calls
    ]
    # The streamed message goes back with what the client added to it.
    client.chat.completions.create(
        model="v000000", messages=[*HELLO, final.message, *results], max_tokens=1
    )


def test_tool_choice_none_leaves_the_text_alone(http: httpx.Client, tool_engine: Engine) -> None:
    (ids,) = forced(tool_engine, ADD_CALL)
    body = {"model": "v000000", "messages": HELLO, "tools": [ADD], "forced_token_ids": ids}
    answer = http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": ADD_CALL}
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_a_stop_text_is_found_across_tokens_and_never_streamed(
    http: httpx.Client, tool_engine: Engine
) -> None:
    (ids,) = forced(tool_engine, "one STO two STOP three")
    body = {"model": "v000000", "messages": HELLO, "forced_token_ids": ids, "stop": "STOP"}
    chunks = stream(http, "/v1/chat/completions", {**body, "return_token_ids": True})
    (choice,) = put_together(chunks, 1)
    assert choice["content"] == "one STO two "
    assert choice["stop_reason"] == "STOP"
    assert choice["token_ids"] == ids[: len("one STO two STOP")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forced_token_ids": [[5]], "messages": [*HELLO, *HELLO]}, None),
        (
            {"forced_token_ids": [[5]], "messages": [{"role": "assistant", "content": "a"}]},
            "1 turns, this is turn 2",
        ),
        ({"forced_token_ids": [99999]}, "token id 99999 is none of the model's"),
        ({"forced_token_ids": [5], "top_p": 0.5}, "neither top_p nor top_k"),
        ({"forced_token_ids": [-5]}, "forced_token_ids"),
    ],
)
def test_scripts_that_do_not_fit_are_refused(
    http: httpx.Client, changes: dict[str, Any], message: str | None
) -> None:
    body = {"model": "v000000", "messages": HELLO, **changes}
    response = http.post("/v1/chat/completions", json=body)
    assert response.status_code == (200 if message is None else 400)
    assert message is None or message in response.json()["error"]["message"]


def test_completions_continue_a_text_or_ids_streamed_and_not(
    http: httpx.Client, tool_engine: Engine
) -> None:
    body = {"model": "v000000", "prompt": "12+34=", "seed": 4, "n": 2, "logprobs": 3}
    body |= {"return_token_ids": True}
    plain = http.post("/v1/completions", json=body).json()
    prompt_ids = tool_engine.loaded.encode_text("12+34=")
    for choice in plain["choices"]:
        assert choice["prompt_token_ids"] == prompt_ids
        assert choice["text"] == tool_engine.loaded.decode(choice["token_ids"])
        columns = choice["logprobs"]
        assert {len(column) for column in columns.values()} == {len(choice["token_ids"]), 16}
        texts, offsets = columns["tokens"], columns["text_offset"]
        assert offsets == [len("".join(texts[:i])) for i in range(16)]
        for text, logprob, top in zip(
            texts, columns["token_logprobs"], columns["top_logprobs"], strict=True
        ):
            assert top[text] == logprob
            assert 3 <= len(top) <= 4
    assert plain["choices"][0]["token_ids"] != plain["choices"][1]["token_ids"]
    by_ids = http.post("/v1/completions", json={**body, "prompt": prompt_ids}).json()
    assert by_ids["choices"] == plain["choices"]
    chunks = stream(http, "/v1/completions", body)
    for choice, streamed in zip(plain["choices"], put_together(chunks, 2), strict=True):
        assert streamed["content"] == choice["text"]
        assert streamed["token_ids"] == choice["token_ids"]
        assert streamed["logprobs"] == choice["logprobs"]
        assert streamed["finish_reason"] == choice["finish_reason"]
    assert chunks[-1]["usage"] == plain["usage"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"prompt": ""}, "prompt: it has no token"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [99999]}, "token id 99999"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_unsupported_completions_are_refused(
    http: httpx.Client, changes: dict[str, Any], named: str
) -> None:
    body = {"model": "v000000", "prompt": "12+34=", **changes}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert named in response.json()["error"]["message"]
