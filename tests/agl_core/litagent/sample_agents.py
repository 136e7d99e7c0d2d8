"""Agents to import by path."""


async def good(task, llm):
    return 1.0


def not_an_agent(task):
    return None


number = 3
