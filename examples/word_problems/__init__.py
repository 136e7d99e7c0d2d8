"""Word problems: a real small language model learns to answer with the right number.

`make_data.py` writes the data, `fetch_model.py` brings the model, `agent.py` is the agent.
"""
