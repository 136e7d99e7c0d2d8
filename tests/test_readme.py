"""What the README tells a newcomer to run, run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from agl_core.ledger.run import RunLedger
from tests.fakes import ScriptedModelServer

README = Path("README.md").read_text()


def queries() -> list[str]:
    return re.findall(r"```sql\n(.*?)```", README, re.DOTALL)


def ask(query: str, run: RunLedger) -> list[dict[str, object]]:
    """Run a query of the README over another run than the demo's."""
    root = run.storage.local_path(run.prefix.rstrip("/"))
    relation = duckdb.sql(query.replace(".agl/ledger/runs/calculator", str(root)))
    return [dict(zip(relation.columns, row, strict=True)) for row in relation.fetchall()]


def test_one_query_gives_an_iterations_mean_reward_and_coverage(trained: RunLedger):
    manifest = trained.manifest(0)
    assert ask(queries()[1], trained) == [
        {
            "expected": manifest.coverage.expected,
            "mean_reward": pytest.approx(manifest.rewards.mean_reward),
            "failed": manifest.coverage.failed,
            "trained": manifest.coverage.trained,
        }
    ]


def test_one_query_follows_a_rollout_from_its_dataset_row_to_the_loss(trained: RunLedger):
    rows = ask(queries()[0], trained)
    assert len(rows) >= 1
    for row in rows:
        num_tokens = len(row["response_token_ids"])
        assert len(row["logprobs"]) == len(row["advantages"]) == num_tokens
        assert row["logprobs"] == pytest.approx(row["old_log_probs"], abs=1e-3)
        assert row["policy_version"] == "v000000"


def test_the_agent_of_the_readme_runs_without_prefect(tmp_path: Path):
    agent, _, program = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "my_agent.py").write_text(agent)
    with ScriptedModelServer() as server:
        program = program.replace("http://127.0.0.1:8000/v1", server.base_url)
        (tmp_path / "program.py").write_text(program)
        env = os.environ | {"PYTHONPATH": str(Path.cwd()), "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("succeeded 0.0\n[Triplet(")
