"""The recording proxy: agents call the model through it, and every call becomes a span.

Import `ProxyServer` and `ProxyConfig` from here; they load on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # uvicorn and starlette are weight that agents do not need
    from agl_core.llm_proxy.config import ProxyConfig
    from agl_core.llm_proxy.server import ProxyServer

__all__ = ["ProxyConfig", "ProxyServer"]


def __getattr__(name: str) -> Any:
    if name == "ProxyConfig":
        from agl_core.llm_proxy.config import ProxyConfig

        return ProxyConfig
    if name == "ProxyServer":
        from agl_core.llm_proxy.server import ProxyServer

        return ProxyServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
