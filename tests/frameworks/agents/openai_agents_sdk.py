"""OpenAI's Agents SDK, over responses (its default)."""

import asyncio

from agents import Agent, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI
from task import QUESTION, finish, model_of_arguments


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def main(model_class):
    """Run the agent over one of the SDK's kinds of model."""
    model = model_of_arguments()
    set_tracing_disabled(True)  # else it sends its traces to OpenAI
    client = AsyncOpenAI(base_url=model.base_url, api_key=model.api_key)
    agent = Agent(
        name="calculator",
        instructions="Use the tool.",
        tools=[add],
        model=model_class(model=model.name, openai_client=client),
    )
    if not model.stream:
        finish([(await Runner.run(agent, QUESTION)).final_output])
        return
    result = Runner.run_streamed(agent, QUESTION)
    pieces = []
    async for event in result.stream_events():
        if event.type == "run_item_stream_event" and event.name == "tool_output":
            pieces = []  # the text before it was not the answer
        elif getattr(event, "data", None) and event.data.type == "response.output_text.delta":
            pieces.append(event.data.delta)
    finish(pieces)


if __name__ == "__main__":
    asyncio.run(main(OpenAIResponsesModel))
