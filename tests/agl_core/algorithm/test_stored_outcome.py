"""How an attempt of a store counts for the pipeline."""

import math

import pytest

from agl_core import semconv
from agl_core.algorithm.stored_outcome import judge_stored
from agl_core.runner.outcome import TriedRollout
from agl_core.types.core import Attempt, Rollout
from agl_core.types.outcome import FailureKind
from agl_core.types.tracer import Span, TraceStatus

TRIED = TriedRollout(index=3, rollout_id="ro-ledger", attempt_id="at-1", attempt=2)
ROLLOUT = Rollout(rollout_id="ro-store", input={}, start_time=10.0, end_time=14.0)
IDS = {semconv.PROMPT_TOKEN_IDS: [1], semconv.RESPONSE_TOKEN_IDS: [2], semconv.LOGPROBS: [-0.5]}
CALL = {**IDS, semconv.INPUT_TOKENS: 1}


def attempt(status, **more) -> Attempt:
    return Attempt(
        rollout_id="ro-store",
        attempt_id="at-1",
        sequence_id=1,
        start_time=11.0,
        status=status,
        **more,
    )


def span(name, attributes) -> Span:
    return Span.from_attributes(
        name=name, attributes=attributes, rollout_id="ro-store", attempt_id="at-1", start_time=12.5
    )


def reward(value) -> Span:
    return span(semconv.ANNOTATION_SPAN, {semconv.PRIMARY_REWARD_VALUE: value})


@pytest.mark.parametrize(
    ("found", "kind", "message"),
    [
        (attempt("timeout"), "timeout", "the attempt is timeout"),
        (attempt("unresponsive"), "infra_error", "no sign of life"),
        (attempt("cancelled"), "cancelled", "cancelled"),
        (attempt("failed"), "agent_error", "the attempt is failed"),
        (attempt("failed", failure_kind="infra_error", failure_message="no"), "infra_error", "no"),
        (None, "cancelled", "before anybody took it"),
    ],
)
def test_an_attempt_that_did_not_succeed_has_a_kind_and_a_reason(found, kind, message):
    outcome = judge_stored(TRIED, ROLLOUT, found, []).outcome
    assert outcome.kind == kind
    assert message in outcome.message
    assert outcome.reward is None


def test_one_that_succeeded_has_its_last_reward_and_its_spans_have_the_ledgers_ids():
    spans = [span(semconv.LLM_CALL_SPAN, CALL), reward(0.25), reward(0.5)]
    judged = judge_stored(TRIED, ROLLOUT, attempt("succeeded"), spans)
    outcome = judged.outcome
    assert (outcome.kind, outcome.reward) == (FailureKind.SUCCEEDED, 0.5)
    assert (outcome.index, outcome.rollout_id, outcome.attempt) == (3, "ro-ledger", 2)
    assert (outcome.num_calls, outcome.prompt_tokens, outcome.duration_seconds) == (1, 1, 3.0)
    attributes = judged.spans[0].attributes or {}
    assert attributes[semconv.ROLLOUT_ID] == "ro-ledger"
    assert judged.spans[0].start_time == 12_500_000_000


def test_a_reward_that_is_no_number_is_the_agents_error():
    spans = [span(semconv.LLM_CALL_SPAN, CALL), reward(math.nan)]
    outcome = judge_stored(TRIED, ROLLOUT, attempt("succeeded"), spans).outcome
    assert (outcome.kind, outcome.reward) == (FailureKind.AGENT_ERROR, None)


def test_a_failed_call_keeps_its_reason():
    failed = span(semconv.LLM_CALL_SPAN, {})
    failed.status = TraceStatus(status_code="ERROR", description="no ids")
    outcome = judge_stored(TRIED, ROLLOUT, attempt("succeeded"), [failed, reward(1.0)]).outcome
    assert outcome.kind is FailureKind.NO_TRACE
    assert "no ids" in outcome.message


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({semconv.RESPONSE_TOKEN_IDS: [9]}, "response token ids: 9 at position 0 is no token"),
        ({semconv.PROMPT_TOKEN_IDS: [1, -1]}, "prompt token ids: -1 at position 1 is no token"),
        ({semconv.PROMPT_TOKEN_IDS: [2**40]}, "1099511627776 at position 0"),
        ({semconv.RESPONSE_TOKEN_IDS: ["2"]}, "not a list of integers"),
        ({semconv.RESPONSE_TOKEN_IDS: "[2]"}, "not a list of integers"),
        ({semconv.LOGPROBS: [0.25]}, "a log-prob is above 0: 0.25 at position 0"),
        ({semconv.LOGPROBS: [math.nan]}, "a log-prob is not finite: nan at position 0"),
        ({semconv.LOGPROBS: [-0.5, -0.5]}, "1 response token ids but 2 log-probs"),
    ],
)
def test_one_impossible_call_makes_its_rollout_no_trace_whoever_recorded_it(wrong, reason):
    calls = [span(semconv.LLM_CALL_SPAN, IDS), span(semconv.LLM_CALL_SPAN, {**IDS, **wrong})]
    succeeded = attempt("succeeded")
    spans = [*calls, reward(1.0)]
    outcome = judge_stored(TRIED, ROLLOUT, succeeded, spans, vocabulary_size=9).outcome
    assert (outcome.kind, outcome.reward) == (FailureKind.NO_TRACE, None)
    assert outcome.message.startswith("model call 1 cannot be trained on: ")
    assert reason in outcome.message


def test_what_the_model_server_said_is_in_the_message_of_an_agent_that_failed():
    refused = span(semconv.LLM_CALL_SPAN, {semconv.HTTP_STATUS: 400})
    words = "the model server answered HTTP 400: top_k is not supported"
    refused.status = TraceStatus(status_code="ERROR", description=words)
    failed = attempt("failed", failure_kind="agent_error", failure_message="ValueError: no")
    outcome = judge_stored(TRIED, ROLLOUT, failed, [refused]).outcome
    assert outcome.message == f"ValueError: no ({words})"
