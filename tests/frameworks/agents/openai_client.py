"""The plain client of OpenAI, with a loop of its own around it."""

import json

from openai import OpenAI
from task import QUESTION, finish, model_of_arguments

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}

model = model_of_arguments()
client = OpenAI(base_url=model.base_url, api_key=model.api_key)


def ask(messages):
    """Return the assistant's message, and its text in the pieces in which it came."""
    asked = {"model": model.name, "messages": messages, "tools": [ADD]}
    if not model.stream:
        message = client.chat.completions.create(**asked).choices[0].message
        return message, [message.content or ""]
    with client.chat.completions.stream(**asked) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        return stream.get_final_completion().choices[0].message, pieces


messages = [{"role": "user", "content": QUESTION}]
message, pieces = ask(messages)
while message.tool_calls:
    messages.append(message)
    for call in message.tool_calls:
        result = sum(json.loads(call.function.arguments).values())
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    message, pieces = ask(messages)
finish(pieces)
