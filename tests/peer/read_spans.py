"""Read spans, as JSON lines on stdin, with the adapters of Agent Lightning; write what they say."""

import json
import sys

import agentlightning as agl

spans = [agl.Span.model_validate_json(line) for line in sys.stdin]
triplets = agl.TracerTraceToTriplet().adapt(spans)
messages = agl.TraceToMessages().adapt(spans)
sys.stdout.write(
    json.dumps(
        {
            "ids": [[t.prompt["token_ids"], t.response["token_ids"], t.reward] for t in triplets],
            "messages": [[m["role"] for m in one["messages"]] for one in messages],
            "texts": [one["messages"][-1]["content"] for one in messages],
        }
    )
)
