"""The pipeline as it is deployed, for tests: a folder's deployments, a process worker, the API."""

import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from agl_core.config import RunConfig
from agl_core.lifeline import ChildProcess, spawn

_FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


@contextmanager
def deployed(
    prefect: Path, folder: Path, log: Path, env: Mapping[str, str], only: str | None = None
) -> Iterator[ChildProcess]:
    """Deploy a folder's `prefect.yaml`, or one deployment of it, and run a process worker on its
    pool.

    `prefect` is the command of the environment that the flow runs are to have, `env` names the
    server.
    """
    which = ["--name", only] if only else ["--all"]
    create_pool = ["work-pool", "create", "agl", "--type", "process", "--overwrite"]
    for arguments in (create_pool, ["deploy", *which]):
        command = [str(prefect), "--no-prompt", *arguments]
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=180, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
    with start_worker(prefect, log, env) as worker:
        yield worker


@contextmanager
def start_worker(
    prefect: Path, log: Path, env: Mapping[str, str], pool: str = "agl"
) -> Iterator[ChildProcess]:
    """Run a process worker on the pool; it polls by then, as a run demands before it begins."""
    name = f"worker-{uuid.uuid4().hex[:8]}"
    start = [str(prefect), "worker", "start", "--pool", pool, "--type", "process", "--name", name]
    with spawn(start, log, {**env, "PREFECT_WORKER_QUERY_SECONDS": "1"}) as worker:
        with Api(env["PREFECT_API_URL"]) as api:
            api.wait_for_worker(pool, name, worker)
        yield worker


def on_pool(config: RunConfig) -> RunConfig:
    """Return the configuration with its shards on the work pool."""
    rollout = config.rollout.model_copy(update={"deployment": "rollout-shard/rollout-shard"})
    return config.model_copy(update={"rollout": rollout})


class Api:
    """Prefect's REST API."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._client = httpx.Client(base_url=url, timeout=30.0)

    def __enter__(self) -> "Api":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()

    def is_healthy(self) -> bool:
        try:
            return self._client.get("/health").is_success
        except httpx.TransportError:
            return False

    def get(self, path: str) -> dict[str, Any]:
        return self._asked("GET", path).json()

    def post(self, path: str, **body: Any) -> Any:
        return self._asked("POST", path, json=body).json()

    def _asked(self, method: str, path: str, **options: Any) -> httpx.Response:
        for _ in range(10):
            answer = self._client.request(method, path, **options)
            if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                break
            time.sleep(1.0)  # SQLite was locked; Prefect's own client comes again too
        return answer.raise_for_status()

    def of_run(self, kind: str, run_id: str) -> list[dict[str, Any]]:
        """Flow runs or artifacts of a training run, of its iterations and of its shards."""
        return self.post(f"/{kind}/filter", flow_runs={"name": {"like_": run_id}})

    def start(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Start a deployment and return the id of its flow run."""
        found = self.get(f"/deployments/name/{deployment}")
        path = f"/deployments/{found['id']}/create_flow_run"
        return self.post(path, parameters=parameters)["id"]

    def wait_for_worker(self, pool: str, name: str, worker: ChildProcess) -> None:
        """Return once the server knows that a worker polls a pool."""
        deadline = time.monotonic() + 120
        while not any(
            found["name"] == name and found["status"] == "ONLINE"
            for found in self.post(f"/work_pools/{pool}/workers/filter")
        ):
            assert time.monotonic() < deadline, worker.log_tail(40)
            time.sleep(0.25)

    def remove_deployments(self) -> None:
        """Take away what tests before on the same server have deployed."""
        for found in self.post("/deployments/filter"):
            self._asked("DELETE", f"/deployments/{found['id']}")

    def remove_automations(self) -> None:
        """Leave none to other tests on the same server, whose flow runs they would act on."""
        for found in self.post("/automations/filter"):
            self._asked("DELETE", f"/automations/{found['id']}")

    def ended(self, flow_run_id: str, timeout_seconds: float = 300.0) -> dict[str, Any]:
        """Wait for the end of a flow run and return it."""
        deadline = time.monotonic() + timeout_seconds
        while (run := self.get(f"/flow_runs/{flow_run_id}"))["state_type"] not in _FINAL:
            assert time.monotonic() < deadline, f"{run['name']} is still {run['state_name']}"
            time.sleep(0.5)
        return run
