"""Which exceptions say that the infrastructure failed: network, name service, servers, this host.

Judged by what an exception is or carries, never by its message alone, and without importing any
client library:

- builtin classes: `ConnectionError`, `socket.gaierror`, `ssl.SSLError`, a broken HTTP answer;
- the error number of an `OSError`: no route, no descriptors, no memory, no disk space;
- base classes of client libraries, by package and name;
- the HTTP or gRPC status that the exception carries: 5xx, 408, 409, 429.

What stays the agent's own: `FileNotFoundError` and other errors of files, and a `TimeoutError` that
no socket raised (`asyncio.timeout`, `signal.alarm`, the agent's `raise`), since that deadline is
the agent's. Agents that know better raise `agl_core.InfraError`.
"""

import errno
import http.client
import imaplib
import smtplib
import socket
import ssl
from asyncio import IncompleteReadError
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.error import HTTPError, URLError
from xmlrpc.client import ProtocolError

_CLASSES = (
    ConnectionError,  # also UpstreamError, TransientError and InfraError
    socket.gaierror,
    socket.herror,
    ssl.SSLError,
    http.client.BadStatusLine,
    http.client.IncompleteRead,
    IncompleteReadError,
    smtplib.SMTPServerDisconnected,
    imaplib.IMAP4.abort,
)
_ERRNOS = frozenset(
    {
        # The network.
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ETIMEDOUT, errno.EADDRNOTAVAIL, errno.ENOBUFS),
        # This host.
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.ENOSPC, errno.EDQUOT),
        *(errno.EIO, errno.ESTALE),
    }
)
_CLIENT_CLASSES: Final[Mapping[str, frozenset[str]]] = {
    "openai": frozenset({"APIConnectionError"}),  # APITimeoutError is one; litellm's are these
    "anthropic": frozenset({"APIConnectionError"}),
    "httpx": frozenset({"TransportError", "DecodingError"}),
    "httpx2": frozenset({"TransportError", "DecodingError"}),  # what openai 3 is built on
    "httpcore": frozenset({"NetworkError", "TimeoutException", "ProtocolError", "ProxyError"}),
    "aiohttp": frozenset(
        {"ClientConnectionError", "ClientPayloadError", "HttpProcessingError"}  # no HTTP answer
    ),
    "requests": frozenset(
        {
            *("ConnectionError", "Timeout", "ChunkedEncodingError", "ContentDecodingError"),
            "RetryError",
        }
    ),
    "urllib3": frozenset(
        {"TimeoutError", "ProtocolError", "MaxRetryError", "SSLError", "DecodeError"}
    ),
    "botocore": frozenset({"ConnectionError", "HTTPClientError"}),
    "websockets": frozenset({"ConnectionClosedError", "InvalidHandshake"}),
    "redis": frozenset({"ConnectionError", "TimeoutError"}),
    "pymongo": frozenset({"ConnectionFailure"}),
    "psycopg": frozenset({"OperationalError"}),
    "psycopg2": frozenset({"OperationalError"}),
    "anyio": frozenset({"BrokenResourceError"}),
    "dns": frozenset({"Timeout", "NoNameservers"}),
}
"""By package: the classes of which all subclasses are errors of the network or of a server."""
_STATUS_FIELDS: Final[Mapping[str, str]] = {"aiohttp": "status", "google": "code"}
"""Where packages keep the HTTP status that others call `status_code`."""
_RETRIABLE_STATUS = frozenset({408, 409, 429})
_GRPC_CODES = frozenset(
    {"UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "ABORTED", "INTERNAL"}
)
_NO_THREAD = "can't start new thread"
"""What Python says where this host refuses another thread (`EAGAIN`)."""
_NETWORK_MODULES = frozenset({"socket", "ssl", "http", "aiohttp", "httpcore", "urllib3"})
_SOCKET_TIMEOUTS = ("timed out", "operation timed out")
"""How Python's sockets end the text of their timeouts (`The read operation timed out`)."""


def is_infrastructure(error: BaseException) -> bool:
    """Say whether an exception reports a failure of the infrastructure; its causes don't count."""
    if isinstance(error, HTTPError):
        return _is_retriable(error.code)
    if isinstance(error, ProtocolError):
        return _is_retriable(error.errcode)
    if isinstance(error, URLError):
        return isinstance(error.reason, BaseException) and is_infrastructure(error.reason)
    if isinstance(error, _CLASSES):
        return True
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    if isinstance(error, TimeoutError) and _is_of_a_socket(error):
        return True
    if isinstance(error, RuntimeError) and error.args == (_NO_THREAD,):
        return True
    bases = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(error).__mro__]
    if any(name in _CLIENT_CLASSES.get(package, ()) for package, name in bases):
        return True
    if ("grpc", "RpcError") in bases:
        code = getattr(error, "code", None)
        return callable(code) and getattr(code(), "name", None) in _GRPC_CODES
    return any(map(_is_retriable, _statuses(error, {package for package, _ in bases}))) or (
        ("openai", "APIError") in bases and _is_error_event(error)
    )


def _is_of_a_socket(error: TimeoutError) -> bool:
    """Say whether a socket, or the code of a client library, raised a timeout."""
    if any(str(error).endswith(text) for text in _SOCKET_TIMEOUTS):
        return True
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    module = "" if last is None else last.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] in _NETWORK_MODULES


def _statuses(error: BaseException, packages: set[str]) -> Iterator[Any]:
    """Yield what an exception has as HTTP status."""
    response = getattr(error, "response", None)
    yield getattr(error, "status_code", None)
    yield getattr(response, "status_code", None)
    for package in packages & _STATUS_FIELDS.keys():
        yield getattr(error, _STATUS_FIELDS[package], None)
    if "botocore" in packages and isinstance(response, Mapping):
        yield response.get("ResponseMetadata", {}).get("HTTPStatusCode")


def _is_retriable(status: Any) -> bool:
    """Judge by the HTTP status: the server failed (5xx), or asks to come again."""
    return isinstance(status, int) and (500 <= status < 600 or status in _RETRIABLE_STATUS)


def _is_error_event(error: BaseException) -> bool:
    """Say whether openai raised this for an error event of the server, as the proxy sends it."""
    return getattr(error, "type", None) == "server_error"
