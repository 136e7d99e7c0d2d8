"""A graph of LangGraph, with LangChain's model of OpenAI over responses."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from task import QUESTION, finish, model_of_arguments


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


model = model_of_arguments()
chat = ChatOpenAI(
    base_url=model.base_url, api_key=model.api_key, model=model.name, use_responses_api=True
).bind_tools([add])


def think(state: MessagesState) -> MessagesState:
    """Ask the model."""
    return {"messages": [chat.invoke(state["messages"])]}


graph = StateGraph(MessagesState)
graph.add_node("think", think)
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "think")
graph.add_conditional_edges("think", tools_condition)
graph.add_edge("tools", "think")
agent = graph.compile()
asked = {"messages": [{"role": "user", "content": QUESTION}]}
if model.stream:
    parts = [part for part, _ in agent.stream(asked, stream_mode="messages")]
    last_tool = max(place for place, part in enumerate(parts) if part.type == "tool")
    finish(part.text for part in parts[last_tool + 1 :] if part.text)
else:
    finish([agent.invoke(asked)["messages"][-1].text])
