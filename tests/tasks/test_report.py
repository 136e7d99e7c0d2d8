"""What the UI shows, drawn from the manifest of a real run."""

from agl_core.ledger.run import RunLedger
from tasks.plot import run_report
from tasks.report import iteration_report


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
