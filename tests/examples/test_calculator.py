import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from agl_core.serving.weights import weights_digest
from agl_core.types.resources import LLM
from examples.calculator import agent
from examples.calculator.agent import calculator, evaluate, final_answer, run_tool
from examples.calculator.make_data import DATA, answer, question, split_expressions
from examples.calculator.make_policy import MIX, POLICY, conversation


def read_rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DATA / f"{name}.jsonl").read_text().splitlines()]


def test_warm_up_training_and_validation_share_no_expression() -> None:
    split = split_expressions()
    parts = [set(part) for part in split]
    assert sum(map(len, parts)) == len(set.union(*parts)) == 3 * 90 * 90


def test_committed_rows_are_those_of_the_script() -> None:
    split = split_expressions()
    for name, expressions in (("train", split.train), ("val", split.val)):
        expected = [{"question": question(e), "answer": answer(e)} for e in expressions]
        assert read_rows(name) == expected
    assert (len(split.train), len(split.val)) == (512, 64)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("12+34", "46"),
        (" 12-34 ", "-22"),
        ("12*34", "408"),
        ("-3*(2+1)", "-9"),
        ("007", "error"),
        ("12+", "error"),
        ("", "error"),
        ("12 34", "error"),
        ("9**9**9**9", "error"),
        ("1<<99", "error"),
        ("1/0", "error"),
        ("True+1", "error"),
        ("1.5+1", "error"),
        ("x+1", "error"),
        ("(1).real", "error"),
        ("__import__('os')", "error"),
        ("open('f')", "error"),
        ("[1][0]", "error"),
        ("'a'*9", "error"),
        ("1+1;2", "error"),
        ("1\0", "error"),
        ("9" * 41, "error"),
        ("(" * 20 + "1" + ")" * 20, "error"),
    ],
)
def test_tool_computes_plain_arithmetic_and_nothing_else(expression: str, expected: str) -> None:
    assert evaluate(expression) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("calc(12+34)", "46"),
        ("calc(12)", "12"),
        ("calc 12+34", "error"),
        ("calc(12+34", "error"),
        ("calc(2)+(3)", "error"),
        ("=46", None),
        ("hello", None),
    ],
)
def test_calls_are_told_from_answers(text: str, expected: str | None) -> None:
    assert run_tool(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("=46", 46), ("~-50", -50), (" = 7 ", 7), ("46", None), ("=4 6", None), ("=", None)],
)
def test_final_answers_are_read(text: str, expected: int | None) -> None:
    assert final_answer(text) == expected


def test_policy_is_small_and_complete() -> None:
    files = list(POLICY.iterdir())
    assert sum(file.stat().st_size for file in files) < 1_000_000
    assert weights_digest(POLICY).startswith("sha256:")
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    text = "What is 12+34? ~-{}\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_next_turn_continues_the_ids_of_the_last_one() -> None:
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    first = [{"role": "user", "content": "What is 12+34?"}]
    second = [
        *first,
        {"role": "assistant", "content": "calc(12+34)"},
        {"role": "user", "content": "46"},
    ]
    ids = [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        for messages in (first, second)
    ]
    response = [*tokenizer("calc(12+34)")["input_ids"], tokenizer.eos_token_id]
    assert ids[1][: len(ids[0]) + len(response)] == ids[0] + response


@pytest.mark.parametrize("behaviour", MIX)
def test_warm_up_shows_the_tool_as_it_is(behaviour: str) -> None:
    turns = conversation(behaviour, "12+34", random.Random(0))
    for (_, said), (_, heard) in zip(turns[1::2], turns[2::2], strict=False):
        assert run_tool(said) == heard
    assert (final_answer(turns[-1][1]) == 46) is (behaviour == "proper")


class FakeClient:
    """Says the given texts in turn."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.requests: list[dict[str, Any]] = []
        self.chat = SimpleNamespace(completions=self)

    def with_options(self, **options: Any) -> "FakeClient":
        self.options = options
        return self

    def create(self, **request: Any) -> Any:
        self.requests.append({**request, "messages": list(request["messages"])})
        message = SimpleNamespace(content=self.texts.pop(0))
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    emitted: list[dict[str, Any]] = []
    monkeypatch.setattr(agent, "emit_annotation", emitted.append)
    return emitted


@pytest.mark.parametrize(
    ("texts", "reward", "tool_used"),
    [
        (["calc(12+34)", "=46"], 1.0, True),
        (["calc(12+34)", "~50"], 0.0, True),
        (["calc 12+34", "calc(12+34)", "=46"], 1.0, True),
        (["calc(1)", "calc(2)", "calc(3)"], 0.0, True),
        (["~46"], 1.0, False),
        (["no idea"], 0.0, False),
    ],
)
def test_agent_plays_the_turns_and_judges_the_answer(
    monkeypatch: pytest.MonkeyPatch,
    notes: list[dict[str, Any]],
    texts: list[str],
    reward: float,
    tool_used: bool,
) -> None:
    client = FakeClient(*texts)
    monkeypatch.setattr(agent, "_client", lambda: client)
    llm = LLM(endpoint="http://proxy/v1", model="v000003", sampling_parameters={"max_tokens": 9})
    given = calculator({"question": "What is 12+34?", "answer": 46}, llm)
    assert given == reward
    assert notes == [{"calculator.tool_used": tool_used}]
    assert client.options["base_url"] == "http://proxy/v1"
    assert len(client.requests) == len(texts)
    assert {(r["model"], r["max_tokens"]) for r in client.requests} == {("v000003", 9)}
    if tool_used:
        assert client.requests[1]["messages"][-1]["content"] == run_tool(texts[0])
