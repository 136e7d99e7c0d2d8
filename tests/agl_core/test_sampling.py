"""What a request says about the distribution that it samples from."""

from typing import Any

import pytest

from agl_core.sampling import (
    CHANGING,
    NEUTRAL,
    deviations,
    is_sampled_by,
    state_fields,
    to_text,
    without_strict_tools,
)


def test_a_request_states_every_field_that_a_server_may_have_a_default_for():
    asked = state_fields({"model": "m", "top_p": 0.9, "top_k": None})
    assert asked == {"model": "m", **NEUTRAL, "top_p": 0.9}


def test_neutral_values_and_other_fields_are_no_deviation():
    fields: dict[str, Any] = {**NEUTRAL, "temperature": 0.3, "top_k": 0, "stop": [], "n": 4}
    fields |= {"tool_choice": "auto", "response_format": {"type": "text"}, "ignore_eos": False}
    fields |= {"min_tokens": 0, "logit_bias": {}, "use_beam_search": False, "best_of": 0}
    fields |= {"max_tokens": 5, "messages": [], "tools": [{"type": "function"}], "user": "me"}
    assert deviations(fields) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_p", 0.5),
        ("top_k", 5),
        ("min_p", 0.2),
        ("presence_penalty", -0.1),
        ("frequency_penalty", 1.0),
        ("repetition_penalty", 1.3),
        ("logit_bias", {"5": -100}),
        ("response_format", {"type": "json_object"}),
        ("structured_outputs", {"regex": "a*"}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "add"}}),
        ("ignore_eos", True),
        ("min_tokens", 3),
        ("stop", ["\n"]),
        ("stop_token_ids", [7]),
        ("bad_words", ["no"]),
        ("allowed_token_ids", [1, 2]),
        ("thinking_token_budget", 100),
        ("thinking_token_budget", 0),
        ("a_field_of_tomorrow", 1),
        ("a_field_of_tomorrow", 0),
        ("a_field_of_tomorrow", False),
    ],
)
def test_what_changes_the_distribution_is_a_deviation(name: str, value: Any):
    assert deviations({**NEUTRAL, name: value}) == {name: value}


STRICT: Any = {"type": "function", "function": {"name": "add", "strict": True}}
PLAIN: Any = {"type": "function", "function": {"name": "add"}}


def test_tools_that_bind_the_answer_to_a_grammar_are_a_deviation():
    assert deviations({"tools": [STRICT, PLAIN]}) == {"tools": ["add"]}
    assert deviations({"tools": [PLAIN], "parallel_tool_calls": False}) == {
        "parallel_tool_calls": False
    }
    assert deviations({"tools": [PLAIN], "parallel_tool_calls": True, "tool_choice": "auto"}) == {}
    assert deviations({"parallel_tool_calls": False}) == {}


def test_strict_tools_are_asked_for_without_it_and_others_as_they_are():
    body = {"tools": [STRICT, PLAIN, {"type": "custom"}], "model": "m"}
    assert without_strict_tools(body) == {"tools": [PLAIN, PLAIN, {"type": "custom"}], "model": "m"}
    assert STRICT["function"]["strict"], "the agent's request is left as it is"
    assert without_strict_tools({"tools": "odd"}) == {"tools": "odd"}


def test_a_call_is_as_expected_if_all_but_the_allowed_fields_agree():
    recorded = to_text({"top_p": 0.9, "stop": ["\n"]})
    assert is_sampled_by(recorded, {"top_p": 0.9}, ["stop"])
    assert not is_sampled_by(recorded, {"top_p": 0.9}, [])
    assert not is_sampled_by(recorded, {"top_p": 0.8}, ["stop"])
    assert not is_sampled_by(to_text({}), {"top_p": 0.9}, ["stop"])
    assert is_sampled_by(to_text({}), {}, [])
    assert is_sampled_by(None, {"top_p": 0.9}, []), "recorded before fields were"


def test_the_temperature_is_no_field_that_can_be_allowed():
    assert "temperature" not in CHANGING
