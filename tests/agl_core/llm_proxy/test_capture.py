import pytest

from agl_core import semconv
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.visible import visible_answer


def make_answer(ids=(5, 6), logprobs=(-0.1, -0.2), prompt_ids=(1, 2, 3), **more):
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "hi"},
        "finish_reason": "stop",
        "token_ids": list(ids),
        "logprobs": {"content": [{"token": "x", "logprob": value} for value in logprobs]},
    }
    return {"id": "c-1", "choices": [choice], "prompt_token_ids": list(prompt_ids), **more}


def test_recording_is_asked_for_and_the_agents_request_stays_as_it_is():
    body = {"model": "m", "messages": [], "temperature": 0.7}
    asked = capture.add_recording(body, 11)
    assert asked == {**body, "logprobs": True, "return_token_ids": True, "seed": 11}
    assert "seed" not in body
    assert capture.add_recording({**body, "seed": 0}, 11)["seed"] == 0


def test_a_stream_is_asked_for_its_usage():
    body = {"messages": [], "stream": True, "stream_options": {"other": 1}}
    asked = capture.add_recording(body, 11)
    assert asked["stream_options"] == {"other": 1, "include_usage": True}
    assert body["stream_options"] == {"other": 1}
    assert "stream_options" not in capture.add_recording({"messages": []}, 11)


def test_seed_depends_on_run_rollout_and_call():
    seed = capture.call_seed("ro-1", 0)
    assert seed == capture.call_seed("ro-1", 0)
    others = {capture.call_seed(*args) for args in [("ro-2", 0), (1, 0), ("ro-1", 1)]}
    assert len(others | {seed}) == 4
    assert 0 <= seed < 2**63


def test_answer_is_recorded():
    headers = {"x-agl-policy-version": "v000003", "x-agl-weights-digest": "abc"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    recorded = capture.response_attributes(make_answer(usage=usage, model="m"), headers)
    assert recorded[semconv.PROMPT_TOKEN_IDS] == [1, 2, 3]
    assert recorded[semconv.RESPONSE_TOKEN_IDS] == [5, 6]
    assert recorded[semconv.LOGPROBS] == [-0.1, -0.2]
    assert recorded[semconv.POLICY_VERSION] == "v000003"
    assert recorded[semconv.WEIGHTS_DIGEST] == "abc"
    assert recorded[semconv.INPUT_TOKENS] == 3
    assert recorded[semconv.OUTPUT_TOKENS] == 2
    assert recorded[semconv.OUTPUT_MESSAGES] == '[{"role":"assistant","content":"hi"}]'
    assert capture.find_defect(recorded) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (make_answer(logprobs=(-0.1,)), "2 response token ids but 1 log-probs"),
        (make_answer(ids=()), "no token ids"),
        (make_answer(prompt_ids=()), "no token ids"),
        (make_answer(ids=("a", "b")), "no token ids"),
        (make_answer(logprobs=(None, -0.1)), "no log-probs"),
        (make_answer(logprobs=(float("-inf"), -0.1)), "not finite"),
        (make_answer(logprobs=(0.5, -0.1)), "above 0"),
        (make_answer(ids=(5, -6)), "-6 at position 1 is no token"),
        (make_answer(prompt_ids=(2**31,)), "prompt token ids: 2147483648 at position 0"),
    ],
)
def test_answer_that_cannot_be_trained_on_has_a_reason(answer, words):
    assert words in capture.find_defect(capture.response_attributes(answer, {}))


def test_agent_sees_only_what_it_asked_for():
    visible = visible_answer(make_answer(), {})
    assert "prompt_token_ids" not in visible
    assert "token_ids" not in visible["choices"][0]
    assert visible["choices"][0]["logprobs"] is None
    assert visible["choices"][0]["message"]["content"] == "hi"
    everything = {"logprobs": True, "return_token_ids": True}
    assert visible_answer(make_answer(), everything) == make_answer()
