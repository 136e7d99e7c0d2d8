"""Names of components, each with the path of its class; a further strategy is one more line."""

ExecutionStrategyRegistry: dict[str, str | type] = {
    "shm": "agl_core.execution.shared_memory.SharedMemoryExecutionStrategy",
    "cs": "agl_core.execution.client_server.ClientServerExecutionStrategy",
}
