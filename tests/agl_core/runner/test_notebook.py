"""As in a notebook: one step of an agent with a stock client gives triplets."""

import openai

from agl_core import (
    LLM,
    LitAgentRunner,
    OtelTracer,
    TracerTraceToTriplet,
    find_final_reward,
    rollout,
)
from agl_core.store import InMemoryLightningStore
from tests.fakes import ScriptedModelServer, encode_chars


@rollout
async def calculator(task, llm: LLM):
    """Asks twice, as the calculator's agent does for a tool call and its answer."""
    async with openai.AsyncOpenAI(base_url=llm.endpoint, api_key="x", max_retries=0) as client:
        messages = [{"role": "user", "content": task["question"]}]
        for turn in range(2):
            answer = await client.chat.completions.create(
                model=llm.model,
                messages=messages,
                seed=turn,  # the scripted server's id of an answer is its seed
                extra_body={"return_token_ids": True},
            )
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}]
    return float(len(text) == 8)


async def test_one_step_of_an_agent_gives_triplets():
    store, tracer = InMemoryLightningStore(), OtelTracer()
    with ScriptedModelServer() as server:
        llm = LLM(endpoint=server.base_url, model="scripted")
        runner = LitAgentRunner(tracer)
        with runner.run_context(agent=calculator, store=store):
            finished = await runner.step({"question": "1+1?"}, resources={"main_llm": llm})
    assert finished.status == "succeeded"
    numbers = finished.attempt.metadata
    assert (numbers["n_llm_calls"], numbers["n_without_ids"]) == (2, 0)
    spans = await store.query_spans(finished.rollout_id, "latest")
    triplets = TracerTraceToTriplet().adapt(list(spans))
    assert len(triplets) == 2
    assert triplets[0].prompt["token_ids"] == encode_chars("user: 1+1?\nassistant: ")
    assert all(len(triplet.response["token_ids"]) == 8 for triplet in triplets)
    assert find_final_reward(spans) == triplets[-1].reward == 1.0
    assert tracer.get_last_trace()[-1].rollout_id == finished.rollout_id
