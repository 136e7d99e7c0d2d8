"""Agents to import by path."""

from agl_core.litagent import LitAgent, rollout


async def good(task, llm):
    return 1.0


def not_an_agent(task):
    return None


number = 3


@rollout
def decorated(task, llm):
    return 2.0


class Classy(LitAgent):
    def rollout(self, task, resources, rollout):
        return 3.0


classy = Classy()
