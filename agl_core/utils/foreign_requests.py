"""Requests that a web page has a browser send to a server on the user's own machine.

A server without a token listens on loopback, where a browser of this machine can still reach it for
any web page. So it serves only requests that name a loopback address as their host (a page could
have the browser look up the page's own name as 127.0.0.1), and that no page of a foreign origin
made: browsers say so in `Origin` and `Sec-Fetch-Site`, which pages cannot change. Store, proxy and
embedded engine ask here; vLLM's middleware stands alone and repeats the rule.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches a host, given by name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def find_foreign(headers: Mapping[str, str], allow_origins: Sequence[str] = ()) -> str | None:
    """Return why a request must be refused by a server without a token; None if it may be served.

    Args:
        headers: Of the request, by names in lower case.
        allow_origins: Of web pages that may ask, besides those of this machine; "*" for any.
    """
    name = _host_name(headers.get("host", ""))
    if not is_loopback(name):
        return (
            f"this server has no token, so it serves localhost only, not the name {name!r:.100}; "
            "give it a token to use another name"
        )
    if "*" in allow_origins:
        return None
    origin = headers.get("origin")
    if origin is None:
        is_foreign = headers.get("sec-fetch-site") == "cross-site"
    else:
        is_foreign = origin not in allow_origins and not is_loopback(_origin_host(origin))
    if is_foreign:
        page = "other sites" if origin is None else f"{origin:.100}"
        return f"web pages of {page} may not use this server: it has no token"
    return None


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _origin_host(origin: str) -> str:
    """Return the host of an Origin header; "" for "null" and for what is no origin."""
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
