"""Content that the policy cannot be trained on is refused in each dialect, before it is sent."""

from typing import Any

import anthropic
import openai
import pytest

from agl_core.llm_proxy.content import check_is_text
from agl_core.llm_proxy.refusal import Refusal
from tests.agl_core.llm_proxy.replay import TEXT, replaying
from tests.agl_core.llm_proxy.test_messages import client as anthropic_client

URL = "data:image/png;base64,iVBORw0KGgo="
WORDS = "has content of the type '{}': policies are trained on text alone"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "f"}},
        {"type": "video_url", "video_url": {"url": "https://x/y.mp4"}},
        {"type": "image_embeds", "image_embeds": "AAAA"},
    ],
)
def test_chat_completions(part: Any):
    content = [{"type": "text", "text": "what?"}, part]
    with replaying(TEXT) as setup:
        client = setup.openai()
        messages: Any = [{"role": "user", "content": content}]
        with pytest.raises(openai.BadRequestError, match=WORDS.format(part["type"])):
            client.chat.completions.create(model="m", messages=messages)
        assert not setup.server.requests
        assert not setup.last_call().status.is_ok


def test_a_part_without_a_type_is_judged_by_its_fields():
    for part in ({"image_url": URL}, {"type": "text", "text": "a", "input_audio": {"data": "A"}}):
        with pytest.raises(Refusal, match=WORDS.format("(image_url|input_audio)")):
            check_is_text({"messages": [{"role": "user", "content": [part]}]})


def test_sound_of_an_earlier_answer_is_refused_too():
    messages: Any = [
        {"role": "assistant", "audio": {"id": "a-1"}},
        {"role": "user", "content": "?"},
    ]
    with replaying(TEXT) as setup, pytest.raises(openai.BadRequestError, match="'audio'"):
        setup.openai().chat.completions.create(model="m", messages=messages)


def test_completions():
    body = {"prompt_embeds": "AAAA"}
    with replaying(TEXT) as setup, pytest.raises(openai.BadRequestError, match="'prompt_embeds'"):
        setup.openai().completions.create(model="m", prompt="hi", extra_body=body)


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
def test_responses(kind: str):
    part: Any = {"type": kind, "image_url": URL}
    with replaying(TEXT) as setup, pytest.raises(openai.BadRequestError, match=WORDS.format(kind)):
        setup.openai().responses.create(model="m", input=[{"role": "user", "content": [part]}])


@pytest.mark.parametrize("where", ["user", "tool_result"])
def test_messages(where: str):
    source = {"type": "base64", "media_type": "image/png", "data": "QUJD"}
    content: list[Any] = [{"type": "image", "source": source}]
    if where == "tool_result":
        content = [{"type": "tool_result", "tool_use_id": "t-1", "content": content}]
    messages: Any = [{"role": "user", "content": content}]
    with (
        replaying(TEXT) as setup,
        pytest.raises(anthropic.BadRequestError, match=WORDS.format("image")),
    ):
        anthropic_client(setup).messages.create(model="m", max_tokens=9, messages=messages)


def test_text_in_parts_is_passed_on():
    content: Any = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    with replaying(TEXT) as setup:
        setup.openai().chat.completions.create(
            model="m", messages=[{"role": "user", "content": content}]
        )
        assert setup.server.requests[0]["messages"][0]["content"] == content
