"""Anthropic's client, with its own loop around tools."""

from anthropic import Anthropic, beta_tool
from task import QUESTION, finish, model_of_arguments


@beta_tool
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


model = model_of_arguments()
client = Anthropic(base_url=model.base_url, api_key=model.api_key)
runner = client.beta.messages.tool_runner(
    model=model.name,
    max_tokens=100,
    tools=[add],
    messages=[{"role": "user", "content": QUESTION}],
    stream=model.stream,
)
if model.stream:
    pieces: list[str] = []
    for stream in runner:
        pieces = [event.text for event in stream if event.type == "text"]
    finish(pieces)
else:
    finish(block.text for block in runner.until_done().content if block.type == "text")
