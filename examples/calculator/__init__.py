"""The calculator: a tiny policy learns to ask a tool for the sum and to pass its result on.

`make_data.py` writes the data, `make_policy.py` the tokenizer and the warmed-up weights, `agent.py`
is the agent.
"""
