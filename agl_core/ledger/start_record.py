"""Who started a run and when; see `starts`."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

EndReason = Literal["done", "failed", "cancelled", "superseded"]


@dataclass(frozen=True, slots=True)
class LeaseTimes:
    """Seconds of a lease."""

    renew: float = 10.0
    """Between two signs of life."""
    expire: float = 60.0
    """After the last one the start may be over."""
    watch: float = 25.0
    """How long a start that seems to be over is watched before another one takes over."""


class StartRecord(BaseModel):
    """Who started a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int
    nonce: str
    host: str
    place: str
    """Names the set of processes that `pid` belongs to: machine since its boot, and container."""
    pid: int
    process_started: str | None
    """Tells the process from a later one with its number; None where the system does not say."""
    flow_run_id: str | None
    flow_run_name: str | None
    since: float
    """UTC epoch seconds, by the host's clock."""
    automatic: bool
    """Whether an automation did it."""
    committed: int
    """Iterations that were committed then."""
    code: dict[str, Any] | None = None
    """Commit of the agent's working tree, and the like; None in starts of before it was noted."""
    packages: dict[str, str] | None = None
    """Versions of the packages that shape results; None as above."""

    @property
    def holder(self) -> str:
        """Who it is, in words."""
        name = f"flow run {self.flow_run_name}, " if self.flow_run_name else ""
        return f"{name}process {self.pid} on host {self.host}, since {clock(self.since)}"


class StartEnd(BaseModel):
    """How a start ended."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reason: EndReason
    at: float
    """UTC epoch seconds, by the host's clock."""
    host: str


def clock(seconds: float) -> str:
    """Return a time for messages, of UTC epoch seconds."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
