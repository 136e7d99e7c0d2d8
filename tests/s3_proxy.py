"""An HTTP proxy in front of the S3 server: stores that differ from AWS, and networks that fail."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def operation(self) -> str:
        """Return what is asked: the method, and the query's names that matter."""
        names = {name for name, _ in parse_qsl(urlsplit(self.target).query, True)}
        return " ".join([self.method, *sorted(names & {"uploads", "uploadId", "partNumber"})])

    @property
    def conditional(self) -> bool:
        return "if-none-match" in self.headers


@dataclass
class Reply:
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    num_sent: int | None = None
    """Bytes of the body that arrive before the connection ends; None for all."""


Forward = Callable[[Request], Reply]
Behaviour = Callable[[Request, Forward], Reply | None]
"""Answers a request, with the help of the server behind; None closes the connection instead."""


@dataclass
class S3Proxy:
    url: str
    behave: Behaviour
    requests: list[Request] = field(default_factory=list)

    def operations(self) -> list[str]:
        return [request.operation for request in self.requests]


def honest(request: Request, forward: Forward) -> Reply:
    return forward(request)


def ignores_conditions(request: Request, forward: Forward) -> Reply:
    request.headers.pop("if-none-match", None)
    return forward(request)


def refuses_conditions(request: Request, forward: Forward) -> Reply:
    if not request.conditional:
        return forward(request)
    body = b"<Error><Code>NotImplemented</Code><Message>A header is unknown.</Message></Error>"
    return Reply(501, [("content-type", "application/xml")], body)


def refuses_multipart(request: Request, forward: Forward) -> Reply:
    if not request.operation.startswith("POST"):
        return forward(request)
    body = b"<Error><Code>NotImplemented</Code><Message>No such thing.</Message></Error>"
    return Reply(501, [("content-type", "application/xml")], body)


def ignores_conditions_of_multipart(then: Behaviour) -> Behaviour:
    """As Ceph's gateway does, which keeps the condition of a whole object."""

    def behave(request: Request, forward: Forward) -> Reply | None:
        if request.operation == "POST uploadId":
            request.headers.pop("if-none-match", None)
        return then(request, forward)

    return behave


def names_no_condition(request: Request, forward: Forward) -> Reply:
    """A refused condition is answered without the element that only AWS documents."""
    reply = forward(request)
    reply.body = reply.body.replace(b"<Condition>If-None-Match</Condition>", b"")
    return reply


def loses_reply(operation: str, times: int = 1, then: Behaviour = honest) -> Behaviour:
    """The first requests of some kind are carried out, and nobody hears of it."""
    left = [times]

    def behave(request: Request, forward: Forward) -> Reply | None:
        if request.operation != operation or not left[0]:
            return then(request, forward)
        left[0] -= 1
        forward(request)
        return None

    return behave


def fails_for(operation: str, status: int, code: str) -> Behaviour:
    def behave(request: Request, forward: Forward) -> Reply:
        if request.operation != operation:
            return forward(request)
        body = f"<Error><Code>{code}</Code><Message>as the test wants it</Message></Error>"
        return Reply(status, [("content-type", "application/xml")], body.encode())

    return behave


@contextmanager
def s3_proxy(backend: str, behave: Behaviour = honest) -> Iterator[S3Proxy]:
    """Run a proxy whose behaviour may be changed while it runs."""
    address = urlsplit(backend).netloc

    def forward(request: Request) -> Reply:
        connection = HTTPConnection(address, timeout=60)
        try:
            connection.request(request.method, request.target, request.body, request.headers)
            response = connection.getresponse()
            return Reply(response.status, response.getheaders(), response.read())
        finally:
            connection.close()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def answer(self) -> None:
            self.close_connection = True
            length = int(self.headers.get("content-length", 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            headers.pop("expect", None)
            request = Request(self.command, self.path, headers, self.rfile.read(length))
            proxy.requests.append(Request(request.method, request.target, dict(headers), b""))
            reply = proxy.behave(request, forward)
            if reply is None:
                return
            self.send_response_only(reply.status)
            for name, value in reply.headers:
                if name.lower() not in {"connection", "content-length", "transfer-encoding"}:
                    self.send_header(name, value)
            # An answer to HEAD states the length of what it does not hold.
            stated = dict(reply.headers).get("Content-Length", "0")
            self.send_header(
                "content-length", stated if self.command == "HEAD" else str(len(reply.body))
            )
            self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(reply.body[: reply.num_sent])

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy = S3Proxy(f"http://127.0.0.1:{server.server_port}", behave)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
