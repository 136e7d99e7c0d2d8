"""Legacy completions through the proxy."""

import openai
import pytest

from agl_core import semconv
from tests.agl_core.llm_proxy.replay import HEAD, replaying, streamed, usage, whole

ASK = {"model": "m", "prompt": "p", "seed": 5}


def text_choice(index, text, ids, reason):
    return {
        "index": index,
        "text": text,
        "logprobs": {
            "tokens": [str(i) for i in ids],
            "token_logprobs": [-i / 8 for i in ids],
            "top_logprobs": [None for _ in ids],
            "text_offset": [0 for _ in ids],
        },
        "finish_reason": reason,
        "token_ids": list(ids),
        "prompt_token_ids": [1, 2, 3],
    }


def completion(*choices, **more):
    return {**HEAD, "object": "text_completion", "choices": list(choices), **more}


ONE = whole(completion(text_choice(0, "abc", [5, 6, 7], "stop"), usage=usage(3, 3)))
TWO = whole(
    completion(
        text_choice(0, "abc", [5, 6], "stop"), text_choice(1, "d", [7], "length"), usage=usage(3, 3)
    )
)
STREAM = streamed(
    [
        completion(text_choice(0, "ab", [5, 6], None)),
        completion(text_choice(0, "c", [7], "stop")),
    ],
    usage(3, 3),
)


def clients(setup):
    return [setup.openai(url) for url in setup.urls]


@pytest.mark.parametrize(("recording", "n"), [(ONE, 1), (TWO, 2)])
def test_client_gets_what_it_gets_from_the_model_server(recording, n):
    with replaying(recording) as setup:
        seen = [c.completions.create(n=n, **ASK).to_dict() for c in clients(setup)]
        assert seen[0] == seen[1]
        span = setup.last_call()
    assert span.status.is_ok
    assert span.name == semconv.LLM_CALL_SPAN
    recorded = span.attributes
    assert recorded[semconv.OPERATION] == "text_completion"
    assert recorded[semconv.PROMPT_TOKEN_IDS] == (1, 2, 3)
    assert recorded[semconv.RESPONSE_TOKEN_IDS] == ((5, 6, 7) if n == 1 else (5, 6))
    assert recorded[semconv.LOGPROBS][0] == -5 / 8
    assert recorded[semconv.INPUT_MESSAGES] == '[{"role":"user","content":"p"}]'
    assert '"abc"' in recorded[semconv.OUTPUT_MESSAGES]
    if n == 2:
        assert recorded["agentlightning.llm.choice.1.response_token_ids"] == (7,)
        assert recorded["agentlightning.llm.choice.1.logprobs"] == (-7 / 8,)
    asked = setup.server.requests[-1]
    assert (asked["logprobs"], asked["return_token_ids"]) == (1, True)


def test_stream_is_the_same_too():
    with replaying(STREAM) as setup:
        seen = [
            [chunk.to_dict() for chunk in client.completions.create(stream=True, **ASK)]
            for client in clients(setup)
        ]
        assert seen[0] == seen[1]
        recorded = setup.last_call().attributes
    assert setup.last_call().status.is_ok
    assert recorded[semconv.PROMPT_TOKEN_IDS] == (1, 2, 3)
    assert recorded[semconv.RESPONSE_TOKEN_IDS] == (5, 6, 7)
    assert recorded[semconv.LOGPROBS] == (-5 / 8, -6 / 8, -7 / 8)
    assert '"abc"' in recorded[semconv.OUTPUT_MESSAGES]


def test_prompt_may_be_token_ids():
    with replaying(ONE) as setup:
        clients(setup)[1].completions.create(model="m", prompt=[[4, 5]])
        assert setup.server.requests[0]["prompt"] == [4, 5]
        assert setup.last_call().status.is_ok


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": [[1], [2]]}, "several prompts"),
        ({"prompt": None}, "no prompt"),
        ({"prompt": 3}, "no prompt"),
        ({"prompt": "p", "echo": True}, "echo is not supported"),
        ({"prompt": "p", "best_of": 3}, "best_of is not supported"),
    ],
)
def test_what_cannot_be_recorded_is_refused(body, words):
    with replaying(ONE) as setup, pytest.raises(openai.BadRequestError, match=words):
        clients(setup)[1].completions.create(model="m", **body)
    assert setup.server.requests == []
    assert words in setup.trace.spans()[0].status.description
