"""OpenAI's Agents SDK, over chat completions."""

import asyncio

from agents import OpenAIChatCompletionsModel
from openai_agents_sdk import main

asyncio.run(main(OpenAIChatCompletionsModel))
