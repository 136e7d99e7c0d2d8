"""What the UI shows, drawn from the manifest of a real run."""

from agl_core.ledger.run import RunLedger
from agl_core.runner.failed import FailedRollout
from tasks.plot import run_report
from tasks.report import failed_report, iteration_report


def test_an_iterations_page_states_rewards_coverage_and_where_the_record_is(trained: RunLedger):
    manifest = trained.manifest(0)
    page = iteration_report(manifest, "the-ledger")
    assert f"| training | v000000 | {manifest.rewards.mean_reward:.3f} |" in page
    assert "| validation | v000001 |" in page
    assert "| 16 | 16 | 0 | 0 | 0 | 0 | 0 |" in page
    assert "the-ledger/runs/trained/iterations/000000/manifest.json" in page
    assert manifest.content_digest in page
    assert manifest.tokens is not None
    assert manifest.tokens.trained == manifest.tokens.sampled > 0
    sampled = manifest.tokens.sampled
    assert f"- tokens: {sampled} sampled, {sampled} trained, 0 masked; breaks: none" in page


def test_a_runs_page_has_a_row_for_each_iteration(trained: RunLedger):
    rows = run_report(trained, trained.manifests()).splitlines()[-2:]
    assert [row.split(" | ")[:2] for row in rows] == [["| 0", "v000000"], ["| 1", "v000001"]]
    assert all("16 of 16" in row for row in rows)


def test_failures_are_shown_where_there_were_any(trained: RunLedger):
    manifest = trained.manifest(1)
    assert "## Failures" not in iteration_report(manifest, "here")
    attempts = {"succeeded": 14, "timeout": 5, "infra_error": 1}
    changes = {"failures": {"timeout": 2}, "attempts": attempts}
    failing = manifest.model_copy(
        update={
            "rewards": manifest.rewards.model_copy(update=changes),
            "coverage": manifest.coverage.model_copy(update={"rewards_by_policy": 3}),
        }
    )
    page = iteration_report(failing, "here")
    assert "| timeout | 2 | 5 |" in page
    assert "| infra_error | 0 | 1 |" in page
    assert "- 3 of these gave no reward and have 0 by failures.no_reward" in page


def test_a_page_of_failed_rollouts_is_bounded_and_holds_any_text():
    rollout = FailedRollout("ro-1", "agent_error", 2, "`a`|b\n" + "x" * 999, "", "")
    page = failed_report([rollout] * 50, {"agent_error": 70, "timeout": 1, "succeeded": 9})
    assert "- agent_error: 70" in page
    assert "The first 50 of 71" in page
    assert "succeeded" not in page
    rows = [line for line in page.splitlines() if line.startswith("| ro-1 ")]
    assert len(rows) == 50
    assert rows[0].startswith("| ro-1 | agent_error | 2 | `'a'\\|b xxx")
    assert len(rows[0]) < 400
