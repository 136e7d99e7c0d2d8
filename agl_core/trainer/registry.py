"""Names of components, each with the path of its class; only the one that is used is imported."""

ExecutionStrategyRegistry: dict[str, str | type] = {
    "shm": "agl_core.execution.shared_memory.SharedMemoryExecutionStrategy",
    "cs": "agl_core.execution.client_server.ClientServerExecutionStrategy",
    "prefect": "deployments.strategy.PrefectExecutionStrategy",
}
