"""Several replicas in one vLLM server (`--data-parallel-size`): new weights reach all of them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from agl_core.config import ServingSettings, VllmSettings
from agl_core.ledger.storage import open_storage
from agl_core.serving.launch import ModelServer
from tests.vllm.test_vllm import PYTHON, Recorded, check_recorded, reference, write_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
ARGS = ["--enforce-eager", "--max-model-len", "256", "--dtype", "float32"]


def test_new_weights_answer_from_every_replica(tmp_path: Path) -> None:
    folders = {
        version: write_policy(tmp_path / version, seed)
        for seed, version in enumerate(("v000000", "v000001"))
    }
    vllm = VllmSettings(
        python=str(PYTHON.absolute()),
        args=(*ARGS, "--data-parallel-size", "2"),
        env={"VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    settings = ServingSettings(vllm=vllm, startup_timeout_seconds=900)
    first, second = (reference(version, folder) for version, folder in folders.items())
    with ModelServer.start(settings, first, tmp_path / "run") as server:
        before = answered(server)
        server.serve(second, open_storage(str(tmp_path / "ledger")))

        def call(number: int) -> dict[str, Any]:
            return Recorded(server, second).call(stream=number % 2 > 0, seed=number)[1]

        with ThreadPoolExecutor(8) as pool:
            for attributes in pool.map(call, range(16)):
                check_recorded(attributes, "v000001", folders["v000001"])
        shares = {engine: count - before[engine] for engine, count in answered(server).items()}
    assert sum(shares.values()) == 16
    assert sorted(shares) == ["0", "1"]
    assert all(shares.values()), shares


def answered(server: ModelServer) -> dict[str, float]:
    """Return how many requests each replica has answered, as vLLM counts."""
    counts: dict[str, float] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            engine = line.split('engine="')[1].split('"')[0]
            counts[engine] = counts.get(engine, 0.0) + float(line.rsplit(" ", 1)[1])
    return counts
