"""vLLM as the model server: how it is started, and what makes it say which policy answers."""
