"""They need an environment with vLLM, which `make test-vllm` makes; nothing else runs them."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip them where they are not asked for by their marker."""
    if "vllm" in config.option.markexpr:
        return
    skip = pytest.mark.skip(reason="needs vLLM: make test-vllm")
    for item in items:
        if "vllm" in item.keywords:
            item.add_marker(skip)
