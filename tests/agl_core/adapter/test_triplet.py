import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agl_core import semconv
from agl_core.adapter.triplet import (
    CallDropReason,
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TripletReport,
)
from agl_core.emitter.reward import find_final_reward
from agl_core.types.core import Triplet
from agl_core.types.tracer import Span
from tests.agl_core.adapter.traces import (
    make_agent,
    make_link,
    make_llm_span,
    make_proxy_span,
    make_reward,
    make_span,
)


def ids(triplets: list[Triplet]) -> list[str]:
    return [triplet.metadata["span_id"] for triplet in triplets]


def rewards(triplets: list[Triplet]) -> list[float | None]:
    return [triplet.reward for triplet in triplets]


def emitted(triplets: list[Triplet]) -> list[list[float]]:
    """The rewards on each triplet."""
    return [[r["value"] for r in triplet.metadata.get("rewards", [])] for triplet in triplets]


def reasons(report: TripletReport) -> dict[str, CallDropReason]:
    return {drop.found.span.span_id: drop.reason for drop in report.dropped}


# Rewards


def test_of_two_rewards_at_the_end_the_last_one_is_final():
    spans = [make_llm_span("a", 0, 1), make_llm_span("b", 2, 3)]
    spans += [make_reward("x", 4, 0.1), make_reward("y", 5, 1.0)]
    triplets = TracerTraceToTriplet().adapt(spans)
    assert rewards(triplets) == [None, 1.0]
    assert emitted(triplets) == [[], [0.1, 1.0]]
    assert find_final_reward(spans) == 1.0


@pytest.mark.parametrize("num_calls", [1, 2])
def test_a_returned_reward_wins_over_the_emitted_one(num_calls: int):
    calls = [make_llm_span(str(i), i, i + 0.5) for i in range(num_calls)]
    spans = [*calls, make_reward("emitted", 7, 0.25)]
    returned = make_reward("returned", 8, 0.75).model_copy(update={"trace_id": "f" * 32})
    triplets = TracerTraceToTriplet().adapt([*spans, returned])
    assert triplets[-1].reward == 0.75
    assert emitted(triplets)[-1] == [0.25, 0.75]


def test_more_rewards_than_calls_are_all_kept():
    spans = [make_llm_span("a"), *(make_reward(f"x{i}", 2 + i, float(i)) for i in range(4))]
    triplets = TracerTraceToTriplet().adapt(spans)
    assert rewards(triplets) == [3.0]
    assert emitted(triplets) == [[0.0, 1.0, 2.0, 3.0]]


def test_rewards_on_the_way_stay_with_the_calls_that_they_follow():
    spans = [
        make_llm_span("a", 0, 1),
        make_reward("x", 2, 0.1),
        make_llm_span("b", 3, 4),
        make_llm_span("c", 5, 6),
        make_reward("y", 7, 0.2),
        make_llm_span("d", 8, 9),
        make_reward("z", 10, 1.0),
    ]
    assert rewards(TracerTraceToTriplet().adapt(spans)) == [0.1, None, 0.2, 1.0]


def test_a_final_reward_before_the_last_call_is_on_the_last_triplet_and_says_what_it_is_about():
    spans = [make_llm_span("a", 0, 1), make_reward("x", 2, 0.5), make_llm_span("b", 3, 4)]
    triplets = TracerTraceToTriplet().adapt(spans)
    assert rewards(triplets) == [None, 0.5]
    assert triplets[1].metadata["rewards"][0]["about"] == "a"


def test_the_list_decides_which_reward_is_final_whatever_the_clocks_say():
    spans = [make_llm_span("a"), make_reward("x", 9, 0.1), make_reward("y", 2, 1.0)]
    assert rewards(TracerTraceToTriplet().adapt(spans)) == [1.0]


def test_a_reward_before_every_call_is_reported():
    spans = [make_reward("x", 0, 0.1), make_llm_span("a", 1, 2), make_reward("y", 3, 1.0)]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert emitted(result.triplets) == [[1.0]]
    assert [reward.span_id for reward in result.report.unmatched_rewards] == ["x"]


def test_rewards_without_calls_are_reported():
    result = TracerTraceToTriplet().adapt_with_report([make_reward("x", 0, 0.1)])
    assert result.triplets == []
    assert [reward.value for reward in result.report.unmatched_rewards] == [0.1]
    assert (result.report.final_reward, result.report.reward_source) == (0.1, "x")


def test_a_call_that_is_still_running_has_not_earned_the_reward():
    spans = [make_llm_span("a", 0, 2), make_llm_span("b", 1, 9)]
    spans += [make_reward("x", 3, 0.1), make_reward("y", 10, 1.0)]
    assert rewards(TracerTraceToTriplet().adapt(spans)) == [0.1, 1.0]


def test_siblings_alone_are_followed_if_asked_for():
    spans = [
        make_agent("one", 0, 9, "one"),
        make_agent("two", 0, 9, "two"),
        make_llm_span("a", 1, 2, parent="one"),
        make_llm_span("b", 3, 4, parent="two"),
        make_reward("x", 5, 0.5, parent="one"),
        make_reward("y", 10, 1.0),
    ]
    adapter = TracerTraceToTriplet(reward_match=RewardMatchPolicy.FIRST_SIBLING)
    assert rewards(adapter.adapt(spans)) == [0.5, 1.0]
    assert emitted(TracerTraceToTriplet().adapt(spans)) == [[], [0.5, 1.0]]


def test_under_first_sibling_the_last_reward_stays_with_its_agent():
    spans = [
        make_agent("one", 0, 9, "one"),
        make_agent("two", 0, 9, "two"),
        make_llm_span("a", 1, 2, parent="one"),
        make_llm_span("b", 3, 4, parent="two"),
        make_reward("x", 5, 0.5, parent="one"),
    ]
    adapter = TracerTraceToTriplet(reward_match="first_sibling")
    assert rewards(adapter.adapt(spans)) == [0.5, None]


def test_a_linked_reward_belongs_to_the_call_that_it_names():
    link = make_link(0, "gen_ai.response.id", "r-a") | make_link(1, "span_id", "a")
    spans = [make_llm_span("a", 0, 1), make_llm_span("b", 2, 3)]
    spans += [make_reward("x", 4, 0.5, attributes=link), make_reward("y", 5, 1.0)]
    assert rewards(TracerTraceToTriplet().adapt(spans)) == [0.5, 1.0]


def test_all_links_of_a_reward_have_to_match():
    link = make_link(0, "gen_ai.response.id", "r-a") | make_link(1, "span_id", "b")
    spans = [make_llm_span("a", 0, 1), make_llm_span("b", 2, 3)]
    spans += [make_reward("x", 4, 0.5, attributes=link), make_reward("y", 5, 1.0)]
    assert emitted(TracerTraceToTriplet().adapt(spans)) == [[], [0.5, 1.0]]


def test_every_dimension_of_a_reward_is_kept():
    more = {f"{semconv.REWARD_PREFIX}.1.name": "cost", f"{semconv.REWARD_PREFIX}.1.value": -2}
    spans = [make_llm_span("a"), make_reward("x", 2, 1.0, attributes=more)]
    (triplet,) = TracerTraceToTriplet().adapt(spans)
    assert triplet.metadata["rewards"] == [
        {"span_id": "x", "value": 1.0, "values": {"primary": 1.0, "cost": -2.0}, "about": "a"}
    ]


def test_a_reward_that_is_not_a_number_is_an_error():
    with pytest.raises(ValueError, match="finite"):
        TracerTraceToTriplet().adapt([make_llm_span("a"), make_reward("x", 2, float("nan"))])


def test_an_unknown_reward_policy_is_an_error():
    with pytest.raises(ValueError, match="nearest"):
        TracerTraceToTriplet(reward_match="nearest")


# Order


def test_triplets_are_in_the_order_of_starts_not_of_the_tree():
    spans = [
        make_agent("one", 0, 9, "one"),
        make_agent("two", 0, 9, "two"),
        make_llm_span("a", 1, 2, parent="one"),
        make_llm_span("c", 5, 6, parent="one"),
        make_llm_span("b", 3, 4, parent="two"),
    ]
    assert ids(TracerTraceToTriplet().adapt(spans)) == ["a", "b", "c"]


def test_concurrent_calls_are_in_the_order_of_starts():
    spans = [make_llm_span("a", 2, 3), make_llm_span("b", 0, 9), make_llm_span("c", 1, 2)]
    assert ids(TracerTraceToTriplet().adapt(spans)) == ["b", "c", "a"]


def test_the_numbers_of_the_proxy_decide_when_its_clock_was_set_back():
    spans = [make_proxy_span("a", 0, 100, 101), make_proxy_span("b", 1, 40, 41)]
    assert ids(TracerTraceToTriplet().adapt(spans[::-1])) == ["a", "b"]


def test_calls_without_times_are_in_the_order_of_sequence_ids():
    spans = [
        make_llm_span("b", None, None, sequence_id=2),
        make_llm_span("a", 7, 8, sequence_id=1),
        make_reward("x", None, 1.0),
    ]
    triplets = TracerTraceToTriplet().adapt(spans)
    assert ids(triplets) == ["a", "b"]
    assert rewards(triplets) == [None, 1.0]


# Calls


def test_a_call_recorded_by_client_and_proxy_has_the_agent_of_one_and_the_ids_of_the_other():
    client = make_llm_span(
        "client", 1, 4, parent="agent",
        attributes={"prompt_token_ids": None, "response_token_ids": None},
    )  # fmt: skip
    proxy = make_proxy_span("proxy", 0, 2, 3, attributes={semconv.RESPONSE_ID: "r-client"})
    spans = [make_agent("agent", 0, 9, "solver"), client, proxy]
    for order in (spans, spans[::-1]):
        result = TracerTraceToTriplet(agent_match="solver").adapt_with_report(order)
        (triplet,) = result.triplets
        assert triplet.metadata["agent_name"] == "solver"
        assert triplet.response["token_ids"] == [3, 4]
        assert triplet.response["logprobs"] == [-0.5, -0.25]
        assert triplet.metadata["policy_version"] == "v000003"
        assert (result.report.num_llm_calls, result.report.num_duplicates) == (1, 1)


def test_a_server_that_repeats_its_ids_loses_no_call_that_the_proxy_numbered():
    same = {semconv.RESPONSE_ID: "r"}
    bare = {"gen_ai.response.id": "r", "prompt_token_ids": None}
    spans = [
        make_llm_span("client-0", 0, 3, attributes=bare),
        make_llm_span("client-1", 10, 13, attributes=bare),
        make_proxy_span("proxy-0", 0, 1, 2, attributes=same),
        make_proxy_span("proxy-1", 1, 11, 12, attributes=same),
    ]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert ids(result.triplets) == ["proxy-0", "proxy-1"]
    assert [t.prompt["raw_content"][0]["content"] for t in result.triplets] == [
        "ask proxy-0",
        "ask proxy-1",
    ]
    assert result.report.num_duplicates == 2


def test_a_nested_span_without_response_id_is_the_same_call():
    inner = make_llm_span("in", 1, 2, parent="out", attributes={"gen_ai.response.id": None})
    result = TracerTraceToTriplet().adapt_with_report([make_llm_span("out", 0, 3), inner])
    assert ids(result.triplets) == ["out"]
    assert result.report.num_duplicates == 1


def test_the_parts_of_a_litellm_call_give_their_ids_to_the_call_of_the_client():
    client = make_llm_span(
        "client", 1, 4, attributes={"prompt_token_ids": None, "response_token_ids": None}
    )
    raw = make_span(
        "raw", 2, 3, name="raw_gen_ai_request",
        attributes={
            "llm.hosted_vllm.id": "r-client",
            "llm.hosted_vllm.prompt_token_ids": "[5, 6]",
            "llm.hosted_vllm.choices": "[{'token_ids': [7], 'stop_reason': None}]",
        },
    )  # fmt: skip
    (triplet,) = TracerTraceToTriplet().adapt([client, raw])
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([5, 6], [7])
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "ask client"}]


def test_only_calls_of_matching_agents_count():
    spans = [
        make_llm_span("before", 0, 1, parent="root"),
        make_agent("root", 0, 20, "outer"),
        make_llm_span("x", 1, 2, parent="root"),
        make_agent("helper", 3, 8, "helper", parent="root"),
        make_llm_span("y", 4, 5, parent="helper"),
        make_agent("again", 6, 8, "outer", parent="helper"),
        make_llm_span("z", 7, 8, parent="again"),
    ]
    result = TracerTraceToTriplet(agent_match="^outer$").adapt_with_report(spans)
    assert ids(result.triplets) == ["before", "x", "z"]
    assert reasons(result.report) == {"y": CallDropReason.OTHER_AGENT}


def test_a_floating_call_passes_the_filter_of_the_agent_that_it_ran_in():
    spans = [
        make_span("session", 0, 20),
        make_agent("agent", 1, 10, "solver", parent="session"),
        make_llm_span("call", 3, 4, parent="session"),
    ]
    assert ids(TracerTraceToTriplet(agent_match="solver").adapt(spans)) == ["call"]
    adapter = TracerTraceToTriplet(agent_match="solver", repair_hierarchy=False)
    assert reasons(adapter.adapt_with_report(spans).report) == {"call": CallDropReason.OTHER_AGENT}


def test_calls_made_for_a_reward_are_left_out_unless_asked_for():
    spans = [
        make_llm_span("a", 0, 1),
        make_reward("judge", 2, 1.0).model_copy(update={"end_time": 5}),
        make_llm_span("b", 3, 4, parent="judge"),
    ]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert ids(result.triplets) == ["a"]
    assert reasons(result.report) == {"b": CallDropReason.INSIDE_REWARD}
    assert ids(TracerTraceToTriplet(exclude_llm_call_in_reward=False).adapt(spans)) == ["a", "b"]


def test_calls_without_ids_give_no_triplet_but_a_reason_and_a_warning(caplog):
    bare = {"prompt_token_ids": None, "response_token_ids": None}
    spans = [make_llm_span("a", 0, 1), make_llm_span("b", 2, 3, attributes=bare)]
    spans += [make_reward("x", 4, 1.0)]
    adapter = TracerTraceToTriplet()
    with caplog.at_level(logging.WARNING):
        triplets = adapter.adapt(spans)
    assert ids(triplets) == ["a"]
    assert rewards(triplets) == [1.0]
    assert "no_token_ids': 1" in caplog.text
    assert "rollout=ro-1" in caplog.text
    report = adapter.adapt_with_report(spans).report
    assert report.num_without_ids == 1
    assert report.dropped[0].found.call.chat.completions[0]["content"] == "answer b"


def test_expected_calls_without_ids_are_left_out_without_a_warning(caplog):
    bare = {"response_token_ids": None}
    spans = [make_llm_span("a", 0, 1), make_llm_span("b", 2, 3, attributes=bare)]
    with caplog.at_level(logging.WARNING):
        assert ids(TracerTraceToTriplet(_skip_empty_token_spans=True).adapt(spans)) == ["a"]
    assert caplog.text == ""


@pytest.mark.parametrize("ids_recorded", [[], ["1", "2"], [1.0], [True], "not ids", 7])
def test_ids_that_are_not_integers_count_as_none(ids_recorded):
    span = make_llm_span("a", attributes={"response_token_ids": ids_recorded})
    report = TracerTraceToTriplet().adapt_with_report([span]).report
    assert reasons(report) == {"a": CallDropReason.NO_TOKEN_IDS}


def test_a_reward_about_a_call_without_ids_goes_to_no_other_call():
    spans = [
        make_llm_span("a", 0, 1),
        make_llm_span("b", 2, 3, attributes={"response_token_ids": None}),
        make_reward("x", 4, 0.5),
        make_llm_span("c", 5, 6),
        make_reward("y", 7, 1.0),
    ]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert rewards(result.triplets) == [None, 1.0]
    assert [(r.span_id, r.about) for r in result.report.unmatched_rewards] == [("x", "b")]


def test_a_failed_call_gives_no_triplet():
    spans = [make_llm_span("a", 0, 1, status="ERROR"), make_llm_span("b", 2, 3)]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert ids(result.triplets) == ["b"]
    assert reasons(result.report) == {"a": CallDropReason.FAILED}


def test_calls_under_other_names_are_reported_and_found_by_theirs(caplog):
    span = make_llm_span("a", name="chat gpt-4o")
    with caplog.at_level(logging.WARNING):
        assert TracerTraceToTriplet().adapt([span]) == []
    assert "other_name" in caplog.text
    assert ids(TracerTraceToTriplet(llm_call_match="^chat ").adapt([span])) == ["a"]


def test_logprobs_that_do_not_pair_up_with_the_ids_are_left_out():
    span = make_proxy_span("a", 0, 0, 1, attributes={semconv.LOGPROBS: [-0.5]})
    assert "logprobs" not in TracerTraceToTriplet().adapt([span])[0].response


def test_a_triplet_holds_ids_text_and_parameters():
    (triplet,) = TracerTraceToTriplet().adapt([make_proxy_span("a", 0, 0, 1)])
    assert triplet == Triplet(
        prompt={
            "token_ids": [1, 2],
            "raw_content": [{"role": "user", "content": "ask a"}],
            "image_urls": [],
        },
        response={
            "token_ids": [3, 4],
            "raw_content": [{"role": "assistant", "content": "yes"}],
            "logprobs": [-0.5, -0.25],
        },
        reward=None,
        metadata={
            "request": {"model": "m"},
            "response": {"id": "r-a"},
            "response_id": "r-a",
            "span_id": "a",
            "agent_name": None,
            "policy_version": "v000003",
        },
    )


def test_no_spans_give_no_triplets():
    assert TracerTraceToTriplet().adapt([]) == []
    assert LlmProxyTraceToTriplet()([]) == []


# The proxy alone


def test_the_proxys_calls_follow_sequence_ids_and_ignore_clocks():
    spans = [
        make_proxy_span("b", 1, 10, 11, sequence_id=4),
        make_proxy_span("a", 0, 90, 91, sequence_id=1),
        make_reward("x", 5, 0.5, sequence_id=4),
        make_reward("y", 6, 1.0, sequence_id=9),
    ]
    triplets = LlmProxyTraceToTriplet().adapt(spans)
    assert ids(triplets) == ["a", "b"]
    assert rewards(triplets) == [0.5, 1.0]
    assert triplets[0].prompt == {"token_ids": [1, 2]}


def test_the_proxys_adapter_reads_litellm_spans_once():
    request = make_span(
        "request", 0, 3, name="litellm_request", sequence_id=1,
        attributes={"gen_ai.response.id": "r"},
    )  # fmt: skip
    raw = make_span(
        "raw", 1, 2, name="raw_gen_ai_request", parent="request", sequence_id=1,
        attributes={
            "llm.hosted_vllm.id": "r",
            "llm.hosted_vllm.prompt_token_ids": "[1, 2]",
            "llm.hosted_vllm.response_token_ids": "[[3]]",
        },
    )  # fmt: skip
    agent = make_llm_span("agent", 0, 4, sequence_id=2)
    result = LlmProxyTraceToTriplet().adapt_with_report([raw, request, agent])
    (triplet,) = result.triplets
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2], [3])
    assert triplet.metadata["response_id"] == "r"
    assert result.report.num_duplicates == 1


def test_the_proxys_calls_without_ids_are_reported():
    bare = {semconv.RESPONSE_TOKEN_IDS: None, semconv.LOGPROBS: None}
    result = LlmProxyTraceToTriplet().adapt_with_report(
        [make_proxy_span("a", 0, 0, 1, attributes=bare)]
    )
    assert result.triplets == []
    assert result.report.num_without_ids == 1


# Spans of the SDK


def record() -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("session") as session:
        session.set_attribute("agent.name", "solver")
        for answer in ("one", "two"):
            with tracer.start_as_current_span(semconv.LLM_CALL_SPAN) as call:
                call.set_attributes(
                    {
                        "gen_ai.response.id": answer,
                        "prompt_token_ids": [1, 2],
                        "response_token_ids": [3],
                        "logprobs.content": '[{"token": "a", "logprob": -0.5}]',
                    }
                )
    with tracer.start_as_current_span(semconv.ANNOTATION_SPAN) as reward:
        reward.set_attribute(semconv.PRIMARY_REWARD_VALUE, 0.75)
    return list(exporter.get_finished_spans())


@pytest.mark.parametrize("converted", [False, True])
def test_spans_of_the_sdk_become_triplets(converted: bool):
    spans: list = record()
    if converted:
        spans = [Span.from_opentelemetry(s, "ro", "at", i) for i, s in enumerate(spans)]
    triplets = TracerTraceToTriplet(agent_match="solver").adapt(spans)
    assert [triplet.metadata["response_id"] for triplet in triplets] == ["one", "two"]
    assert [triplet.response for triplet in triplets] == [
        {"token_ids": [3], "logprobs": [-0.5], "raw_content": []}
    ] * 2
    assert rewards(triplets) == [None, 0.75]


# Invariants


@st.composite
def traces(draw: st.DrawFn) -> list[Span]:
    """Random trees of agents, calls and rewards, in a random order."""
    size = draw(st.integers(1, 14))
    spans: list[Span] = []
    for number in range(size):
        name = f"s{number}"
        start = draw(st.integers(0, 9))
        end = start + draw(st.integers(0, 5))
        parent = draw(st.sampled_from([None, "lost", *(span.span_id for span in spans)]))
        kind = draw(st.sampled_from(["call", "call", "bare", "failed", "reward", "agent"]))
        given_ = {"parent": parent, "sequence_id": draw(st.integers(0, 5))}
        if kind == "reward":
            spans.append(make_reward(name, start, float(number), **given_))
        elif kind == "agent":
            agent = make_agent(name, start, end, draw(st.sampled_from("AB")), parent=parent)
            spans.append(agent)
        else:
            if kind == "bare":
                given_["attributes"] = {"prompt_token_ids": None}
            if kind == "failed":
                given_["status"] = "ERROR"
            spans.append(make_llm_span(name, start, end, **given_))
    return draw(st.permutations(spans))


@given(traces(), st.sampled_from([None, "A"]), st.sampled_from(RewardMatchPolicy), st.booleans())
def test_nothing_is_lost_and_nothing_counts_twice(
    spans: list[Span], agent_match: str | None, policy: RewardMatchPolicy, repair: bool
):
    adapter = TracerTraceToTriplet(
        repair_hierarchy=repair, agent_match=agent_match, reward_match=policy
    )
    before = [span.model_copy(deep=True) for span in spans]
    triplets, report = (result := adapter.adapt_with_report(spans)).triplets, result.report
    assert spans == before
    calls = [span.span_id for span in spans if span.name == semconv.LLM_CALL_SPAN]
    dropped = [drop.found.span.span_id for drop in report.dropped]
    assert sorted(ids(triplets) + dropped) == sorted(calls)
    assert report.num_llm_calls == len(calls)
    starts = {span.span_id: span.start_time for span in spans}
    assert [starts[i] for i in ids(triplets)] == sorted(starts[i] for i in ids(triplets))
    on_triplets = [value for values in emitted(triplets) for value in values]
    unmatched = [reward.value for reward in report.unmatched_rewards]
    all_rewards = [s for s in spans if s.name == semconv.ANNOTATION_SPAN]
    assert sorted(on_triplets + unmatched) == sorted(
        span.attributes[semconv.PRIMARY_REWARD_VALUE] for span in all_rewards
    )
    assert report.final_reward == find_final_reward(spans)
    if triplets and policy is RewardMatchPolicy.FIRST_OCCURRENCE:
        assert triplets[-1].reward == find_final_reward(spans)
    assert all(triplet.response["token_ids"] for triplet in triplets)


@given(traces())
def test_the_proxys_adapter_loses_nothing_either(spans: list[Span]):
    proxied = [
        span
        if span.name != semconv.LLM_CALL_SPAN
        else span.model_copy(update={"attributes": {**span.attributes, semconv.CALL_INDEX: 0}})
        for span in spans
    ]
    result = LlmProxyTraceToTriplet().adapt_with_report(proxied)
    calls = [span for span in spans if span.name == semconv.LLM_CALL_SPAN]
    assert len(result.triplets) + len(result.report.dropped) == len(calls)
    by_id = {span.span_id: span.sequence_id for span in spans}
    sequence = [by_id[i] for i in ids(result.triplets)]
    assert sequence == sorted(sequence)
    if result.triplets:
        assert result.triplets[-1].reward == find_final_reward(spans)


@given(traces(), st.floats(-1e9, 1e9))
def test_the_hour_does_not_matter(spans: list[Span], shift: float):
    def moved(span: Span) -> Span:
        assert span.start_time is not None
        assert span.end_time is not None
        times = {"start_time": span.start_time * 8, "end_time": span.end_time * 8}
        return span.model_copy(update={name: t + round(shift) for name, t in times.items()})

    adapter = TracerTraceToTriplet()
    result, later = map(adapter.adapt_with_report, (spans, [moved(span) for span in spans]))
    assert ids(later.triplets) == ids(result.triplets)
    assert rewards(later.triplets) == rewards(result.triplets)
    assert replace(later.report, dropped=[]) == replace(result.report, dropped=[])


# What others recorded may be anything


def test_calls_that_start_at_once_are_in_the_order_of_sequence_ids():
    spans = [make_llm_span("b", sequence_id=2), make_llm_span("a", sequence_id=1)]
    assert ids(TracerTraceToTriplet().adapt(spans)) == ["a", "b"]


def test_a_reward_at_the_moment_at_which_a_call_ends_follows_it():
    spans = [make_llm_span("a", 0, 1), make_reward("x", 1, 0.5), make_llm_span("b", 2, 3)]
    triplets = TracerTraceToTriplet().adapt([*spans, make_reward("y", 4, 1.0)])
    assert emitted(triplets) == [[0.5], [1.0]]


@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
def test_a_reward_that_is_listed_twice_is_one(adapter):
    calls = [make_proxy_span("a", 0, 0, 1, sequence_id=1)]
    twice = [make_reward("x", 2, 0.5, sequence_id=2)] * 2
    spans = [*calls, *twice, make_reward("y", 3, 1.0, sequence_id=3)]
    assert emitted(adapter.adapt(spans)) == [[0.5, 1.0]]


NO_ID = {"gen_ai.response.id": None}


def test_several_calls_without_response_id_in_one_call_are_calls_of_their_own():
    spans = [
        make_llm_span("outer", 0, 9, attributes=NO_ID | {"response_token_ids": None}),
        make_llm_span("a", 1, 2, parent="outer", attributes=NO_ID),
        make_llm_span("b", 3, 4, parent="outer", attributes=NO_ID),
    ]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert ids(result.triplets) == ["a", "b"]
    assert reasons(result.report) == {"outer": CallDropReason.NO_TOKEN_IDS}


def test_so_they_are_for_the_proxys_adapter():
    unnumbered = {semconv.RESPONSE_ID: None, semconv.CALL_INDEX: None}
    spans = [
        make_proxy_span("outer", 0, 0, 9, attributes=unnumbered, sequence_id=1),
        make_proxy_span("a", 0, 1, 2, parent="outer", attributes=unnumbered, sequence_id=2),
        make_proxy_span("b", 0, 3, 4, parent="outer", attributes=unnumbered, sequence_id=3),
    ]
    assert ids(LlmProxyTraceToTriplet().adapt(spans)) == ["outer", "a", "b"]
    assert ids(LlmProxyTraceToTriplet().adapt(spans[:2])) == ["outer"]


def test_a_failed_try_in_a_call_does_not_part_it_from_the_one_that_was_answered():
    spans = [
        make_llm_span("outer", 0, 9, attributes=NO_ID | {"response_token_ids": None}),
        make_llm_span("a", 1, 2, parent="outer", attributes=NO_ID, status="ERROR"),
        make_llm_span("b", 3, 4, parent="outer", attributes=NO_ID),
    ]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert ids(result.triplets) == ["outer"]
    assert result.report.num_duplicates == 2


def test_numbers_that_are_there_twice_do_not_order_calls():
    spans = [
        make_proxy_span("c", 1, 4, 5),
        make_proxy_span("b", 0, 2, 3),
        make_proxy_span("a", 0, 0, 1),
    ]
    assert ids(TracerTraceToTriplet().adapt(spans)) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "attributes",
    [
        {"logprobs.content": [10**400]},
        {"gen_ai.prompt." + "9" * 5000: 1},
        {"llm.input_messages.0.message.contents.0.message_content.type": "text"},
        {"gen_ai.completion.0.tool_calls.0.arguments": {"n": 2**70, "t": "\udcff"}},
    ],
    ids=["log-prob", "number", "part without text", "arguments"],
)
def test_odd_attributes_cost_no_triplet(attributes):
    spans = [make_llm_span("a", 0, 1, attributes=attributes)]
    assert ids(TracerTraceToTriplet().adapt(spans)) == ["a"]
    broken = make_span("x", 2, 3, attributes={semconv.AGENTOPS_TASK_OUTPUT: "[" * 100_000})
    assert ids(TracerTraceToTriplet().adapt([*spans, broken])) == ["a"]


def test_negative_token_ids_are_none():
    spans = [make_llm_span("a", attributes={"response_token_ids": [5, -1]})]
    result = TracerTraceToTriplet().adapt_with_report(spans)
    assert reasons(result.report) == {"a": CallDropReason.NO_TOKEN_IDS}
