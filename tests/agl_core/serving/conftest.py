"""Tiny policies with random weights, and engines over them."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agl_core.serving.engine import Engine
from examples.calculator.make_policy import make_model, make_tokenizer

TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_policy(folder: Path, seed: int, template: str | None = None) -> Path:
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    if template is not None:
        tokenizer.chat_template = template
        model.config.max_position_embeddings = 2048
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4.0)  # the default start is near uniform: make the tokens differ
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"), seed=0)


@pytest.fixture(scope="session")
def other_policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="session")
def tool_policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose chat template shows tools."""
    return write_policy(tmp_path_factory.mktemp("tools"), seed=2, template=TOOL_TEMPLATE)


@pytest.fixture
def engine(policy_folder: Path) -> Iterator[Engine]:
    engine = Engine(policy_folder, "v000000")
    yield engine
    engine.close()
