"""Pydantic AI's agent, with its model of OpenAI."""

import asyncio

from pydantic_ai import Agent, PartDeltaEvent, PartStartEvent, TextPart, TextPartDelta
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from task import QUESTION, finish, model_of_arguments

model = model_of_arguments()
provider = OpenAIProvider(base_url=model.base_url, api_key=model.api_key)
agent = Agent(OpenAIChatModel(model.name, provider=provider), instructions="Use the tool.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def stream() -> list[str]:
    """Return the pieces of the last model call's text."""
    pieces: list[str] = []
    async with agent.iter(QUESTION) as run:
        async for node in run:
            if not Agent.is_model_request_node(node):
                continue
            pieces = []
            async with node.stream(run.ctx) as events:
                async for event in events:
                    match event:
                        case PartStartEvent(part=TextPart(content=text)):
                            pieces.append(text)
                        case PartDeltaEvent(delta=TextPartDelta(content_delta=text)):
                            pieces.append(text)
    return pieces


finish(asyncio.run(stream()) if model.stream else [agent.run_sync(QUESTION).output])
