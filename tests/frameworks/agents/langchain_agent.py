"""LangChain's agent, with its model of OpenAI."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from task import QUESTION, finish, model_of_arguments


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = model_of_arguments()
chat = ChatOpenAI(base_url=model.base_url, api_key=model.api_key, model=model.name)
agent = create_agent(chat, tools=[add], system_prompt="Use the tool.")
asked = {"messages": [{"role": "user", "content": QUESTION}]}
if model.stream:
    parts = [part for part, _ in agent.stream(asked, stream_mode="messages")]
    last_tool = max(place for place, part in enumerate(parts) if part.type == "tool")
    finish(part.content for part in parts[last_tool + 1 :] if part.content)
else:
    finish([agent.invoke(asked)["messages"][-1].content])
