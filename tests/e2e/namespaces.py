"""A second network on this machine, as another host has: a namespace behind a pair of devices."""

import os
import shutil
import socket
import socketserver
import subprocess
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class OtherHost:
    """A namespace that reaches this one by one address, and nothing else."""

    name: str
    head: str
    """Address of this namespace as seen from there."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Run a command there, under a host name of its own."""
        script = 'hostname "$0" && exec "$@"'
        inside = ["unshare", "--uts", "sh", "-c", script, self.name, *arguments]
        return ["ip", "netns", "exec", self.name, *inside]


@contextmanager
def other_host() -> Generator[OtherHost]:
    """Make the namespace, and remove it with its devices; skips where that is not allowed."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    pid = os.getpid()
    name, here, there = f"agl-runner-{pid}", f"aglh{pid}", f"aglr{pid}"
    head, runner = f"10.213.{pid % 250}.1", f"10.213.{pid % 250}.2"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
    try:
        for arguments in (
            ["link", "add", here, "type", "veth", "peer", "name", there, "netns", name],
            ["addr", "add", f"{head}/30", "dev", here],
            ["link", "set", here, "up"],
            ["-n", name, "addr", "add", f"{runner}/30", "dev", there],
            ["-n", name, "link", "set", there, "up"],
            ["-n", name, "link", "set", "lo", "up"],
        ):
            subprocess.run(["ip", *arguments], check=True)
        yield OtherHost(name, head)
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


class _Forward(socketserver.BaseRequestHandler):
    target: tuple[str, int]

    def handle(self) -> None:
        with socket.create_connection(self.target) as upstream:
            back = threading.Thread(target=_copy, args=(upstream, self.request), daemon=True)
            back.start()
            _copy(self.request, upstream)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # either side hung up, which ends the other
        for end in (source, target):
            end.close()


@contextmanager
def forwarded(host: str, target_port: int) -> Generator[int]:
    """Let a server on the loopback address be reached at another one, as a reverse proxy does;
    yields the port there.
    """
    handler = type("Handler", (_Forward,), {"target": ("127.0.0.1", target_port)})
    with socketserver.ThreadingTCPServer((host, 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
