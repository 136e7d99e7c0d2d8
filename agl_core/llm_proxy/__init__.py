"""The recording proxy: agents call the model through it, and every call becomes a span.

Import `ProxyServer`, `ProxyConfig`, `Backend`, `Price` and `LLMProxy` from here; they load on first
use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # uvicorn and starlette are weight that agents do not need
    from agl_core.llm_proxy.accounts import Price
    from agl_core.llm_proxy.backends import Backend
    from agl_core.llm_proxy.config import ModelConfig, ProxyConfig
    from agl_core.llm_proxy.proxy import LLMProxy
    from agl_core.llm_proxy.server import ProxyServer

__all__ = ["Backend", "LLMProxy", "ModelConfig", "Price", "ProxyConfig", "ProxyServer"]

_MODULES = {
    "Backend": "backends",
    "LLMProxy": "proxy",
    "ModelConfig": "config",
    "Price": "accounts",
    "ProxyConfig": "config",
    "ProxyServer": "server",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"agl_core.llm_proxy.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
