import itertools

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agl_core import semconv
from agl_core.llm_proxy import capture
from agl_core.llm_proxy.events import DONE, EventSplitter, StreamEvent
from agl_core.llm_proxy.stream import StreamedAnswer, find_hole
from agl_core.llm_proxy.visible import visible_event
from tests.streams import to_chunks, to_event, to_events


def make_answer(text="abc", ids=(5, 6, 7), *, calls=None, usage=None):
    tokens = [{"token": "x", "logprob": -i / 8, "bytes": None, "top_logprobs": []} for i in ids]
    message = {"role": "assistant", "content": text}
    if calls:
        message = {"role": "assistant", "content": None, "tool_calls": calls}
    return {
        "id": "c-1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "prompt_token_ids": [1, 2],
        "choices": [
            {
                "index": 0,
                "message": message,
                "logprobs": {"content": tokens},
                "finish_reason": "tool_calls" if calls else "stop",
                "token_ids": list(ids),
            }
        ],
        "usage": usage or {"prompt_tokens": 2, "completion_tokens": len(ids), "total_tokens": 5},
    }


CALL = {
    "id": "call-1",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 1}'},
}


def gather(chunks):
    gathered = StreamedAnswer()
    for chunk in chunks:
        gathered.add(chunk)
    return gathered


def split(pieces):
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.add(piece)]
    return events, splitter.rest()


@pytest.mark.parametrize("answer", [make_answer(), make_answer(calls=[CALL])])
def test_chunks_make_up_the_answer_that_came_without_a_stream(answer):
    assert gather(to_chunks(answer)).answer() == answer


def test_span_attributes_are_those_of_the_call_without_a_stream():
    answer = make_answer(calls=[CALL])
    streamed = gather(to_chunks(answer)).answer()
    assert capture.response_attributes(streamed, {}) == capture.response_attributes(answer, {})


STREAM = b": comment\r\n\r\n" + b"".join(to_events(make_answer("\xe4\u20ac!"))) + b"data: cut"


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_the_same_events_are_found_however_bytes_are_split(cuts):
    bounds = sorted({0, *cuts, len(STREAM)})
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(bounds)]
    assert split(pieces) == split([STREAM])


def test_so_are_they_byte_by_byte():
    events, rest = split([STREAM[n : n + 1] for n in range(len(STREAM))])
    assert (events, rest) == split([STREAM])
    assert b"".join(event.raw for event in events) + rest == STREAM
    assert events[-1].data() == DONE
    chunks = [orjson.loads(event.data()) for event in events if event.data() not in (b"", DONE)]
    assert gather(chunks).answer() == make_answer("\xe4\u20ac!")


LINES = [b"\n", b"\r\n", b"\r", b"data: a", b"id: 1"]


@given(st.lists(st.sampled_from(LINES), max_size=30), st.data())
def test_odd_line_ends_are_split_alike_too(lines, data):
    content = b"".join(lines)
    cut = data.draw(st.integers(0, len(content)))
    whole = split([content])
    assert split([content[:cut], content[cut:]]) == whole
    assert b"".join(event.raw for event in whole[0]) + whole[1] == content


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_events_end_with_their_last_byte_whatever_the_line_ends(line_end):
    content = line_end.join(
        [b": hi", b"", b"data: a", b"data:b", b"", b"id: 1", b"data: c", b"", b""]
    )
    splitter, found = EventSplitter(), []
    for number in range(len(content)):
        for event in splitter.add(content[number : number + 1]):
            found.append((number, event.data()))
    ends = [n + len(line_end) for n in range(len(content)) if content[n:].startswith(2 * line_end)]
    assert found == list(
        zip((n + len(line_end) - 1 for n in ends), [b"", b"a\nb", b"c"], strict=True)
    )


def test_data_of_several_lines_is_one():
    event = StreamEvent(b"event: x\r\ndata: a\r\ndata:b\r\n\r\n")
    assert event.data() == b"a\nb"
    assert event.with_data(b"c") == b"event: x\ndata: c\n\n"


def visible(chunk, body):
    return visible_event(StreamEvent(to_event(chunk)), chunk, body)


def test_agent_sees_only_what_it_asked_for():
    first, token, *_, usage = to_chunks(make_answer())
    del first["prompt_token_ids"]
    assert visible(to_chunks(make_answer())[0], {}) == to_event(first)
    assert visible(usage, {}) == b""
    del token["choices"][0]["token_ids"]
    token["choices"][0]["logprobs"] = None
    assert visible(to_chunks(make_answer())[1], {}) == to_event(token)


def test_what_needs_no_change_keeps_its_bytes():
    everything = {
        "logprobs": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }
    for chunk in to_chunks(make_answer()):
        assert visible(chunk, everything) == to_event(chunk)
    odd = b'data:  {"choices": [ ], "x": 1.0}\r\n\r\n'
    assert visible_event(StreamEvent(odd), orjson.loads(odd[5:]), {}) == odd


def test_usage_beside_content_is_taken_out_alone():
    chunk = {**to_chunks(make_answer())[0], "usage": {"prompt_tokens": 2}}
    assert b"usage" not in visible(chunk, {})
    assert b"assistant" in visible(chunk, {})


@pytest.mark.parametrize(
    ("chunk", "words"),
    [
        ([], "not one of a chat completion"),
        ({}, "'choices'"),
        ({"choices": [3]}, "not one of"),
        ({"choices": [], "usage": 3}, "usage is not a JSON object"),
        ({"choices": [{"delta": "x"}]}, "not one of"),
        ({"choices": [{"token_ids": ["a"]}]}, "token_ids are not integers"),
        ({"choices": [{"logprobs": {"content": 3}}]}, "not one of"),
        ({"error": {"message": "out of memory"}}, "broke off: {'message': 'out of memory'}"),
    ],
)
def test_a_chunk_that_cannot_be_taken_leaves_no_token_ids(chunk, words):
    chunks = to_chunks(make_answer())
    gathered = gather([*chunks[:2], chunk, *chunks[2:]])
    assert words in gathered.defect
    recorded = capture.response_attributes(gathered.answer(), {})
    assert semconv.RESPONSE_TOKEN_IDS not in recorded
    assert semconv.PROMPT_TOKEN_IDS not in recorded
    assert semconv.LOGPROBS not in recorded


def test_without_a_finish_reason_there_are_no_token_ids():
    gathered = gather(to_chunks(make_answer())[:-2])
    assert not gathered.has_finished
    (choice,) = gathered.answer()["choices"]
    assert (choice["message"]["content"], choice["token_ids"]) == ("ab", None)


def test_a_hole_in_the_tokens_is_found_by_the_servers_count():
    chunks = to_chunks(make_answer())
    del chunks[2]
    recorded = capture.response_attributes(gather(chunks).answer(), {})
    assert find_hole(recorded) == "2 response token ids came, the model server counts 3"
    whole = capture.response_attributes(make_answer(), {})
    assert find_hole(whole) is None
    assert find_hole({semconv.OUTPUT_TOKENS: 3}) is None


def test_tool_calls_at_once_are_kept_apart():
    def delta(*calls):
        return {"choices": [{"index": 0, "delta": {"tool_calls": list(calls)}}]}

    def call(index, arguments, **more):
        return {"index": index, "function": {"arguments": arguments}, **more}

    gathered = gather(
        [
            delta(call(0, "{", id="a"), call(1, "[", id="b")),
            delta(call(1, "]", id="b")),
            delta(call(0, "}")),
        ]
    )
    calls = gathered.answer()["choices"][0]["message"]["tool_calls"]
    assert calls == [
        {"id": "a", "function": {"arguments": "{}"}},
        {"id": "b", "function": {"arguments": "[]"}},
    ]
