"""Examples: each folder is one agent with its data, ready to be trained by the pipeline."""
